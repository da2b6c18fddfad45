"""`bench_wire.py`: its records, and the bandwidth below which a format pays."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mpi_scripts.bench_wire import FORMATS, break_even_gbit_per_second, main, trained, uniform

SMALL = ["--entries", "500", "--elements", "40000", "--rounds", "2", "--densities", "0.01"]


def test_every_wire_format_of_every_vector_has_a_record(tmp_path: Path) -> None:
    path = tmp_path / "wire.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [(r["indices"], r["values"]) for r in records] == [*FORMATS] * 2
    assert [r["positions"] for r in records[:: len(FORMATS)]] == [
        "uniform (synthetic)",
        "perceptron in training (synthetic images)",
    ]
    for record in records:
        for spent in (record["encode_ns"], record["decode_ns"]):
            assert 0 < spent["low"] <= spent["median"] <= spent["high"]
        assert record["bytes_per_entry"] > record["index_bits"] / 8
        assert record["bound_bits"] == pytest.approx(math.log2(math.e / record["density"]))
    raw, *others = (r["bytes_per_entry"] for r in records[: len(FORMATS)])
    assert all(other < raw for other in others)
    assert records[0]["pays_below_gbit_per_second"] == 0


def test_break_even_bandwidth_is_saved_bits_over_coding_seconds() -> None:
    # 4 bytes at 8 Gbit/s take 4 ns.
    assert break_even_gbit_per_second(4.0, 4.0) == pytest.approx(8.0)
    assert break_even_gbit_per_second(4.0, 0.0) == math.inf
    assert break_even_gbit_per_second(0.0, 1.0) == 0


def test_sparse_vectors_have_the_requested_entries() -> None:
    for density in (1e-4, 0.1, 0.5):
        vector = uniform(1000, density).vector
        assert (vector.entries, vector.length) == (1000, round(1000 / density))
    picked = trained(40_000, 0.01).vector
    assert picked.entries == round(0.01 * picked.length)


def test_density_of_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--densities", "0"])
    assert "--densities: must lie in (0, 1], got '0'" in capsys.readouterr().err
