"""DeviceCopy: a fast worker's own copy of the shared parameters, on its device.

    shared   ----x------------- x' = x + others' updates --- a step of x' with g ---->
                  \\                                          /
    own copy      x ---- forward, backward ---------------- g

What comes back is the gradient, and the optimizer steps with it in place, on the host, as a slow
worker's does. To write a stepped copy over the model would undo what all others did meanwhile. Nor
is what a step of the copy changed to be added: others may have decayed a second moment n times
since, and (1-b)g^2 - (1-b)v, right for the old v, leaves less than nothing of it where b^n < 1-b.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

from collectives.vector import Array

from ...exchange.buckets.arrays import await_copies
from .shared_model import SharedModel

_log = logging.getLogger("gtopk")

_FOR_ALL_CONTEXTS: Final = 1  # cudaHostRegisterPortable


def lock_pages(memory: Array, device: torch.device) -> bool:
    """Register memory with CUDA for as long as the array lives; tell whether that worked.

    Where it did not, copies are as right, and slower: the limit on locked memory (ulimit -l) may
    be too low.
    """
    if device.type != "cuda" or not memory.size:
        return False
    address = memory.ctypes.data
    try:
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, memory.nbytes, _FOR_ALL_CONTEXTS))
    except (RuntimeError, AttributeError, TypeError) as error:
        _log.debug("shared memory could not be page-locked: %s", error)
        return False
    if status:
        _log.debug("shared memory could not be page-locked: CUDA's error %d", status)
        _take_last_error(device)
        return False
    unlock = weakref.finalize(memory, runtime.cudaHostUnregister, address)
    unlock.atexit = False  # CUDA may have ended before
    return True


def _take_last_error(device: torch.device) -> None:
    """Clear CUDA's last error: torch would raise it from the next kernel that it launches."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


class DeviceCopy:
    """Parameters beside the shared ones; the optimizer's state is the shared one.

    tensors: the worker's own parameters, and the shared state, in the order of the layout.
    """

    def __init__(self, shared: SharedModel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._shared = shared.parameters
        self._own = [parameter.data for parameter in parameters]
        gpu = next((own.device for own in self._own if own.is_cuda), torch.device("cpu"))
        self._locked = lock_pages(shared.memory, gpu)
        self.tensors = [
            tensor if place.key else self._own[place.parameter]
            for place, tensor in zip(shared.layout.places, shared.tensors, strict=True)
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Become what the shared parameters are."""
        for own, shared in zip(self._own, self._shared, strict=True):
            own.copy_(shared, non_blocking=self._locked)  # the gradients' way back waits for it

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Have the parameters be the shared ones, and their gradients on the host, for a step."""
        gradients = [parameter.grad for parameter in self._parameters]
        on_host = list(map(_begin_copy, gradients, self._shared))
        await_copies([gradient for gradient in gradients if gradient is not None])
        self._put(self._shared, on_host)
        try:
            yield
        finally:
            self._put(self._own, gradients)

    def _put(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        for parameter, tensor, gradient in zip(self._parameters, tensors, gradients, strict=True):
            parameter.grad = None  # one on another device than its parameter's is an error
            parameter.data = tensor
            parameter.grad = gradient


def _begin_copy(gradient: torch.Tensor | None, shared: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient on the host, in the strides of the shared parameter.

    Fused steps take the two entry by entry as they lie in memory, whatever their strides. What
    comes from a GPU is there after `await_copies`.
    """
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        return gradient.to("cpu")
    if gradient.is_cuda:
        pinned = torch.empty_like(shared, dtype=gradient.dtype, pin_memory=True)
        return pinned.copy_(gradient, non_blocking=True)
    if gradient.stride() != shared.stride():
        return torch.empty_like(shared).copy_(gradient)
    return gradient.to("cpu")
