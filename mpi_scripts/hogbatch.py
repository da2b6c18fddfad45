"""Time Hogbatch against synchronous and one-sided training, on workers that repeat their work.

mpirun -n 2 python mpi_scripts/hogbatch.py --repeat 1 8

The first worker is fast, the others are slow: with --repeat r a worker computes every batch r times
and discards r-1 of the results. So it is r times as slow, whatever else the machine does; no worker
sleeps. The real ratio is measured at the start and the end; a run is rejected if the ratio is not
the requested one, or not steady. Seconds are of training only: losses are evaluated between epochs
and not timed. Use no more workers than there are cores.

mpirun -n 5 python mpi_scripts/hogbatch.py --gpus 1 --slow 1:64 --fast 256:4096 --batch 4096

The first worker is on a GPU, the others on the CPU; their ratio is measured and printed. With
--gpus n the first n workers are on GPUs, and share the machine's GPUs evenly.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

# Run by its path, a script finds neither `models` nor a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtopk.torch as hvd
from gtopk.cli.arguments import as_argument, output_file
from gtopk.units import counted
from models.data.batches import as_batch
from models.fully_connected import fully_connected
from mpi_scripts.tables import TABLES, File, Table, open_table
from mpi_scripts.unlike_ranks import REJECTED, flaws

MODES = ("sync", "slow-only", "fast-only", "hogbatch", "adaptive-hogbatch")


class Point(NamedTuple):
    """State after an epoch: seconds of training so far, mean training loss, accuracy."""

    seconds: float
    loss: float
    accuracy: float


class Run(NamedTuple):
    """One mode and seed; figures are of the whole run.

    updates, busy: by worker. staleness: mean over all updates. fast: number of fast workers, which
        come first.
    """

    mode: str
    seed: int
    points: list[Point]
    updates: list[int]
    busy: list[float]
    staleness: float
    overlapped: float
    fast: int = 1

    @property
    def slow_share(self) -> float:
        """Return the share of updates that slow workers made."""
        return sum(self.updates[self.fast :]) / max(sum(self.updates), 1)

    def loss_at(self, seconds: float) -> float:
        """Return the loss of the last epoch that had ended; infinity before the first."""
        return next((p.loss for p in reversed(self.points) if p.seconds <= seconds), float("inf"))

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds after which a loss was first reached; None: never."""
        return next((point.seconds for point in self.points if point.loss <= loss), None)


class Worker:
    """A worker's device, and the repetitions that make it as slow as requested.

    twin: a copy of the model for the repetitions, so that the model's gradients stay unchanged.
    """

    def __init__(self, rank: int, repeat: int, arguments: argparse.Namespace) -> None:
        self.repeat, self.arguments = repeat, arguments
        self.is_fast = rank < max(arguments.gpus, 1)
        self.device, self.device_class = "cpu", "fast" if self.is_fast else "slow"
        if arguments.gpus:
            self.device_class = "gpu" if self.is_fast else "cpu"
            if self.is_fast:
                self.device = f"cuda:{rank % torch.cuda.device_count()}"
        self.table = self.open_table(0)
        self.twin = self.new_model(0)

    def open_table(self, seed: int) -> Table:
        """Return the data; the seed selects the fifth of it that is held out."""
        arguments = self.arguments
        file = arguments.file
        if file is not None:
            file = File(file, arguments.label_base, arguments.feature_base)
        return open_table(arguments.data, seed, arguments.rows, file)

    def new_model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = fully_connected(self.table.features, self.table.outputs, self.arguments.hidden)
        return model.to(self.device)

    def compute(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compute the gradients of a batch, `repeat` times; return when they are complete."""
        x, y = x.to(self.device), y.to(self.device)
        for _ in range(self.repeat - 1):
            self.twin.zero_grad()
            self.table.loss(self.twin(x), y).backward()
        self.table.loss(model(x), y).backward()
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def calibrate(self) -> list[float]:
        """Return the seconds of each of several batches."""
        x, y = self.table.train.__getitems__(range(self.arguments.batch))
        model, seconds = self.new_model(0), []
        for _ in range(self.arguments.calibration):
            begun = time.perf_counter()
            self.compute(model, x, y)
            seconds.append(time.perf_counter() - begun)
        return seconds


def train(mode: str, seed: int, worker: Worker) -> Run:
    """Train for the requested time, and return the run."""
    arguments, is_fast = worker.arguments, worker.is_fast
    slow, fast = ("cpu", "gpu") if arguments.gpus else ("slow", "fast")
    data, model = worker.open_table(seed), worker.new_model(seed)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), arguments.lr), model.named_parameters()
    )
    is_hogbatch = mode != "sync"
    loader: Any = DataLoader(
        data.train,  # type: ignore[arg-type]
        arguments.batch if is_hogbatch else arguments.batch // hvd.size(),
        shuffle=True,
        collate_fn=as_batch,
    )
    if is_hogbatch:
        loader = hvd.adapt(
            loader,
            optimizer,
            "adaptive-hogbatch" if mode == "adaptive-hogbatch" else "hogbatch",
            global_batch=arguments.batch,
            device_class=worker.device_class,
            sizes={slow: arguments.slow, fast: arguments.fast},
            seed=1000 * seed,
        )
    else:
        loader = hvd.adapt(loader, optimizer, interval=1 << 40, seed=1000 * seed)
    takes_part = mode not in ("slow-only", "fast-only") or (mode == "fast-only") == is_fast
    points: list[Point] = []
    spent = computed = 0.0
    updates = 0
    while not points or points[-1].seconds < arguments.seconds:
        hvd.barrier()
        begun = time.perf_counter()
        if not takes_part:
            loader.sit_out()
        else:
            for x, y in loader:
                optimizer.zero_grad()
                at = time.perf_counter()
                worker.compute(model, x, y)
                computed += time.perf_counter() - at
                optimizer.step()
                updates += 1
        hvd.barrier()
        spent = hvd.broadcast_object(spent + time.perf_counter() - begun)
        points.append(Point(spent, *evaluate(model, data, loader, worker.device)))
    if is_hogbatch:
        report = loader.report()
        rows = report.workers
        return Run(
            mode,
            seed,
            points,
            [row.updates for row in rows],
            [row.busy for row in rows],
            report.staleness,
            report.overlapped_share,
            max(arguments.gpus, 1),
        )
    busy = [share / spent for share in hvd.allgather_object(computed)]
    return Run(mode, seed, points, [updates] * hvd.size(), busy, 0.0, 0.0)


def evaluate(model: torch.nn.Module, data: Table, loader: Any, device: str) -> tuple[float, float]:
    """Return the mean loss of the training samples, and the accuracy on the others, by rank 0."""
    loader.drain()
    found = None
    if hvd.rank() == 0:
        found = data.mean_loss(model, device), data.accuracy(model, device)
    return hvd.broadcast_object(found)  # type: ignore[no-any-return]


def pair(text: str) -> tuple[int, int]:
    """Parse two sizes, such as "4:64"."""
    smallest, _, largest = text.partition(":")
    return int(smallest), int(largest or smallest)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--repeat", type=int, nargs="+", help="how often each worker computes; default: 1 8")
    add("--gpus", type=int, default=0, help="instead of --repeat: put the first workers on GPUs")
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add(
        "--data",
        default="digits",
        help="digits, breast-cancer, wine, an .npz file; or synthetic data with the dimensions of "
        f"{', '.join(TABLES)}",
    )
    add("--rows", type=int, default=4000, help="number of synthetic rows")
    add(
        "--file",
        type=Path,
        help="file to use instead of synthetic data: LIBSVM's; for delicious also the Extreme "
        "Classification Repository's, with its header",
    )
    add(
        "--label-base",
        type=int,
        choices=(0, 1),
        help="the first label's number in a file of delicious without a header",
    )
    add("--feature-base", type=int, choices=(0, 1), default=1, help="the first feature's number")
    add("--hidden", type=int, nargs="+", default=[512] * 8, help="widths of the hidden layers")
    add("--batch", type=int, default=256, help="the batch size that --lr is for")
    add("--slow", type=pair, default=(8, 64), help="smallest and largest batch of slow workers")
    add("--fast", type=pair, default=(32, 256), help="the same of fast workers")
    add("--lr", type=float, default=0.1)
    add("--seconds", type=float, default=20.0, help="for each mode and seed")
    add("--seeds", type=int, default=5)
    add("--calibration", type=int, default=20, help="batches to measure speeds with")
    add("--json", type=as_argument(output_file), help="file to write all runs to")
    options = parser.parse_args()
    if options.file and options.data not in TABLES:
        parser.error(f"--file is for --data {', '.join(TABLES)}, got --data {options.data}")
    if options.label_base is not None and (options.data != "delicious" or not options.file):
        parser.error("--label-base is for a --file of --data delicious")
    if options.gpus and options.repeat:
        parser.error("give --repeat, for workers on CPUs, or --gpus, not both")
    if options.gpus < 0 or (options.gpus and not torch.cuda.is_available()):
        parser.error(f"--gpus needs GPUs that torch can use, got --gpus {options.gpus}")
    return options


def main() -> int:
    """Print the measurements and return the exit code."""
    reported_below = "workers of hogbatch on CPUs share"
    logging.getLogger("gtopk").addFilter(lambda record: reported_below not in record.getMessage())
    hvd.init()
    torch.set_num_threads(1)
    arguments = parse()
    repeats = arguments.repeat or ([1] * hvd.size() if arguments.gpus else [1, 8])
    if len(repeats) != hvd.size():
        raise SystemExit(f"--repeat needs {hvd.size()} numbers, one for each worker")
    worker = Worker(hvd.rank(), repeats[hvd.rank()], arguments)
    worker.calibrate()  # warm
    hvd.barrier()
    calibrated = hvd.allgather_object(worker.calibrate())
    # Real devices may have any ratio, as long as it is steady.
    expected = list(map(statistics.median, calibrated)) if arguments.gpus else repeats
    found = flaws(expected, calibrated)
    runs = [
        train(mode, seed, worker)
        for seed in range(arguments.seeds)  # in turns: the machine's speed affects all modes
        for mode in arguments.modes
    ]
    again = hvd.allgather_object(worker.calibrate())
    found += [f"afterwards {flaw}" for flaw in flaws(expected, again)]
    cores = os.cpu_count() or 1
    if hvd.size() > cores:
        found.append(f"{hvd.size()} workers share {counted(cores, 'core')}")
    if hvd.rank() == 0:
        print(f"data: {worker.table.origin}; hidden layers {arguments.hidden}")
        print("\n".join(lines(arguments, calibrated, runs, found)), flush=True)
        if arguments.json:
            rows = [{**run._asdict(), "slow_share": run.slow_share} for run in runs]
            record = {"wall_clock": True, "rejected": found, "runs": rows}
            arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    hvd.shutdown()
    return REJECTED if found else 0


def lines(
    arguments: argparse.Namespace,
    calibrated: Sequence[Sequence[float]],
    runs: Sequence[Run],
    found: Sequence[str],
) -> list[str]:
    """Return the table: medians over the seeds, and the reasons to reject them."""
    medians = [statistics.median(each) for each in calibrated]
    work = "work is repeated " + ":".join(map(str, arguments.repeat or [1, 8])) + " times"
    if arguments.gpus:
        work = f"workers on GPUs: {arguments.gpus}; seconds of a batch"
    measured = ":".join(f"{median / min(medians):.2f}" for median in medians)
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    rows = [
        f"wall clock; {work}, measured {measured}; load averages {load}",
        "mode               loss at 1/4   1/2     end  to sync's  slow's share  busy fast/slow  "
        "stale  accuracy %",
    ]
    by_mode = {mode: [run for run in runs if run.mode == mode] for mode in arguments.modes}
    for mode, mode_runs in by_mode.items():
        targets = {run.seed: run.points[-1].loss for run in by_mode.get("sync", [])}
        reached = [run.seconds_to(targets[run.seed]) for run in mode_runs if run.seed in targets]
        seconds = [second for second in reached if second is not None]
        to_target = f"{statistics.median(seconds):6.1f} s" if seconds else "   never"
        at = [
            statistics.median(run.loss_at(share * arguments.seconds) for run in mode_runs)
            for share in (0.25, 0.5)
        ]
        end = statistics.median(run.points[-1].loss for run in mode_runs)
        share = statistics.median(run.slow_share for run in mode_runs)
        busy = [statistics.median(run.busy[place] for run in mode_runs) for place in (0, -1)]
        stale = statistics.median(run.staleness for run in mode_runs)
        accuracy = [100 * run.points[-1].accuracy for run in mode_runs]
        rows.append(
            f"{mode:18} {at[0]:10.4f} {at[1]:6.4f} {end:7.4f}  {to_target} "
            f"({len(seconds)}/{len(mode_runs)}) {share:8.2f}     {busy[0]:8.2f}/{busy[1]:.2f} "
            f"{stale:7.2f}  {statistics.median(accuracy):.1f} "
            f"({min(accuracy):.1f}-{max(accuracy):.1f})"
        )
    return [*rows, *(f"rejected: {flaw}" for flaw in found)]


if __name__ == "__main__":
    sys.exit(main())
