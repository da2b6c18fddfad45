"""Record the machine: versions, tools, the check's packages, whether the host's name resolves."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import socket
import subprocess

import torch
from common import arguments, device_name, on_gpu, record

PACKAGES = (
    *("numpy", "torch", "cupy", "triton", "mpi4py", "msgpack", "safetensors", "hypothesis"),
    *("pytest", "pytest_timeout", "xdist", "sklearn", "cloudpickle", "PIL", "yaml"),
)
TOOLS = ("g++", "nvcc", "ncu", "compute-sanitizer", "mpirun", "nvidia-smi")


def version_of(package: str) -> str | None:
    """Return a package's version, or the error of its import; None if it is missing."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return str(getattr(importlib.import_module(package), "__version__", "there"))
    except Exception as error:
        return f"broken: {type(error).__name__}: {error}"[:200]


def own_name_is_known() -> bool:
    """Tell whether the host can resolve its own name, as launchers may need."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def record_gpu() -> None:
    """Record the GPU, its driver and the CUDA libraries."""
    properties = torch.cuda.get_device_properties(0)
    record(
        "gpu",
        name=device_name("cuda"),
        count=torch.cuda.device_count(),
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        cuda_of_torch=torch.version.cuda,
        nccl_of_torch=list(torch.cuda.nccl.version()),
    )
    cupy = importlib.import_module("cupy")
    nccl = importlib.import_module("cupy.cuda.nccl")
    record(
        "cupy",
        runtime=cupy.cuda.runtime.runtimeGetVersion(),
        driver=cupy.cuda.runtime.driverGetVersion(),
        nvrtc=list(cupy.cuda.nvrtc.getVersion()),
        nccl=nccl.get_version() if nccl.available else None,
    )
    if shutil.which("nvidia-smi"):
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout[:2000])


def main() -> None:
    """Record the machine, and its GPU if there is one."""
    device = arguments().device
    packages = {name: version_of(name) for name in PACKAGES}
    # A package of this name beside the others would hide the tests' own modules.
    spec = importlib.util.find_spec("tests")
    record(
        "machine",
        python=platform.python_version(),
        system=platform.platform(),
        cores=len(os.sched_getaffinity(0)),
        own_name_is_known=own_name_is_known(),
        tools={name: shutil.which(name) for name in TOOLS},
        packages=packages,
        tests_are_hidden_by=spec.origin if spec else None,
    )
    if on_gpu(device):
        record_gpu()
    missing = [name for name, version in packages.items() if version is None]
    print(f"missing: {', '.join(missing) if missing else 'nothing'}")


if __name__ == "__main__":
    main()
