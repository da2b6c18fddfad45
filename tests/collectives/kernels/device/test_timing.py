"""The rows of the GPU's benchmark: their rates, and on a GPU that every one is measured."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.kernels.device.timing import COPY, Row, measure, table


def test_rates_are_shares_of_the_copy() -> None:
    copy = Row(COPY, 1000, 10, 2e-6, 1e-6, 3e-6, 8000)
    rows = [copy, Row("half as fast", 1000, 10, 6e-6, 6e-6, 6e-6, 12_000), copy._replace(bytes=0)]
    assert copy.bytes_per_second == 4e9
    head, *lines = table(rows)
    assert "n = 1,000, k = 10" in head
    assert "synthetic" in head
    assert "100% of copy" in lines[0]
    assert "2.0 us (1.0-3.0)" in lines[0]
    assert "50% of copy" in lines[1]
    assert "of copy" not in lines[2]


@pytest.mark.gpu
def test_every_row_is_measured_on_a_gpu(on_gpu: Any) -> None:
    rows = measure(300_000, 300, rounds=3)
    names = {row.name for row in rows}
    assert {COPY, "kernel mark", "merge, waited for", "pack blocks, waited for"} < names
    assert {"step as a graph", "step as a graph, waited for", "step launched, waited for"} < names
    assert all(0 < row.low <= row.median <= row.high for row in rows if row.bytes)
