r"""Writer: how a worker's steps reach the shared model.

slow classes    its parameters are the shared ones
fast classes    they are its own copy, and the shared ones for a step

So every step is one in place, of the model and the optimizer's state as they are by then, whatever
the optimizer makes of both; only the gradient is old.

DeviceCopy: a fast worker's own copy of the shared parameters, on its device.

    shared   ----x------------- x' = x + others' updates --- a step of x' with g ---->
                  \                                          /
    own copy      x ---- forward, backward ---------------- g

What comes back is the gradient, and the optimizer steps with it in place, on the host, as a slow
worker's does. To write a stepped copy over the model would undo what all others did meanwhile. Nor
is what a step of the copy changed to be added: others may have decayed a second moment n times
since, and (1-b)g^2 - (1-b)v, right for the old v, leaves less than nothing of it where b^n < 1-b.

Audit: how much of the workers' steps never reached the shared model.

    where it began + every worker's steps - where it is = lost

The race: two workers read an element, both add, and the one that writes last wins.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

import numpy as np
import torch

from collectives.transports import Transport
from collectives.vector import Array

from ...exchange.buckets.arrays import await_copies
from ...runtime.world.state import World
from .ledger import Board
from .shared_model import SharedModel, require_in_place

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


class Audit:
    """One worker's account, of the parameters.

    Rounding is the smaller part of what it finds where parameters are float64.
    """

    def __init__(self, shared: SharedModel, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._shared = shared.parameters
        self._begin = [tensor.double().clone() for tensor in self._shared]
        self._steps = [torch.zeros_like(each) for each in self._begin]
        self._distance = 0.0

    @torch.no_grad()
    def in_place(self, apply: Callable[[], None]) -> None:
        """Take in what a step in place changes: computed on a copy, and added at once."""
        shared = [parameter.data for parameter in self._parameters]
        before = [tensor.clone() for tensor in shared]
        for parameter, copy in zip(self._parameters, before, strict=True):
            parameter.data = copy.clone()
        apply()
        steps = [p.data - copy for p, copy in zip(self._parameters, before, strict=True)]
        for parameter, tensor, step in zip(self._parameters, shared, steps, strict=True):
            parameter.data = tensor
            tensor.add_(step)
        for total, step in zip(self._steps, steps, strict=True):
            total.add_(step)
            self._distance += float(step.double().abs().sum())

    def lost(self, world: World) -> float:
        """Return the lost share of all steps, in L1; all ranks call it together."""
        steps = torch.cat([each.reshape(-1) for each in self._steps]).numpy()
        sums = np.append(steps, self._distance)

        def work(transport: Transport, all_flags: list[int]) -> None:
            transport.allreduce(sums)

        name = f"adapt.audit.{next(world.sets[0].unnamed)}"
        world.engine.submit(name, [f"{len(sums)} numbers"], work).wait()
        now = torch.cat([tensor.double().reshape(-1) for tensor in self._shared])
        begin = torch.cat([each.reshape(-1) for each in self._begin])
        missing = begin + torch.from_numpy(sums[:-1]) - now
        return float(missing.abs().sum()) / max(float(sums[-1]), 1e-300)


class Writer:
    """One worker's; its board counts the updates, and how stale they were.

    last_staleness: others' updates between the last hand-over and the update that followed.
    """

    def __init__(
        self,
        shared: SharedModel,
        board: Board,
        trained: Sequence[torch.nn.Parameter],
        states: Sequence[dict[str, Any]],
        optimizer: torch.optim.Optimizer,
        *,
        copies: bool,
        audits: bool,
    ) -> None:
        """Let the optimizer's state be shared, and the parameters, or `copies` of what is."""
        self._shared, self._board = shared, board
        self._trained, self._optimizer = trained, optimizer
        shared.map_state(trained, states, optimizer)
        self._copy = DeviceCopy(shared, trained) if copies else None
        if self._copy is None:
            shared.map_parameters(trained)
        self._audit = Audit(shared, trained) if audits else None
        self._seen = 0  # updates of the model, at the last hand-over
        self.last_staleness = 0

    def check(self) -> None:
        """Raise RuntimeError where the script has put other tensors into parameters or state."""
        tensors = self._copy.tensors if self._copy is not None else self._shared.tensors
        require_in_place(self._shared.layout, tensors, self._trained, self._optimizer)

    def hand_over(self) -> None:
        """Have the parameters be what the model is now, for the batch that comes."""
        self.refresh()
        self._seen = self._board.total("updates")

    def refresh(self) -> None:
        """Have the parameters be what the model is now."""
        if self._copy is not None:
            self._copy.refresh()

    def update(self, apply: Callable[[], None]) -> None:
        """Update the model by a step, which `apply` makes of the shared parameters."""
        board = self._board
        with self._copy.lent() if self._copy is not None else nullcontext(), board.writing():
            if self._audit is not None:
                self._audit.in_place(apply)
            else:
                apply()
        self.last_staleness = board.total("updates") - self._seen
        board.add("staleness", self.last_staleness)
        board["stalest"] = max(board["stalest"], self.last_staleness)
        board.add("updates", 1)

    def audited(self, world: World) -> float:
        """Return the share of all steps, in L1, that was lost; raise ValueError without an audit.

        All workers call it.
        """
        if self._audit is None:
            raise ValueError("nothing was audited: make the loader by adapt(..., audit=True)")
        return self._audit.lost(world)
