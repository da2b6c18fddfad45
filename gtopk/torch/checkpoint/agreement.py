"""What the ranks agree on as they save and load: they all fail, or none does."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from ...errors import CheckpointError, DamagedError
from ...exchange.buckets.arrays import as_bytes
from ...runtime.coordinator.agreement import name_ranks
from ..functions import allgather_object, broadcast_object, broadcast_parameters
from ..mpi_ops import rank, size

T = TypeVar("T")


def on_all(take: Callable[[], T], what: str) -> T:
    """Return what this rank takes; all ranks call it together.

    Raises CheckpointError, on every rank alike, where one of them fails: none waits for it.
    """
    problem, taken = "", None
    try:
        taken = take()
    except Exception as error:  # of any kind
        problem = f"{type(error).__name__}: {error}"
    if problems := by_rank(allgather_object(as_told(problem), "checkpoint.problem")):
        raise CheckpointError(f"{what}: {problems}")
    return cast(T, taken)


def take_on_all(take: Callable[[Any], Any], given: Any) -> tuple[Any | None, str]:
    """Return what is taken of a checkpoint, or what on any rank is damaged of it."""
    problem, taken = "", None
    try:
        taken = take(given)
    except DamagedError as error:
        problem = str(error)
    return taken, by_rank(allgather_object(as_told(problem), "checkpoint.taken"))


def spread(tensors: dict[str, torch.Tensor], source: int) -> dict[str, torch.Tensor]:
    """Return one rank's tensors on every rank; all ranks call it together."""
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    layout = broadcast_object(layout, source, "checkpoint.layout")
    if rank() != source:
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="cpu")
            for name, (dtype, shape) in layout.items()
        }
    if size() > 1:
        bits = [
            (f"checkpoint.{name}", as_bytes(tensor))
            for name, tensor in tensors.items()
            if tensor.numel()
        ]
        broadcast_parameters(bits, source)
    return tensors


def by_rank(problems: Sequence[str]) -> str:
    """Return every rank's problem in one text, each behind its rank; "": none has any."""
    return "; ".join(f"{name_ranks([r])} {text}" for r, text in enumerate(problems) if text)


def as_told(problem: str) -> str:
    """Return what this rank tells the others of a problem: where it is, and what; "": of none."""
    return f"(host {socket.gethostname()}): {problem}" if problem else ""
