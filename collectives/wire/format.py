"""Format: how indices and values are written into a message; equal on all ranks."""

from __future__ import annotations

from typing import Final, NamedTuple

# A code's number in the header is its place in these tuples.
INDEX_CODES: Final = ("raw",)
VALUE_CODES: Final = ("exact",)


class Format(NamedTuple):
    """The codes of a message."""

    indices: str = "raw"  # int32, or int64 from 2^31 elements on
    values: str = "exact"  # float32 or float64, as they are


EXACT: Final = Format()


def check(format: Format) -> Format:
    """Return the format, or raise ValueError naming what it may be."""
    if format.indices not in INDEX_CODES:
        raise ValueError(
            f"a format's indices must be one of {', '.join(INDEX_CODES)}; got {format.indices!r}"
        )
    if format.values not in VALUE_CODES:
        raise ValueError(
            f"a format's values must be one of {', '.join(VALUE_CODES)}; got {format.values!r}"
        )
    return format
