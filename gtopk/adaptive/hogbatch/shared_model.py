"""SharedModel: a model's parameters and its optimizer's state in memory that all workers map."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from collectives.vector import Array

from ...exchange.buckets.buckets import is_expanded

_ALIGNMENT: Final = 64
# What an optimizer's state has before its first step, where a step without a gradient changes it.
_UNTOUCHED: Final = {"step": 0.0, "mu_product": 1.0}


class Place(NamedTuple):
    """A tensor's place in the memory.

    key: of the optimizer's state of this parameter; "" for the parameter itself.
    """

    parameter: int
    key: str
    shape: torch.Size
    dtype: torch.dtype
    first_byte: int
    size_bytes: int


class Layout(NamedTuple):
    """The places of parameters and states in the shared memory; equal on all workers."""

    places: list[Place]
    size_bytes: int

    @property
    def signature(self) -> list[str]:
        """Return what must be equal on all workers, in words."""
        return [
            f"{f'state {key!r} of ' * bool(key)}parameter {number}, {list(shape)} {dtype}"
            for number, key, shape, dtype, *_ in self.places
        ]


def layout_of(parameters: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]) -> Layout:
    places, first = [], 0
    for number, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
        tensors = {"": parameter, **{k: v for k, v in state.items() if torch.is_tensor(v)}}
        for key, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            places.append(Place(number, key, tensor.shape, tensor.dtype, first, size))
            first += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Layout(places, first)


def require_shareable(names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raise ValueError, with its name, for a trained parameter that cannot be shared.

    names: of the frozen ones, too.
    """
    for parameter, name in names.items():
        if parameter.requires_grad:
            check(parameter, name)
    require_apart([p for p in names if p.layout is torch.strided and p.numel()], names)


def require_apart(
    parameters: Sequence[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str]
) -> None:
    """Raise ValueError where a trained parameter lies in another one's memory.

    In the shared memory each has a place of its own: what was one would be two.
    """
    ends: dict[torch.device, tuple[int, Any]] = {}  # the furthest so far, and whose it is
    for parameter in sorted(parameters, key=torch.Tensor.data_ptr):
        end, other = ends.get(parameter.device, (0, None))
        if parameter.data_ptr() < end and (parameter.requires_grad or other.requires_grad):
            raise ValueError(
                f"parameters {names[other]!r} and {names[parameter]!r} lie in the same memory, and "
                "hogbatch moves each into memory of its own: tie them by the same Parameter "
                "(b.weight = a.weight), not by its data"
            )
        reach = sum(
            (n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True)
        )
        own_end = parameter.data_ptr() + (reach + 1) * parameter.element_size()
        ends[parameter.device] = max((end, other), (own_end, parameter), key=lambda each: each[0])


def check(parameter: torch.Tensor, name: str) -> None:
    """Raise ValueError for a parameter that no memory can be shared for, with the reason."""
    reason = None
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        reason = f"it is a {type(parameter).__name__}, whose parts lie elsewhere"
    elif parameter.layout is not torch.strided:
        reason = f"its layout is {parameter.layout}"
    elif parameter.device.type not in ("cpu", "cuda"):
        reason = f"it is on the device '{parameter.device}'"
    elif parameter.is_quantized:
        reason = "it is quantized"
    elif is_expanded(parameter):
        reason = "elements of it share their memory, as expand has them (clone it)"
    if reason is not None:
        raise ValueError(
            f"parameter '{name}' cannot be shared by the workers of a node: {reason}; hogbatch "
            "takes dense tensors on the CPU or a GPU"
        )


def states_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """Return the state that an optimizer has, or will have made in its first step, by parameter.

    Raises ValueError where such a step fails.
    """
    states = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    # A parameter that was frozen so far has none beside others that have one.
    without = [number for number, state in enumerate(states) if not state]
    first = first_states(optimizer, [parameters[number] for number in without]) if without else []
    for number, state in zip(without, first, strict=True):
        states[number] = state
    return states


def first_states(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """Return the state that an optimizer will make for parameters which it has not stepped yet.

    A copy of it steps with parameters and gradients of zero to tell. Raises ValueError where such a
    step fails.
    """
    # On the host, where workers of every device step.
    stand_ins = [torch.nn.Parameter(torch.zeros_like(p, device="cpu")) for p in parameters]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    groups = [
        {
            **{key: value for key, value in copy_of(group).items() if key != "params"},
            "params": [stand_ins[numbers[id(p)]] for p in group["params"] if id(p) in numbers],
        }
        for group in optimizer.param_groups
    ]
    probe: Any = object.__new__(plain_class(optimizer))
    torch.optim.Optimizer.__init__(probe, [g for g in groups if g["params"]], optimizer.defaults)
    for stand_in in stand_ins:
        stand_in.grad = torch.zeros_like(stand_in)
    try:
        probe.step()
    except Exception as error:
        where = "its first step there fails"
        if isinstance(error, AttributeError) and error.name in vars(optimizer):
            where = (
                f"its first step is tried by a copy that has its groups and defaults, not "
                f"self.{error.name}, which belongs into either"
            )
        raise ValueError(
            f"{type(probe).__name__} cannot step a model that workers share: it must take dense "
            f"gradients, and, for GPU ranks too, step on the CPU, and {where}: {error}"
        ) from error
    states = [dict(probe.state.get(stand_in, {})) for stand_in in stand_ins]
    for state in states:
        for key in _UNTOUCHED.keys() & state.keys():
            if torch.is_tensor(state[key]):
                state[key].fill_(_UNTOUCHED[key])
            else:
                state[key] = _UNTOUCHED[key]
    return states


def copy_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options, which the probe may change."""
    return {key: copy.copy(value) if key != "params" else value for key, value in group.items()}


def plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the optimizer that was wrapped."""
    plain: torch.optim.Optimizer = getattr(optimizer, "_wrapped", optimizer)
    return type(plain)


def require_in_place(
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raise RuntimeError where a worker's parameters and state are not these tensors any more."""
    for place, tensor in zip(layout.places, tensors, strict=True):
        parameter = parameters[place.parameter]
        own = optimizer.state[parameter].get(place.key) if place.key else parameter.data
        if own is None or (own.numel() and own.data_ptr() != tensor.data_ptr()):
            what = f"state {place.key!r} of parameter" if place.key else "parameter"
            raise RuntimeError(
                f"{what} {place.parameter}, {list(place.shape)}, has been replaced since adapt: "
                "the workers of its node do not share it any more. Load the optimizer's state, and "
                "move or convert the model, before adapt"
            )


class SharedModel:
    """The tensors of a layout, in the memory given."""

    def __init__(self, memory: Array, layout: Layout) -> None:
        self.layout = layout
        self.memory = memory
        self.tensors = [
            torch.from_numpy(memory[place.first_byte : place.first_byte + place.size_bytes])
            .view(place.dtype)
            .view(place.shape)
            for place in layout.places
        ]

    def fill(self, parameters: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]) -> None:
        """Make the content that of one worker's parameters and states."""
        for place, tensor in zip(self.layout.places, self.tensors, strict=True):
            own = states[place.parameter][place.key] if place.key else parameters[place.parameter]
            tensor.copy_(own.detach())

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, without the optimizer's state."""
        places = zip(self.layout.places, self.tensors, strict=True)
        return [tensor for place, tensor in places if not place.key]

    def map_parameters(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Let a worker's parameters be this memory; gradients that they have go.

        A fused step takes both entry by entry as they lie in memory, and these may lie otherwise.
        """
        for parameter, tensor in zip(parameters, self.parameters, strict=True):
            parameter.grad = None
            parameter.data = tensor

    def map_state(
        self,
        parameters: Sequence[torch.nn.Parameter],
        states: Sequence[dict[str, Any]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Let a worker's optimizer have its state in this memory."""
        for parameter, state in zip(parameters, states, strict=True):
            if state:
                optimizer.state[parameter] = state
        for place, tensor in zip(self.layout.places, self.tensors, strict=True):
            if place.key:
                optimizer.state[parameters[place.parameter]][place.key] = tensor
