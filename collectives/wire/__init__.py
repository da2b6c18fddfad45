"""A SparseVector as one contiguous message, and back.

    +--------+---------+--------+-------+
    | header | indices | values | extra |       header.py, indices.py, values.py; bytes of the
    +--------+---------+--------+-------+       algorithm's own

The indices' part is filled up with zeros to a multiple of what one element of the values' takes.

`decode` trusts nothing: whatever is wrong with a message ends in one MessageError that says what
and from which rank, before anything is done with its content.
"""

from .format import EXACT, Format
from .format import check as check_format
from .header import HEADER_BYTES
from .indices import INDEX_CODES, WHOLE
from .message import NOBODY, NOTHING_CODED, Coded, Decoded, Encoded, coded, decode, encode
from .values import VALUE_CODES

__all__ = [
    "EXACT",
    "HEADER_BYTES",
    "INDEX_CODES",
    "NOBODY",
    "NOTHING_CODED",
    "VALUE_CODES",
    "WHOLE",
    "Coded",
    "Decoded",
    "Encoded",
    "Format",
    "check_format",
    "coded",
    "decode",
    "encode",
]
