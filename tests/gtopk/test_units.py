"""Parsing and formatting of numbers with units."""

from __future__ import annotations

import math

import pytest

from gtopk.units import (
    about_bandwidth_text,
    bandwidth_text,
    bytes_text,
    counted,
    digits,
    duration_text,
    listed,
    points_text,
    seconds_text,
    with_article,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(12_800), "12.8 kB"),
        (bytes_text(1_000_000), "1 MB"),
        (bytes_text(999_999), "1,000 kB"),
        (bandwidth_text(9.93e9), "9.93 Gbit/s"),
        (bandwidth_text(1e8), "100 Mbit/s"),
        (bandwidth_text(math.inf), "infinite bit/s"),  # as in a Link
        (seconds_text(0), "0 µs"),
        (seconds_text(50e-6), "50 µs"),
        (seconds_text(0.00235), "2.35 ms"),
        (seconds_text(12.34), "12.3 s"),
        (seconds_text(4000), "4,000 s"),
        (seconds_text(-3.5), "-3.50 s"),  # a clock was set back
        (seconds_text(3600.24, 5), "3,600.2 s"),
        (duration_text(0.00235), "2.35 ms"),
        (duration_text(9999), "9,999 s"),
        (duration_text(3 * 86_400), "72 h"),
        (duration_text(31_234), "8.68 h"),
        (with_article("outer step"), "an outer step"),
        (with_article("step"), "a step"),
        (counted(1, "rank"), "1 rank"),
        (counted(1437, "epoch"), "1,437 epochs"),
        (counted(2, "mega-batch"), "2 mega-batches"),
        (listed(["a", "b", "c"], most=2), "a, b and 1 more"),
        (digits(0.0042), "0.0042"),
        (digits(0.05), "0.05"),
        (digits(0.5), "0.50"),
        (digits(9.999), "10.0"),
        (points_text(-0.003), "\N{MINUS SIGN}0.3 points"),
    ],
)
def test_numbers_have_three_digits_and_the_largest_fitting_unit(text: str, expected: str) -> None:
    assert text.replace("\N{NO-BREAK SPACE}", " ") == expected


@pytest.mark.parametrize(
    ("bits_per_second", "expected"),
    [
        (9.9349e9, "about 9.9 Gbit/s"),
        (2.04e9, "about 2 Gbit/s"),
        (234e6, "about 230 Mbit/s"),
        (999e6, "about 1 Gbit/s"),
        (math.inf, "about infinite bit/s"),
        (37_499, "about 37 kbit/s"),
    ],
)
def test_approximate_bandwidth_has_two_digits(bits_per_second: float, expected: str) -> None:
    assert about_bandwidth_text(bits_per_second).replace("\N{NO-BREAK SPACE}", " ") == expected
