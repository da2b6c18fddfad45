"""TorchState: models, optimizers, samplers and plain objects, committed and restored together.

A handler saves, restores, synchronizes, and commits to disk the values of one type.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ...adaptive.balanced import BalancedLoader
from ...adaptive.loader_base import LoaderBase
from ...optim.wrapped.checkpoint import KEY
from ..checkpoint.archive import Found, OwnValues
from ..checkpoint.state import residual_share
from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .base import FOR_DISK_COMMITS, Commit, ObjectState, missing_override
from .sampler import ElasticSampler


class StateHandler:
    """Handles one value of a state; register a subclass for your own type.

    The last four methods are only used for commits to disk (GTOPK_ELASTIC_DIR).
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the value, for `restore`."""
        raise missing_override(self, "save")

    def restore(self) -> None:
        """Return the value to its last saved state."""
        raise missing_override(self, "restore")

    def sync(self) -> None:
        """Give every rank the value of rank 0."""
        raise missing_override(self, "sync")

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Reset what depends on the ranks, after they have rejoined."""

    def saved(self) -> Any:
        """Return the saved part that is equal on all ranks, in types that the codec supports."""
        raise missing_override(self, "saved() and resume", FOR_DISK_COMMITS)

    def saved_here(self) -> Any:
        """Return the saved part that is this rank's own; None for none."""
        return None

    def resume(self, saved: Any) -> None:
        """Load the part that `saved` returned in an earlier job."""
        raise missing_override(self, "saved() and resume", FOR_DISK_COMMITS)

    def resume_here(self, owned: Sequence[OwnValues], ranks: int) -> None:
        """Load the parts that `saved_here` returned on zero, one or more ranks of that job.

        Called on every rank, after `sync`. Each part is loaded on exactly one rank; with the same
        number of ranks as before, every rank gets its own part.
        ranks: the number of ranks in that job.
        """


class StateDictHandler(StateHandler):
    """Handles an object with state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: an optimizer later changes the tensors that it has loaded.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()

    def saved(self) -> Any:
        return self._saved

    def resume(self, saved: Any) -> None:
        self.value.load_state_dict(saved)


class ModelStateHandler(StateDictHandler):
    """Handles a module's parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateDictHandler):
    """Handles an optimizer: options and state are equal on every rank, residuals each rank's own.

    Within a round of LocalSGD, this and the model's handler give all ranks the state of rank 0.
    """

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()

    def restore(self) -> None:
        super().restore()
        # Saved before the first step: without a residual to load, discard the present one.
        if KEY not in self._saved and hasattr(self.value, "forget_steps"):
            self.value.forget_steps()

    def saved(self) -> Any:
        return {key: part for key, part in self._saved.items() if key != KEY}

    def saved_here(self) -> Any:
        return self._saved.get(KEY)

    def resume_here(self, owned: Sequence[OwnValues], ranks: int) -> None:
        """Load residuals so that the sum of those ranks' is preserved, also on fewer ranks."""
        residual = residual_share({KEY: dict(owned)}, ranks)[KEY]
        if residual is not None:
            self.value.load_state_dict({**self.value.state_dict(), KEY: residual})


class SamplerStateHandler(StateDictHandler):
    """Handles an ElasticSampler: its position in the epoch."""

    def reset(self) -> None:
        self.value.reset()


class LoaderStateHandler(StateDictHandler):
    """Handles a loader of `adapt` in mode "balanced": position in the epoch, and batch sizes."""

    def reset(self) -> None:
        # Reload: after an interrupt `restore` is not called, and `sync` may be skipped.
        self.value.load_state_dict(self.value.state_dict())


class LRSchedulerStateHandler(StateDictHandler):
    """Handles a learning rate scheduler."""


Registry: TypeAlias = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (BalancedLoader, LoaderStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs of a type and its handler; the first match for a value is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these pairs for states that are created later."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    found = (handler for kind, handler in _registry if isinstance(value, kind))
    handler = next(found, None)
    if handler is None and isinstance(value, LoaderBase):
        # `sync` would overwrite the residual in each rank's loader with rank 0's.
        raise ValueError(
            "of the loaders of hvd.adapt only those of mode 'balanced' can be in an elastic state: "
            "create another mode's loader, and its DistributedOptimizer, within the function that "
            "hvd.elastic.run decorates"
        )
    if handler is None and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        handler = StateDictHandler  # for example, of a GradScaler
    return handler(value) if handler else None


class TorchState(ObjectState):
    """The state of a PyTorch training process: each keyword becomes an attribute.

    model, optimizer: one of each; pass more as keywords.
    kwargs: modules, optimizers, learning rate schedulers, ElasticSamplers and the loaders of
        hvd.adapt in mode "balanced" have their own handlers (see `get_handler_registry`). Other
        objects with state_dict() and load_state_dict(), such as a GradScaler, are handled through
        these, and anything else as a plain object.
    Raises ValueError for a loader of hvd.adapt in another mode, which cannot resume.
    """

    # A class attribute: `__setattr__` reads it before the constructor has set one.
    _handlers: Mapping[str, StateHandler] = {}

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs |= {"model": model, "optimizer": optimizer}
        found = {name: _handler_of(value) for name, value in kwargs.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler}
        for name, handler in self._handlers.items():
            # Bypass this class's __setattr__: the handler has just saved the value.
            super().__setattr__(name, handler.value)
        # None, for a script without a model, is a plain value, too.
        plain = {name: kwargs[name] for name, handler in found.items() if handler is None}
        super().__init__(**plain)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()
        super().reset()

    def _share(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super()._share()

    def _committed(self) -> Commit:
        saved = {name: handler.saved() for name, handler in self._handlers.items()}
        here = {name: handler.saved_here() for name, handler in self._handlers.items()}
        own = {name: part for name, part in here.items() if part}
        return Commit({**super()._committed().replicated, **saved}, own)

    def _resume(self, replicated: Mapping[str, Any]) -> None:
        for name, handler in self._handlers.items():
            handler.resume(replicated[name])
        super()._resume(replicated)

    def _resume_here(self, found: Found) -> None:
        for name, handler in self._handlers.items():
            # A rank's own part has a name only if the rank had something to save.
            owned = [
                OwnValues(each.rank, each.state[name]) for each in found.owned if name in each.state
            ]
            handler.resume_here(owned, found.ranks)
