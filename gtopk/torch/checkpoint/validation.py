"""Checks a loaded state before any of it is restored; all ranks fail, or none does.

A correct checksum shows that a file is unchanged, not who wrote it. Most load_state_dict()s accept
anything: a string as momentum fails in the next step, and a NaN as batch size loops forever.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ...errors import CheckpointError, DamagedError
from ...exchange.buckets.arrays import as_bytes
from ...exchange.residual import ROWS
from ...exchange.residual_state import fits
from ...runtime.coordinator.agreement import name_ranks
from ..functions import allgather_object, broadcast_object, broadcast_parameters
from ..mpi_ops import rank, size

T = TypeVar("T")


def run_on_all(func: Callable[[], T], what: str) -> T:
    """Return `func()`; all ranks call it together.

    Raises CheckpointError on every rank if one of them fails, so that none waits for it.
    """
    problem, result = "", None
    try:
        result = func()
    except Exception as error:  # of any kind
        # Not raised here: the other ranks wait in the gather below.
        problem = f"{type(error).__name__}: {error}"
    if problems := by_rank(allgather_object(problem_text(problem), "checkpoint.problem")):
        raise CheckpointError(f"{what}: {problems}")
    return cast(T, result)


def take_on_all(func: Callable[[Any], Any], argument: Any, what: str) -> tuple[Any | None, str]:
    """Return `func(argument)` and all ranks' DamagedErrors as text; all ranks call it together.

    The first is None if `func` raises DamagedError here. If it raises any other error, that error
    is raised on its rank, and CheckpointError on the others.
    """
    damage, refusal, result = "", None, None
    try:
        result = func(argument)
    except DamagedError as error:
        damage = str(error)
    except Exception as error:  # of any kind: raising here would leave the other ranks waiting
        refusal = error
    own_texts = problem_text(damage), problem_text("" if refusal is None else f"{refusal!r:.300}")
    damages, refusals = zip(*allgather_object(own_texts, "checkpoint.taken"), strict=True)
    # Raised after the gather, in which the failed rank must take part, too.
    if refusal is not None:
        raise refusal
    if refused := by_rank(refusals):
        raise CheckpointError(f"{what}: {refused}")
    return result, by_rank(damages)


def broadcast_tensors(tensors: dict[str, torch.Tensor], source: int) -> dict[str, torch.Tensor]:
    """Return one rank's tensors on every rank; all ranks call it together."""
    # Send the layout first: receivers must allocate memory before a broadcast.
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
    """Join all ranks' problems into one text, each after its rank; "" if there are none."""
    return "; ".join(f"{name_ranks([r])} {text}" for r, text in enumerate(problems) if text)


def problem_text(problem: str) -> str:
    """Return this rank's host and problem as a text for the others; "" without a problem."""
    return f"(host {socket.gethostname()}): {problem}" if problem else ""


def check_model(saved: Any, like: Mapping[str, Any]) -> None:
    """Raise DamagedError unless the checkpoint has a tensor for each tensor of a model's state."""
    if not isinstance(saved, Mapping):
        raise DamagedError(f"its model must be a dict, got {_kind(saved)}")
    for name, tensor in like.items():
        if isinstance(tensor, torch.Tensor) and name in saved:
            _check_tensor(f"model.{name}", saved[name])


def check_optimizer(name: str, saved: Any, like: Mapping[str, Any]) -> None:
    """Raise DamagedError unless `saved` is a state_dict of a torch optimizer.

    like: the state_dict of the optimizer to load into, perhaps before its first step.
    """
    if not isinstance(saved, Mapping):
        raise DamagedError(f"its {name} must be a dict, got {_kind(saved)}")
    state, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(state, Mapping) or any(type(number) is bool for number in state):
        raise DamagedError(f"{name}.state must hold a dict for each parameter")
    # Keys that are not parameter numbers may hold anything, such as a counter.
    state = {number: each for number, each in state.items() if type(number) is int}
    if not all(isinstance(each, Mapping) for each in state.values()):
        raise DamagedError(f"{name}.state must hold a dict for each parameter")
    # An entry must be a tensor for all parameters or for none; it may still be None for some.
    are_tensors = {
        what
        for each in state.values()
        for what, value in each.items()
        if isinstance(value, torch.Tensor)
    }
    for number, each in state.items():
        for what, value in each.items():
            if what in are_tensors and value is not None:
                _check_tensor(f"{name}.state.{number}.{what}", value)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise DamagedError(f"{name}.param_groups must be a list of dicts")
    for place, group in enumerate(groups):
        if not isinstance(group.get("params"), list):
            raise DamagedError(f"{name}.param_groups.{place}.params must be a list")
    for place, (group, like_group) in enumerate(zip(groups, like["param_groups"], strict=False)):
        options = {what: value for what, value in like_group.items() if what != "params"}
        check_alike(f"{name}.param_groups.{place}", group, options)


def check_residual(residuals: Any, *, is_of_shards: bool) -> None:
    """Raise DamagedError unless this is a rank's residual state, by parameter.

    Without this check gradients could be lost unnoticed.
    is_of_shards: each residual is the vector of a shard; only the model knows the shard's rows.
    """
    for name, tensors in residuals.items():
        if "residual" not in tensors:
            raise DamagedError(f"the residual state of '{name}' lacks its residual")
        shape = tensors["residual"].shape
        for what, tensor in tensors.items():
            rows = tensor.numel() if is_of_shards and what == ROWS and tensor.dim() == 1 else 0
            if not (rows and shape.numel() % rows == 0) and not fits(what, tensor, shape):
                raise DamagedError(
                    f"the {what} of '{name}' has the shape {list(tensor.shape)}, its residual "
                    f"{list(shape)}"
                )


def check_alike(place: str, saved: Any, like: Any) -> None:
    """Raise DamagedError if a state has other types than the one that it replaces.

    None matches anything, on either side. An integer matches a float. Lists may have any length,
    and dicts may lack keys or have more.
    """
    # Check NaN first: a None in `like` accepts anything else, and a NaN as size loops forever.
    if isinstance(saved, float) and math.isnan(saved) and not _is_nan(like):
        raise DamagedError(f"{place} is not a number")
    if saved is None or like is None or isinstance(saved, torch.Tensor):
        return
    if isinstance(like, bool | np.bool_):
        fits = isinstance(saved, bool | np.bool_)
    elif isinstance(like, torch.Tensor):
        fits = isinstance(saved, Real) and not isinstance(saved, bool)  # a rate may now be a tensor
    elif isinstance(like, Real):
        # Python counts a bool as a number.
        fits = isinstance(saved, Real) and not isinstance(saved, bool)
        if fits and not math.isfinite(saved) and math.isfinite(like):
            raise DamagedError(f"{place} is {saved}")
    elif isinstance(like, Mapping):
        fits = isinstance(saved, Mapping)
        for key in like.keys() & saved.keys() if fits else ():
            check_alike(f"{place}.{key}", saved[key], like[key])
    elif isinstance(like, list | tuple):
        fits = isinstance(saved, list | tuple)
        for number, item in enumerate(saved if fits and _are_of_one_kind(like) else ()):
            check_alike(f"{place}.{number}", item, like[0])
    else:
        fits = isinstance(saved, type(like))
    if not fits:
        raise DamagedError(f"{place} must be {_kind(like)}, got {_kind(saved)}")


def _check_tensor(place: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise DamagedError(f"{place} must be a tensor, got {_kind(value)}")


def _are_of_one_kind(items: Any) -> bool:
    return len({type(item) for item in items}) == 1


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
