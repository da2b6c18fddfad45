"""An optimizer as a tree; its tensors can be taken out on one rank and put in on another.

    {"groups": [options], "parameters": {number: state}, "other": {key: state}}

Parameters are numbered in the order of the groups; "other" is state that belongs to no parameter.
A path is the tuple of keys that leads from the top to a tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch

from ...exchange.buckets.parameters import parameters_of

Path: TypeAlias = tuple[Any, ...]
Tree: TypeAlias = dict[str, Any]


class Slot(NamedTuple):
    """A tensor in one rank's tree, with what a rank that lacks it needs to create it."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    beside_parameter: bool  # on the device of its parameter; otherwise on the CPU
    value: torch.Tensor | None  # only for a scalar, so that it needs no message of its own


def layout(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the optimizer's class and parameter shapes, which must be equal on all ranks."""
    return [
        f"optimizer {type(optimizer).__name__}",
        *(
            f"parameter {number} of group {index}, {list(parameter.shape)}"
            for index, group in enumerate(optimizer.param_groups)
            for number, parameter in enumerate(group["params"])
        ),
    ]


def difference(layout: list[str], other: list[str]) -> tuple[str, str] | None:
    """Return the first lines in which two layouts differ, or None if they are the same."""
    pairs = zip_longest(layout, other, fillvalue="nothing more")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def tree(optimizer: torch.optim.Optimizer) -> Tree:
    """Return the optimizer's options and state; its tensors are not copied."""
    state = optimizer.state
    return {
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "parameters": {
            number: state[parameter]
            for number, parameter in enumerate(parameters_of(optimizer))
            if parameter in state
        },
        "other": {key: part for key, part in state.items() if not isinstance(key, torch.Tensor)},
    }


def install(tree: Tree, optimizer: torch.optim.Optimizer) -> None:
    """Install the tree's options and state; the groups stay the same objects."""
    # In place, because schedulers refer to the groups.
    for group, options in zip(optimizer.param_groups, tree["groups"], strict=True):
        group.update(options)
    state = optimizer.state
    for key in [key for key in state if not isinstance(key, torch.Tensor)]:
        del state[key]
    state.update(tree["other"])
    for number, parameter in enumerate(parameters_of(optimizer)):
        state.pop(parameter, None)
        if number in tree["parameters"]:
            state[parameter] = tree["parameters"][number]


def take_tensors_out(tree: Tree, optimizer: torch.optim.Optimizer) -> tuple[Tree, list[Slot]]:
    """Return a copy of the tree with None in place of its tensors, and a slot for each."""
    slots: list[Slot] = []

    def take_out(part: Any, path: Path) -> Any:
        if not _is_tensor(part):
            return part
        device, parameters_device = part.device.type, _device(path, optimizer).type
        # A step count on the CPU stays there, wherever its parameter is.
        beside_parameter = device == parameters_device and (part.dim() > 0 or device != "cpu")
        value = part if part.dim() == 0 else None
        slots.append(Slot(path, part.dtype, part.shape, beside_parameter, value))
        return None

    return _rebuild(tree, take_out), slots


def put_tensors_in(skeleton: Tree, tensors: dict[Path, torch.Tensor]) -> Tree:
    """Return a copy of a skeleton from `take_tensors_out`, with these tensors in their places."""
    tree: Tree = _rebuild(skeleton, lambda part, path: tensors.get(path, part))
    return tree


def at(part: Any, path: Path) -> Any:
    """Return the part of a tree at a path, or None."""
    for key in path:
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list | tuple) and isinstance(key, int) and key < len(part):
            part = part[key]
        else:
            return None
    return part


def make_tensors(
    slots: list[Slot], tree: Tree, optimizer: torch.optim.Optimizer
) -> dict[Path, torch.Tensor]:
    """Return a tensor for every slot: the tree's own, or a new one if that does not fit.

    If the slot has a value, the tensor is set to it; otherwise the caller must fill the tensor.
    """
    tensors: dict[Path, torch.Tensor] = {}
    taken = set()
    for slot in slots:
        tensor = at(tree, slot.path)
        fits = (
            _is_tensor(tensor)
            and (tensor.dtype, tensor.shape) == (slot.dtype, slot.shape)
            and id(tensor) not in taken  # groups may share an lr here but not on the other rank
        )
        if not fits:
            device = _device(slot.path, optimizer) if slot.beside_parameter else "cpu"
            tensor = torch.empty(slot.shape, dtype=slot.dtype, device=device)
        if slot.value is not None:
            tensor.copy_(slot.value)
        taken.add(id(tensor))
        tensors[slot.path] = tensor
    return tensors


def lay_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give state with its parameter's shape the parameter's strides, too.

    Fused steps pair the entries of both by their order in memory, and ignore strides.
    """
    for parameter, state in optimizer.state.items():
        if not (isinstance(parameter, torch.Tensor) and isinstance(state, dict)):
            continue
        for key, part in state.items():
            if not _is_tensor(part) or part.shape != parameter.shape:
                continue
            if part.stride() != parameter.stride():
                laid_out = torch.empty_like(parameter, dtype=part.dtype, device=part.device)
                state[key] = laid_out.copy_(part)


def _device(path: Path, optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the device of the parameter that a path belongs to, otherwise of the first."""
    return parameters_of(optimizer)[path[1] if path[0] == "parameters" else 0].device


def _is_tensor(part: Any) -> bool:
    return type(part) is torch.Tensor and part.layout is torch.strided and not part.requires_grad


def _rebuild(part: Any, leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Return a copy of a tree with leaf(part, path) in place of each non-container part."""
    # Compare exact types: another container may be more than its items, so it is a leaf.
    if type(part) in (dict, OrderedDict):
        return type(part)((key, _rebuild(p, leaf, (*path, key))) for key, p in part.items())
    if type(part) in (list, tuple):
        return type(part)(_rebuild(p, leaf, (*path, index)) for index, p in enumerate(part))
    return leaf(part, path)
