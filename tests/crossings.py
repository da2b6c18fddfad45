"""Count the files that one gradient crosses in a step, and the calls from one file to another.

    PYTHONPATH=. python -m torch.distributed.run --standalone --nproc-per-node 2 tests/crossings.py

Rank 0 prints both figures for a step of DistributedOptimizer and for one through DDP's hook, for a
model of 8 layers in 3 buckets. On all threads of the process, a call counts if caller and callee
are in different files of gtopk or collectives. Waiting adds calls, so 5 steps are counted and the
one with the fewest calls is printed. `--files` lists the files, `--pairs` the calls by caller and
callee.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import gtopk.torch as hvd
from gtopk.ddp import GTopKState, gtopk_hook

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("gtopk", "collectives"))
SETTLED = 6  # steps not counted: the first ones also start up, measure links and check replicas
COUNTED = 5


class Calls:
    """The calls between files of the two packages, on all threads, during `counted` steps.

    files, pairs: those of the step with the fewest calls; pairs are (caller, callee).
    """

    def __init__(self) -> None:
        self.is_counting = False
        self._steps: list[tuple[set[str], Counter[tuple[str, str]]]] = []

    @property
    def files(self) -> set[str]:
        return self._least()[0]

    @property
    def pairs(self) -> Counter[tuple[str, str]]:
        return self._least()[1]

    def _least(self) -> tuple[set[str], Counter[tuple[str, str]]]:
        return min(self._steps, key=lambda step: step[1].total())

    def note_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.is_counting:
            return
        callee = frame.f_code.co_filename
        if not callee.startswith(PACKAGES):
            return
        files, pairs = self._steps[-1]
        files.add(callee)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGES):
            caller = caller.f_back  # through torch, NumPy or contextlib
        if caller is not None and caller.f_code.co_filename != callee:
            pairs[caller.f_code.co_filename, callee] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._steps.append((set(), Counter()))
        self.is_counting = True
        try:
            yield
        finally:
            self.is_counting = False


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)))


def by_optimizer(calls: Calls) -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        hvd.Compression.gtopk(density=0.01),
        bucket_bytes=12_000,
    )
    _steps(calls, model, optimizer)


def by_hook(calls: Calls) -> None:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    model.register_comm_hook(GTopKState(0.01), gtopk_hook)
    _steps(calls, model, torch.optim.SGD(model.parameters(), lr=0.01))


def _steps(calls: Calls, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()

    for _ in range(SETTLED):
        step()
    for _ in range(COUNTED):
        with calls.counted():
            step()


def measure(way: Callable[[Calls], None]) -> Calls:
    """Return the calls of one step; `way` must start its threads itself, to have them profiled."""
    calls = Calls()
    threading.setprofile(calls.note_event)
    sys.setprofile(calls.note_event)
    hvd.init()
    way(calls)
    hvd.shutdown()
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.add_argument("--pairs", action="store_true", help="list the calls by caller and callee")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    for name, way in {"DistributedOptimizer": by_optimizer, "DDP's hook": by_hook}.items():
        calls = measure(way)
        if torch.distributed.get_rank() != 0:
            continue
        print(f"{name}: {len(calls.files)} files, {calls.pairs.total()} calls from file to file")
        if options.files:
            print(*sorted(_short(file) for file in calls.files), sep="\n")
        if options.pairs:
            for (caller, callee), count in calls.pairs.most_common():
                print(f"{count:6}  {_short(caller)} -> {_short(callee)}")
    torch.distributed.destroy_process_group()


def _short(path: str) -> str:
    return str(Path(path).relative_to(ROOT))


if __name__ == "__main__":
    main()
