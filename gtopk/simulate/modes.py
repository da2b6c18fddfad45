"""The modes that a comparison may hold, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from . import delayed, joined, local_sgd, synchronous
from .record import Record
from .setting import Setting


def equal_dense(setting: Setting) -> Record:
    """Train with equal batches and a dense allreduce: data parallelism as it usually is."""
    record = synchronous.simulate(replace(setting, density=None), "equal")
    return replace(record, mode="equal-dense")


SIMULATED: Final[Mapping[str, Callable[[Setting], Record]]] = {
    "equal-dense": equal_dense,
    "equal": partial(synchronous.simulate, mode="equal"),
    "balanced": partial(synchronous.simulate, mode="balanced"),
    "abs": delayed.simulate,
    "join": joined.simulate,
    "local-sgd": local_sgd.simulate,
}
