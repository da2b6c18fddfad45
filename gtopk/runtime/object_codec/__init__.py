"""Python objects as bytes that only ever decode to data: typed msgpack, no pickle unless allowed.

The format (drawn in format.py) keeps structure and content apart: one loop reads the structure, a
tensor is copied once, and nothing is allocated that the message does not hold the bytes of.
`decode` trusts nothing: whatever is wrong with a message ends in one ObjectFormatError.
"""

from __future__ import annotations

from .codec import decode, encode, holds_pickle
from .format import HEADER_BYTES, MAX_DEPTH, Code, ObjectFormatError, pickle_allowed

__all__ = [
    "HEADER_BYTES",
    "MAX_DEPTH",
    "Code",
    "ObjectFormatError",
    "decode",
    "encode",
    "holds_pickle",
    "pickle_allowed",
]
