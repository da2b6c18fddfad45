"""Predicted times are compared with measured ones, algorithm by algorithm."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from collectives.errors import CollectiveError
from gtopk.cli import main as gtopk
from gtopk.cli.bench.collectives.cases import SCHEMA
from mpi_scripts import predictions
from mpi_scripts.predictions import (
    DENSE,
    Forecast,
    busyness,
    by_busyness,
    main,
    read,
    row,
    savings,
    simulated,
)
from mpi_scripts.replay.simulate import SimulationError, find_python
from mpi_scripts.replay.traces import Reduction, Trace


def test_forecast_row_counts_near_ones_and_names_the_worst() -> None:
    found = [
        Forecast("5mbit", 2, 1000, 100, "gtopk", predicted, 1.0) for predicted in (1.1, 0.86, 1.0)
    ]
    found.append(Forecast("9mbit", 4, 1000, 100, "gtopk", 0.5, 1.0))
    assert row("gtopk", found) == "| gtopk | 4 | 12 % | 3 | -50 % (9mbit, 4 ranks) |"


def test_forecast_error_is_infinite_when_zero_seconds_were_measured() -> None:
    """Two algorithms that took equally long saved nothing."""
    assert Forecast("5mbit", 2, 1000, 100, "gtopk", 0.1, 0.0).error == math.inf


@pytest.mark.parametrize("content", [None, "", "{}", '{"benchmark": "collectives", "schema": %d}'])
def test_file_not_written_by_the_benchmark_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "1gbit-2.json"
    if content is not None:
        file.write_text(content % SCHEMA if "%" in content else content)
    with pytest.raises(SystemExit, match="2"):
        main([str(file)])
    assert str(file) in capsys.readouterr().err


def test_savings_compare_with_dense_on_the_same_network() -> None:
    quick = Forecast("5mbit", 2, 1000, 10, DENSE, 9.0, 10.0)
    others = [quick._replace(rate="9mbit", measured=4.0), quick._replace(length=2000)]
    sparse = Forecast("5mbit", 2, 1000, 20, "gtopk", 1.0, 2.0)
    alone = sparse._replace(ranks=3)
    (saved,) = savings([quick, *others, sparse, alone])
    assert saved == sparse._replace(predicted=8.0, measured=8.0)


def test_forecasts_are_grouped_by_busyness_of_shared_cores() -> None:
    one = Forecast("5mbit", 2, 1000, 100, "gtopk", 1.0, 1.0, busy=0.1)
    found = [one, one._replace(busy=0.25, predicted=1.3), one._replace(busy=1.2, predicted=0.5)]
    _, _, *rows = by_busyness([*found, one._replace(busy=None)])
    assert rows == [
        "| from 0 % to 25 % | 1 | 0 % | 1 | +0 % (5mbit, 2 ranks) |",
        "| from 25 % to 50 % | 1 | 30 % | 0 | +30 % (5mbit, 2 ranks) |",
        "| from 75 % | 1 | 50 % | 0 | -50 % (5mbit, 2 ranks) |",
    ]


@pytest.mark.parametrize(("cores", "busy"), [(None, None), (2, 0.75), (4, 0.375)])
def test_busyness_is_cpu_seconds_of_all_ranks_over_shared_cores(
    file: Path, cores: int | None, busy: float | None
) -> None:
    record = read(file)["records"][0]
    record["cpu_seconds"] = {"mean": 3.0, "max": 4.0}
    record["seconds_by_round"] = [100.0, 8.0]
    assert record["ranks"] == 4
    assert busyness(record, cores) == busy


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the benchmark measures here."""
    file = tmp_path_factory.mktemp("bench") / "here-4.json"
    few = ["--lengths", "1000", "--densities", "0.1", "--rounds", "1", "--baselines"]
    few += ["--shared-cores", "2"]
    arguments = [*few, "--algorithms", "dense", "gtopk", "--json", str(file)]
    assert gtopk(["bench", "collectives", *arguments]) == 0
    return file


def test_benchmark_results_are_compared_with_predictions(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("100 entries a rank: time\n")
    time, saved = printed.split("100 entries a rank: saved of dense's time\n")
    assert time.count("\n| gtopk ") == 1
    assert "\n| gtopk's own dense" not in time
    assert "(here, 4 ranks)" in time
    saved, dense = saved.split("1,000 entries a rank: time\n")
    assert saved.count("\n| gtopk ") == 1
    assert "\n| gtopk's own dense" not in saved
    dense, busy = dense.split("all times, by how busy the shared cores were\n")
    assert dense.count("\n| gtopk's own dense") == 1
    assert sum(int(line.split("|")[2]) for line in busy.splitlines()[3:] if line) == 2


def test_savings_compare_with_dense_of_the_same_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs of the same networks, of which the later one's dense took ten times as long."""
    results = read(file)
    for scale, folder in ((1.0, "first"), (10.0, "second")):
        for record in results["records"]:
            is_dense = record["label"] == DENSE
            record["seconds"]["median"] = scale * (4.0 if is_dense else 3.0)
            record["modelled_wire_seconds"] = scale * (4.0 if is_dense else 3.0)
            record["modelled_code_seconds"] = 0.0
        # What the first run's gtopk saves is a quarter of its own dense.
        results["records"][-1]["seconds"]["median"] -= scale if folder == "first" else 0.0
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file.name).write_text(json.dumps(results))
    assert results["records"][-1]["label"] != DENSE
    assert main([str(tmp_path / folder / file.name) for folder in ("first", "second")]) == 0
    saved = capsys.readouterr().out.partition("saved of dense's time")[2]
    assert "| 2 | 25 % | 1 | -50 % (here, 4 ranks) |" in saved


@pytest.mark.parametrize(
    "forged",
    [
        {"ranks": 0},
        {"k": 2000},
        {"seconds": 5},
        {"seconds": {"median": math.nan}},
        {"seconds_by_round": []},
        {"seconds_by_round": [0.0]},
        {"modelled_link": [1.0]},
        {"modelled_wire_seconds": "1"},
        {"format": "foo+bar"},
    ],
)
def test_malformed_benchmark_record_is_refused_naming_the_file(
    forged: dict[str, Any], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results: dict[str, Any] = dict(read(file))
    results["records"][1].update(forged)
    path = tmp_path / "forged-4.json"
    for content in (results, {**results, "records": [5]}):
        path.write_text(json.dumps(content))
        with pytest.raises(SystemExit, match="2"):
            main([str(path)])
        assert f"of {path} must" in capsys.readouterr().err


def test_results_without_shared_cores_are_read(file: Path, tmp_path: Path) -> None:
    results = read(file)
    del results["run"]["shared_cores"]
    (tmp_path / file.name).write_text(json.dumps(results))
    assert main([str(tmp_path / file.name)]) == 0


def test_simulating_more_ranks_than_threads_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(reduction: Reduction) -> Trace:
        raise CollectiveError(f"the system allows 2 of {reduction.ranks} threads")

    monkeypatch.setattr(predictions, "find_python", lambda: "python")
    monkeypatch.setattr(predictions, "trace_of", refused)
    with pytest.raises(SystemExit, match="2"):
        main(["--simulate", str(file)])
    assert "the system allows 2 of 4 threads" in capsys.readouterr().err


def test_shards_algorithm_is_not_simulated(file: Path) -> None:
    record = read(file)["records"][0]
    record["algorithm"] = "shards"
    assert simulated("python")(record) is None


def test_benchmark_results_are_simulated(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_python()
    except SimulationError as error:
        pytest.skip(str(error))
    assert main(["--simulate", str(file)]) == 0
    assert capsys.readouterr().out.count("\n| gtopk ") == 2
