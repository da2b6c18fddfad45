"""The modes that a comparison may hold, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from . import delayed, hogbatch, joined, replicas, synchronous
from .record import Record
from .setting import Setting


def equal_dense(setting: Setting) -> Record:
    """Train with equal batches and a dense allreduce: data parallelism as it usually is."""
    record = synchronous.simulate(replace(setting, density=None), "equal")
    return replace(record, mode="equal-dense")


def merged(setting: Setting, mode: str, **options: Any) -> Record:
    """Train replicas whose models are merged whole."""
    return replicas.simulate(replace(setting, density=None), mode, **options)


def adaptive(setting: Setting, mode: str, run: Callable[..., Record]) -> Record:
    """Train replicas by Adaptive SGD, with mega-batches as long as the setting says."""
    return run(setting, mode, mega_batch=setting.mega_batch)


SIMULATED: Final[Mapping[str, Callable[[Setting], Record]]] = {
    "equal-dense": equal_dense,
    "equal": partial(synchronous.simulate, mode="equal"),
    "balanced": partial(synchronous.simulate, mode="balanced"),
    "goodput": partial(synchronous.simulate, mode="goodput"),
    "abs": delayed.simulate,
    "join": joined.simulate,
    "local-sgd": partial(merged, mode="local-sgd", algorithm="k-step"),
    "elastic": partial(merged, mode="elastic", algorithm="elastic"),
    "crossbow": partial(merged, mode="crossbow", algorithm="crossbow"),
    "adaptive-sgd": partial(adaptive, mode="adaptive-sgd", run=merged),
    "adaptive-sgd-gtopk": partial(adaptive, mode="adaptive-sgd-gtopk", run=replicas.simulate),
    "slow-only": partial(hogbatch.simulate, mode="slow-only", who="slow"),
    "fast-only": partial(hogbatch.simulate, mode="fast-only", who="fast"),
    "hogbatch": partial(hogbatch.simulate, mode="hogbatch"),
    "adaptive-hogbatch": partial(hogbatch.simulate, mode="adaptive-hogbatch", adapts=True),
}
DEFAULT: Final = ("equal-dense", "equal", "balanced", "abs", "local-sgd", "adaptive-sgd")
# These exchange whole gradients or models, whatever the density.
DENSE: Final = ("equal-dense", "join", "local-sgd", "elastic", "crossbow", "adaptive-sgd")
# A rank that dies is the end of any other.
OUTLIVE: Final = ("local-sgd", "elastic", "crossbow", "adaptive-sgd", "adaptive-sgd-gtopk")
# These train one model in classes of ranks, and are compared by its loss.
OF_CLASSES: Final = ("slow-only", "fast-only", "hogbatch", "adaptive-hogbatch")
