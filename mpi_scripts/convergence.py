"""Train small models with many recipes, on ranks that are threads, and compare the results.

python mpi_scripts/convergence.py --ranks 4 16 --densities 0.005 0.01 0.05 --seeds 5

Models, gradients, residuals, messages and their bytes are real; nothing is timed. Every recipe
starts from the same weights and sees the same batches, so that accuracies are compared seed by
seed: each comes with its mean difference from the first dense recipe with the same optimizer, SGD
or AdamW, and that difference's standard error. `--losses 0.5 0.2` adds how many steps later a
recipe reaches these training losses.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

# Run by its path, a script finds neither `models` nor a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives import run_ranks
from collectives.transports import Transport, local_world
from gtopk.cli.arguments import as_argument, output_file
from gtopk.local_sgd import LocalSGD
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from mpi_scripts.decoupled import DecoupledMomentum
from mpi_scripts.low_rank import LowRank
from mpi_scripts.recipes import RECIPES, Recipe, Setting
from mpi_scripts.tasks import TASKS, Task

ADAMW_DECAY: Final = 0.01  # torch's own
SMOOTH: Final = 11  # steps: an epoch of digits


class Run(NamedTuple):
    """The outcome of a training.

    accuracy:   of rank 0's model; with batch norm, other ranks' running statistics differ.
    digest:     of the parameters, which are equal on all ranks.
    selected:   entries that a rank sends in a step, on average; updated: coordinates of an update.
    sent_bytes: what a rank sends in a step; mean over steps and ranks.
    losses:     of every step; means over the ranks.
    """

    accuracy: float
    digest: str
    selected: float
    updated: float
    sent_bytes: float
    losses: list[float]

    def reaches(self, loss: float) -> int | None:
        """Return the first step from which SMOOTH steps have this mean loss; None: never."""
        windows = zip(*(self.losses[first:] for first in range(SMOOTH)), strict=False)
        return next((step for step, at in enumerate(windows) if sum(at) <= SMOOTH * loss), None)


def train(task: Task, recipe: Recipe, ranks: int) -> Run:
    """Train once; raise AssertionError if the ranks' models differ in the end."""

    def rank(transport: Transport) -> Run:
        model = task.model()
        inner: torch.optim.Optimizer
        schedule = task.adam_rate if recipe.adam else task.rate
        rate = recipe.rate_at(0.0) * schedule(0.0)
        if recipe.is_adam_before or recipe.decoupled:
            inner = torch.optim.SGD(model.parameters(), rate, weight_decay=ADAMW_DECAY)
        elif recipe.adam:
            inner = torch.optim.AdamW(model.parameters(), rate, weight_decay=ADAMW_DECAY)
        else:
            inner = torch.optim.SGD(model.parameters(), rate, momentum=recipe.momentum)
        optimizer: Any
        with contextlib.ExitStack() as stack:
            if recipe.low_rank:
                named = model.named_parameters()
                optimizer = LowRank(inner, named, recipe.low_rank, transport, **recipe.options)
            elif recipe.decoupled:
                named = model.named_parameters()
                optimizer = DecoupledMomentum(inner, named, recipe.decoupled, transport)
            else:
                stack.enter_context(world.entered(transport))
                wrap: Any = DistributedOptimizer
                if recipe.inner_steps:
                    wrap = partial(LocalSGD, inner_steps=recipe.inner_steps)
                optimizer = wrap(
                    inner,
                    named_parameters=model.named_parameters(),
                    compression=recipe.compression,
                    **recipe.options,
                )
            reports: list[Any] = []
            losses = []
            for number, batch in enumerate(task.batches()):
                share = number / task.steps
                inner.param_groups[0]["lr"] = recipe.rate_at(share) * schedule(share)
                optimizer.zero_grad()
                loss = task.loss(model, batch.tensor_split(ranks)[transport.rank])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if not reports or optimizer.last_step is not reports[-1]:
                    reports.append(optimizer.last_step)
            a_step = 1.0  # exchanges
            if recipe.inner_steps:
                optimizer.outer_step()  # ends an unfinished round or overlap
                reports.append(optimizer.last_step)
                a_step = optimizer.outer_steps / task.steps
        exchanges = [each for each in reports if each is not None]
        parameters = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        return Run(
            task.accuracy(model) if transport.rank == 0 else 0.0,
            hashlib.blake2b(parameters, digest_size=8).hexdigest(),
            a_step * statistics.fmean(each.selected for each in exchanges),
            a_step * statistics.fmean(each.updated for each in exchanges),
            a_step * statistics.fmean(each.sent_bytes for each in exchanges),
            losses,
        )

    runs = run_ranks(local_world(ranks, 600.0, recipe.node_size or None), rank)
    assert len({run.digest for run in runs}) == 1, "the ranks' models differ"
    return runs[0]._replace(
        sent_bytes=statistics.fmean(run.sent_bytes for run in runs),
        losses=[statistics.fmean(step) for step in zip(*(run.losses for run in runs), strict=True)],
    )


def run_seed(
    name: str, recipe: str, density: float, ranks: int, seed: int, epochs: int | None
) -> Run:
    """Train one seed of a task with a recipe, in its own process; epochs: None: the task's."""
    logging.getLogger("gtopk").setLevel(logging.ERROR)  # ranks share cores and delay each other
    torch.set_num_threads(1)
    task = TASKS[name](seed) if epochs is None else TASKS[name](seed, epochs)
    length = sum(weight.numel() for weight in task.weights.values())
    return train(task, RECIPES[recipe](Setting(ranks, density, length, task.steps)), ranks)


class Result(NamedTuple):
    """One recipe's runs, one for each seed."""

    ranks: int
    density: float
    recipe: str
    runs: list[Run]


def results(options: argparse.Namespace) -> Iterator[Result]:
    """Train all recipes; train those that do not depend on the density only once."""
    # A process for each: threads of one process would share a core and Python's lock.
    context = get_context("spawn")
    cores = context.SimpleQueue()
    for core in itertools.islice(itertools.cycle(os.sched_getaffinity(0)), options.jobs):
        cores.put(core)
    with ProcessPoolExecutor(options.jobs, context, initializer=_pin, initargs=(cores,)) as pool:
        waiting = [
            (
                ranks,
                density,
                name,
                [
                    pool.submit(run_seed, options.task, name, density, ranks, seed, options.epochs)
                    for seed in range(options.first_seed, options.first_seed + options.seeds)
                ],
            )
            for ranks in options.ranks
            for density in options.densities
            for name in options.recipes
            if density == options.densities[0] or depends_on_density(name)
        ]
        for ranks, density, name, seeds in waiting:
            yield Result(ranks, density, name, [seed.result() for seed in seeds])


def _pin(cores: SimpleQueue[int]) -> None:
    """Pin this process to a core: handing Python's lock between two cores doubles all times."""
    os.sched_setaffinity(0, {cores.get()})


def depends_on_density(name: str) -> bool:
    """Tell whether a recipe depends on the density."""
    one, other = (RECIPES[name](Setting(4, density, 10**6, 100)) for density in (0.1, 0.2))
    return one != other


def later(runs: Sequence[Run], dense: Sequence[Run], loss: float) -> str:
    """Return how many steps later than dense the runs reach a loss: median (min-max)."""
    steps = []
    for run, other in zip(runs, dense, strict=True):
        own, base = run.reaches(loss), other.reaches(loss)
        if own is None or base is None:
            return "not all seeds"
        steps.append(own - base)
    return f"{statistics.median(steps):.0f} ({min(steps)}-{max(steps)})"


def line(result: Result, dense: Result | None, losses: Sequence[float]) -> str:
    """Return a row of the table."""
    accuracies = [run.accuracy for run in result.runs]
    columns = ""
    if dense is not None and dense is not result:
        differences = [
            a.accuracy - b.accuracy for a, b in zip(result.runs, dense.runs, strict=True)
        ]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        columns = f"{statistics.fmean(differences):+.2f} ± {error:.2f}"
    columns += "".join(f" | {later(result.runs, (dense or result).runs, loss)}" for loss in losses)
    return (
        f"| {result.ranks} | {result.recipe} | {result.density:g} "
        f"| {statistics.fmean(run.selected for run in result.runs):,.0f} "
        f"| {statistics.fmean(run.updated for run in result.runs):,.0f} "
        f"| {statistics.fmean(run.sent_bytes for run in result.runs) / 1e3:.1f} kB "
        f"| {statistics.fmean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f} "
        f"| {columns} |"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--task", choices=TASKS, default="digits")
    add("--ranks", type=int, nargs="+", default=[4])
    add("--densities", type=float, nargs="+", default=[0.01])
    add("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    add("--seeds", type=int, default=5, help="at least 2")
    add("--first-seed", type=int, default=0, help="others than those that a recipe was chosen by")
    add("--epochs", type=int, help="default: the task's")
    add("--losses", type=float, nargs="+", default=[], help="of training, to wait for")
    add("--jobs", type=int, default=1, help="seeds trained at a time, each on a core")
    add("--json", type=as_argument(output_file), help="file to write the runs to")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds must be at least 2, to estimate the spread")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, row by row, and return the exit code."""
    options = parse(arguments)
    columns = ["ranks", "recipe", "density", "selected", "updated", "sent a step", "accuracy %"]
    columns += ["to dense", *(f"steps later to {loss:g}" for loss in options.losses)]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    done: list[Result] = []
    dense: dict[tuple[int, bool], Result] = {}
    for result in results(options):
        recipe = RECIPES[result.recipe](Setting(result.ranks, 0.1, 10**6, 100))
        kind = result.ranks, recipe.adam
        if recipe.is_dense:
            dense.setdefault(kind, result)
        print(line(result, dense.get(kind), options.losses), flush=True)
        done.append(result)
    if options.json:
        written = [
            {**each._asdict(), "runs": [run._asdict() for run in each.runs]} for each in done
        ]
        settings = {**vars(options), "json": str(options.json), "torch": torch.__version__}
        content = {**settings, "results": written}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
