"""The wire's hot loops in NumPy: the truth for their twins, and what runs where none is compiled.

checksum.py   any bytes -> 64 bits
"""

from .checksum import checksum

__all__ = ["checksum"]
