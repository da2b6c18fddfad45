"""The demo on one rank: train with every method and seed; rank 0 writes the records.

It then trains dense and gTop-k once more, over an emulated link.

mpirun starts it with the plan and the path of results.json as arguments. Rank 0 prints progress
lines (PROGRESS and JSON) for the command that started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gtopk.torch as hvd

from ... import settings
from ...runtime.machine import this_machine
from ...runtime.world import world
from ...telemetry.step_report import StepReport
from ...units import bandwidth_text, seconds_text
from ..arguments import write_records
from ..simulate.setting import mean_loss, open_task
from . import PROGRESS, Method, Plan
from .verdicts import PARTS, Record


class Run(NamedTuple):
    """One training run, as this rank saw it."""

    accuracy_by_epoch: list[float]
    loss_by_epoch: list[float]
    seconds_by_epoch: list[float]
    seconds: float
    steps: list[StepReport]
    selected: int
    identical: bool


def network(plan: Plan, seed: int) -> torch.nn.Sequential:
    """Return the MLP 64-hidden-hidden-10."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, plan.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(plan.hidden, plan.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(plan.hidden, 10),
    )


def train(plan: Plan, method: Method, seed: int, done: int, total: int) -> Run:
    """Train once; done: finished epochs of the whole demo, out of `total`."""
    task, model = open_task("digits", seed), network(plan, seed)
    inner = torch.optim.SGD(
        model.parameters(), plan.lr, momentum=0.0 if method.sparse else plan.momentum
    )
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), method.compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # The order depends only on seed and epoch, so that all methods get the same batches.
    global_batch = plan.batch * hvd.size()
    accuracies: list[float] = []
    losses, trained = [mean_loss(task, model)], [0.0]
    steps: list[StepReport] = []
    hvd.barrier()
    begun = time.perf_counter()
    evaluation_seconds = 0.0
    for epoch in range(plan.epochs):
        shuffle = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(task.samples, generator=shuffle)
        for start in range(0, plan.steps_per_epoch() * global_batch, global_batch):
            own = order[start + hvd.rank() * plan.batch :][: plan.batch]
            optimizer.zero_grad()
            task.loss(model, own).backward()
            optimizer.step()
            assert optimizer.last_step is not None
            steps.append(optimizer.last_step)
        if hvd.rank() == 0:
            epoch_ended = time.perf_counter()
            trained.append(epoch_ended - begun - evaluation_seconds)
            accuracies.append(task.accuracy(model))
            losses.append(mean_loss(task, model))
            # Exclude the time of rank 0's evaluation from the curve.
            evaluation_seconds += time.perf_counter() - epoch_ended
            progress(method, seed, epoch, accuracies[-1], done + epoch + 1, total)
    hvd.barrier()
    seconds = time.perf_counter() - begun
    identical = replicas_identical(model)
    return Run(accuracies, losses, trained, seconds, steps, steps[-1].selected, identical)


def replicas_identical(model: torch.nn.Module) -> bool:
    """Tell whether all ranks hold the same bits."""
    digest = hashlib.blake2b()
    for parameter in model.parameters():
        # Compare bits, not values: drift between replicas starts in the last bit.
        digest.update(parameter.detach().numpy().tobytes())
    return len(set(hvd.allgather_object(digest.hexdigest()))) == 1


def progress(method: Method, seed: int, epoch: int, accuracy: float, done: int, total: int) -> None:
    """Print one line of progress for the command that started the ranks."""
    fields = {
        "method": f"{method.label}, emulated link" if settings.LINK.read() else method.label,
        "seed": seed,
        "epoch": epoch + 1,
        "accuracy": accuracy,
        "done": done,
        "total": total,
    }
    print(PROGRESS + json.dumps(fields), flush=True)


def part_seconds(runs: list[Run], part: str) -> float:
    """Return a part's seconds: median over steps, as the first may be slow, mean over ranks."""
    median = statistics.median(
        getattr(step, f"{part}_seconds") for run in runs for step in run.steps[1:]
    )
    return statistics.fmean(hvd.allgather_object(median))


def record(plan: Plan, method: Method, runs: list[Run], machine: dict[str, Any]) -> Record:
    """Return the record of one method, from all ranks' runs; every rank must call it."""
    model = network(plan, seed=0)
    sent = statistics.fmean(step.sent_bytes for run in runs for step in run.steps)
    widths = [64, plan.hidden, plan.hidden, 10]
    accuracies = [run.accuracy_by_epoch[-1] for run in runs] if hvd.rank() == 0 else [0.0]
    return Record(
        method=method.name,
        label=method.label,
        link=link_text(),
        accuracy=statistics.fmean(accuracies),
        accuracy_by_seed=accuracies,
        accuracy_by_epoch=[run.accuracy_by_epoch for run in runs],
        loss_by_epoch=[run.loss_by_epoch for run in runs],
        seconds_by_epoch=[run.seconds_by_epoch for run in runs],
        bytes_per_step=statistics.fmean(hvd.allgather_object(sent)),
        bytes_counted=all(step.bytes_counted for run in runs for step in run.steps),
        density=method.density,
        seconds=statistics.fmean(run.seconds for run in runs),
        step_seconds={part: part_seconds(runs, part) for part in PARTS},
        merge_seconds=part_seconds(runs, "merge"),
        final_replicas_identical=all(run.identical for run in runs),
        ranks=hvd.size(),
        parameters=sum(p.numel() for p in model.parameters()),
        selected=runs[0].selected,
        epochs=plan.epochs,
        steps=len(runs[0].steps),
        seeds=len(runs),
        batch_per_rank=plan.batch,
        dataset="digits",
        model="MLP " + "-".join(map(str, widths)),
        machine=machine,
    )


def link_text() -> str:
    """Return the emulated link as text, "" for none."""
    link = settings.LINK.read()
    if link is None:
        return ""
    latency = f", {seconds_text(link.latency_seconds)}" if link.latency_seconds else ""
    return bandwidth_text(link.bits_per_second) + latency


def machine_and_transport() -> dict[str, Any]:
    """Return the current state of the machine, and the versions of torch and MPI."""
    mpi = world.current().transport.library()
    return {**this_machine(), "torch": torch.__version__, "mpi": mpi}


def main(plan_json: str, results: str) -> None:
    """Run the whole plan on this rank."""
    plan = Plan(**json.loads(plan_json))
    # Advice measured inside one machine is useless for a cluster.
    os.environ.setdefault(settings.ADVICE.name, "off")
    # A link in the caller's environment would also slow the first part, which needs none.
    os.environ.pop(settings.LINK.name, None)
    hvd.init()
    machine = machine_and_transport()
    methods = plan.methods()
    total = plan.runs() * plan.epochs
    runs: dict[str, list[Run]] = {method.name: [] for method in methods}
    done = 0
    # Run all methods of a seed in turn, so that noise of the machine affects them equally.
    for seed in range(plan.seeds):
        for method in methods:
            runs[method.name].append(train(plan, method, seed, done, total))
            done += plan.epochs
    records = [record(plan, method, runs[method.name], machine) for method in methods]
    if plan.over_link():
        hvd.shutdown()
        os.environ[settings.LINK.name] = plan.link
        hvd.init()
        machine = machine_and_transport()
    for method in plan.over_link():
        run = train(plan, method, 0, done, total)
        done += plan.epochs
        records.append(record(plan, method, [run], machine))
    if hvd.rank() == 0:
        write_records(records, Path(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
