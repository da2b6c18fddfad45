"""Simulated clusters, one rank per process: the same result as with all ranks in one process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace

import light_torch  # noqa: F401

import pytest
from checks import run_tests

import gtopk.torch as hvd
from gtopk.adaptive.hogbatch.sizes import Thresholds
from gtopk.cli.simulate import main
from gtopk.cli.simulate.modes import SIMULATED
from gtopk.cli.simulate.ranks import processes_launched
from gtopk.cli.simulate.setting import Classes, Cluster, Death, Record, Setting, open_task

PROCESSES = processes_launched()
assert PROCESSES is not None
DIGITS = open_task("digits", 0)
SETTING = Setting(
    Cluster([400.0, 200.0, 100.0], noise=0.03, exchange_seconds=0.3),
    DIGITS._replace(x=DIGITS.x[:480], y=DIGITS.y[:480]),
    seed=0,
    epochs=2,
    global_batch=96,
    learning_rate=0.3,
    momentum=0.0,
    density=0.05,
    interval=2,
    micro_batch=16,
    mega_batch=160,
    classes=Classes(sizes={"slow": Thresholds(8, 64), "fast": Thresholds(32, 256)}),
    losses=True,
)
SPARSE = ("balanced", "abs", "adaptive-sgd-gtopk")
DENSE = ("equal-dense", "elastic")


def records_of_processes_and_threads(
    mode: str, setting: Setting = SETTING
) -> tuple[Record, Record] | None:
    """Return, on rank 0, the records of a run on processes and of one on threads."""
    record = SIMULATED[mode](replace(setting, processes=PROCESSES))
    return (record, SIMULATED[mode](setting)) if hvd.rank() == 0 else None


def test_simulated_gtopk_over_processes_is_bit_identical_to_threads() -> None:
    for mode in SPARSE:
        if records := records_of_processes_and_threads(mode):
            assert records[0] == records[1], mode


def test_simulated_shared_model_over_processes_is_bit_identical_to_threads() -> None:
    # Only slow ranks: the first of them evaluates, and is not rank 0.
    for mode in ("adaptive-hogbatch", "slow-only"):
        if records := records_of_processes_and_threads(mode):
            assert records[0] == records[1], mode


def test_simulated_dense_training_differs_only_by_mpis_order_of_sums() -> None:
    for mode in DENSE:
        if records := records_of_processes_and_threads(mode):
            processes, threads = (replace(record, accuracy=[], loss=[]) for record in records)
            assert processes == threads, mode
            reached = [[accuracy for _, accuracy in record.accuracy] for record in records]
            assert reached[0] == pytest.approx(reached[1], abs=0.01), mode


def test_simulated_death_of_rank_0_is_still_recorded() -> None:
    setting = replace(SETTING, cluster=replace(SETTING.cluster, deaths=[Death(0, 0.8)]))
    if records := records_of_processes_and_threads("adaptive-sgd-gtopk", setting):
        assert [size > 0 for size in records[0].sizes[-1][1]] == [False, True, True]
        assert records[0] == records[1]


def test_wrong_number_of_processes_is_refused_and_printed_once() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert main(["--speeds", "400:100"]) == 2
    expected = (
        "gtopk simulate: --speeds has 2 ranks, and 3 processes were started: start 2, or no "
        "launcher, to compute all ranks in one process\n"
    )
    assert errors.getvalue() == (expected if hvd.rank() == 0 else "")


def test_unwritable_json_file_is_an_error_on_all_ranks() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(["--speeds", "400:100:100", "--json", "/dev/null/x"]) == 2
    assert ("/dev/null/x cannot be written" in said.getvalue()) == (hvd.rank() == 0)


def test_only_rank_0_prints_the_simulation() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        words = "--speeds 400:100:100 --epochs 1 --batch 480 --modes abs"
        assert main(words.split()) == 0
    assert printed.getvalue().startswith("Simulated, not measured: 3 ranks") == (hvd.rank() == 0)


if __name__ == "__main__":
    run_tests(globals())
    print(f"rank {hvd.rank()}: done\n", end="", flush=True)
