r"""SharedModel: a model's parameters and its optimizer's state in memory that all workers map.

DeviceCopy: a fast worker's own copy of the shared parameters, on its device.

    shared   ----x------------- x' = x + others' updates --- a step of x' with g ---->
                  \                                          /
    own copy      x ---- forward, backward ---------------- g

Only the gradient is copied back; the optimizer steps with it in place, on the host, as it does for
a slow worker. Writing a stepped copy over the model would undo the updates that others have made
in the meantime. Adding the copy's change would be wrong, too: others may have decayed a second
moment n times since, and (1-b)g^2 - (1-b)v, right for the old v, makes it negative if b^n < 1-b.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import torch

from collectives.vector import Array

from ...exchange.buckets.arrays import await_copies
from ...exchange.buckets.buckets import is_expanded

_ALIGNMENT: Final = 64
# State values before an optimizer's first step, which a step with zero gradients changes.
_INITIAL_VALUES: Final = {"step": 0.0, "mu_product": 1.0}


class Place(NamedTuple):
    """A tensor's place in the memory.

    key: the key in this parameter's optimizer state; "" for the parameter itself.
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
        """Return words that must be equal on all workers."""
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

    names: of all parameters, frozen ones included.
    """
    for parameter, name in names.items():
        if parameter.requires_grad:
            check(parameter, name)
    require_separate_memory([p for p in names if p.layout is torch.strided and p.numel()], names)


def require_separate_memory(
    parameters: Sequence[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str]
) -> None:
    """Raise ValueError if a trained parameter shares memory with another one.

    In the shared memory each gets its own place, which would separate tied values.
    """
    ends: dict[torch.device, tuple[int, Any]] = {}  # the furthest end so far, and its parameter
    for parameter in sorted(parameters, key=torch.Tensor.data_ptr):
        end, other = ends.get(parameter.device, (0, None))
        if parameter.data_ptr() < end and (parameter.requires_grad or other.requires_grad):
            raise ValueError(
                f"parameters {names[other]!r} and {names[parameter]!r} share memory, and hogbatch "
                "moves each to its own place: to tie them, assign the same Parameter "
                "(b.weight = a.weight), not its data"
            )
        reach = sum(
            (n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True)
        )
        own_end = parameter.data_ptr() + (reach + 1) * parameter.element_size()
        ends[parameter.device] = max((end, other), (own_end, parameter), key=lambda each: each[0])


def check(parameter: torch.Tensor, name: str) -> None:
    """Raise ValueError, with the reason, for a parameter that cannot lie in shared memory."""
    reason = None
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        reason = f"it is a {type(parameter).__name__}, which keeps its values in other tensors"
    elif parameter.layout is not torch.strided:
        reason = f"its layout is {parameter.layout}"
    elif parameter.device.type not in ("cpu", "cuda"):
        reason = f"it is on the device '{parameter.device}'"
    elif parameter.is_quantized:
        reason = "it is quantized"
    elif is_expanded(parameter):
        reason = "its elements share memory, as after expand (clone it)"
    if reason is not None:
        raise ValueError(
            f"parameter '{name}' cannot be shared by the workers of a node: {reason}; hogbatch "
            "takes dense tensors on the CPU or a GPU"
        )


def states_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """Return an optimizer's state by parameter: the current one, or the one after its first step.

    Raises ValueError if such a step fails.
    """
    states = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    # Parameters that were frozen so far have no state, although others have one.
    without = [number for number, state in enumerate(states) if not state]
    first = first_states(optimizer, [parameters[number] for number in without]) if without else []
    for number, state in zip(without, first, strict=True):
        states[number] = state
    return states


def first_states(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """Return the state that an optimizer will create for parameters that it has not stepped yet.

    A copy of the optimizer takes a step with zero parameters and gradients. Raises ValueError if
    that step fails.
    """
    # On the host, where all workers step, on any device.
    stand_ins = [torch.nn.Parameter(torch.zeros_like(p, device="cpu")) for p in parameters]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    groups = [
        {
            # Copies: a step may change the values of options.
            **{key: copy.copy(value) for key, value in group.items() if key != "params"},
            "params": [stand_ins[numbers[id(p)]] for p in group["params"] if id(p) in numbers],
        }
        for group in optimizer.param_groups
    ]
    probe: Any = object.__new__(type(getattr(optimizer, "_wrapped", optimizer)))
    torch.optim.Optimizer.__init__(probe, [g for g in groups if g["params"]], optimizer.defaults)
    for stand_in in stand_ins:
        stand_in.grad = torch.zeros_like(stand_in)
    try:
        probe.step()
    except Exception as error:
        reason = "its first step there fails"
        if isinstance(error, AttributeError) and error.name in vars(optimizer):
            reason = (
                f"its first step is tried on a copy that has its groups and defaults but not "
                f"self.{error.name}, which belongs in one of them"
            )
        raise ValueError(
            f"{type(probe).__name__} cannot step a model that workers share: it must step on the "
            f"CPU with dense gradients, also for GPU ranks, and {reason}: {error}"
        ) from error
    states = [dict(probe.state.get(stand_in, {})) for stand_in in stand_ins]
    for state in states:
        for key in _INITIAL_VALUES.keys() & state.keys():
            if torch.is_tensor(state[key]):
                state[key].fill_(_INITIAL_VALUES[key])
            else:
                state[key] = _INITIAL_VALUES[key]
    return states


def require_in_place(
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raise RuntimeError if a worker's parameters and state are no longer these tensors."""
    for place, tensor in zip(layout.places, tensors, strict=True):
        parameter = parameters[place.parameter]
        own = optimizer.state[parameter].get(place.key) if place.key else parameter.data
        if own is None or (own.numel() and own.data_ptr() != tensor.data_ptr()):
            what = f"state {place.key!r} of parameter" if place.key else "parameter"
            raise RuntimeError(
                f"{what} {place.parameter}, {list(place.shape)}, has been replaced since adapt: "
                "the workers of its node no longer share it. Load the optimizer's state, and move "
                "or convert the model, before adapt"
            )


class SharedModel:
    """The tensors of a layout, as views of the given memory."""

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
        """Copy one worker's parameters and states into the memory."""
        for place, tensor in zip(self.layout.places, self.tensors, strict=True):
            own = states[place.parameter][place.key] if place.key else parameters[place.parameter]
            tensor.copy_(own.detach())

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, without the optimizer's state."""
        places = zip(self.layout.places, self.tensors, strict=True)
        return [tensor for place, tensor in places if not place.key]

    def map_parameters(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Map a worker's parameters to this memory, and drop their gradients.

        A fused step pairs entries by their order in memory, which may differ in old gradients.
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
        """Map the state of a worker's optimizer to this memory."""
        for parameter, state in zip(parameters, states, strict=True):
            if state:
                optimizer.state[parameter] = state
        for place, tensor in zip(self.layout.places, self.tensors, strict=True):
            if place.key:
                optimizer.state[parameters[place.parameter]][place.key] = tensor


_log = logging.getLogger("gtopk")

_FOR_ALL_CONTEXTS: Final = 1  # cudaHostRegisterPortable


def lock_pages(memory: Array, device: torch.device) -> bool:
    """Register memory with CUDA for as long as the array lives; tell whether that worked.

    If it failed, copies are slower; the limit on locked memory (ulimit -l) may be too low.
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
        with suppress(RuntimeError):  # otherwise torch would raise it from its next kernel
            torch.ones(1, device=device)
        return False
    unlock = weakref.finalize(memory, runtime.cudaHostUnregister, address)
    unlock.atexit = False  # CUDA may have shut down earlier
    return True


class DeviceCopy:
    """A worker's copy of the shared parameters; the optimizer's state remains the shared one.

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
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [parameter._version for parameter in self._parameters]

    @torch.no_grad()
    def publish(self) -> None:
        """Copy parameters that the script has changed, by a checkpoint say, to all workers."""
        if any(p._version != v for p, v in zip(self._parameters, self._versions, strict=True)):
            for own, shared in zip(self._own, self._shared, strict=True):
                shared.copy_(own)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the shared parameters into this worker's own."""
        for own, shared in zip(self._own, self._shared, strict=True):
            own.copy_(shared, non_blocking=self._locked)  # copying gradients back waits for it
        self._note_versions()

    def wait(self) -> None:
        """Wait until `refresh` has copied; after that others may write."""
        await_copies(self._own)

    @contextmanager
    def on_shared_memory(self) -> Iterator[None]:
        """Replace the parameters with the shared ones, with gradients on the host, for a step."""
        gradients = [parameter.grad for parameter in self._parameters]
        on_host = list(map(_begin_copy, gradients, self._shared))
        await_copies([gradient for gradient in gradients if gradient is not None])
        self._set_tensors(self._shared, on_host)
        try:
            yield
        finally:
            self._set_tensors(self._own, gradients)
            self._note_versions()

    def _set_tensors(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        for parameter, tensor, gradient in zip(self._parameters, tensors, gradients, strict=True):
            parameter.grad = None  # torch refuses a gradient on another device than its parameter
            parameter.data = tensor
            parameter.grad = gradient


def _begin_copy(gradient: torch.Tensor | None, shared: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient on the host, in the strides of the shared parameter.

    Fused steps pair entries by their order in memory, regardless of strides. A copy from a GPU is
    complete after `await_copies`.
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
