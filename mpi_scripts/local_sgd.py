"""Train the digits with an exchange in every step, and every n steps (gtopk.LocalSGD).

python mpi_scripts/local_sgd.py --ranks 4 --inner-steps 8 32 --densities 0.25 0.05 --seeds 5

Ranks are threads; models, gradients, residuals, messages and their bytes are real; nothing is
timed. All recipes of a seed start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Run by its path, a script finds neither `models` nor a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives import run_ranks
from collectives.transports import Transport, local_world
from gtopk.cli.arguments import as_argument, output_file
from gtopk.compression import Compression
from gtopk.local_sgd import LocalSGD, averaging, nesterov
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from mpi_scripts.tasks import TASKS, Task

plain = partial(torch.optim.SGD, lr=0.7)

# Wraps the plain optimizer.
Wrap = Callable[[torch.optim.Optimizer], Any]


class Run(NamedTuple):
    """A training's outcome.

    exchanges: in the whole training; sent_bytes: by a rank in all of them, mean over ranks.
    """

    accuracy: float
    exchanges: int
    sent_bytes: float


def recipes(inner_steps: Sequence[int], densities: Sequence[float]) -> Iterator[tuple[str, Wrap]]:
    """Yield the compared recipes, by name."""
    yield "dense, every step", DistributedOptimizer
    for density in densities:
        gtopk = Compression.gtopk(density, growth=1.0)
        yield f"gtopk {density:g}, every step", partial(DistributedOptimizer, compression=gtopk)
    for steps in inner_steps:
        local = partial(LocalSGD, inner_steps=steps)
        yield f"averaging, {steps} steps", partial(local, outer=averaging)
        yield f"DiLoCo, {steps} steps", partial(local, outer=nesterov)
        for density in densities:
            gtopk = Compression.gtopk(density, growth=1.0)
            inside = Compression.gtopk(
                density, growth=1.0, momentum_correction=0.9, factor_masking=True
            )
            for outer in (averaging, nesterov):
                yield (
                    f"gtopk {density:g}, {steps} steps, {outer.__name__}",
                    partial(local, outer=outer, compression=gtopk),
                )
            yield (
                f"gtopk {density:g}, {steps} steps, momentum before selection, masked",
                partial(local, outer=plain, compression=inside),
            )


def train(task: Task, wrap: Wrap, ranks: int) -> Run:
    """Train once, with AdamW as the inner optimizer; each rank has its own AdamW state."""

    def rank(transport: Transport) -> Run:
        model = task.model()
        exchanges, sent = 0, 0
        with world.entered(transport):
            optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=task.adam_rate(0.0)))
            seen = None
            for batch in task.batches():
                optimizer.zero_grad()
                task.loss(model, batch.tensor_split(ranks)[transport.rank]).backward()
                optimizer.step()
                if optimizer.last_step is not seen:
                    seen = optimizer.last_step
                    exchanges, sent = exchanges + 1, sent + seen.sent_bytes
            if getattr(optimizer, "steps_made", 0):  # ends an unfinished round
                optimizer.outer_step()
                exchanges, sent = exchanges + 1, sent + optimizer.last_step.sent_bytes
        return Run(task.accuracy(model), exchanges, sent)

    runs = run_ranks(local_world(ranks), rank)
    assert len({run.accuracy for run in runs}) == 1, "the ranks' models differ"
    return runs[0]._replace(sent_bytes=statistics.fmean(run.sent_bytes for run in runs))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--inner-steps", type=int, nargs="+", default=[8, 32])
    add("--densities", type=float, nargs="+", default=[0.25, 0.05])
    add("--seeds", type=int, default=5, help="at least 2")
    add("--epochs", type=int, default=60)
    add("--json", type=as_argument(output_file), help="file to write the runs to")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds must be at least 2, to estimate the spread")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, row by row, and return the exit code."""
    options = parse(arguments)
    torch.set_num_threads(1)
    tasks = [TASKS["digits"](seed, options.epochs) for seed in range(options.seeds)]
    print("| recipe | exchanges | sent by a rank | accuracy % |")
    print("|---|---|---|---|")
    done = []
    for name, wrap in recipes(options.inner_steps, options.densities):
        runs = [train(task, wrap, options.ranks) for task in tasks]
        accuracies = [run.accuracy for run in runs]
        print(
            f"| {name} | {runs[0].exchanges} "
            f"| {statistics.fmean(run.sent_bytes for run in runs) / 1e6:.2f} MB "
            f"| {statistics.fmean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f} |",
            flush=True,
        )
        done.append({"recipe": name, "runs": [run._asdict() for run in runs]})
    if options.json:
        facts = {**vars(options), "json": str(options.json), "torch": torch.__version__}
        options.json.write_text(json.dumps({**facts, "results": done}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
