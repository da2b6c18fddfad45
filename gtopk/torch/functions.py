"""Broadcasts for the start of a script: all ranks get the root's parameters, state and objects.

Every rank must call these functions in the same order. They use pickle only if it is allowed (see
`runtime.object_codec`). Objects are encoded before anything is sent. If one cannot be encoded,
every rank raises the same TypeError, and no rank waits for the object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import GeneratorType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ..errors import HorovodInternalError
from ..exchange.buckets.buckets import is_expanded
from ..exchange.buckets.parameters import require_optimizer
from ..optim.wrapped import tree as optimizer_tree
from ..optim.wrapped.local_residual import restore_centers
from ..optim.wrapped.wrapping import Wrapping
from ..runtime.coordinator.agreement import name_ranks
from ..runtime.object_codec import decode, encode, holds_pickle, pickle_allowed
from ..runtime.world.process_sets import ProcessSet, global_process_set
from .mpi_ops import allgather, broadcast_, rank, synchronize
from .mpi_ops.broadcasting import begin_broadcast, begin_refused, check_root
from .mpi_ops.tensors import check, why_unsendable

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

Named: TypeAlias = tuple[str | None, torch.Tensor]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | Named], root_rank: int
) -> None:
    """Overwrite the parameters with the root's, in place.

    params: model.state_dict(), model.named_parameters(), model.parameters(), or a list of tensors
        or (name, tensor) pairs. A dict is sent in the order of its sorted keys, anything else in
        its own order.
    Raises ValueError for any other `params`, also for a generator that has been read to its end.
    Raises HorovodInternalError, on every rank, if the ranks disagree on a name, dtype or shape, or
    a tensor (sparse, quantized) cannot be sent.
    """
    named = _named(params)
    restore_centers(tensor for _, tensor in named)
    _broadcast_in_place(named, root_rank)


def _named(params: object) -> list[Named]:
    """Return names and tensors from the argument of `broadcast_parameters`."""
    pairs: Iterable[Any]
    if isinstance(params, GeneratorType) and params.gi_frame is None:
        raise ValueError(
            "params is a generator that has already been read to its end, and nothing would be "
            "broadcast: call model.named_parameters() again"
        )
    if isinstance(params, Mapping):
        pairs = sorted(((str(k), v) for k, v in params.items()), key=lambda pair: pair[0])
    # A Sequential is iterable, too: over its layers.
    elif isinstance(params, Iterable) and not isinstance(
        params, torch.Tensor | torch.nn.Module | str
    ):
        pairs = (item if isinstance(item, tuple) else (None, item) for item in params)
    else:
        raise ValueError(
            f"invalid params of type: {type(params)}; pass model.state_dict(), "
            "model.named_parameters() or a list of tensors"
        )
    named = []
    for number, (name, tensor) in enumerate(pairs):
        if not (name is None or isinstance(name, str)) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                "params must hold tensors or (name, tensor) pairs, but "
                f"{f'number {number}' if name is None else repr(name)} is of type {type(tensor)}; "
                "broadcast_object sends other objects"
            )
        named.append((name, tensor))
    return named


def _broadcast_in_place(named: Iterable[Named], root_rank: int) -> None:
    """Overwrite tensors of any strides and dtype with the root's; raise the first error at the end.

    Broadcasts are all begun before the first is waited for, so that they share engine cycles.
    """
    pending = [_begin_in_place(name, tensor, root_rank) for name, tensor in named]
    errors = []
    for target, dense, handle in pending:
        try:
            synchronize(handle)
        except HorovodInternalError as error:
            # Raised at the end: the remaining tensors must be received, too.
            errors.append(error)
        else:
            # Not earlier: a failed broadcast must leave the tensor unchanged.
            if dense is not target:
                target.copy_(dense)
    if errors:
        raise errors[0]


def _begin_in_place(
    name: str | None, tensor: torch.Tensor, root_rank: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Begin to broadcast a tensor; return the tensor to copy to, the received one, and the handle.

    If this rank cannot send its tensor, the operation fails on all ranks with the tensor's name.
    Otherwise ranks that can send theirs would wait.
    """
    if why := why_unsendable(tensor):
        return tensor, tensor, begin_refused(why, root_rank, name)
    try:
        target, signature = _unexpanded(tensor.detach())
        dense = target.resolve_conj().resolve_neg().contiguous()
        message = check(_transferable(dense))
    except Exception as error:  # a tensor subclass may raise anything
        return tensor, tensor, begin_refused(f"{type(error).__name__}: {error}", root_rank, name)
    return target, dense, begin_broadcast(message, message, root_rank, name, signature=signature)


def _unexpanded(tensor: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Return a view without repeated elements, and signature texts about the expanded dimensions.

    `expand` creates such tensors, for example in rotary tables and masks. All ranks must have
    expanded the same dimensions, or their tensors would not fit each other.
    """
    if not is_expanded(tensor):
        return tensor, []
    shape = [
        min(size, 1) if step == 0 else size
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    signature = [f"expanded from {shape} to {list(tensor.shape)}"]
    return tensor.as_strided(shape, tensor.stride()), signature


def _transferable(dense: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a view of it in a dtype that collectives support."""
    if dense.is_complex():
        # A view, not a copy: the broadcast then writes into the complex tensor itself.
        return torch.view_as_real(dense)
    is_float8 = dense.dtype.is_floating_point and dense.dtype.itemsize == 1
    return dense.view(torch.uint8) if is_float8 else dense


class _EncodedObject(NamedTuple):
    """An encoded object, or the error's text if it could not be encoded."""

    content: bytes
    has_pickle: bool = False
    error: Exception | None = None


class _ObjectHeader(NamedTuple):
    """Metadata about one rank's object, gathered by all ranks before any content is sent."""

    content_bytes: int
    failed: bool
    has_pickle: bool
    takes_pickle: bool


def _try_to_encode(obj: object) -> _EncodedObject:
    try:
        content = encode(obj)
    except Exception as error:  # of any kind: no rank may wait for an object that never comes
        # Send the error's text in place of the object, so that all ranks raise the same error.
        text = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        return _EncodedObject(text.encode(errors="replace"), error=error)
    return _EncodedObject(content, holds_pickle(content))


def _gather_headers(
    own: _EncodedObject, name: str, process_set: ProcessSet = global_process_set
) -> list[_ObjectHeader]:
    """Return the headers in rank order; raise TypeError if a rank would refuse a pickle."""
    header = _ObjectHeader(
        len(own.content), own.error is not None, own.has_pickle, pickle_allowed()
    )
    # On the host: the transport may not support the default device.
    row = torch.tensor([header], dtype=torch.int64, device="cpu")
    rows = allgather(row, f"{name}.label", process_set)
    headers = [_ObjectHeader(size, *map(bool, flags)) for size, *flags in rows.tolist()]
    ranks = process_set.members.ranks
    senders = [r for r, header in zip(ranks, headers, strict=True) if header.has_pickle]
    refusing = [r for r, header in zip(ranks, headers, strict=True) if not header.takes_pickle]
    if senders and refusing:
        raise TypeError(
            f"{name}: the object of {name_ranks(senders)} holds a pickle, and GTOPK_ALLOW_PICKLE "
            f"is not 1 on {name_ranks(refusing)}; set it on every rank, or send plain data"
        )
    return headers


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(memoryview(content), np.uint8))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object; the other ranks' `obj` is ignored.

    root_rank: the root's rank in the world, also with a process set.
    The root gets its own object back, the others a copy (`object_codec.encode` lists the types).
    Raises TypeError, on every rank, if the root's object cannot be sent.
    """
    ranks = check_root(root_rank, process_set)
    name = name or "broadcast_object"
    is_root = rank() == root_rank
    own = _try_to_encode(obj) if is_root else _EncodedObject(b"")
    header = _gather_headers(own, name, process_set)[ranks.index(root_rank)]
    # Placeholders have the root's length: a broadcast needs equal shapes on all ranks.
    content = _as_tensor(own.content if is_root else bytes(header.content_bytes))
    received = broadcast_(content, root_rank, f"{name}.content", process_set).numpy()
    if header.failed:
        text = received.tobytes().decode()
        raise TypeError(f"{name}: rank {root_rank}: {text}") from own.error
    return obj if is_root else decode(received)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return copies of every rank's object, in rank order.

    Raises TypeError, on every rank, if a rank's object cannot be sent; it names the rank.
    """
    name = name or "allgather_object"
    own = _try_to_encode(obj)
    headers = _gather_headers(own, name)
    gathered = allgather(_as_tensor(own.content), f"{name}.content").numpy()
    ends = np.cumsum([header.content_bytes for header in headers])
    contents = np.split(gathered, ends[:-1])
    failures = [
        f"rank {sender}: {content.tobytes().decode()}"
        for sender, (header, content) in enumerate(zip(headers, contents, strict=True))
        if header.failed
    ]
    if failures:
        raise TypeError(f"{name}: {'; '.join(failures)}") from own.error
    return [decode(content) for content in contents]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank's optimizer the root's options (lr, betas, ...) and state.

    Existing tensors are overwritten in place, missing ones are created, and state that the root
    lacks is dropped. The parameter groups stay the same objects, so schedulers keep working.
    Unlike Horovod, this takes no step with zero gradients to create state: weight decay and
    momentum would move the parameters. The root sends the structure of its state instead.

    optimizer: plain or distributed. For LocalSGD the outer optimizer's state and the position in
        the round are sent, too: once it also has the root's parameters, a rank continues the round
        from the root's position.
    model: accepted for Horovod's scripts, not used.
    Raises ValueError for LBFGS. Raises ValueError, on every rank, if a rank's optimizer is of
    another class or has other parameters, and TypeError if the root's state cannot be sent.
    """
    require_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    name = "optimizer_state"
    is_root = rank() == root_rank
    layout, own = optimizer_tree.layout(optimizer), optimizer_tree.tree(optimizer)
    if isinstance(optimizer, Wrapping):
        layout += optimizer.shared_layout()
    message: Any = None
    if is_root:
        skeleton, slots = optimizer_tree.take_tensors_out(own, optimizer)
        message = {
            "layout": layout,
            "optimizer": skeleton,
            "tensors": [(*slot,) for slot in slots],
            "shared_state": optimizer.shared_state() if isinstance(optimizer, Wrapping) else None,
        }
    message = broadcast_object(message, root_rank, name)
    difference = optimizer_tree.difference(layout, message["layout"])
    # Gather the differences: a rank that raised alone would leave the others waiting.
    differences = allgather_object(difference, f"{name}.layout")
    if any(differences):
        raise ValueError(
            "broadcast_optimizer_state needs the same optimizer on every rank: "
            + "; ".join(
                f"rank {where} has {pair[0]}, rank {root_rank} has {pair[1]}"
                for where, pair in enumerate(differences)
                if pair
            )
        )
    slots = [optimizer_tree.Slot(*slot) for slot in message["tensors"]]
    if is_root:
        tensors = {slot.path: optimizer_tree.at(own, slot.path) for slot in slots}
    else:
        tensors = optimizer_tree.make_tensors(slots, own, optimizer)
    # Small tensors came with the skeleton; broadcast the large ones one by one, in place.
    large = [slot.path for slot in slots if slot.value is None]
    _broadcast_in_place(
        [(f"{name}.{'.'.join(map(str, path))}", tensors[path]) for path in large], root_rank
    )
    if not is_root:
        filled = optimizer_tree.put_tensors_in(message["optimizer"], tensors)
        optimizer_tree.install(filled, optimizer)
    optimizer_tree.lay_out_as_parameters(optimizer)
    if isinstance(optimizer, Wrapping):
        optimizer.load_shared_state(message["shared_state"])
        for other in optimizer.outer_optimizers():
            broadcast_optimizer_state(other, root_rank)
