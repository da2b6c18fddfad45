"""Time the hot loops beside what they replace, in one run: ratios, medians and spread.

    python mpi_scripts/bench_select.py --elements 25600000 --density 0.001

Thread CPU time, one thread. Synthetic: every round brings a new gradient of normal values, and the
residual is what error feedback leaves of the rounds before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from collectives import kernels, merge, select
from gtopk.residual import Residual

WARM_UP = 10  # rounds; until then the residual is not what error feedback leaves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25_600_000)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n, k = arguments.elements, max(1, round(arguments.elements * arguments.density))
    print(
        f"{n:,} float32 elements, k = {k:,}, kernels: {kernels.in_use()}, torch {torch.__version__}"
    )
    print("synthetic normal gradients; thread CPU seconds; ratios are taken round by round\n")

    random = np.random.default_rng(0)
    gradient = random.standard_normal(n, np.float32)
    residual = Residual(n, gradient.dtype)
    plain = random.standard_normal(n, np.float32)
    plain_tensor, gradient_tensor = torch.from_numpy(plain), torch.from_numpy(gradient)

    def floor() -> None:
        np.add(plain, gradient, out=plain)

    def selected() -> None:
        picked = residual.accumulate_and_select(gradient, k)
        residual.settle(picked, picked.where(np.zeros(picked.entries, np.bool_)))

    def torch_topk() -> None:
        plain_tensor.add_(gradient_tensor)
        torch.topk(plain_tensor.abs(), k, sorted=False)

    def next_step() -> None:
        random.standard_normal(out=gradient, dtype=np.float32)

    rows = timed([floor, selected, torch_topk], arguments.rounds, next_step)
    report("a += g, NumPy (the floor)", rows[0], rows[0])
    report("accumulate, select, clear", rows[1], rows[0])
    report("add_, abs, torch.topk", rows[2], rows[0])
    faster = [b / a for a, b in zip(rows[1], rows[2], strict=True)]
    print(f"\nselect is {spread(faster, 'x')} faster than torch.topk")

    a, _ = select(random.standard_normal(n, np.float32), k)
    b, _ = select(random.standard_normal(n, np.float32), k)
    (merged,) = timed([lambda: merge(a, b, k)], arguments.rounds)
    per_entry = [1e9 * seconds / (2 * k) for seconds in merged]
    print(f"merge of two lists of k: {spread(per_entry, ' ns')} per input entry")


def timed(
    functions: list[Callable[[], object]],
    rounds: int,
    before_round: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Return each function's seconds by round; the functions run in turn, after WARM_UP rounds."""
    rows: list[list[float]] = [[] for _ in functions]
    for number in range(WARM_UP + rounds):
        before_round()
        for row, function in zip(rows, functions, strict=True):
            begun = time.thread_time()
            function()
            if number >= WARM_UP:
                row.append(time.thread_time() - begun)
    return rows


def report(name: str, row: list[float], floor: list[float]) -> None:
    ratios = [seconds / base for seconds, base in zip(row, floor, strict=True)]
    print(f"{name:28} {1e3 * statistics.median(row):8.2f} ms   {spread(ratios, 'x')} the floor")


def spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
