"""A SparseVector as one contiguous message, and back.

    +--------+---------+--------+-------+
    | header | indices | values | extra |       header.py, indices.py, values.py; bytes of the
    +--------+---------+--------+-------+       algorithm's own

The indices' part is filled up with zeros to a multiple of what one element of the values' takes.

`decode` trusts nothing: whatever is wrong with a message ends in one MessageError that says what
and from which rank, before anything is done with its content.
"""

from .format import EXACT, INDEX_CODES, VALUE_CODES, Format
from .header import HEADER_BYTES
from .message import NOBODY, Decoded, Encoded, decode, encode

__all__ = [
    "EXACT",
    "HEADER_BYTES",
    "INDEX_CODES",
    "NOBODY",
    "VALUE_CODES",
    "Decoded",
    "Encoded",
    "Format",
    "decode",
    "encode",
]
