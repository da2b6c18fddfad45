"""Findings, and the probes of Python, the cores, and the packages that need neither MPI nor a GPU.

A probe looks at one thing and returns a Finding; it may raise. `isolation` turns what it raises
into a finding.
"""

from __future__ import annotations

import math
import platform
import shutil
from enum import Enum
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Final, NamedTuple

from ...settings import KERNELS

# What pip installs gtopk from, in the folder of a clone; "gtopk" once it is published.
PACKAGE: Final = "."


class State(str, Enum):
    """OK; WARN: training works, but mind this; MISSING: optional, and not there; FAIL: in the way.

    Where a report has a FAIL, several ranks cannot train here, and the exit code says so.
    """

    OK = "OK"
    WARN = "WARN"
    MISSING = "MISSING"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """A line of the report; `advice` says what to run, and is "" where all is well."""

    name: str
    state: State
    detail: str
    advice: str = ""


def installed(module: str) -> bool:
    """Tell whether a top-level module can be found, without importing it."""
    return util.find_spec(module) is not None


def gist(output: str) -> str:
    """Return the line that says most of what a failed program printed; "" when it was silent."""
    lines = [line.strip() for line in output.splitlines()]
    said = [line for line in lines if any(character.isalpha() for character in line)]
    if not said:
        return ""
    # Python says it last, mpirun first.
    line = said[-1] if any(line.startswith("Traceback") for line in said) else said[0]
    return line if len(line) <= 160 else f"{line[:157]}..."


def look_at_python() -> Finding:
    """Probe which Python this is."""
    detail = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return Finding("Python", State.OK, detail)


def look_at_gtopk() -> Finding:
    """Probe which gtopk is imported, and from where."""
    if not installed("msgpack"):
        return Finding("gtopk", State.FAIL, "it needs msgpack", "pip install msgpack")
    package = import_module("gtopk")
    folder = Path(package.__path__[0])
    detail = f"{package.__version__}, {folder}"
    here = Path.cwd() / "gtopk"
    if (here / "__init__.py").is_file() and here.resolve() != folder.resolve():
        detail += f"; but a script in this folder imports {here}"
        return Finding("gtopk", State.WARN, detail, "pip install -e ., or train in another folder")
    return Finding("gtopk", State.OK, detail)


def look_at_cores() -> Finding:
    """Probe how many cores ranks can share."""
    if not installed("numpy"):
        return Finding("cores", State.MISSING, "counted once numpy is here", "pip install numpy")
    from collectives.cores import core_quota, usable_cores

    quota = core_quota()
    granted = "" if math.isinf(quota) else f", {quota:g} granted to this container"
    return Finding("cores", State.OK, f"{usable_cores()} usable{granted}")


def look_at_numpy() -> Finding:
    """Probe whether numpy adds."""
    if not installed("numpy"):
        return Finding("numpy", State.MISSING, "gtopk computes with it", "pip install numpy")
    numpy = import_module("numpy")
    if (total := numpy.arange(5, dtype=numpy.float32).sum()) != 10:
        raise ArithmeticError(f"0 + 1 + 2 + 3 + 4 = {total}")
    return Finding("numpy", State.OK, numpy.__version__)


def look_at_torch() -> Finding:
    """Probe whether torch differentiates."""
    if not installed("torch"):
        return Finding("torch", State.MISSING, "gtopk trains its models", "pip install torch")
    torch = import_module("torch")
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    (weight * weight).sum().backward()
    if (gradient := weight.grad.tolist()) != [2.0, 4.0]:
        raise ArithmeticError(f"the gradient of 1^2 + 2^2 is {gradient}")
    return Finding("torch", State.OK, f"{torch.__version__}, autograd works")


def look_at_torch_distributed() -> Finding:
    """Probe which backends torch.distributed has, and whether gloo reduces."""
    name, mend = "torch.distributed", "pip install --force-reinstall torch"
    if not installed("torch"):
        return Finding(name, State.MISSING, "comes with torch", "pip install torch")
    distributed = import_module("torch.distributed")
    if not distributed.is_available():
        return Finding(name, State.MISSING, "torch is built without it", mend)
    backends = [
        backend
        for backend in ("gloo", "nccl", "mpi")
        if getattr(distributed, f"is_{backend}_available")()
    ]
    if "gloo" not in backends:
        return Finding(name, State.WARN, f"no gloo, only {', '.join(backends) or 'nothing'}", mend)
    ones = import_module("torch").ones(3)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_reduce(ones)
    distributed.destroy_process_group()
    return Finding(name, State.OK, f"{', '.join(backends)}; gloo works")


def look_at_kernels() -> Finding:
    """Probe which implementation of the hot loops is in use."""
    if not installed("numpy"):
        return Finding("kernels", State.FAIL, "they need numpy", "pip install numpy")
    kernels = import_module("collectives.kernels")
    if reason := kernels.why_not_compiled():
        advice = f"unset {KERNELS.name}" if KERNELS.name in reason else _how_to_build()
        return Finding("kernels", State.WARN, f"{kernels.in_use()}: {reason}", advice)
    return Finding("kernels", State.OK, kernels.in_use())


def _how_to_build() -> str:
    # pip keeps the wheel that it built without the core.
    build = (
        f"pip install -v --force-reinstall --no-deps --no-cache-dir {PACKAGE}, or to train in a "
        "clone: pip install -v -e ."
    )
    compiler = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        return f"with a C++ compiler (apt install g++): {build}"
    return f"{compiler} is here: {build}; where the build fails, that shows why"


def look_at_horovod() -> Finding:
    """Probe whether Horovod is there, and what it was built with."""
    if not installed("horovod"):
        # Its build asks for C++14, torch's headers for C++17 or more.
        advice = (
            "only to compare: pip install --no-build-isolation horovod (CXX must add -std=c++20)"
        )
        return Finding("Horovod", State.MISSING, "gtopk works without it", advice)
    horovod = import_module("horovod.torch")
    built = [part for part in ("mpi", "gloo", "nccl") if getattr(horovod, f"{part}_built")()]
    version = metadata.version("horovod")
    return Finding("Horovod", State.OK, f"{version}, built with {', '.join(built) or 'nothing'}")


def look_at_demo() -> Finding:
    """Probe whether `gtopk demo` has what it needs beside MPI."""
    packages = {"sklearn": "scikit-learn", "rich": "rich"}
    absent = [package for module, package in packages.items() if not installed(module)]
    if absent:
        detail = f"gtopk demo needs {' and '.join(absent)}"
        return Finding("demo", State.MISSING, detail, f"pip install {' '.join(absent)}")
    versions = [f"{package} {metadata.version(package)}" for package in packages.values()]
    return Finding("demo", State.OK, ", ".join(versions))
