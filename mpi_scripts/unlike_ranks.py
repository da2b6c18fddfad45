"""Time equal, balanced and delayed batches on ranks that repeat their work, on a real clock.

mpirun -n 2 python mpi_scripts/unlike_ranks.py --repeat 1 3

With --repeat r a rank computes every batch r times and discards r-1 of the results: it is r times
as slow, whatever else the machine does. No rank sleeps, as it would give its core to the others.
The ranks' real ratio is measured first; a run is rejected if the ratio is not the requested one, or
not steady. Use no more ranks than there are cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

# Run by its path, a script finds neither `models` nor a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtopk.torch as hvd
from models.mlp import mlp

MODES = ("equal", "balanced", "abs")
FEATURES = 64
NEVER = 1_000_000_000  # a window of steps that never fills, so that batches stay equal
REJECTED = 3  # the exit code
RATIO_OFF, UNSTEADY = 0.15, 0.20


class Rank:
    """The repetitions that make this rank as slow as requested.

    twin: a copy of the model for the repetitions, so that the model's gradients stay unchanged.
    """

    def __init__(self, repeat: int, hidden: int) -> None:
        self.repeat = repeat
        self.hidden = hidden
        self.twin = self.new_model()

    def new_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return mlp(FEATURES, self.hidden)

    def compute(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compute the gradients of a batch, `repeat` times."""
        for _ in range(self.repeat - 1):
            self.twin.zero_grad()
            F.cross_entropy(self.twin(x), y).backward()
        F.cross_entropy(model(x), y).backward()

    def calibrate(self, samples: int, batches: int) -> list[float]:
        """Return the seconds of each of several batches."""
        (x, y), model = synthetic(samples), self.new_model()
        seconds = []
        for _ in range(batches):
            begun = time.perf_counter()
            self.compute(model, x, y)
            seconds.append(time.perf_counter() - begun)
        return seconds


def synthetic(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise and labels: only the time to compute matters here."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, torch.randint(10, (samples,), generator=generator)


def flaws(requested: Sequence[float], seconds: Sequence[Sequence[float]]) -> list[str]:
    """Return the reasons why the ranks' ratio is not as requested; empty if it is.

    seconds: of every batch of the calibration, by rank.
    """
    medians = [statistics.median(each) for each in seconds]
    per_repeat = [median / repeat for median, repeat in zip(medians, requested, strict=True)]
    found = []
    off = max(per_repeat) / min(per_repeat) - 1
    if off > RATIO_OFF:
        found.append(f"the ratio is off by {100 * off:.0f} %, more than {100 * RATIO_OFF:.0f} %")
    for rank, each in enumerate(seconds):
        unsteady = statistics.stdev(each) / statistics.fmean(each)
        if unsteady > UNSTEADY:
            found.append(
                f"rank {rank} varies by {100 * unsteady:.0f} %, more than {100 * UNSTEADY:.0f} %"
            )
    return found


class Training(NamedTuple):
    """One mode's loader, and the rest of its training."""

    model: torch.nn.Module
    optimizer: Any
    loader: Any


def open_mode(mode: str, rank: Rank, arguments: argparse.Namespace) -> Training:
    model = rank.new_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        hvd.Compression.gtopk(density=0.01),
    )
    loader = DataLoader(TensorDataset(*synthetic(arguments.samples)), 1, shuffle=True)
    options: dict[str, Any] = {"interval": NEVER if mode == "equal" else 5}
    adapted = hvd.adapt(
        loader,
        optimizer,
        "abs" if mode == "abs" else "balanced",
        global_batch=arguments.batch,
        **({} if mode == "abs" else options),
    )
    return Training(model, optimizer, adapted)


def epoch_seconds(rank: Rank, training: Training) -> float:
    """Return the seconds of an epoch, until the last rank has finished it."""
    hvd.barrier()
    begun = time.perf_counter()
    for x, y in training.loader:
        training.optimizer.zero_grad()
        rank.compute(training.model, x, y)
        training.optimizer.step()
    hvd.barrier()
    return time.perf_counter() - begun


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--repeat", type=int, nargs="+", default=[1, 3], help="how often each rank computes")
    add("--modes", nargs="+", choices=MODES, default=["equal", "balanced"])
    add("--rounds", type=int, default=5, help="epochs of each mode, in turns")
    add("--samples", type=int, default=8192, help="of an epoch")
    add("--batch", type=int, default=512, help="of all ranks")
    add("--hidden", type=int, default=512)
    add("--calibration", type=int, default=30, help="batches of it")
    return parser.parse_args()


def main() -> int:
    """Print the measurements and return the exit code."""
    hvd.init()
    torch.set_num_threads(1)
    arguments = parse()
    if len(arguments.repeat) != hvd.size():
        raise SystemExit(f"--repeat needs {hvd.size()} numbers, one for each rank")
    rank = Rank(arguments.repeat[hvd.rank()], arguments.hidden)
    rank.calibrate(arguments.batch // hvd.size(), 3)  # warm
    hvd.barrier()
    own_seconds = rank.calibrate(arguments.batch // hvd.size(), arguments.calibration)
    calibrated = hvd.allgather_object(own_seconds)
    found = flaws(arguments.repeat, calibrated)
    opened = {mode: open_mode(mode, rank, arguments) for mode in arguments.modes}
    for training in opened.values():
        epoch_seconds(rank, training)  # the sizes settle in this epoch
    seconds: dict[str, list[float]] = {mode: [] for mode in opened}
    for _ in range(arguments.rounds):
        for mode, training in opened.items():  # in turns: the machine's speed affects all
            seconds[mode].append(epoch_seconds(rank, training))
    again = hvd.allgather_object(
        rank.calibrate(arguments.batch // hvd.size(), arguments.calibration)
    )
    found += [f"afterwards {flaw}" for flaw in flaws(arguments.repeat, again)]
    if hvd.rank() == 0:
        report(arguments, calibrated, seconds, found)
        balanced = opened.get("balanced")
        if balanced:
            print(f"sizes of balanced: {balanced.loader.sizes}")
    hvd.shutdown()
    return REJECTED if found else 0


def report(
    arguments: argparse.Namespace,
    calibrated: Sequence[Sequence[float]],
    seconds: dict[str, list[float]],
    found: Sequence[str],
) -> None:
    """Print ratios, times, and reasons to reject them."""
    medians = [statistics.median(each) for each in calibrated]
    requested = ":".join(map(str, arguments.repeat))
    measured = ":".join(f"{median / min(medians):.2f}" for median in medians)
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"work is repeated {requested} times; measured {measured}; load averages {load}")
    first = statistics.median(next(iter(seconds.values())))
    for mode, each in seconds.items():
        median = statistics.median(each)
        print(
            f"{mode:9} {arguments.samples / median:8.0f} samples/s, {first / median:.2f}x "
            f"(epochs of {median:.3f} s, {min(each):.3f}-{max(each):.3f})"
        )
    for flaw in found:
        print(f"rejected: {flaw}")


if __name__ == "__main__":
    sys.exit(main())
