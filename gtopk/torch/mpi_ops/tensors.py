"""Tensors as messages: check which tensors collectives accept, and convert them for sending.

A script refers to an asynchronous operation by its handle, a number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from collectives.transports import Transport

from ...exchange.buckets.arrays import (
    as_bytes,
    await_copies,
    begin_copy,
    flattened,
    from_array,
    is_host_array,
    to_array,
    to_device,
    view_dense,
)
from ...runtime.coordinator import Operation, Work
from ...runtime.coordinator.fusion import ON_GPU, ON_HOST, Dense
from ...runtime.world.process_sets import ProcessSet

_handles: Final[dict[int, tuple[Operation, Callable[[Any], Any]]]] = {}
_next_handle: Final = itertools.count(1)  # from 1: a handle is never false


def submit(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    signature: Sequence[str],
    work: Work,
    finish: Callable[[Any], Any],
    *,
    on_gpu: bool = False,
    fusion: Sequence[Dense] = (),
) -> int:
    """Queue an operation of a process set's ranks, and return its handle.

    finish: turns the result of `work` into the output, in the thread that synchronizes.
    on_gpu: whether this rank's tensors are on a GPU; sent to the other ranks in the flags.
    Raises ValueError on a rank outside the set, and if an operation of this name is in flight.
    """
    members = process_set.members
    # Includes the kind: an allreduce and a broadcast may have the same name, as in Horovod.
    full_name = f"{kind}.{name or f'noname.{next(members.unnamed)}'}"
    flags = ON_GPU if on_gpu else ON_HOST
    operation = process_set.engine.submit(full_name, signature, work, flags, fusion=fusion)
    handle = next(_next_handle)
    _handles[handle] = operation, finish
    return handle


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its output; None for an unknown handle.

    A grouped operation returns a tuple. alltoall returns a pair: the rows, and the number of rows
    from each rank. Raises HorovodInternalError if the ranks disagreed or one is gone.
    """
    if handle not in _handles:
        return None
    # Removed before the wait: the handle of a failed operation is used up, too.
    operation, finish = _handles.pop(handle)
    return finish(operation.wait())


def poll(handle: int) -> bool:
    """Tell whether `synchronize` would return at once; if so, tensors changed in place are ready.

    Raises ValueError for a handle that is unknown or was synchronized.
    """
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    operation, finish = _handles[handle]
    if operation.done and operation.error is None:
        output = finish(operation.result)
        _handles[handle] = operation, lambda result: output
    return operation.done


def clear_handles() -> None:
    """Forget the handles of an earlier world."""
    _handles.clear()


def require_tensor(tensor: object, what: str, *, sparse: bool = False) -> None:
    """Raise TypeError for anything but a tensor, ValueError for one that cannot be sent.

    `why_unsendable` defines the latter.
    what: the operation's name.
    sparse: whether the operation accepts sparse tensors.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{what} needs a torch tensor, got {_kind(tensor)}; torch.as_tensor() makes one of "
            "numbers, lists and arrays"
        )
    if not sparse:
        _require_fit(tensor, what)


def _require_fit(tensor: torch.Tensor, what: str) -> None:
    if why := why_unsendable(tensor):
        raise ValueError(f"Tensor type {tensor.dtype} is not supported by {what}: {why}.")


def why_unsendable(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be sent, ignoring its dtype; "" if it can."""
    if is_lazy(tensor):
        return "it has no size yet: run a batch through the model's lazy modules first"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else f"of layout {tensor.layout}"
        return f"it is {'nested' if tensor.is_nested else kind}, not a dense tensor"
    return "it is on the meta device, which holds no data" if tensor.is_meta else ""


def require_tensors(tensors: Iterable[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Return the tensors as a list; raise the errors of `require_tensor` for anything else."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"{what} needs a list of torch tensors, got {_kind(tensors)}")
    listed = list(tensors)
    for number, tensor in enumerate(listed):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{what} needs a list of torch tensors, but number {number} is {_kind(tensor)}"
            )
        _require_fit(tensor, what)
    return listed


def _kind(value: object) -> str:
    """Return a type's name, with the package unless it is built in: numpy.ndarray."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"


def check(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; raise ValueError for a dtype that collectives do not support."""
    is_float8 = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    if tensor.dtype.is_complex or is_float8:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    return tensor


def check_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; raise ValueError if it is not contiguous, or as `check` does."""
    if not check(tensor).is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape as text, which must be equal on all ranks."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def describe_rows(tensor: torch.Tensor) -> str:
    """Return dtype and row shape as text, for operations where the number of rows may differ."""
    if tensor.dim() == 0:
        return f"{tensor.dtype} scalar"
    return f"{tensor.dtype} [{', '.join(['*', *map(str, tensor.shape[1:])])}]"


def describe_each(
    tensors: Sequence[torch.Tensor],
    describe: Callable[[torch.Tensor], str],
    group: bool,
    common: str = "",
) -> list[str]:
    """Return the texts that must be equal on all ranks.

    For a group these are the number of tensors with `common`, then one text for each tensor.
    """
    if not group:
        return [f"{describe(tensor)} {common}".strip() for tensor in tensors]
    numbered = [f"tensor {number}: {describe(tensor)}" for number, tensor in enumerate(tensors)]
    return [f"{len(tensors)} tensors {common}".strip(), *numbered]


def row_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of one row."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def accepted_by(tensors: Sequence[torch.Tensor], transport: Transport) -> bool:
    """Tell whether a transport can work on all of these tensors in GPU memory."""
    # All or none: an operation's flags give one location for all its tensors.
    return bool(tensors) and all(map(transport.carries, tensors))


def view_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the tensor's bytes, uint8 [numel * element_size]; a copy only if necessary."""
    flat = as_bytes(tensor)
    if flat.is_cuda:
        copy = begin_copy(flat)
        # The copy was queued on the current stream, behind the kernels that write the tensor.
        await_copies([flat])
        flat = copy
    array: NDArray[np.uint8] = flat.cpu().numpy()
    return array


def from_bytes(
    message: NDArray[np.uint8], like: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """Return bytes from `view_bytes` as a tensor with the dtype and device of `like`."""
    # torch cannot view an empty array as another dtype.
    if not message.size:
        return like.new_empty(shape)
    return to_device(torch.from_numpy(message).view(like.dtype).reshape(shape), like.device)


class Memory(NamedTuple):
    """A tensor's elements in a form that ranks can reduce, [numel].

    elements: an array on the host, or a tensor on a GPU.
    pinned:   the tensor behind the array, if that is in page-locked memory.
    """

    elements: Any
    pinned: torch.Tensor | None = None


def memory_of(output: torch.Tensor, tensor: torch.Tensor, on_gpu: bool = False) -> Memory:
    """Return the elements of a tensor to reduce, in the output's memory if possible.

    output: the tensor itself, or one with the same dtype, shape and device.
    on_gpu: whether the elements stay on the GPU. If not, and the tensor is on a GPU, they are valid
            after `await_copies`.
    """
    # A bool is reduced as uint8, and the bits of a negated view are not its values.
    is_usable = output.dtype != torch.bool and not output.is_neg() and output.is_contiguous()
    # A result in the output's own memory needs no copy back.
    if on_gpu and is_usable:
        if output is not tensor:
            output.copy_(tensor.detach())
        return Memory(flattened(output))
    if on_gpu:
        return Memory(flattened(tensor).clone())
    if tensor.is_cuda:
        pinned = begin_copy(flattened(tensor))
        return Memory(view_dense(pinned), pinned)
    if not is_host_array(output):
        return Memory(to_array(tensor))
    if output is not tensor:
        output.copy_(tensor.detach())
    return Memory(view_dense(output))


def mark_written(tensor: torch.Tensor) -> torch.Tensor:
    """Notify autograd that a tensor's memory was written outside torch; return the tensor."""
    # Inference tensors have no version counter.
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


def write(reduced: Any, output: torch.Tensor, memory: Memory) -> torch.Tensor:
    """Write the reduced elements of a memory into `output`, and return `output`."""
    if isinstance(reduced, torch.Tensor):
        if reduced.data_ptr() == output.data_ptr():
            return mark_written(output)
        written = reduced
    # Compare addresses: the engine may have reduced in place, or returned another array.
    elif is_host_array(output) and reduced.ctypes.data == output.data_ptr():
        return mark_written(output)
    elif memory.pinned is not None and reduced.ctypes.data == memory.pinned.data_ptr():
        written = memory.pinned  # torch keeps page-locked memory until the copy has finished
    else:
        written = from_array(reduced, output)
    with torch.no_grad():
        return output.copy_(written.reshape(output.shape), non_blocking=True)
