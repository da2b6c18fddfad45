"""A SparseVector as one contiguous message, and back.

    +--------+---------+--------+-------+
    | header | indices | values | extra |       message.py: the header; format.py: indices and
    +--------+---------+--------+-------+       values; extra: bytes of the algorithm's own

The indices are padded with zeros to a multiple of the size of one element of the values.

`decode` trusts nothing: any defect of a message raises a MessageError that names the defect and the
sender, before the content is used.
"""

from .format import EXACT, INDEX_CODES, VALUE_CODES, WHOLE, Format
from .format import check as check_format
from .message import (
    HEADER_BYTES,
    NOBODY,
    NOTHING_CODED,
    CodingTotals,
    Decoded,
    Encoded,
    allgather,
    coded,
    decode,
    encode,
    receive,
)

__all__ = [
    "EXACT",
    "HEADER_BYTES",
    "INDEX_CODES",
    "NOBODY",
    "NOTHING_CODED",
    "VALUE_CODES",
    "WHOLE",
    "CodingTotals",
    "Decoded",
    "Encoded",
    "Format",
    "allgather",
    "check_format",
    "coded",
    "decode",
    "encode",
    "receive",
]
