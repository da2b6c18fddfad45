"""Peers: the ranks that reduce an optimizer's gradients together, and a joined rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from collectives.transports import Transport

from ..runtime.coordinator import Engine, Work
from ..runtime.world.membership import World
from ..runtime.world.process_sets import ProcessSet

LEFT_OUT: Final = b"not where a rank has joined"  # descriptor: joined ranks skip the operation


class ShadowedReducer(Protocol):
    """An object that reduces an optimizer's gradients, even after this rank has joined."""

    def abort(self) -> None:
        """Leave this rank's current step, if any: the rank is about to join."""

    def shadow_work(self, index: int) -> Work:
        """Return this rank's work for a bucket of the other ranks' transaction."""


# By engine, and by the prefix of its operations' names. Weak, to keep no reducer alive.
_by_name: WeakKeyDictionary[Engine, WeakValueDictionary[str, ShadowedReducer]] = WeakKeyDictionary()


def register_shadow(reducer: ShadowedReducer, engine: Engine, name: str) -> None:
    """Let a reducer take part in operations `name.0`, `name.1`, ... after this rank has joined.

    Each bucket is one operation.
    """
    _by_name.setdefault(engine, WeakValueDictionary())[name] = reducer
    engine.shadow_work = partial(_shadow_work, _by_name[engine])


def abort_steps(engine: Engine) -> None:
    """Leave this rank's current steps before it joins; the other ranks complete them without it."""
    # A copy, because reducers may be garbage-collected meanwhile.
    for reducer in list(_by_name.get(engine, {}).values()):
        reducer.abort()


def _shadow_work(
    reducers: Mapping[str, ShadowedReducer], name: str, join_descriptor: bytes
) -> Work:
    if join_descriptor == LEFT_OUT:
        return lambda transport, all_flags: None
    # Split from the right: parameter names may have dots, too.
    prefix, _, index = name.rpartition(".")
    if prefix not in reducers:
        raise RuntimeError(
            f"this rank has joined, but its optimizer for {prefix} was deleted: keep it"
        )
    return reducers[prefix].shadow_work(int(index))


@dataclass(frozen=True)
class Peers:
    """The ranks of one world that reduce an optimizer's gradients together.

    `run` and its variants run an operation on all of them. In the next world, after `shutdown` or
    a failure, call `peers_in` again.

    engine: runs their operations.
    name:   prefix of the operations' names: the same on every rank for one optimizer.
    ranks:  the peers' ranks in the world, in order.
    takes_part: whether this rank is one of them; otherwise it steps on its own.
    """

    world: World
    engine: Engine
    name: str
    ranks: Sequence[int]
    takes_part: bool

    @property
    def rank(self) -> int:
        """Return this rank's index among the peers."""
        return self.ranks.index(self.world.rank)

    @cached_property
    def size(self) -> int:
        """Return the number of peers."""
        return len(self.ranks)

    def run(self, suffix: str, signature: Sequence[str], work: Work, flags: int = 0) -> Any:
        """Run `work` on all peers together, as an operation of this optimizer; return its result.

        suffix: of the operation's name. signature: values that must be equal on all ranks.
        """
        return self.engine.submit(f"{self.name}.{suffix}", signature, work, flags=flags).wait()

    def run_without_joined(
        self, suffix: str, signature: Sequence[str], work: Callable[[Transport, list[int]], Any]
    ) -> Any:
        """Run `work` together on all peers that have not joined.

        work: also gets the world ranks that have joined; the same list on all ranks that run it.
        """

        def run_with_joined(transport: Transport, all_flags: list[int]) -> Any:
            # All ranks submit with flags 1, except for joined ranks, which have 0.
            pairs = zip(transport.ranks, all_flags, strict=True)
            return work(transport, [rank for rank, is_present in pairs if not is_present])

        name = f"{self.name}.{suffix}"
        return self.engine.submit(
            name, signature, run_with_joined, flags=1, join_descriptor=LEFT_OUT
        ).wait()


def peers_in(here: World, process_set: ProcessSet, parameters: Iterable[str]) -> Peers:
    """Return the peers in a world; raise ValueError if the process set is not registered there.

    parameters: the names from which the names of the optimizer's operations are derived.
    """
    members = process_set.registered()
    name = f"gradients.{here.name_optimizer(parameters, members.ranks)}"
    if here.rank not in members.ranks:
        return Peers(here, here.engine, name, [here.rank], takes_part=False)
    return Peers(here, process_set.engine, name, members.ranks, takes_part=True)
