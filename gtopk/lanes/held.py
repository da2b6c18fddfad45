"""What is held back of each parameter, taken out of its bucket and put into another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..exchange.residual import AGE, ROWS, Residual
from .lanes import Lane
from .sparse_gradients import SparseGradientLane

# By what it is, "residual" or "velocity" say: a tensor of the parameter's shape; AGE has none, and
# ROWS as many as the parameter has rows.
Held = dict[str, torch.Tensor]


def fits(what: str, tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Tell whether a part of what is held back of a parameter of this shape may be one."""
    if what == ROWS:
        return tensor.dim() == 1
    return list(tensor.shape) == ([] if what == AGE else list(shape))


def take_out(lanes: Sequence[Any]) -> dict[str, Held]:
    """Return copies of what the lanes hold back, by parameter name."""
    return {
        name: {what: view.clone(memory_format=torch.contiguous_format) for what, view in views}
        for name, views in _views(lanes)
    }


def put_in(lanes: Sequence[Any], held: Mapping[str, Held]) -> None:
    """Make the lanes hold this back, and nothing of parameters that are not in it.

    Those that have no room leave it where it is: see `send_along`.
    """
    for name, views in _views(lanes):
        for what, view in views:
            tensor = held.get(name, {}).get(what)
            if tensor is None:
                view.zero_()
                continue
            if tensor.shape != view.shape:
                raise ValueError(
                    f"the {what} of '{name}' has the shape {list(tensor.shape)}, but the "
                    f"parameter has {list(view.shape)}"
                )
            view.copy_(tensor)
    for lane in lanes:
        if (residual := _residual(lane)) is not None:
            residual.holds_nothing = not bool(residual.after_last_step()["residual"].any())


def unsent(held: Mapping[str, Held]) -> list[str]:
    """Return the names of the parameters of which something is to be sent yet."""
    return [name for name, parts in held.items() if "residual" in parts and parts["residual"].any()]


def _residual(lane: Any) -> Residual | None:
    return lane.exchange.residual if isinstance(lane, Lane) else None


def _views(lanes: Sequence[Any]) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    """Return, parameter by parameter, its part of every vector that is held, as its shape."""
    for lane in lanes:
        if isinstance(lane, SparseGradientLane) and lane.unsent is not None:
            yield lane.names[0], [("residual", lane.unsent)]
        residual = _residual(lane)
        if residual is None:
            continue
        tensors = residual.after_last_step()
        starts = np.cumsum([0, *(p.numel() for p in lane.parameters)]).tolist()
        row = 0
        for number, (name, parameter, stride, start) in enumerate(
            zip(lane.names, lane.parameters, lane.bucket.strides, starts, strict=False)
        ):
            views = {
                what: tensor.as_strided(parameter.shape, stride, start)
                for what, tensor in tensors.items()
                if what not in (AGE, ROWS)
            }
            if AGE in tensors:
                views[AGE] = tensors[AGE][number]
            if ROWS in tensors:
                rows = residual.rows[number]
                views[ROWS] = tensors[ROWS][row : row + rows]
                row += rows
            yield name, list(views.items())


def residuals(lanes: Sequence[Any]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return the parameters whose lanes hold something back, and the memory of it, as their shape.

    After the last step that counts; it stays so until the next one begins.
    """
    for lane in lanes:
        residual = _residual(lane)
        if residual is None or residual.holds_nothing:
            continue
        yield from zip(
            lane.parameters,
            lane.bucket.split(residual.after_last_step()["residual"]),
            strict=True,
        )


def mean_square_ratio(lanes: Sequence[Any]) -> float:
    """Return the squares of the mean gradient over those of this rank's, as sampled lately.

    1 where nothing was sampled.
    """
    found = [
        residual.row_sums()
        for lane in lanes
        if (residual := _residual(lane)) is not None and residual.learns
    ]
    mean, own = (sum(sums) for sums in zip(*found, strict=True)) if found else (1.0, 1.0)
    return min(1.0, mean / own) if mean > 0 and own > 0 else 1.0
