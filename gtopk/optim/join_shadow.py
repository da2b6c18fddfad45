"""Join shadow: takes part, for a rank that has joined, in the operations of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..runtime.coordinator import Engine, Work

LEFT_OUT: Final = b"not where a rank has joined"  # descriptor of operations that it does not run


class ShadowedReducer(Protocol):
    """An object that reduces an optimizer's gradients, also while this rank has joined."""

    def abort(self) -> None:
        """Leave the step that this rank is in, if any: it is about to join."""

    def shadow_work(self, index: int) -> Work:
        """Return this rank's work for a bucket of the others' transaction."""


# By engine, and by the name of its operations. Weak: this keeps no reducer alive.
_by_name: WeakKeyDictionary[Engine, WeakValueDictionary[str, ShadowedReducer]] = WeakKeyDictionary()


def register_shadow(reducer: ShadowedReducer, engine: Engine, name: str) -> None:
    """Let a reducer take part in operations `name.0`, `name.1`, ... while this rank has joined.

    There is one for each bucket.
    """
    _by_name.setdefault(engine, WeakValueDictionary())[name] = reducer
    engine.shadow_work = partial(_shadow_work, _by_name[engine])


def abort_steps(engine: Engine) -> None:
    """Leave the steps that this rank is in, before it joins: the others take them without it."""
    for reducer in list(_by_name.get(engine, {}).values()):
        reducer.abort()


def _shadow_work(
    reducers: Mapping[str, ShadowedReducer], name: str, join_descriptor: bytes
) -> Work:
    if join_descriptor == LEFT_OUT:
        return lambda transport, all_flags: None
    of, _, index = name.rpartition(".")
    if of not in reducers:
        raise RuntimeError(f"this rank has joined, and its optimizer of {of} is no more")
    return reducers[of].shadow_work(int(index))
