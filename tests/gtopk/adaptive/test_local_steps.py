"""In modes where ranks step at their own pace, each second and byte is in one recorded step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk
import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.adaptive.hogbatch import loader as periods
from gtopk.adaptive.partitioning.cursor import by_speed
from gtopk.cli.report import page
from gtopk.cli.top import as_lines, status_of
from gtopk.runtime.world import world
from gtopk.runtime.world.membership import World
from gtopk.telemetry import timeline
from gtopk.telemetry.reading import RankRecord, Run, Step, read_run
from gtopk.telemetry.step_report import parts
from tests.gtopk.traces_read import records_in

RANKS, LENGTH = 2, 96


def record(
    threads: Callable[..., Any],
    folder: Path,
    mode: str,
    compression: Any = hvd.Compression.none,
    spoils: Callable[[World, int], bool] = lambda here, step: False,
    epochs: int = 2,
    **options: Any,
) -> tuple[Run, list[Any]]:
    """Train on threads; return the run's record, and each rank's loader."""

    def rank(transport: LocalTransport) -> Any:
        with world.entered(transport) as here:
            gtopk.record(str(folder))
            timeline.start(here, str(folder / "trace"))
            own_generator = torch.Generator().manual_seed(0)  # all threads share torch's generator
            model = torch.nn.Linear(30, 4)
            for parameter in model.parameters():
                parameter.data.normal_(std=0.2, generator=own_generator)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression
            )
            samples = TensorDataset(torch.randn(LENGTH, 30, generator=own_generator))
            own = {name: each[here.rank] if name == "device_class" else each
                   for name, each in options.items()}  # fmt: skip
            loader = hvd.adapt(DataLoader(samples, 8, shuffle=True), optimizer, mode, **own)
            steps = 0
            for _ in range(epochs):
                for (x,) in loader:
                    model(x).square().mean().backward()
                    if spoils(here, steps):
                        model.weight.grad.fill_(float("nan"))
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
            loader.drain()
            return loader, optimizer.last_step

    found = threads(RANKS, rank)
    run = read_run(folder)
    for each, (_, last) in zip(run.ranks, found, strict=True):
        assert each.steps[-1].report.sent_bytes == last.sent_bytes
        for step in each.steps:
            seconds = step.report.compute_seconds + step.report.synchronize_seconds
            assert sum(parts(step.report).values()) == pytest.approx(seconds, abs=1e-5)
            assert 0 <= step.report.hidden_seconds <= step.report.working_seconds + 1e-6
        taken = sum(s.report.compute_seconds + s.report.synchronize_seconds for s in each.steps)
        assert 0 < taken <= each.steps[-1].seconds
    check_trace(records_in(folder / "trace"), run.ranks[0])
    return run, [loader for loader, _ in found]


def check_trace(records: list[dict[str, Any]], rank: RankRecord) -> None:
    """Check that a rank's trace agrees with its record, with every second once."""
    covers = rank.steps[0].report.covers
    name = f"each {covers} of bias"  # the first that backward comes to
    (row,) = (record["pid"] for record in records if record.get("args") == {"name": name})
    spans = [record for record in records if record["pid"] == row and record["ph"] == "X"]
    span_args = [span["args"] for span in spans if span["name"] == covers.upper()]
    reports = [step.report for step in rank.steps]
    assert span_args == [
        {"step": each.step, "local steps": each.local_steps, "samples": each.samples}
        for each in reports
    ]
    parts = {
        "COMPUTE": sum(each.compute_seconds for each in reports),
        "WAIT": sum(each.synchronize_seconds for each in reports),
    }
    for part, seconds in parts.items():
        drawn = sum(span["dur"] for span in spans if span["name"] == part)
        assert drawn / 1e6 == pytest.approx(seconds, abs=1e-6 * len(spans))
    ends = sorted((s["ts"], round(s["ts"] + s["dur"], 1)) for s in spans if s["name"] in parts)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(ends))
    exchanges = sum(record["ph"] == "C" and record["pid"] == row for record in records)
    assert exchanges == sum(each.working_seconds > 0 for each in reports)


def steps_of(run: Run) -> list[Step]:
    return [step for rank in run.ranks for step in rank.steps]


def shown(run: Run, folder: Path) -> tuple[str, str]:
    """Return the run's page, and the output of `gtopk top`."""
    html = page(run, "a run").replace("\N{NO-BREAK SPACE}", " ")
    return html, "\n".join(as_lines(status_of(run, folder)))


def test_record_has_one_step_per_round(tmp_path: Path, threads: Callable[..., Any]) -> None:
    run, loaders = record(
        threads, tmp_path, "abs", hvd.Compression.gtopk(0.1),
        lambda here, step: here.rank == 1 and step == 0, micro_batch=4,
    )  # fmt: skip
    for rank in run.ranks:
        numbers = [step.report.step for step in rank.steps]
        assert numbers == list(range(len(numbers)))
        assert {step.report.covers for step in rank.steps} == {"round"}
        assert rank.residuals
    skipped = {s.report.step for s in steps_of(run) if s.report.skipped}
    assert len(skipped) == loaders[0].rounds.skipped == 1
    assert sum(step.report.samples for step in steps_of(run)) == 2 * LENGTH
    for step in steps_of(run):
        if not step.report.skipped:
            assert (step.report.elements, step.report.algorithm) == (124, "gtopk")
            assert step.report.selected <= 12  # fewer if it had no samples yet
        assert step.report.sent_bytes > 0
    html, _ = shown(run, tmp_path)
    for words in ("A round of each rank", "Rounds, one after", "Batch sizes", "Density"):
        assert words in html
    assert "1 round</h3><p>skipped on every rank" in html


def test_record_has_one_step_per_mega_batch(tmp_path: Path, threads: Callable[..., Any]) -> None:
    run, loaders = record(
        threads, tmp_path, "adaptive-sgd", hvd.Compression.gtopk(0.1),
        mega_batch=48, replay=by_speed([3.0, 1.0]), batch_rule="none",
    )  # fmt: skip
    merges = loaders[0].merges
    assert [len(rank.steps) for rank in run.ranks] == [merges, merges]
    reports = [[step.report for step in rank.steps] for rank in run.ranks]
    for quick, slow in zip(*reports, strict=True):
        assert quick.samples + slow.samples == 48
        assert quick.samples > slow.samples > 0
        for each in (quick, slow):
            assert each.samples == 8 * each.local_steps
            assert (each.elements, each.selected, each.skipped) == (124, 12, False)
            assert each.sent_bytes > 0
    for each in reports:
        assert each[-1].step + 1 == sum(report.local_steps for report in each)
    assert all(rank.residuals for rank in run.ranks)
    html, table = shown(run, tmp_path)
    for words in (
        "A mega-batch takes",
        "Mega-batches, one after the other",
        "Values of the model",
        "Batch sizes",
    ):
        assert words in html
    quick, slow = (sum(report.local_steps for report in each) for each in reports)
    assert f"took {slow} to {quick} steps each" in html
    assert [line.split()[2] for line in table.splitlines()[1:]] == [str(quick - 1), str(slow - 1)]


@pytest.mark.parametrize("mode", ["adaptive-sgd", "hogbatch"])
def test_rank_without_a_batch_writes_a_readable_record(
    tmp_path: Path, threads: Callable[..., Any], mode: str
) -> None:
    def rank(transport: LocalTransport) -> None:
        with world.entered(transport) as here:
            gtopk.record(str(tmp_path))
            layer = torch.nn.Linear(30, 4)
            for parameter in layer.parameters():
                parameter.data.fill_(0.1)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(layer.parameters(), lr=0.01), layer.named_parameters()
            )
            samples = DataLoader(TensorDataset(torch.zeros(1, 30)), 8)
            loader = hvd.adapt(samples, optimizer, mode)
            for (x,) in loader:
                layer(x).square().mean().backward()
                optimizer.step()
            loader.drain()
            assert here.step <= 1

    threads(RANKS, rank)
    run = read_run(tmp_path)
    assert run.skipped_text() is None
    assert {step.report.step for step in steps_of(run)} == {0}
    assert sum(step.report.local_steps for step in steps_of(run)) == 1


def test_lost_merge_is_recorded_as_skipped_step(
    tmp_path: Path, threads: Callable[..., Any]
) -> None:
    run, _ = record(
        threads, tmp_path, "adaptive-sgd", spoils=lambda here, step: step == 0, epochs=1,
        algorithm="k-step", local_steps=3,
    )  # fmt: skip
    for rank in run.ranks:
        assert [step.report.skipped for step in rank.steps] == [True, False]
        assert [step.report.local_steps for step in rank.steps] == [3, 3]


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0], [1]]])
def test_record_has_one_step_per_worker_period(
    tmp_path: Path, threads: Callable[..., Any], nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periods, "PERIOD_NANOSECONDS", 0)  # each batch
    run, loaders = record(
        threads, tmp_path, "adaptive-hogbatch", hvd.Compression.gtopk(0.1),
        lambda here, step: here.rank == 1 and step == 0, nodes=nodes,
        device_class=("fast", "slow"), sizes={"fast": (4, 8), "slow": (2, 4)},
    )  # fmt: skip
    workers = [worker for loader in loaders[: len(nodes)] for worker in loader.report().workers]
    for rank, worker in zip(run.ranks, workers, strict=True):
        assert {step.report.covers for step in rank.steps} == {"period"}
        assert sum(step.report.local_steps for step in rank.steps) == worker.updates
        assert sum(step.report.samples for step in rank.steps) == worker.samples
        assert sum(step.report.skipped for step in rank.steps) == worker.skipped
        merges = sum(step.report.buckets for step in rank.steps)
        assert merges == loaders[rank.rank]._node.merging.merges
        assert sum(s.report.elements for s in rank.steps) == 124 * merges
        assert sum(s.report.selected for s in rank.steps) <= 12 * merges
        assert bool(rank.residuals) == (merges > 0)
        assert (rank.steps[-1].bytes_so_far > 0) == (merges > 0) == (len(nodes) > 1)
    norms = [note.content["norm"] for rank in run.ranks for note in rank.residuals]
    assert any(norms) == (len(nodes) > 1)
    html, table = shown(run, tmp_path)
    for words in ("A period of each rank", "Batch sizes"):
        assert words in html
    assert ("Values of the model" in html) == (len(nodes) > 1)
    assert "density" not in table.splitlines()[0] or len(nodes) > 1
