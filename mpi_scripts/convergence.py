"""Train the digits by many recipes on ranks that are threads, and compare what comes of it.

python mpi_scripts/convergence.py --ranks 4 16 --densities 0.005 0.01 0.05 --seeds 5

Models, gradients, residuals, messages and their bytes are real; nothing is timed. Every recipe
starts from the same weights and sees the same batches, so that accuracies are compared seed by
seed: what stands beside each is its mean difference to dense, and the standard error of that.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

# By path, Python would find neither `models` nor a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives import run_ranks
from collectives.transports import Transport, local_world
from gtopk import world
from gtopk.compression import Compression
from gtopk.demo.plan import equal_bytes_density
from gtopk.optimizer import DistributedOptimizer
from models.data.classification import Classification, load
from models.mlp import mlp

MOMENTUM: Final = 0.9
ADAM_RATE: Final = 1e-3


class Setting(NamedTuple):
    """What a recipe may go by; steps: of the whole training."""

    ranks: int
    density: float
    steps: int


class Recipe(NamedTuple):
    """momentum: of the wrapped SGD; None: Adam."""

    compression: Any
    momentum: float | None = MOMENTUM


def corrected(kind: Callable[..., Any], density: float, **options: Any) -> Recipe:
    """Return a recipe that takes the momentum before it selects."""
    return Recipe(kind(density, momentum_correction=MOMENTUM, **options), momentum=0.0)


# Each of these leaves a choice open or makes it: momentum before or after the selection, a
# warm-up, who keeps what is dropped, how wide updates are, how values are rounded.
RECIPES: Final[Mapping[str, Callable[[Setting], Recipe]]] = {
    "dense": lambda s: Recipe(Compression.none),
    "fp16": lambda s: Recipe(Compression.fp16),
    "topk, momentum after": lambda s: Recipe(Compression.topk(s.density)),
    "topk": lambda s: corrected(Compression.topk, s.density),
    "gtopk, momentum after": lambda s: Recipe(Compression.gtopk(s.density)),
    "gtopk": lambda s: corrected(Compression.gtopk, s.density),
    "gtopk, warm-up": lambda s: corrected(
        Compression.gtopk, s.density, warmup_steps=max(1, s.steps // 10)
    ),
    "gtopk, vectors dense": lambda s: corrected(Compression.gtopk, s.density, dense_vectors=True),
    "gtopk, spread": lambda s: corrected(Compression.gtopk, s.density, put_back="spread"),
    "gtopk, growth 4": lambda s: corrected(Compression.gtopk, s.density, growth=4.0),
    "gtopk, int8": lambda s: corrected(Compression.gtopk, s.density, wire="packed", values="int8"),
    "gtopk, bytes of topk": lambda s: corrected(
        Compression.gtopk, equal_bytes_density(s.density, s.ranks)
    ),
    "oktopk": lambda s: corrected(Compression.oktopk, s.density),
    "oktopk, k_out 4": lambda s: corrected(Compression.oktopk, s.density, k_out=4.0),
    "Adam": lambda s: Recipe(Compression.none, momentum=None),
    "Adam, gtopk": lambda s: Recipe(Compression.gtopk(s.density), momentum=None),
    "Adam, gtopk, warm-up": lambda s: Recipe(
        Compression.gtopk(s.density, warmup_steps=max(1, s.steps // 10)), momentum=None
    ),
}


class Run(NamedTuple):
    """selected: entries a rank sends a step; sent_bytes: by a rank, mean over steps and ranks."""

    accuracy: float
    selected: float
    updated: float
    sent_bytes: float


class Training(NamedTuple):
    """What is the same for every recipe of a seed."""

    data: Classification
    weights: Mapping[str, torch.Tensor]
    batches: Sequence[torch.Tensor]  # of all ranks together
    rate: float

    def model(self) -> torch.nn.Module:
        """Return the model as it begins."""
        model = mlp(self.data.features, classes=self.data.classes)
        model.load_state_dict(self.weights)
        return model


def open_training(options: argparse.Namespace, seed: int) -> Training:
    """Return the data, weights and batches of a seed."""
    data = load("digits", seed)
    torch.manual_seed(seed)
    weights = mlp(data.features, classes=data.classes).state_dict()
    order = torch.Generator().manual_seed(seed)
    batches = [
        batch
        for _ in range(options.epochs)
        for batch in torch.randperm(len(data.train), generator=order).split(options.batch)
        if len(batch) == options.batch
    ]
    return Training(data, weights, batches, options.lr)


def train(training: Training, recipe: Recipe, ranks: int) -> Run:
    """Train once."""
    x, y = training.data.train.tensors

    def rank(transport: Transport) -> Run:
        model = training.model()
        inner: torch.optim.Optimizer
        if recipe.momentum is None:
            inner = torch.optim.Adam(model.parameters(), lr=ADAM_RATE)
        else:
            inner = torch.optim.SGD(model.parameters(), training.rate, momentum=recipe.momentum)
        with world.entered(transport):
            optimizer = DistributedOptimizer(inner, model.named_parameters(), recipe.compression)
            steps = []
            for batch in training.batches:
                mine = batch.tensor_split(ranks)[transport.rank]
                optimizer.zero_grad()
                F.cross_entropy(model(x[mine]), y[mine]).backward()
                optimizer.step()
                steps.append(optimizer.last_step)
        return Run(
            accuracy(model, training.data),
            statistics.fmean(step.selected for step in steps),
            statistics.fmean(step.updated for step in steps),
            statistics.fmean(step.sent_bytes for step in steps),
        )

    runs = run_ranks(local_world(ranks), rank)
    assert len({run.accuracy for run in runs}) == 1, "replicas are alike"
    return runs[0]._replace(sent_bytes=statistics.fmean(run.sent_bytes for run in runs))


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: Classification) -> float:
    """Return the share of the test samples that the model names right."""
    x, y = data.test.tensors
    return float((model(x).argmax(1) == y).float().mean())


class Result(NamedTuple):
    """One recipe's runs, a seed each."""

    ranks: int
    density: float
    recipe: str
    runs: list[Run]


def results(options: argparse.Namespace) -> Iterator[Result]:
    """Train everything; those that do not depend on the density once."""
    trainings = [open_training(options, seed) for seed in range(options.seeds)]
    steps = len(trainings[0].batches)
    for ranks in options.ranks:
        for density in options.densities:
            for name in options.recipes:
                recipe = RECIPES[name](Setting(ranks, density, steps))
                if density != options.densities[0] and recipe in of_any_density():
                    continue
                runs = [train(training, recipe, ranks) for training in trainings]
                yield Result(ranks, density, name, runs)


def of_any_density() -> list[Recipe]:
    """Return the recipes that are the same at every density."""
    return [
        Recipe(Compression.none),
        Recipe(Compression.fp16),
        Recipe(Compression.none, momentum=None),
    ]


def line(result: Result, dense: Result | None) -> str:
    """Return a row of the table."""
    accuracies = [run.accuracy for run in result.runs]
    beside = ""
    if dense is not None and dense is not result:
        differences = [
            a.accuracy - b.accuracy for a, b in zip(result.runs, dense.runs, strict=True)
        ]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        beside = f"{100 * statistics.fmean(differences):+.2f} ± {100 * error:.2f}"
    return (
        f"| {result.ranks} | {result.recipe} | {result.density:g} "
        f"| {statistics.fmean(run.selected for run in result.runs):,.0f} "
        f"| {statistics.fmean(run.updated for run in result.runs):,.0f} "
        f"| {statistics.fmean(run.sent_bytes for run in result.runs) / 1e3:.1f} kB "
        f"| {100 * statistics.fmean(accuracies):.2f} ± {100 * statistics.stdev(accuracies):.2f} "
        f"| {beside} |"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[4])
    add("--densities", type=float, nargs="+", default=[0.01])
    add("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    add("--seeds", type=int, default=5, help="at least 2")
    add("--epochs", type=int, default=30)
    add("--batch", type=int, default=128, help="of all ranks; default: %(default)s")
    add("--lr", type=float, default=0.05, help="of SGD; Adam takes 0.001")
    add("--json", type=Path, help="file to write the runs to")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one alone says nothing of the spread")
    if options.batch < max(options.ranks):
        parser.error("--batch must have a sample for every rank")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, row by row, and return the exit code."""
    options = parse(arguments)
    torch.set_num_threads(1)
    print("| ranks | recipe | density | selected | updated | sent a step | accuracy % | to dense |")
    print("|---|---|---|---|---|---|---|---|")
    done: list[Result] = []
    dense: dict[int, Result] = {}
    for result in results(options):
        if result.recipe == "dense":
            dense[result.ranks] = result
        print(line(result, dense.get(result.ranks)), flush=True)
        done.append(result)
    if options.json:
        written = [
            {**each._asdict(), "runs": [run._asdict() for run in each.runs]} for each in done
        ]
        facts = {**vars(options), "json": str(options.json), "torch": torch.__version__}
        content = {**facts, "results": written}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
