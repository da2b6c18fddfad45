"""Hardware counters of the largest kernels, by Nsight Compute: bytes, share of the peak, warps."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from common import arguments, record, require_gpu
from internals import LARGEST_KERNELS, array_of, on_stream_of_torch

from collectives import kernels

SIZE = 25_600_000
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
SETTLED, WATCHED = 12, 2  # steps: until the guess is good, and those that are profiled


def rows(report: Iterable[str]) -> list[dict[str, str]]:
    """Return the launches of a report in CSV, a dict of metrics each; skip ncu's messages."""
    lines = list(report)
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, str]] = defaultdict(dict)
    for row in csv.DictReader(lines[first:]):
        launch = launches[row["ID"]]
        launch["kernel"] = row["Kernel Name"]
        if "Metric Name" in row:  # a line for each metric
            unit = row.get("Metric Unit", "")
            launch[row["Metric Name"]] = f"{row['Metric Value']} {unit}".strip()
        else:
            launch |= {name: row[name] for name in METRICS if name in row}
    return list(launches.values())


def work(size: int, device: str, watch: Callable[[], object]) -> None:
    """Take steps of one selection; those after `watch` are profiled, the last without a guess."""
    residual, gradient = (torch.zeros(size, device=device) for _ in range(2))
    guess = 0.0
    with on_stream_of_torch(device):
        for step in range(SETTLED + WATCHED + 1):
            gradient.normal_()
            if step == SETTLED:
                watch()
            if step == SETTLED + WATCHED:
                guess = 0.0  # as in a first step, the vector itself is searched
            picked, guess = kernels.accumulate_and_select(
                array_of(residual), array_of(gradient), max(1, size // 1000), guess
            )
            kernels.clear_at(array_of(residual), picked.indices)


def main() -> int:
    """Run the work under ncu, and record its counters."""
    options = arguments("what")
    if options.what == "work":
        work(SIZE, "cuda", torch.cuda.profiler.start)
        return 0
    require_gpu(options.device, "its counters are read")
    if shutil.which("ncu") is None:
        sys.exit("no ncu here: it comes with CUDA's toolkit")
    watched = ("--kernel-name", f"regex:^({'|'.join(LARGEST_KERNELS)})")
    which = ("--profile-from-start", "off")  # but from `cudaProfilerStart` on
    how = ("--clock-control", "none", "--csv", "--metrics", ",".join(METRICS))
    job = (sys.executable, str(Path(__file__).resolve()), "work")
    done = subprocess.run(["ncu", *watched, *which, *how, *job], stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    found = rows(done.stdout.splitlines())
    for launch in found:
        record("launch", n=SIZE, **launch)
    return done.returncode or not found


if __name__ == "__main__":
    sys.exit(main())
