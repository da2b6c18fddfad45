"""Python objects as bytes that decode to data and run no code: typed msgpack, no pickle unless
allowed.

The format (codec.py draws it, types.py lists its types) separates structure from content. So one
loop reads the structure, a tensor is copied once, and decoding allocates no more memory than the
message has bytes.
`decode` trusts nothing: a defective message always raises ObjectFormatError.
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
