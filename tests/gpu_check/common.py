"""Code shared by the programs of the check: device, recorded results, clocks, and cases."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from runner import SKIPPED
from torch._C._distributed_c10d import HashStore

# The GPU spins this long before clocked work, so that all its launches are queued by then.
SPIN_SECONDS = 0.0005
REPETITIONS = 20


def arguments(*names: str) -> argparse.Namespace:
    """Return the runner's arguments: the device, and positional words of these names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--wheels", default="")
    for name in names:
        parser.add_argument(name, nargs="?")
    return parser.parse_args()


def on_gpu(device: str) -> bool:
    """Tell whether the device is a GPU; exit if one is requested and missing."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu runs what needs none")
    return device == "cuda"


def require_gpu(device: str, why: str) -> None:
    """Exit as skipped, unless the device is a GPU."""
    if not on_gpu(device):
        print(f"needs a GPU: {why}")
        sys.exit(SKIPPED)


def seconds_left() -> float:
    """Return the seconds that this stage may take, from its start."""
    return float(os.environ.get("GPU_CHECK_SECONDS", "120"))


def record(what: str, **found: Any) -> None:
    """Print a result, and write it to the runner's file of results."""
    line = json.dumps({"what": what, **found})
    print(line, flush=True)
    if path := os.environ.get("GPU_CHECK_RESULTS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def device_name(device: str) -> str:
    """Return the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


class Clock:
    """Clocks work on a device: CUDA events behind a spin on a GPU, the wall clock on a CPU."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self._spin = self._cycles() if self.on_gpu else 0

    def __call__(
        self, work: Callable[[], object], repetitions: int = REPETITIONS, warm: int = 3
    ) -> dict[str, float]:
        """Return the median, quartiles, least and most of the repetitions, in microseconds."""
        times = [self.once(work) for _ in range(warm + repetitions)][warm:]
        return spread(times)

    def once(self, work: Callable[[], object]) -> float:
        """Return the seconds of one call."""
        if not self.on_gpu:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self._spin)
        before.record()
        work()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def _cycles(self) -> int:
        """Return the number of cycles of the GPU's spin."""
        cycles = 1_000_000
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):  # the first wakes the clocks
            before.record()
            torch.cuda._sleep(cycles)
            after.record()
            after.synchronize()
        return int(cycles * SPIN_SECONDS / (before.elapsed_time(after) / 1e3))


def wall_clock(
    work: Callable[[], object], device: str, repetitions: int = REPETITIONS, warm: int = 4
) -> dict[str, float]:
    """Return the same statistics by the wall clock, from an idle device to an idle device."""

    def once() -> float:
        synchronize(device)
        begun = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - begun

    return spread([once() for _ in range(warm + repetitions)][warm:])


def spread(seconds: list[float]) -> dict[str, float]:
    """Return microseconds: the median, the quartiles around it, the least and the most."""
    low, median, high = statistics.quantiles(seconds, n=4)
    found = {"median": median, "q1": low, "q3": high, "min": min(seconds), "max": max(seconds)}
    return {f"{name}_us": round(1e6 * value, 2) for name, value in found.items()}


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def init_group_of_one(device: str) -> None:
    """Make this process the one rank of a process group, over NCCL for a GPU's tensors."""
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=HashStore(),
        rank=0,
        world_size=1,
    )


class CaseSkipped(Exception):
    """A case does not apply on this device, or with these ranks."""


def run_cases(cases: Iterable[tuple[str, Callable[[], object]]], by: str) -> list[str]:
    """Call each case, record its outcome, print the traceback if it fails; return the failures.

    by: recorded with each outcome, such as "rank 1 of 2".
    """
    failed = []
    for name, case in cases:
        begun, outcome, why = time.perf_counter(), "ok", ""
        try:
            case()
        except CaseSkipped as reason:
            outcome, why = "skipped", str(reason)
        except Exception as error:
            traceback.print_exc()
            outcome, why = "failed", f"{type(error).__name__}: {error}"[:500]
            failed.append(name)
        seconds = round(time.perf_counter() - begun, 2)
        record(name, by=by, outcome=outcome, seconds=seconds, **({"why": why} if why else {}))
    print(f"{by}: failed {', '.join(failed) if failed else 'nothing'}", flush=True)
    return failed


def tests_of(program: dict[str, Any]) -> list[tuple[str, Callable[[], object]]]:
    """Return a program's functions that are named test_..., in their order."""
    return [(n[5:], f) for n, f in program.items() if n.startswith("test_") and callable(f)]
