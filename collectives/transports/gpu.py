"""Gpu: this rank's device, the CuPy and NCCL modules for it, and arrays in its memory."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from ..errors import MismatchError
from ..kernels.narrow import BFLOAT16
from ..vector import Array, is_on_device
from .device_choice import OWN_GPU, GpuFacts
from .transport import Transport

T = TypeVar("T")

_NOT_READY: Final = 600  # cudaErrorNotReady


class Gpu(NamedTuple):
    """This rank's device.

    cupy, nccl: the modules cupy and cupy.cuda.nccl.
    device:     cupy.cuda.Device; a context manager that makes it current.
    """

    cupy: Any
    nccl: Any
    device: Any


class Span(NamedTuple):
    """The location of a CuPy array or torch tensor; dtype: its NumPy name."""

    address: int
    size: int
    dtype: str
    itemsize: int
    device: int
    is_contiguous: bool


def is_tensor(array: Any) -> bool:
    """Tell whether an array is a torch tensor, which transports accept in dense collectives."""
    return hasattr(array, "data_ptr")


def is_gpu_array(array: Any) -> bool:
    """Tell whether an array is CuPy's or torch's, not NumPy's."""
    return is_tensor(array) or is_on_device(array)


def span_of(array: Any) -> Span:
    """Return an array's location."""
    if is_tensor(array):
        return Span(
            array.data_ptr(),
            array.numel(),
            str(array.dtype).removeprefix("torch."),
            array.element_size(),
            array.device.index or 0,
            array.is_contiguous(),
        )
    return Span(
        array.data.ptr,
        array.size,
        array.dtype.name,
        array.itemsize,
        array.device.id,
        array.flags.c_contiguous,
    )


def require_message(array: Any) -> None:
    """Raise ValueError unless the array is a message, uint8 [m]."""
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"a message must be uint8 [m], got {array.dtype} {list(array.shape)}")


def require_place(array: Any, own: int | None, rank: int) -> None:
    """Raise ValueError unless an array is on a rank's own GPU and contiguous.

    own: the GPU's number; None: accept any.
    """
    span = span_of(array)
    own = span.device if own is None else own
    if span.device == own and span.is_contiguous:
        return
    way_out = ""
    if span.device != own:
        way_out = f"; {OWN_GPU}, before anything is on a GPU; for a model on several GPUs set "
        way_out += "GTOPK_TRANSPORT=staged"
    strides = array.stride() if is_tensor(array) else array.strides
    raise ValueError(
        f"rank {rank} uses GPU {own}: arrays must be contiguous and on that GPU, got one on GPU "
        f"{span.device} with strides {strides}{way_out}"
    )


def tensor_event(tensor: Any) -> Any:
    """Return a torch event after the work so far on the current stream of a tensor's device."""
    torch = sys.modules["torch"]
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def host_copy(tensor: Any) -> Array:
    """Return a flat tensor's copy as a host array that ranks can reduce; waits for the copy."""
    torch = sys.modules["torch"]
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    copy.copy_(tensor)
    # NumPy has no bfloat16: pass the bits through an integer dtype that both know.
    if copy.dtype == torch.bfloat16:
        bits: Array = copy.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    array: Array = copy.numpy()
    return array


def tensor_of(array: Array, like: Any) -> Any:
    """Return a host array as a tensor of the dtype and device of `like`."""
    torch = sys.modules["torch"]
    # torch does not know BFLOAT16, our own dtype.
    plain = array.view(np.int16) if array.dtype == BFLOAT16 else array
    return torch.from_numpy(plain).view(like.dtype).to(like.device)


def is_reached(event: Any, cupy: Any) -> bool:
    """Tell whether a GPU has reached an event; raise CuPy's error if the GPU has failed.

    CuPy's `event.done` cannot tell a failed GPU from one that has not reached the event.
    """
    status = cupy.cuda.runtime.eventQuery(event.ptr)
    if status != _NOT_READY:
        cupy.cuda.runtime.check_status(status)
    return bool(status != _NOT_READY)


def load_cupy(transport: str) -> Any:
    """Return the module cupy; raise ImportError with installation advice."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(_missing(transport, error)) from error


def _query_cupy(query: Callable[[Any], T]) -> T | None:
    """Return `query(cupy)`; None if CuPy cannot tell."""
    try:
        return query(load_cupy("nccl"))
    except (ImportError, OSError, RuntimeError):  # missing; broken; CuPy's error without a driver
        return None


def gpus_of_cupy() -> int | None:
    """Return how many GPUs CuPy sees; None if it cannot tell."""
    return _query_cupy(lambda cupy: int(cupy.cuda.runtime.getDeviceCount()))


def current_device() -> int | None:
    """Return the number of CuPy's current GPU; None without CuPy or a GPU."""
    return _query_cupy(lambda cupy: int(cupy.cuda.Device().id))


def load_nccl() -> Any:
    """Return the module cupy.cuda.nccl; raise ImportError with installation advice."""
    load_cupy("nccl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns if it finds no NCCL; we raise instead
        nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise ImportError(_missing("nccl", "CuPy finds no libnccl"))
    return nccl


def _missing(transport: str, reason: object) -> str:
    needed = "cupy and NCCL" if transport == "nccl" else "cupy, for messages of GPUs,"
    return (
        f"transport '{transport}' needs {needed} ({reason}): "
        "pip install cupy-cuda12x nvidia-nccl-cu12, or cupy-cuda13x nvidia-nccl-cu13"
    )


def torch_nccl() -> int:
    """Return the version of torch's own NCCL in this process, such as 22703; 0: none.

    Only considers a torch that is already imported: tensors on a GPU imply that it is.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return 0
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def own_gpu_facts(host: Transport, device: int | None) -> GpuFacts:
    """Return this rank's facts for the choice of how GPU messages are carried; sends nothing.

    device: the number of its GPU; None: by its place on its host.
    """
    cupy, nccl = "", 0
    try:
        load_cupy("nccl").cuda.runtime.getDeviceCount()
        nccl = load_nccl().get_version()
    except (ImportError, OSError, RuntimeError) as error:  # OSError: broken; RuntimeError: CUDA's
        cupy = f"{error}"
    number, count = own_gpu_number(host) if device is None else device, visible_gpus()
    problem = ""
    if not 0 <= number < count:
        problem = f"it sees {count} GPUs and would use number {number}{cupy and f'; {cupy}'}"
    return GpuFacts(
        "" if problem else name_of_device(number, host.ranks[host.neighbours()[0]]),
        problem,
        cupy,
        nccl,
        torch_nccl(),
        host.checks_messages,
    )


def visible_gpus() -> int:
    """Return how many GPUs CuPy, or else torch, sees; torch's NCCL may serve GPUs without CuPy."""
    if (count := gpus_of_cupy()) is not None:
        return count
    torch = sys.modules.get("torch")
    return torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0


def own_gpu_number(host: Transport) -> int:
    """Return the number of this rank's GPU, by its place on its host."""
    # A launcher may show each rank only its own GPU, as number 0.
    return 0 if visible_gpus() == 1 else host.neighbours().index(host.rank)


def name_of_device(number: int, first_on_host: int) -> str:
    """Return a unique name for a GPU: its UUID, else its bus and its host's first rank.

    MIG instances of a GPU share a bus id, but each has its own UUID.
    """
    if uuid := _uuid(number):
        return uuid
    bus = _query_cupy(lambda cupy: cupy.cuda.Device(number).pci_bus_id)
    return f"{bus or f'GPU {number}'} on the host of rank {first_on_host}"


def _uuid(number: int) -> str:
    """Return the UUID of a GPU or MIG instance; "" if unknown."""
    uuid = (ctypes.c_ubyte * 16)()
    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number):
            return ""
        if driver.cuDeviceGetUuid_v2(uuid, device):  # the variant that supports MIG
            return ""
    except (OSError, AttributeError):  # no driver, or older than CUDA 11.4
        return ""
    text = bytes(uuid).hex()
    cuts = (0, 8, 12, 16, 20, 32)
    return "GPU-" + "-".join(text[a:b] for a, b in itertools.pairwise(cuts))


def gather_facts(host: Transport, device: int | None) -> list[GpuFacts]:
    """Return every rank's facts; device: this rank's GPU, None: by its place.

    Raises MismatchError if a rank is in another operation.
    """
    own = np.frombuffer(json.dumps(own_gpu_facts(host, device)).encode(), np.uint8)
    facts = []
    for message, rank in zip(host.allgather(own), host.ranks, strict=True):
        try:
            facts.append(GpuFacts(*json.loads(message.tobytes())))
        except (ValueError, TypeError) as error:  # the message is from another operation
            raise MismatchError(
                f"rank {rank} does not take part in connecting the GPUs: if one rank passes arrays "
                "on a GPU, every rank must; or set GTOPK_TRANSPORT=staged to send them through "
                "host memory"
            ) from error
    return facts


def open_gpu(device: int | None) -> Gpu:
    """Open a GPU with CuPy."""
    cupy = load_cupy("nccl")
    return Gpu(cupy, load_nccl(), cupy.cuda.Device(device))
