"""On GPU: tensors that operations work on where they lie, on a stream of the engine's thread.

    submitter's stream   ... make the tensor | moment                          | wait | use it
                                             v                                 ^
    engine's stream                            wait | scale, fuse, NCCL, scale | moment

So what backward still has to do there, and does meanwhile, is not waited for. Tensors on the host,
as in tests, have no streams and no moments.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.transports import Transport
from collectives.transports.gpu import host_copy, tensor_of

# Flags of operations that may be done where the tensors lie; 0 are those of a rank that has joined.
ON_HOST, ON_GPU = 1, 2

_own: Final = threading.local()

Moment = Any  # torch.cuda.Event, or None on the host


@dataclass(frozen=True)
class OnGpu:
    """A flat, contiguous tensor that is worked on where it lies.

    made: when it has its values; known where it is submitted.
    """

    tensor: torch.Tensor
    made: Moment

    @classmethod
    def now(cls, tensor: torch.Tensor) -> OnGpu:
        """Return a tensor that has its values when the current stream has come so far."""
        return cls(tensor, moment(tensor.device))

    def on_host(self) -> NDArray[Any]:
        """Return a copy on the host, once it has its values; bfloat16 as BFLOAT16."""
        with beside(self.tensor.device, [self.made]):
            return host_copy(self.tensor)

    def bytes_on_host(self) -> NDArray[np.uint8]:
        """Return the same, uint8 [bytes]; on the current stream, once it has its values there."""
        return host_copy(self.tensor.view(torch.uint8))

    def write(self, array: NDArray[Any]) -> None:
        """Copy such an array back."""
        with beside(self.tensor.device):
            self.tensor.copy_(tensor_of(array, self.tensor))


def all_on_gpu(all_flags: Sequence[int]) -> bool:
    """Tell whether every rank that takes part has its tensors where they can be worked on."""
    those = {flags for flags in all_flags if flags}
    return those == {ON_GPU}


def moment(device: torch.device) -> Moment:
    """Return when the current stream of a device will have done what it was given so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def beside(device: torch.device, moments: Sequence[Moment] = ()) -> Iterator[None]:
    """Work on this thread's own stream of a device, after these moments."""
    if device.type != "cuda":
        yield
        return
    streams: dict[int, torch.cuda.Stream] = _own.__dict__.setdefault("streams", {})
    index = device.index or 0
    with torch.cuda.device(index):
        if index not in streams:
            streams[index] = torch.cuda.Stream(index)
        stream = streams[index]
        for each in moments:
            if each is not None:
                stream.wait_event(each)
        with torch.cuda.stream(stream):
            yield


class Finish:
    """When an operation's work on a GPU has ended; nothing where there was none."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._end: Moment = None

    @contextmanager
    def on(self, device: torch.device, made: Sequence[Moment] = ()) -> Iterator[None]:
        """Work there, beside other streams, after what was made; the last of it is the end."""
        with beside(device, made):
            yield
            self._device, self._end = device, moment(device)

    def wait(self, results: Iterable[Any] = ()) -> None:
        """Have the current stream wait for the end; the host does not.

        results: of these the tensors were made there, and are used here. Their memory belongs to
            that stream: torch must know of this one, or it gives the memory away too early.
        """
        if self._end is None:
            return
        here = torch.cuda.current_stream(self._device)
        here.wait_event(self._end)
        for result in results:
            if getattr(result, "is_cuda", False):
                result.record_stream(here)


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in float64, truncated; 16-bit floats in float32."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).trunc())


def reduce_as_one(
    members: Sequence[tuple[OnGpu, float]], postscale: float, reduction: str, transport: Transport
) -> None:
    """Reduce tensors of one dtype over the ranks, each in its own memory.

    members: each with its factor before the reduction; postscale: the one after it.
    """
    tensors = [each.tensor for each, _ in members]
    prescales = {prescale for _, prescale in members}
    with beside(tensors[0].device, [each.made for each, _ in members]):
        if len(prescales) > 1:  # one stands in for a rank that has joined
            for tensor, (_, prescale) in zip(tensors, members, strict=True):
                scale(tensor, prescale)
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if len(prescales) == 1:
            scale(whole, *prescales)
        transport.allreduce(whole, reduction)  # type: ignore[arg-type]
        scale(whole, postscale)
        if len(tensors) > 1:
            parts = whole.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, list(parts))


def on_place(array: NDArray[np.generic], place: str, dtype: str) -> OnGpu:
    """Return a host array's elements as a tensor at a place."""
    like = torch.empty(0, dtype=getattr(torch, dtype), device=place)
    with beside(like.device):
        tensor = tensor_of(array, like)
        return OnGpu(tensor, moment(like.device))
