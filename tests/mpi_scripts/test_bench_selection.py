"""`bench_selection.py`: its records, and its check of exactness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collectives import SELECTORS, SparseVector, select
from collectives.kernels import why_not_compiled
from mpi_scripts.bench_selection import cases, main
from mpi_scripts.selection_methods import FLOOR, SOURCES, Answer, Training, all_methods, open_source

SMALL = ["--elements", "40000", "--density", "0.01", "--rounds", "2", "--warm-up", "4"]


def test_every_selection_method_and_size_has_a_record(tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    assert main([*SMALL, "--threads", "2", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    names = [method.name for method in all_methods(2)]
    records = [record for record in written["records"] if record["method"] in names]
    kinds = dict.fromkeys(record["data"] for record in written["records"])
    assert len(kinds) == len(SOURCES) + len(list(cases(1000, 10)))
    of_sources = [record for record in records if record["data"] in list(kinds)[-len(SOURCES) :]]
    assert [record["method"] for record in of_sources] == names * len(SOURCES)
    for record in records:
        for spent in (record["seconds"], record["over_floor"]):
            assert spent["low"] <= spent["median"] <= spent["high"]
        assert record["k"] == pytest.approx(record["n"] * record["density"], abs=1)
        assert record["torch"] == torch.__version__
        assert record["device"] == written["machine"]["processor"]
        assert record["clock"] == ("wall" if record["method"].endswith("threads") else "cpu")
        assert "synthetic" in record["data"]
    for record in of_sources:
        check_exactness(record)
    for record in records:
        if record in of_sources:
            continue
        assert record["exact"] == (record["method"] != FLOOR)
    merged = {(merge["method"], merge["lists"]) for merge in written["merges"]}
    twins = ["gtopk-reference"] + ([] if why_not_compiled() else ["gtopk-compiled"])
    assert merged == {(name, lists) for name in twins for lists in (2, 8)}


def check_exactness(record: dict[str, Any]) -> None:
    """Floors select nothing, fitted thresholds about k, all other methods exactly k."""
    if record["method"] == FLOOR:
        assert record["selected"] == 0
        assert record["over_floor"]["median"] == 1
    elif record["method"] not in SELECTORS:
        assert record["exact"]
        assert record["selected"] == record["k"]


def test_only_requested_methods_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "gaussian", "--methods", "gtopk-reference", "torch.topk"]
    assert main([*SMALL, *words]) == 0
    output = capsys.readouterr().out
    assert "torch.topk" in output
    assert "mstopk" not in output
    assert "gtopk-reference is " in output


def test_unknown_selection_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--methods", "bogus"])
    assert "got bogus" in capsys.readouterr().err


def test_selection_is_exact_only_with_the_k_largest(random: np.random.Generator) -> None:
    total = random.standard_normal(1000)
    answer = Answer(total, 10)
    picked, _ = select(total, 10)
    assert answer.is_given_by(picked)
    nearly = SparseVector.from_dense(np.where(np.isin(np.arange(1000), picked.indices), total, 0))
    assert answer.is_given_by(nearly)
    rest = np.setdiff1d(np.arange(1000), picked.indices)[:1]
    wrong = np.sort(np.append(picked.indices[1:], rest)).astype(np.int32)
    for indices in (picked.indices[1:], wrong):
        assert not answer.is_given_by(SparseVector(indices, total[indices], 1000))
    assert not answer.is_given_by(picked._replace(values=picked.values + 1))


def test_any_choice_among_equal_magnitudes_is_exact() -> None:
    total = np.array([1.0, -1.0, 1.0, 0.5])
    for indices in ([0, 1], [1, 2]):
        chosen = np.array(indices, np.int32)
        assert Answer(total, 2).is_given_by(SparseVector(chosen, total[chosen], 4))


def test_zeros_may_fill_an_exact_selection_or_be_left_out() -> None:
    total = np.array([0, 3, 0, np.nan, 0], np.float32)

    def given(*indices: int) -> bool:
        chosen = np.array(indices, np.int32)
        return Answer(total, 3).is_given_by(SparseVector(chosen, total[chosen], 5))

    assert given(1, 3)
    assert given(1, 2, 3)
    assert not given(3)
    assert not given(0, 2, 3)
    assert not given(0, 1, 2, 3)


@pytest.mark.parametrize("length", [40_000, 1_000_000])
def test_training_source_has_the_requested_length_and_learns(length: int) -> None:
    source = open_source("training", length)
    assert isinstance(source, Training)
    assert source.length == pytest.approx(length, rel=0.1)
    first = np.linalg.norm(source.next_gradient())
    for _ in range(30):
        gradient = source.next_gradient()
        source.apply(SparseVector.from_dense(gradient))
    assert np.linalg.norm(source.next_gradient()) < first
