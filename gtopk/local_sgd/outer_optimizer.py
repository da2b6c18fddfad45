"""The outer optimizer: how it is made, the options that ranks compare, and its step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve

from ..optim.step_checks import checksums

# Makes the outer optimizer for these parameters: the model's own, which are z when it steps.
Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def nesterov(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: rate 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def averaging(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain descent of rate 1: dense, z' is the mean of the models."""
    return torch.optim.SGD(parameters, lr=1.0)


def options_of(outer: torch.optim.Optimizer) -> str:
    """Return the class and options of the outer optimizer, which must be equal on all ranks."""
    options = [
        # A rate of 1 on one rank is 1.0 on another.
        {name: float(value) if type(value) is int else value for name, value in group.items()}
        for group in options_by_group(outer)
    ]
    return f"outer {type(outer).__name__} {options}"


def options_by_group(outer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in outer.param_groups
    ]


def state_of(outer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> str:
    """Return a text by which ranks compare the outer optimizer's state: all must have the same."""
    # By parameter: the order of `outer.state` is that in which it was filled.
    state = [value for p in parameters for value in outer.state.get(p, {}).values()]
    tensors = checksums([value for value in state if isinstance(value, torch.Tensor)])
    others = [value for value in state if isinstance(value, (int, float))]
    return (
        f"state of the outer optimizer {zlib.crc32(tensors.tobytes()):08x} {others} "
        "(all ranks load, or broadcast_optimizer_state gives them one's)"
    )


@contextmanager
def center_in_place(
    parameters: Iterable[torch.nn.Parameter],
    center: Sequence[torch.Tensor],
    outer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
) -> Iterator[None]:
    """Let the outer optimizer step the center, by these options, while the replica stays.

    By `data`, and unseen by autograd: a backward pass under way may need the replica.
    """
    known, groups = list(parameters), outer.param_groups
    replica = [parameter.data for parameter in known]
    now = [{name: group[name] for name in of} for group, of in zip(groups, options, strict=True)]
    try:
        for parameter, tensor in zip(known, center, strict=True):
            parameter.data = tensor
        for group, of in zip(groups, options, strict=True):
            group.update(of)
        with ExitStack() as versions:
            # A step in place counts up the parameters' versions, and a backward pass under way
            # would refuse them.
            for parameter in known:
                versions.enter_context(preserve(parameter))
            yield
    finally:
        for parameter, tensor in zip(known, replica, strict=True):
            parameter.data = tensor
        for group, of in zip(groups, now, strict=True):
            group.update(of)
