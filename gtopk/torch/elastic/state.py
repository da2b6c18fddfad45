"""TorchState: models, optimizers, samplers and plain objects, committed and restored together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from ...adaptive.balanced import BalancedLoader
from ..checkpoint.archive import Found, Owned
from .archive import Commit
from .base import ObjectState
from .handlers import (
    LoaderStateHandler,
    LRSchedulerStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
)
from .sampler import ElasticSampler

__all__ = [
    "LRSchedulerStateHandler",
    "LoaderStateHandler",
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

Registry: TypeAlias = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (BalancedLoader, LoaderStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs of a type and its handler; the first that fits a value is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these pairs for the states made from now on."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    found = (handler for kind, handler in _registry if isinstance(value, kind))
    handler = next(found, None)
    if handler is None and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        handler = StateDictHandler  # a GradScaler, say
    return handler(value) if handler else None


class TorchState(ObjectState):
    """The state of a PyTorch training process: each keyword becomes an attribute.

    model, optimizer: most scripts have one of each; more go as keywords.
    kwargs: modules, optimizers, learning rate schedulers, ElasticSamplers and the loaders of
        hvd.adapt in mode "balanced" are handled as what they are (see `get_handler_registry`), what
        else has state_dict() and load_state_dict(), as a GradScaler has, by these, and anything
        else as a plain object.
    """

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
            super().__setattr__(name, handler.value)
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
            owned = [
                Owned(each.rank, each.state[name]) for each in found.owned if name in each.state
            ]
            handler.resume_here(owned, found.ranks)
