"""Python objects as bytes that decode to data and run no code: typed msgpack, no pickle unless
allowed.

The format (drawn in codec.py; its types are in types.py) keeps structure and content apart: one
loop reads the structure, a tensor is copied once, and no more memory is allocated than the message
has bytes for.
`decode` trusts nothing: every defect of a message ends in an ObjectFormatError.
"""

from __future__ import annotations

from .codec import HEADER_BYTES, MAX_DEPTH, decode, encode, holds_pickle, pickle_allowed
from .types import Code, ObjectFormatError

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
