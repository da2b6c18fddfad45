"""The wire's hot loops, behind one interface."""

from .reference_codes import checksum

__all__ = ["checksum"]
