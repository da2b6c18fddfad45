"""Format: how indices and values are written into a message; equal on all ranks."""

from __future__ import annotations

from typing import Final, NamedTuple

from .indices import ALL_INDEX_CODES, INDEX_CODES
from .values import VALUE_CODES


class Format(NamedTuple):
    """The codes of a message."""

    indices: str = "raw"  # "raw", "blocks" or "packed": fewer bytes, more time
    # "exact", "bf16", "fp16", "int8", "int4", "int3" or "int2": fewer bytes, more rounding
    values: str = "exact"


EXACT: Final = Format()

# The formats that a GPU writes and reads itself; in others its vectors go by way of the host.
ON_DEVICE: Final = frozenset(
    Format(indices, values)
    for indices in ("raw", "blocks")
    for values in ("exact", "bf16", "fp16", "int4", "int3", "int2")
)

# A code's number in the header is its index here.
_INDEX_NAMES: Final = tuple(ALL_INDEX_CODES)
_VALUE_NAMES: Final = tuple(VALUE_CODES)


def check(format: Format) -> Format:
    """Return the format; raise ValueError, which lists the codes for sparse vectors, for others."""
    for part, code, names in (
        ("indices", format.indices, tuple(INDEX_CODES)),
        ("values", format.values, _VALUE_NAMES),
    ):
        if code not in names:
            raise ValueError(f"the code of {part} must be one of {', '.join(names)}; got {code!r}")
    return format


def numbers(format: Format) -> tuple[int, int]:
    """Return the numbers of the codes."""
    return _INDEX_NAMES.index(format.indices), _VALUE_NAMES.index(format.values)


def numbered(index_code: int, value_code: int) -> Format:
    """Return the format with these numbers; raise ValueError where there is none."""
    if index_code >= len(_INDEX_NAMES) or value_code >= len(_VALUE_NAMES):
        raise ValueError(
            f"its codes are numbers {index_code} and {value_code}; "
            f"this rank knows {len(_INDEX_NAMES)} and {len(_VALUE_NAMES)}"
        )
    return Format(_INDEX_NAMES[index_code], _VALUE_NAMES[value_code])
