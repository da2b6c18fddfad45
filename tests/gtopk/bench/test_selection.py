"""`gtopk bench selection`: what it records, and that it checks what it claims."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from collectives import SELECTORS, SparseVector, select
from collectives.kernels import device, why_not_compiled
from gtopk.bench.selection import gpu
from gtopk.bench.selection.command import DATA, main
from gtopk.bench.selection.gradients import Training, open_source
from gtopk.bench.selection.measure import Answer
from gtopk.bench.selection.methods import FLOOR, all_methods

SMALL = ["--elements", "40000", "--density", "0.01", "--rounds", "2", "--warm-up", "4"]


def test_every_method_and_size_has_a_record(tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    assert main([*SMALL, "--threads", "2", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    records = written["records"]
    names = [method.name for method in all_methods(2)]
    assert [record["method"] for record in records] == names * len(DATA)
    for record in records:
        assert record["seconds_low"] <= record["seconds"] <= record["seconds_high"]
        assert record["over_floor_low"] <= record["over_floor"] <= record["over_floor_high"]
        assert record["k"] == round(record["n"] * record["density"])
        if record["method"] == FLOOR:
            assert record["over_floor"] == 1
        elif record["method"] not in SELECTORS:
            assert record["exact"]
            assert record["selected"] == record["k"]
        assert record["clock"] == ("wall" if record["method"].endswith("threads") else "cpu")
        assert "synthetic" in record["data"]
    merged = {(merge["method"], merge["lists"]) for merge in written["merges"]}
    twins = ["gtopk-reference"] + ([] if why_not_compiled() else ["gtopk-compiled"])
    assert merged == {(name, lists) for name in twins for lists in (2, 8)}


def test_only_the_methods_asked_for_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["--data", "gaussian", "--methods", "gtopk-reference", "torch.topk"]
    assert main([*SMALL, *words]) == 0
    said = capsys.readouterr().out
    assert "no rows of a GPU: torch sees none" in said
    assert "torch.topk" in said
    assert "mstopk" not in said
    assert "gtopk-reference is " in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--warm-up", "0"], "--warm-up must be at least 1"),
        (["--methods", "bogus"], "got bogus"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_gpu_out_of_reach_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ImportError("arrays on a GPU need cupy: pip install gtopk[cuda12]")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "cupy", absent)
    assert gpu.measure_on_gpu(1000, 0.01, 2) == []
    assert "gtopk[cuda12]" in gpu.why_no_gpu()


@pytest.mark.gpu
def test_a_gpu_has_rows_beside_torch_topk(tmp_path: Path) -> None:
    if reason := gpu.why_no_gpu():
        pytest.skip(reason)
    path = tmp_path / "selection.json"
    assert main([*SMALL, "--data", "gaussian", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["on_gpu"]
    assert {row["name"] for row in rows} >= {gpu.TOPK, "copy", "kernel mark"}
    assert {(row["n"], row["k"]) for row in rows} == {(40000, 400)}
    assert all(row["gpu"] for row in rows)


def test_an_answer_is_exact_only_with_the_k_largest(random: np.random.Generator) -> None:
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


def test_of_equal_magnitudes_any_will_do() -> None:
    total = np.array([1.0, -1.0, 1.0, 0.5])
    for indices in ([0, 1], [1, 2]):
        chosen = np.array(indices, np.int32)
        assert Answer(total, 2).is_given_by(SparseVector(chosen, total[chosen], 4))


@pytest.mark.parametrize("length", [40_000, 1_000_000])
def test_the_network_has_about_the_length_asked_for_and_learns(length: int) -> None:
    source = open_source("training", length)
    assert isinstance(source, Training)
    assert source.length == pytest.approx(length, rel=0.1)
    first = np.linalg.norm(source.next_gradient())
    for _ in range(30):
        gradient = source.next_gradient()
        source.apply(SparseVector.from_dense(gradient))
    assert np.linalg.norm(source.next_gradient()) < first
