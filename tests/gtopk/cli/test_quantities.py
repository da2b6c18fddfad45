"""Quantities are parsed, or refused with a clear error."""

from __future__ import annotations

import pytest

from gtopk.units import bandwidth, count, duration


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [
        ("1gbit", 1e9),
        ("100Mbit/s", 1e8),
        ("12.5GB/s", 1e11),
        ("10Gbps", 1e10),
        ("10 Gb/s", 1e10),
        ("1.25e2MB", 1e9),
        ("56 kbit/s", 56e3),
        ("1GBps", 8e9),
        ("1 MiB/s", 8 * 1024**2),
        ("500bits", 500),
        ("3 gigabytes", None),
        ("2kbytes/s", 16e3),
        ("1tbit", 1e12),
    ],
)
def test_bandwidth_accepts_bits_or_bytes(text, bits_per_second):
    if bits_per_second is None:
        with pytest.raises(ValueError, match="must be a rate"):
            bandwidth(text)
    else:
        assert bandwidth(text) == pytest.approx(bits_per_second)


@pytest.mark.parametrize(
    "text", ["", "1", "fast", "1 foo", "-1gbit", "gbit", "1gbit/h", "nan", "1,5gbit", "1,2345gbit"]
)
def test_invalid_bandwidth_raises_with_examples(text):
    with pytest.raises(ValueError, match=r"such as 1gbit, 100Mbit/s or 12\.5GB/s, got"):
        bandwidth(text)


@pytest.mark.parametrize("text", ["0gbit", "0.9bit", "1.1e9gbit", "1e999gbit"])
def test_bandwidth_out_of_range_raises(text):
    with pytest.raises(ValueError, match=f"at least 1bit and at most 1e.09gbit, got '{text}'"):
        bandwidth(text)
    assert (bandwidth("1bit"), bandwidth("1e9gbit")) == (1.0, 1e18)


@pytest.mark.parametrize("text", ["1.1e9s", "1e308s", "1e999s"])
def test_duration_out_of_range_raises(text):
    with pytest.raises(ValueError, match=f"must be at most 1e.09s, got '{text}'"):
        duration(text)
    assert duration("1e9s") == 1e9


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.4ms", 4e-4), ("30us", 3e-5), ("30 µs", 3e-5), ("2s", 2.0), ("500ns", 5e-7), ("0ms", 0.0)],
)
def test_duration_accepts_units(text, seconds):
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0.4", "", "ms", "-1ms", "1min", "0,2ms", "1_0ms"])
def test_invalid_duration_raises_with_examples(text):
    with pytest.raises(ValueError, match=r"must be a time such as 0\.4ms or 30us, got"):
        duration(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("25557032", 25_557_032),
        ("25,557,032", 25_557_032),
        ("25_557_032", 25_557_032),
        ("25.6M", 25_600_000),
        ("25.557032M", 25_557_032),
        ("1e3", 1000),
        ("1.3B", 1_300_000_000),
        ("350k", 350_000),
        ("7", 7),
    ],
)
def test_count_accepts_suffixes_and_separators(text, number):
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "many", "-3", "2.5", "2,5"])
def test_invalid_count_raises(text):
    with pytest.raises(ValueError, match="must be"):
        count(text)


@pytest.mark.parametrize(
    ("text", "must_be"),
    [
        *((text, "at least 1") for text in ("0", "0.2", "0.0001k", "1e-999")),
        *((text, r"at most 1e\+30") for text in ("1e22B", "1e31", "1e999", "1e9999999")),
    ],
)
def test_count_out_of_range_names_the_limit_that_it_exceeds(text, must_be):
    with pytest.raises(ValueError, match=f"^must be {must_be}, got '{text}'$"):
        count(text)
    assert (count("1"), count("1e30")) == (1, 10**30)
