"""Probes of what runs on GPUs: CUDA through torch, CuPy, NCCL."""

from __future__ import annotations

import ctypes
import re
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Final

from .basics import Finding, State, installed

CHECK_DRIVER: Final = "see whether the driver works: nvidia-smi"


def look_at_cuda() -> Finding:
    """Probe whether torch computes on a GPU."""
    if not installed("torch"):
        return Finding("CUDA", State.MISSING, "comes with torch", "pip install torch")
    torch = import_module("torch")
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


def look_at_cupy() -> Finding:
    """Probe whether there is one CuPy, for torch's CUDA, and whether it computes."""
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


def look_at_nccl() -> Finding:
    """Probe whether CuPy finds NCCL; else whether torch brings one."""
    if not installed("cupy"):
        advice = f"on a machine with NVIDIA GPUs: pip install {_packages()}"
        return _torchs_nccl(advice) or Finding(
            "NCCL", State.MISSING, "reached through CuPy, or through torch's CUDA builds", advice
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where it finds no NCCL; so do we, in our way
        nccl = import_module("cupy.cuda.nccl")
    if not nccl.available:
        of_cupy = re.search(r"\d+", " ".join(cupy_packages()))
        major = of_cupy.group() if of_cupy else _major()
        advice = f"on a machine with NVIDIA GPUs: pip install nvidia-nccl-cu{major}"
        return _torchs_nccl(advice) or Finding(
            "NCCL", State.MISSING, "CuPy finds no libnccl", advice
        )
    version = nccl.get_version()
    dotted = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return Finding("NCCL", State.OK, f"{dotted}, through CuPy")


def _torchs_nccl(advice: str) -> Finding | None:
    """Return what torch's own NCCL is good for; None where it has none."""
    if not installed("torch"):
        return None
    import_module("torch")
    gpu = import_module("collectives.transports.gpu")
    version = gpu.torch_nccl()
    if not version:
        return None
    dotted = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    detail = f"{dotted} of torch carries dense reductions; sparse ones go through the host"
    return Finding("NCCL", State.WARN, detail, advice)


def cupy_packages() -> list[str]:
    """Return the installed packages that bring a `cupy`; two of them overwrite each other."""
    names = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    return sorted(name for name in names if name and re.fullmatch(r"cupy(-(cuda|rocm).*)?", name))


def _refusal(use: Callable[[], object]) -> str:
    """Return why a GPU cannot be used."""
    try:
        use()
    except Exception as error:  # its text is what we are after
        return f"{error}".split(". ")[0].splitlines()[0]
    return "it sees no GPU"


def _packages() -> str:
    """Return the packages that bring CuPy and NCCL."""
    major = _major()
    return f"cupy-cuda{major}x nvidia-nccl-cu{major}"


def _major() -> int:
    """Return the CUDA to install for: torch's, else the driver's, else the newest."""
    return _torch_major() or _driver_major() or 13


def _torch_major() -> int | None:
    """Return the CUDA that torch is built for, without importing it."""
    spec = util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if version is None or not version.exists():
        return None
    found = re.search(r"^cuda\b.*= '(\d+)\.", version.read_text(), re.MULTILINE)
    return int(found.group(1)) if found else None


def _driver_major() -> int | None:
    """Return the newest CUDA that the driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value // 1000 or None
