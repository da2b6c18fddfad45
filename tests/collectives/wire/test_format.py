"""Format: the names of codes, and their numbers in a header."""

from __future__ import annotations

import pytest

from collectives.wire import EXACT, INDEX_CODES, VALUE_CODES, WHOLE, Format, check_format
from collectives.wire.format import numbered, numbers


def test_numbers_stay_what_they_were() -> None:
    # A number that changes its code would have old and new ranks misread each other.
    assert [*INDEX_CODES] == ["raw", "blocks", "packed"]
    assert [*VALUE_CODES] == ["exact", "bf16", "fp16", "int8", "int4", "int3", "int2"]
    assert numbers(EXACT) == (0, 0)
    assert numbered(2, 3) == Format("packed", "int8")
    assert numbered(3, 5) == Format(WHOLE, "int3")


def test_a_number_without_a_code_is_an_error() -> None:
    with pytest.raises(ValueError, match="codes are numbers 4 and 0; this rank knows 4 and 7"):
        numbered(4, 0)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (Format("zip"), "code of indices must be one of raw, blocks, packed; got 'zip'"),
        (
            Format(values="f8"),
            "code of values must be one of exact, bf16, fp16, int8, int4, int3, int2; got 'f8'",
        ),
    ],
)
def test_an_unknown_code_is_an_error_that_names_the_known_ones(format: Format, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_format(format)


def test_a_known_format_passes() -> None:
    assert check_format(Format("packed", "bf16")) == Format("packed", "bf16")
