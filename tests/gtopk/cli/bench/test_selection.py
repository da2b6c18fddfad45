"""`gtopk bench selection`: what it records, and that it checks what it claims."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collectives import SELECTORS, SparseVector, select
from collectives.kernels import device, why_not_compiled
from gtopk.cli.bench.selection import command, measure
from gtopk.cli.bench.selection import measure as rescans
from gtopk.cli.bench.selection.command import SOURCES, cases, main
from gtopk.cli.bench.selection.measure import Answer
from gtopk.cli.bench.selection.methods import (
    COPY,
    FLOOR,
    TORCH_SELECTORS,
    Training,
    all_methods,
    open_source,
)
from tests.collectives import fake_cuda
from tests.collectives.kernels.device import machine_on_host

SMALL = ["--elements", "40000", "--density", "0.01", "--rounds", "2", "--warm-up", "4"]


def test_every_method_and_size_has_a_record(tmp_path: Path) -> None:
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
        assert record["seconds_low"] <= record["seconds"] <= record["seconds_high"]
        assert record["over_floor_low"] <= record["over_floor"] <= record["over_floor_high"]
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
    """The floors select nothing, the fitted thresholds what they do, all others exactly k."""
    if record["method"] in (FLOOR, COPY):
        assert record["selected"] == 0
        assert record["over_floor"] == 1 or record["method"] == COPY
    elif record["method"] not in SELECTORS:
        assert record["exact"]
        assert record["selected"] == record["k"]


def test_only_the_methods_asked_for_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["--data", "gaussian", "--methods", "gtopk-reference", "torch.topk"]
    assert main([*SMALL, *words]) == 0
    said = capsys.readouterr().out
    assert "nothing on a GPU: torch sees none" in said
    assert "torch.topk" in said
    assert "mstopk" not in said
    assert "gtopk-reference is " in said


def test_rescans_are_counted_over_changes_and_results_stay_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "rescans.json", 80
    words = ["--elements", "40000", "--density", "0.01", "--rescans", str(steps)]
    assert main([*words, "--json", str(path)]) == 0
    counted = json.loads(path.read_text())["rescans"]
    assert len(counted) == len(SOURCES) * len(rescans.searches())
    for record in counted:
        assert record["exact"]
        assert record["steps"] == steps
        assert (record["density_changes"], record["rate_drops"]) == (5, 2)
        assert record["at_changes"] <= record["rescans"] <= 7 + 0.1 * steps
        assert record["share"] == record["rescans"] / steps


def test_every_guess_that_misleads_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = rescans.reference.search

    def misleading(residual: Any, gradient: Any, k: int, threshold: float) -> Any:
        wrong = step[0] in (3, 4, 40)  # 40: the learning rate has just dropped
        step[0] += 1
        return told(residual, gradient, k, 1e30 if wrong else 1e-30)

    monkeypatch.setattr(rescans, "searches", lambda: {"misled": misleading})
    step = [0]
    (record,) = rescans.count_rescans(open_source("gaussian", 5000), 0.01, 100)
    assert (record.rescans, record.at_changes, record.exact) == (3, 1, True)


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
        raise ImportError("arrays on a GPU need cupy: pip install cupy-cuda12x")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "cupy", absent)
    assert "cupy-cuda12x" in measure.why_no_gpu()


def model_of_a_gpu() -> measure.Gpu:
    """All but the events and the stream of a GPU: tensors, and arrays of the same memory."""
    return measure.Gpu(torch.device("cpu"), "a model", nullcontext, lambda work: (1e-3, work()))


def test_a_gpu_has_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "why_no_gpu", lambda: "")
    monkeypatch.setattr(command, "open_gpu", model_of_a_gpu)
    monkeypatch.setattr(command, "measure_kernels", lambda *_: [])
    monkeypatch.setattr(command, "kernel_table", lambda rows: rows)
    path = tmp_path / "selection.json"
    words = ["--elements", "40000", "80000", *SMALL[2:], "--data", "gaussian", "laplace"]
    assert main([*words, "--json", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    on_gpu = [record for record in records if record["device"] == "a model"]
    assert [record["method"] for record in on_gpu] == list(measure.MAKERS) * 4
    assert {"gtopk-cuda", "torch.topk", *SELECTORS, COPY, FLOOR} == set(measure.MAKERS)
    assert {tuple(record) for record in on_gpu} == {tuple(record) for record in records}
    assert {(record["n"], record["clock"]) for record in on_gpu} == {
        (40_000, "gpu"),
        (80_000, "gpu"),
    }
    for record in on_gpu:
        check_exactness(record)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("k", [3, 400])
def test_a_rival_by_torch_selects_what_numpy_s_selects(
    name: str, k: int, random: np.random.Generator
) -> None:
    total = random.laplace(size=40_000).astype(np.float32)
    ours = SELECTORS[name](total, k).indices
    theirs = TORCH_SELECTORS[name](torch.from_numpy(total), k).numpy()
    assert np.unique(theirs).size == theirs.size
    # Means are added up in another order; DGC's threshold is one of the sample in both.
    assert np.setxor1d(ours, theirs).size <= 0.01 * k


def test_a_rival_by_torch_takes_what_all_are_equal_in() -> None:
    flat = torch.full((100,), -2.0)
    assert TORCH_SELECTORS["gaussian-k"](flat, 5).numel() == 100
    assert TORCH_SELECTORS["torch.topk"](flat, 5).numel() == 5


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, shared_folder: Path) -> Iterator[Any]:
    """A model of GPUs, on which the CUDA kernels run."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here to compile the kernels for the host with")
    library = machine_on_host.build(shared_folder / "kernels", device.cuda.THREADS)
    with fake_cuda.with_kernels(monkeypatch, library) as cuda:
        yield cuda


@pytest.mark.usefixtures("cuda")
def test_ours_accumulates_selects_and_clears_on_arrays_of_a_gpu(
    random: np.random.Generator,
) -> None:
    arrays = import_module("cupy")
    total, k = np.zeros(20_000, np.float32), 40
    residual, gradient = arrays.asarray(total), arrays.asarray(total)
    work = measure.on_arrays(residual, gradient, k)
    for _ in range(3):
        fresh = random.standard_normal(total.size).astype(np.float32)
        gradient.set(fresh)
        total += fresh
        indices, values = work()
        picked = SparseVector(indices.get(), values.get(), total.size)
        assert Answer(total, k).is_given_by(picked)
        total[picked.indices] = 0
        assert (residual.get() == total).all()


@pytest.mark.gpu
def test_a_real_gpu_has_records_and_rows_of_its_kernels(tmp_path: Path) -> None:
    if reason := measure.why_no_gpu():
        pytest.skip(reason)
    path = tmp_path / "selection.json"
    assert main([*SMALL, "--data", "gaussian", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    on_gpu = [record for record in written["records"] if record["clock"] == "gpu"]
    assert [record["method"] for record in on_gpu] == list(measure.MAKERS)
    assert {record["device"] for record in on_gpu} == {torch.cuda.get_device_name()}
    for record in on_gpu:
        check_exactness(record)
    assert {row["name"] for row in written["gpu_kernels"]} >= {"copy", "kernel mark"}


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


def test_zeros_may_be_selected_or_not_where_there_are_too_few_others() -> None:
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
def test_the_network_has_about_the_length_asked_for_and_learns(length: int) -> None:
    source = open_source("training", length)
    assert isinstance(source, Training)
    assert source.length == pytest.approx(length, rel=0.1)
    first = np.linalg.norm(source.next_gradient())
    for _ in range(30):
        gradient = source.next_gradient()
        source.apply(SparseVector.from_dense(gradient))
    assert np.linalg.norm(source.next_gradient()) < first
