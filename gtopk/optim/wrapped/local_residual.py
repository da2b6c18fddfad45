"""LocalResidual: forward and backward use the model with this rank's own unsent steps applied.

    step()      parameters hold the center c, bit-identical on all ranks
    forward     of a model in training: they become c - a; a: this rank's unsent steps
    backward    this rank's gradient at c - a
    step()      c moves by the agreed update

Without it a rank computes gradients as if its unsent steps had never been made, and repeats these
steps until they are sent. Under AdamW, with steps as large as training can bear, that causes most
of the accuracy loss from compression. Between a step and the next forward pass parameters are the
center: evaluation, checkpoints, the replica check and broadcasts see that.

While parameters are c - a, no other code may change them: a rank could not tell the new center from
its own unsent steps. A model's load_state_dict() is allowed, because it replaces the center. So is
wrapping in a new DDP, as after an error between forward and step(): it broadcasts rank 0's center.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ..peers import Peers

_log = logging.getLogger("gtopk")

# By parameter: the source of the unsent steps in it. The optimizer created last wins.
_sources: MutableMapping[torch.Tensor, LocalResidual] = WeakIdKeyDictionary()
_numbers = itertools.count()


def take_center(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the center of a parameter that is c - a; the caller must write it back.

    None if the parameter is the center. Raises RuntimeError if it was changed while it was c - a.
    """
    source = _sources.get(parameter)
    return None if source is None else source._load_center(parameter)


def center_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's center, which is the parameter itself unless it is c - a; read-only."""
    source = _sources.get(parameter)
    return parameter if source is None else source._center[parameter]


def restore_centers(parameters: Iterable[torch.Tensor]) -> None:
    """Restore the center of models that are c - a, because a broadcast reads and writes it."""
    for residual in {_sources[p] for p in parameters if p in _sources}:
        residual.restore()


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's elements on this rank: for a DTensor the local shard."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def versions_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often a tensor was changed in place; a DTensor's shard has its own count."""
    return tensor._version, on_this_rank(tensor)._version


class ResidualSource(Protocol):
    """An object with the residual of an optimizer's steps; see `Reducer` and `HookedAdam`.

    names: of the residual's parameters; "" if only the model knows a name.
    """

    @property
    def names(self) -> Mapping[torch.nn.Parameter, str]: ...
    @property
    def peers(self) -> Peers: ...
    def residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]: ...


class LocalResidual:
    """Switch the parameters of one optimizer between the center and c - a.

    The models are found in the first forward pass after there is something to apply: the outermost
    modules that have any of the parameters. If none is found by the end of that step, such as for
    models that are not a torch.nn.Module, parameters are c - a from the end of each step on, and
    the caller must call `restore`.

    owner: for messages, the object with `evaluating` and the option local_residual.
    swapped: called when parameters have become c - a, or the center.
    """

    def __init__(
        self,
        source: ResidualSource,
        owner: str = "optimizer",
        swapped: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._owner, self._swapped = source, owner, swapped
        self._center: dict[torch.nn.Parameter, torch.Tensor] = {}
        # Versions of the parameters that are currently c - a.
        self._versions: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self._roots = weakref.WeakSet[torch.nn.Module]()
        self._searched = weakref.WeakSet[torch.nn.Module]()
        self._search_hook: Any = None  # the global module hook, during the search for models
        self._number = next(_numbers)
        self._is_evaluating = False  # set by `eval`, until `train`
        self._has_given_up = False
        _watch_wrapping()

    def find_models(self) -> None:
        """Find the models in the next forward pass; do nothing if some are known.

        torch.compile then warns, once, of a global module hook. The hook is removed before
        anything inside the compiled module is called.
        """
        if self._roots or self._search_hook is not None or self._has_given_up:
            return
        # Weak, because torch's global hook must not keep this object alive.
        self_ref = weakref.ref(self)

        def find(module: torch.nn.Module, inputs: Any) -> None:
            if (own := self_ref()) is None:
                handle.remove()
            else:
                own._find(module)

        handle = self._search_hook = register_module_forward_pre_hook(find)

    def _find(self, module: torch.nn.Module) -> None:
        """Add a model that has any of the parameters, unless it is inside one added before."""
        if module in self._searched or isinstance(module, torch.jit.ScriptModule):
            return  # a scripted module takes no hooks
        if isinstance(module, DistributedDataParallel):
            return  # the inner module comes next: scripts may also call it directly
        self._searched.add(module)
        names = self._source.names
        if any(parameter in names for parameter in module.parameters()):
            self._roots.add(module)
            self._searched.update(module.modules())
            hook = _Hook(self)
            # Before FSDP's hook, which gathers the parameters of all ranks.
            module.register_forward_pre_hook(hook.before_forward, prepend=True)
            # Also for models inside wrappers, because a script may take the state of either.
            for each in _layers(module):
                each.register_state_dict_pre_hook(hook.before_state)
                each.register_load_state_dict_pre_hook(hook.before_state)
            hook.before_forward(module, ())  # the current call began before the hook existed
            found = {parameter for root in self._roots for parameter in root.parameters()}
            if found.issuperset(names):
                self._stop_search()  # before torch.compile traces the inner modules

    def _stop_search(self) -> None:
        if self._search_hook is not None:
            self._search_hook.remove()
            self._search_hook = None

    @property
    def is_applied(self) -> bool:
        """Return whether parameters are currently c - a."""
        return bool(self._versions)

    @torch.no_grad()
    def apply(self) -> None:
        """Set the parameters to c - a, unless they already are, or `eval` was called."""
        if self.is_applied or self._is_evaluating:
            return
        ranks = self._source.peers.size
        for parameter, residual in self._source.residuals():
            if not parameter.requires_grad:
                continue  # a frozen layer keeps its values, and its residual waits
            if (other := _sources.get(parameter)) is not None:
                # The optimizer created last owns the parameter, whichever model is called first.
                if other._number > self._number:
                    continue
                other._restore(parameter)
            local, center = on_this_rank(parameter), self._center.get(parameter)
            # A model may have been moved to another device or dtype since the last step.
            if center is None or (center.shape, center.dtype, center.device) != (
                local.shape,
                local.dtype,
                local.device,
            ):
                center = self._center[parameter] = torch.empty_like(local)
            # A copy: (c - a) + a is not exactly c, and the center must be equal on all ranks.
            center.copy_(local)
            # A residual includes the rank's weight in the sum, 1/ranks; here it counts in full.
            local.sub_(residual.to(local.device), alpha=ranks)
            self._versions[parameter] = versions_of(parameter)
            _sources[parameter] = self
        if self._versions:
            self._swapped()

    @torch.no_grad()
    def restore(self) -> None:
        """Set the parameters to the center; raise RuntimeError if one was changed meanwhile."""
        # A copy, because `_restore` removes entries.
        applied = [*self._versions]
        for parameter in applied:
            self._restore(parameter)
        if applied:
            self._swapped()

    @torch.no_grad()
    def _restore(self, parameter: torch.nn.Parameter) -> None:
        if (center := self._load_center(parameter)) is not None:
            on_this_rank(parameter).copy_(center)

    def _load_center(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        version = self._versions.pop(parameter, None)
        if version is None:
            return None
        _sources.pop(parameter, None)
        if version != versions_of(parameter) and not self._is_as_applied(parameter):
            raise RuntimeError(
                f"rank {self._source.peers.world.rank}: parameter '{self._name_of(parameter)}' "
                "was changed between a forward pass and step(), when it includes steps that this "
                "rank has not sent yet: replicas would diverge. Change it after step(), or within "
                f"`with {self._owner}.evaluating():`, or give local_residual=False"
            )
        return self._center[parameter]

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        named = (pair for root in self._roots for pair in root.named_parameters())
        in_model = next((name for name, other in named if other is parameter), "?")
        return self._source.names.get(parameter) or in_model

    def _is_as_applied(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a parameter has the values that `apply` set, such as after SAM."""
        ranks, center = self._source.peers.size, self._center[parameter]
        for other, residual in self._source.residuals():
            if other is parameter:
                applied = center.sub(residual.to(center.device), alpha=ranks)
                return torch.equal(applied, on_this_rank(parameter))
        return False

    def end_step(self) -> None:
        """End a step; if it found no model, set the parameters to c - a now."""
        if self._source.peers.size == 1:
            return  # a single rank has no residual
        if self._roots:
            self._stop_search()
        # After the first step, before which there was nothing to apply.
        elif self._search_hook is None and not self._has_given_up:
            self.find_models()
        else:
            # A whole step has passed since the search began, without a call of a model.
            if not self._has_given_up and self._source.peers.rank == 0:
                _log.warning(
                    "no torch.nn.Module with the optimizer's parameters was called in a step: "
                    "between steps they include steps that rank %d has not sent yet. Evaluate and "
                    "save within `with %s.evaluating():`, or give local_residual=False",
                    self._source.peers.world.rank,
                    self._owner,
                )
            self._has_given_up = True
            self._stop_search()
            self.apply()

    def eval(self) -> None:
        """Keep the parameters at the center until `train`."""
        self.restore()
        self._is_evaluating = True

    def train(self) -> None:
        """Let forward passes set the parameters to c - a again."""
        self._is_evaluating = False
        if self._has_given_up:
            self.apply()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep the parameters at the center within the context."""
        self.eval()
        try:
            yield
        finally:
            self.train()


@functools.cache
def _watch_wrapping() -> None:
    """From now on, restore the center of a model's parameters when DDP wraps it."""

    def restore(module: torch.nn.Module, name: str, inner: torch.nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and inner is not None:
            restore_centers(inner.parameters())

    # DDP broadcasts rank 0's parameters on creation, so they must be the center by then.
    register_module_module_registration_hook(restore)


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a model, and the models inside the wrappers of torch.compile and DDP."""
    yield module
    if isinstance(module, DistributedDataParallel):
        yield from _layers(module.module)
    elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
        yield from _layers(inner)


class _Hook:
    """A model's hooks before forward, and before its state is read or loaded; copies do nothing."""

    def __init__(self, residual: LocalResidual | None = None) -> None:
        self._residual_ref = (lambda: None) if residual is None else weakref.ref(residual)

    def __reduce__(self) -> Any:
        return _Hook, ()

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if (residual := self._residual_ref()) is None:
            return
        if not module.training:
            residual.restore()
        # Without gradients this call trains nothing, so leave the parameters.
        elif torch.is_grad_enabled():
            residual.apply()

    def before_state(self, *call: Any) -> None:
        if (residual := self._residual_ref()) is not None:
            residual.restore()
