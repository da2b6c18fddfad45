"""The stages of the check, in order; the stages of a group run in parallel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runner import Stage

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KERNELS = "tests/collectives/kernels/device"
# This test takes most of the GPU's memory, so it runs alone.
POOL = f"{KERNELS}/test_cuda.py::test_cupy_pool_gets_memory_that_torch_has_cached"
LIBRARY = (
    "tests/collectives/algorithms/test_by_host.py",
    "tests/collectives/algorithms/test_on_device.py",
    "tests/gtopk/adaptive/test_sources.py",
    "tests/gtopk/adaptive/hogbatch/test_on_gpu.py",
    "tests/gtopk/exchange/buckets/test_arrays.py",
    "tests/gtopk/exchange/test_residual.py",
    "tests/gtopk/test_on_gpu.py",
)
NCCL = "tests/collectives/transports/test_nccl_gpu.py"
CPU_SECONDS = 170.0
# On 1 GPU, 3 ranks of which the first is on it.
HOGBATCH = {"HOGBATCH_GPUS": "1"}


def groups(device: str, wheels: Path) -> list[list[Stage]]:
    """Return the stages for a device: "cuda", or "cpu" with small sizes and one after the other.

    wheels: the folder of wheels to install first; it may be missing.
    """
    small = device == "cpu"

    def program(name: str, *words: str) -> list[str]:
        return [sys.executable, str(HERE / f"{name}.py"), "--device", device, *words]

    def tests(*words: str, workers: int) -> list[str]:
        # Load only these plugins; versions other than the pinned ones may warn.
        side_by_side = ("-p", "xdist.plugin", f"--numprocesses={workers}", "--dist=worksteal")
        how = ("--collect-only",) if small else ("--maxfail=40", *side_by_side)
        return [
            *(sys.executable, "-m", "pytest", "-p", "pytest_timeout", "--timeout=60"),
            *("--timeout-method=thread", "-o", "filterwarnings=default", "-m", "gpu", "-q"),
            *("-rfE", "--tb=short", "--durations=8", *how, *words),
        ]

    def mpirun(ranks: int, *words: str) -> list[str]:
        return [
            *(sys.executable, "-m", "gtopk", "run", "--launcher=mpirun", f"--ranks={ranks}"),
            *words,
        ]

    def torchrun(ranks: int, *words: str) -> list[str]:
        # An address, because a machine without a network may not resolve its own name.
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", *words),
        ]

    several = [str(HERE / "features.py"), "--device", device]
    hogbatch = "tests/programs/hogbatch_gpu.py" if not small else "tests/programs/hogbatch.py"
    gpt = [str(HERE / "transformer.py"), "--device", device]
    laws = ["tests/programs/collectives_gpus.py", "staged"]
    all_groups = [
        [Stage("facts", 25, program("facts"))],
        [Stage("core", 60, program("core", "--wheels", str(wheels)))],
        [Stage("warm", 60, program("warm"))],
        [Stage("bench", 100, program("bench"))],
        [
            Stage("kernels", 110, tests(KERNELS, "--deselect", POOL, workers=5)),
            Stage("library", 110, tests(*LIBRARY, workers=5)),
            Stage("nccl of one", 110, tests(NCCL, workers=3)),
            Stage("features", 110, program("features")),
        ],
        [Stage("pool", 30, tests(POOL, workers=1))],
        [
            Stage("mpirun 2", 70, mpirun(2, *several)),
            Stage("torchrun 2", 70, torchrun(2, *several)),
            Stage("hogbatch", 70, mpirun(3, hogbatch), HOGBATCH),
        ],
        [
            Stage("mpirun 4", 70, mpirun(4, *several)),
            Stage("torchrun 4", 70, torchrun(4, *several)),
            *([] if small else [Stage("mpirun laws", 70, mpirun(4, *laws))]),
        ],
        [
            Stage("memcheck", 70, program("sanitize", "memcheck")),
            Stage("racecheck", 70, program("sanitize", "racecheck")),
        ],
        [Stage("counters", 45, program("counters"))],
        [Stage("transformer", 110, mpirun(4 if small else 8, *gpt))],
    ]
    if not small:
        return all_groups
    # Few cores, perhaps busy: one after the other, with as much time as a test has.
    return [[each._replace(seconds=CPU_SECONDS)] for group in all_groups for each in group]


def named(all_groups: Sequence[Sequence[Stage]], names: Sequence[str]) -> list[list[Stage]]:
    """Return the stages of these names, or all; raise ValueError for an unknown name."""
    known = [stage.name for group in all_groups for stage in group]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no stage is named {', '.join(unknown)}; there are: {', '.join(known)}")
    kept = [[each for each in group if not names or each.name in names] for group in all_groups]
    return [group for group in kept if group]
