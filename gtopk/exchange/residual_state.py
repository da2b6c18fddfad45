"""Residuals by parameter: read from one run's buckets, and loaded into another's by name.

A compiled run may resume from one that was not compiled, and vice versa: names are matched without
the parts that torch.compile adds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch

from ..errors import DamagedError
from .residual import AGE, OWNER_ERROR, ROWS
from .sparse_gradients import AnyBucketExchange, SparseGradientExchange

_log = logging.getLogger("gtopk")
_COMPILED: Final = "_orig_mod"  # torch.compile adds it to the names of all that it wraps

# By the part's name, such as "residual" or "velocity": a tensor of the parameter's shape; AGE is
# a scalar, and ROWS has one value per row.
ResidualState = dict[str, torch.Tensor]


def fits(part: str, tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor fits this part of the residual of a parameter of this shape."""
    if part == ROWS:  # one value per row; a single one if rows are not contiguous in memory
        return list(tensor.shape) in ([1], [*shape][:1])
    return list(tensor.shape) == ([] if part == AGE else list(shape))


def validate_residual(
    owner: str, parts: ResidualState, shape: Sequence[int], rows: Sequence[int] = ()
) -> None:
    """Raise DamagedError unless a residual is finite and fits a parameter of this shape.

    owner: of the residual, for the message. rows: the shape that ROWS is based on, if different.
    """
    for part, tensor in parts.items():
        if not fits(part, tensor, (rows or shape) if part == ROWS else shape):
            raise DamagedError(
                f"the {part} of {owner} has the shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if not tensor.isfinite().all():  # each later step would be skipped
            raise DamagedError(f"the {part} of {owner} holds NaN or infinity")


def validate_residuals(
    residuals: Mapping[str, ResidualState], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Raise DamagedError unless each residual is finite and fits the parameter of its name."""
    for name, parameter in parameters.items():
        validate_residual(f"'{name}'", residuals.get(name, {}), parameter.shape)


def copy_residuals(bucket_exchanges: Sequence[AnyBucketExchange]) -> dict[str, ResidualState]:
    """Return copies of the residuals of the buckets, by parameter name."""
    return {
        # Contiguous, not in the parameter's memory order, which may differ in another run.
        name: {
            part: view.clone(memory_format=torch.contiguous_format) for part, view in views.items()
        }
        for name, views in _views(bucket_exchanges)
    }


def load_residuals(
    bucket_exchanges: Sequence[AnyBucketExchange], residuals: Mapping[str, ResidualState]
) -> None:
    """Load residuals into the buckets; parameters without one get zeros.

    Buckets without room for a residual are skipped: see `BucketExchange.start_draining`.
    Raises ValueError if a tensor's shape differs from its parameter's.
    """
    for name, views in _views(bucket_exchanges):
        parts = residuals.get(name, {})
        if OWNER_ERROR not in views:
            parts = without_owner_errors(parts)
        for part, view in views.items():
            tensor = parts.get(part)
            if tensor is None:
                view.zero_()
                continue
            if tensor.shape != view.shape:
                raise ValueError(
                    f"the {part} of '{name}' has the shape {list(tensor.shape)}, but the "
                    f"parameter has {list(view.shape)}"
                )
            view.copy_(tensor)
    # Steps skip an empty residual; one of zeros not marked as empty would cost a pass each time.
    for bucket_exchange in bucket_exchanges:
        if (residual := bucket_exchange.residual) is not None:
            residual.is_empty = not bool(residual.after_last_step()["residual"].any())


def without_owner_errors(parts: ResidualState) -> ResidualState:
    """Return the parts with owner errors added to the residual, for an exchange without owners."""
    if OWNER_ERROR not in parts:
        return parts
    rest = {part: tensor for part, tensor in parts.items() if part != OWNER_ERROR}
    return {**rest, "residual": parts["residual"] + parts[OWNER_ERROR]}


def nonzero_names(residuals: Mapping[str, ResidualState]) -> list[str]:
    """Return the names of parameters with a nonzero residual or owner error."""
    return [
        name
        for name, parts in residuals.items()
        # Velocity and moments do not count: they contain nothing that is still to be sent.
        if any(part in parts and parts[part].any() for part in ("residual", OWNER_ERROR))
    ]


def norm_of(residuals: Iterable[ResidualState]) -> float:
    """Return the norm of all residuals and owner errors, as one vector."""
    unsent = (
        parts[part] for parts in residuals for part in ("residual", OWNER_ERROR) if part in parts
    )
    return math.sqrt(sum(float(each.detach().double().square().sum()) for each in unsent))


def _views(
    bucket_exchanges: Sequence[AnyBucketExchange],
) -> Iterator[tuple[str, ResidualState]]:
    """Yield each parameter's name and views of its parts of the residual, in its shape."""
    for bucket_exchange in bucket_exchanges:
        if isinstance(bucket_exchange, SparseGradientExchange):
            if (unsent := bucket_exchange.after_last_step()) is not None:
                yield bucket_exchange.names[0], {"residual": unsent}
            continue
        if (residual := bucket_exchange.residual) is None:
            continue
        bucket = bucket_exchange.bucket
        for place, name in enumerate(bucket_exchange.names):
            shape, stride = bucket.parameters[place].shape, bucket.strides[place]
            parts = residual.parts(place)
            for part in parts.keys() - {AGE, ROWS}:
                parts[part] = parts[part].as_strided(shape, stride)
            yield name, parts


def residuals_of(
    bucket_exchanges: Sequence[AnyBucketExchange],
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter with a residual in its bucket, and a view of it in its shape.

    The residual is that after the last step that counts, until the next one begins.
    Raises ValueError if a parameter's shape has changed.
    """
    for bucket_exchange in bucket_exchanges:
        if isinstance(bucket_exchange, SparseGradientExchange):
            continue
        residual = bucket_exchange.residual
        if residual is None or residual.is_empty:
            continue
        bucket_exchange.require_shapes()
        yield from zip(
            bucket_exchange.parameters,
            bucket_exchange.bucket.split(residual.after_last_step()["residual"]),
            strict=True,
        )


def state_before(
    bucket_exchanges: Sequence[AnyBucketExchange],
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the parameters' optimizer state as before a step that may still be undone."""
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for bucket_exchange in bucket_exchanges:
        if (residual := bucket_exchange.residual) is not None:
            found.update(residual.state_before())
    return found


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def translate(saved: Collection[str], own_names: Collection[str]) -> dict[str, str]:
    """Map saved names to this run's names; a name without a match maps to itself."""
    by_plain_name = {plain_name(name): name for name in own_names}
    new_names = {
        name: name if name in own_names else by_plain_name.get(plain_name(name), name)
        for name in saved
    }
    # Never map two names to one: a saved name that is known exactly wins.
    return {name: name if other in saved else other for name, other in new_names.items()}


def under_known_names(
    residuals: Mapping[str, ResidualState], own_names: Collection[str]
) -> dict[str, ResidualState]:
    """Return the residuals under this run's names; names without a match stay."""
    new_names = translate(residuals.keys(), own_names)
    return {new_names[name]: parts for name, parts in residuals.items()}


def unmatched(
    residuals: Mapping[str, ResidualState], own_names: Collection[str], rank: int, why: str
) -> dict[str, ResidualState]:
    """Return residuals that no parameter's name matches, to be saved again, and warn of them.

    why: the end of the warning: the reason, and what to do.
    """
    found = {
        name: parts
        for name, parts in residuals.items()
        if name not in own_names and any(bool(tensor.any()) for tensor in parts.values())
    }
    if found:
        named = ", ".join(map(repr, sorted(found)[:5])) + ", ..." * (len(found) > 5)
        _log.warning(
            "rank %d: residuals for %s are kept but cannot be applied: %s", rank, named, why
        )
    return found
