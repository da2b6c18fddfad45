"""Join shadow: takes part, for a rank that has joined, in the operations of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..runtime.coordinator import Engine, Work

LEFT_OUT: Final = b"not where a rank has joined"  # descriptor of operations that it does not run


class StandsIn(Protocol):
    """An object that reduces an optimizer's gradients, also while this rank has joined."""

    def break_off(self) -> None:
        """Leave the step that this rank is in, if any: it is about to join."""

    def stand_in(self, index: int) -> Work:
        """Return this rank's work for a bucket of the others' transaction."""


# By engine, and by the name of its operations. Weak: this keeps no reducer alive.
_by_name: WeakKeyDictionary[Engine, WeakValueDictionary[str, StandsIn]] = WeakKeyDictionary()


def stands_in(reducer: StandsIn, engine: Engine, name: str) -> None:
    """Let a reducer stand in for operations `name.0`, `name.1`, ..., one for each bucket."""
    _by_name.setdefault(engine, WeakValueDictionary())[name] = reducer
    engine.stand_in = partial(_stand_in, _by_name[engine])


def break_off_steps(engine: Engine) -> None:
    """Leave the steps that this rank is in, before it joins: the others take them without it."""
    for reducer in list(_by_name.get(engine, {}).values()):
        reducer.break_off()


def _stand_in(reducers: Mapping[str, StandsIn], name: str, join_descriptor: bytes) -> Work:
    if join_descriptor == LEFT_OUT:
        return lambda transport, all_flags: None
    of, _, index = name.rpartition(".")
    if of not in reducers:
        raise RuntimeError(f"this rank has joined, and its optimizer of {of} is no more")
    return reducers[of].stand_in(int(index))
