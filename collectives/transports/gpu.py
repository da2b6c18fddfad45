"""Gpu: the one device of this rank, and CuPy, which reaches it."""

from __future__ import annotations

import importlib
import warnings
from collections import defaultdict
from typing import Any, Final, NamedTuple

import numpy as np

from .transport import Transport

_NOT_READY: Final = 600  # cudaErrorNotReady
_STAGED: Final = "open_transport('staged', bootstrap=...) goes through pinned host memory instead"


class Gpu(NamedTuple):
    """This rank's device.

    cupy, nccl: the modules cupy and cupy.cuda.nccl.
    device:     cupy.cuda.Device; a context manager that makes it current.
    """

    cupy: Any
    nccl: Any
    device: Any


def has_come(event: Any, cupy: Any) -> bool:
    """Tell whether a GPU has come to an event; raise CuPy's error where it fails instead.

    To CuPy's `event.done`, a GPU that has failed is one that has not come there yet.
    """
    status = cupy.cuda.runtime.eventQuery(event.ptr)
    if status != _NOT_READY:
        cupy.cuda.runtime.check_status(status)
    return bool(status != _NOT_READY)


def load_cupy(transport: str) -> Any:
    """Return the module cupy; raise ImportError with what to install."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(_missing(transport, error)) from error


def has_gpu() -> bool:
    """Tell whether CuPy is there, and sees a GPU."""
    try:
        return bool(load_cupy("mpi").cuda.runtime.getDeviceCount())
    except (ImportError, OSError, RuntimeError):  # none; broken; CuPy's own, without a driver
        return False


def load_nccl() -> Any:
    """Return the module cupy.cuda.nccl; raise ImportError with what to install."""
    load_cupy("nccl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where it finds no NCCL; we raise
        nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise ImportError(_missing("nccl", "CuPy finds no libnccl"))
    return nccl


def _missing(transport: str, reason: object) -> str:
    needed = "cupy and NCCL" if transport == "nccl" else "cupy, for messages of GPUs,"
    return (
        f"transport '{transport}' needs {needed} ({reason}): "
        "pip install gtopk[cuda12], or gtopk[cuda13] for CUDA 13"
    )


def choose_gpu(bootstrap: Transport, device: int | None) -> Gpu:
    """Return this rank's GPU, after every rank has found one of its own: a collective.

    device: its number; None: the only one in sight, else by the rank's place on its host.
    Raises the same on all ranks: ImportError where this rank lacks CuPy or NCCL, RuntimeError
    for a rank without a GPU of its own.
    """
    gpu, bus, problem = None, "", None
    try:
        gpu = _own_gpu(bootstrap, device)
        bus = gpu.device.pci_bus_id
    except (ImportError, RuntimeError) as error:
        problem = error
    # A host is called by the first rank on it.
    mine = f"{bootstrap.neighbours()[0]} {bus} {problem or ''}"
    answers = bootstrap.allgather(np.frombuffer(mine.encode(), np.uint8))
    owners: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, answer in zip(bootstrap.ranks, answers, strict=True):
        host, its_bus, its_problem = answer.tobytes().decode().split(" ", 2)
        owners[host, its_bus].append(rank)
        if its_problem:
            raise problem or RuntimeError(f"rank {rank} cannot use NCCL: {its_problem}")
    for (_, its_bus), ranks in owners.items():
        if len(ranks) > 1:
            raise RuntimeError(
                f"transport 'nccl' needs a GPU for each rank, but ranks {ranks} share {its_bus}, "
                f"which NCCL refuses; {_STAGED}"
            )
    assert gpu is not None
    return gpu


def _own_gpu(bootstrap: Transport, device: int | None) -> Gpu:
    nccl, cupy = load_nccl(), load_cupy("nccl")
    rank = bootstrap.ranks[bootstrap.rank]
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:  # CuPy's, without a driver
        raise RuntimeError(
            f"transport 'nccl' needs a GPU; rank {rank} has none ({error})"
        ) from error
    here = bootstrap.neighbours()
    place = here.index(bootstrap.rank)
    if device is None:
        device = 0 if count == 1 else place
        if device >= count:
            raise RuntimeError(
                f"transport 'nccl' needs a GPU for each rank, but rank {rank} is number "
                f"{place + 1} of {len(here)} on its host, which has {count}; {_STAGED}"
            )
    elif not 0 <= device < count:
        raise RuntimeError(f"device must lie in 0..{count - 1} (the GPUs in sight), got {device}")
    return Gpu(cupy, nccl, cupy.cuda.Device(device))
