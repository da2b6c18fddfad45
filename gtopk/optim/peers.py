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
    # A copy: a reducer that is collected meanwhile leaves the dict.
    for reducer in list(_by_name.get(engine, {}).values()):
        reducer.abort()


def _shadow_work(
    reducers: Mapping[str, ShadowedReducer], name: str, join_descriptor: bytes
) -> Work:
    if join_descriptor == LEFT_OUT:
        return lambda transport, all_flags: None
    # From the right: names of parameters have dots, too.
    of, _, index = name.rpartition(".")
    if of not in reducers:
        raise RuntimeError(f"this rank has joined, and its optimizer of {of} is no more")
    return reducers[of].shadow_work(int(index))


@dataclass(frozen=True)
class Peers:
    """The ranks of one world that reduce an optimizer's gradients together.

    `run` and its variants run an operation on all of them. In the next world, after `shutdown` or
    a failure, `peers_in` makes another.

    engine: runs their operations.
    name:   begins the operations' names: the same on every rank for one optimizer.
    ranks:  the peers' ranks in the world, in order.
    takes_part: whether this rank is one of them; otherwise it steps by itself.
    """

    world: World
    engine: Engine
    name: str
    ranks: Sequence[int]
    takes_part: bool

    @property
    def rank(self) -> int:
        """Return this rank's place among the peers."""
        return self.ranks.index(self.world.rank)

    @cached_property
    def size(self) -> int:
        """Return the number of peers."""
        return len(self.ranks)

    def run(self, what: str, signature: Sequence[str], work: Work, flags: int = 0) -> Any:
        """Run `work` on all peers together, as an operation of this optimizer; return its result.

        what: ends the operation's name. signature: what must be equal on all ranks, in words.
        """
        return self.engine.submit(f"{self.name}.{what}", signature, work, flags=flags).wait()

    def run_without_joined(
        self, what: str, signature: Sequence[str], work: Callable[[Transport, list[int]], Any]
    ) -> Any:
        """Run `work` on all peers together but those that have joined.

        work: is also given the ranks in the world that have joined; all that run it get the same.
        """

        def without(transport: Transport, all_flags: list[int]) -> Any:
            # All submit with the flags 1, and a rank that has joined has 0.
            pairs = zip(transport.ranks, all_flags, strict=True)
            return work(transport, [rank for rank, is_there in pairs if not is_there])

        name = f"{self.name}.{what}"
        return self.engine.submit(
            name, signature, without, flags=1, join_descriptor=LEFT_OUT
        ).wait()


def peers_in(here: World, process_set: ProcessSet, parameters: Iterable[str]) -> Peers:
    """Return the peers in a world; raise ValueError where the process set is not registered there.

    parameters: the names that the optimizer's operations are named by.
    """
    members = process_set.registered()
    name = f"gradients.{here.name_optimizer(parameters, members.ranks)}"
    if here.rank not in members.ranks:
        return Peers(here, here.engine, name, [here.rank], takes_part=False)
    return Peers(here, process_set.engine, name, members.ranks, takes_part=True)
