"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.errors import MismatchError
from collectives.transports import Transport

from ...reduce_ops import Average
from ...runtime.coordinator.fusion import DeferredGpuArray, Finish, all_on_gpu
from ...runtime.world.process_sets import ProcessSet, global_process_set, require_process_set
from ...runtime.world.world import current
from .reduction import allreduce
from .tensors import (
    accepted_by,
    check,
    check_in_place,
    describe,
    from_bytes,
    mark_written,
    memory_of,
    require_tensor,
    submit,
    synchronize,
    view_bytes,
)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor; differentiable.

    root_rank: the root's rank in the world, also with a process set.
    """
    require_tensor(tensor, "broadcast")
    output: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return output


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor with the root's, and return it."""
    require_tensor(tensor, "broadcast_")
    output: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return output


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to fetch the root's tensor; return a handle."""
    require_tensor(tensor, "broadcast_async")
    return begin_broadcast(tensor, torch.empty_like(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to overwrite the tensor with the root's; do not use it until `synchronize`."""
    require_tensor(tensor, "broadcast_async_")
    return begin_broadcast(check_in_place(tensor), tensor, root_rank, name, process_set)


def check_root(root_rank: int, process_set: ProcessSet) -> Sequence[int]:
    """Return the ranks of the set; raise ValueError if the root is not one of them."""
    ranks = require_process_set(process_set).members.ranks
    if root_rank not in ranks:
        valid = f"lie in 0..{len(ranks) - 1}" if isinstance(ranks, range) else f"be one of {ranks}"
        raise ValueError(f"root_rank must {valid}, got {root_rank!r}")
    return ranks


def begin_refused(why: str, root_rank: int, name: str | None) -> int:
    """Begin a broadcast that fails on every rank because of this rank's tensor; return a handle."""
    check_root(root_rank, global_process_set)

    def work(transport: Transport, all_flags: list[int]) -> Any:
        raise MismatchError(f"the tensor cannot be broadcast: {why}")

    # Ranks with a valid tensor have another signature, so the mismatch error tells them why.
    signature = [f"a tensor that cannot be broadcast: {why}"]
    return submit("broadcast", name, global_process_set, signature, work, lambda result: result)


def begin_broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    *,
    signature: Sequence[str] = (),
) -> int:
    """Begin to write the root's tensor into the output; return a handle.

    signature: additional texts that must be equal on all ranks.
    """
    # The transport numbers ranks within the set; Horovod's root_rank is a rank in the world.
    root = check_root(root_rank, process_set).index(root_rank)
    check(tensor)
    is_root = current().rank == root_rank
    on_gpu = accepted_by([tensor], process_set.engine.transport)
    deferred = (
        DeferredGpuArray.now(memory_of(output, tensor, on_gpu=True).elements) if on_gpu else None
    )
    # A copy: the script may change the tensor before the operation runs.
    message = np.array(view_bytes(tensor)) if is_root and not on_gpu else None
    finished = Finish()

    def work(transport: Transport, all_flags: list[int]) -> NDArray[np.uint8] | torch.Tensor:
        if deferred is None:
            return transport.broadcast(message, root)
        with finished.on(tensor.device, [deferred.ready]):
            if not all_on_gpu(all_flags):
                own = deferred.bytes_on_host() if is_root else None
                return transport.broadcast(own, root)
            transport.broadcast_into(deferred.tensor, root)  # type: ignore[arg-type]
            return deferred.tensor

    def finish(result: NDArray[np.uint8] | torch.Tensor) -> torch.Tensor:
        finished.wait([result])
        if isinstance(result, torch.Tensor):
            # Received in place; no copy needed.
            if result.data_ptr() == output.data_ptr():
                return mark_written(output)
            result = result.view(tensor.dtype).reshape(tensor.shape)
        else:
            result = from_bytes(result, tensor, tensor.shape)
        with torch.no_grad():
            return output.copy_(result, non_blocking=True)

    signature = [*signature, f"{describe(tensor)} root_rank={root_rank}"]
    return submit("broadcast", name, process_set, signature, work, finish, on_gpu=on_gpu)


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast; the root gets the averaged gradient, the others zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        ctx.arguments = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        root_rank, process_set = ctx.arguments
        reduced = allreduce(gradients[0], op=Average, process_set=process_set)
        # Compute the zeros from `reduced`, so that a second backward pass reduces on every rank.
        elsewhere = torch.full((), current().rank != root_rank, device=reduced.device)
        return reduced.masked_fill(elsewhere, 0), None, None, None
