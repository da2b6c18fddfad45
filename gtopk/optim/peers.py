"""Peers: the ranks that reduce an optimizer's gradients together, and what else they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.transports import Transport

from ..runtime.coordinator import Engine, Work
from ..runtime.world.process_sets import ProcessSet
from ..runtime.world.state import World
from .join_shadow import LEFT_OUT


@dataclass(frozen=True)
class Peers:
    """Those of one world; the next one has others.

    engine: runs their operations.
    name:   of these: every rank's optimizer of these parameters has the same.
    ranks:  of the world that reduce together, in order.
    takes_part: whether this rank is one of them: it steps by itself otherwise.
    """

    world: World
    engine: Engine
    name: str
    ranks: Sequence[int]
    takes_part: bool

    @property
    def rank(self) -> int:
        """Return this one's place among them."""
        return self.ranks.index(self.world.rank)

    @property
    def size(self) -> int:
        """Return how many they are."""
        return len(self.ranks)

    def run(self, what: str, signature: Sequence[str], work: Work, flags: int = 0) -> Any:
        """Run something that concerns these parameters on all ranks together."""
        return self.engine.submit(f"{self.name}.{what}", signature, work, flags=flags).wait()

    def run_without_joined(
        self, what: str, signature: Sequence[str], work: Callable[[Transport, list[int]], Any]
    ) -> Any:
        """Run it on all ranks but those that have joined, which do nothing of it.

        work: is given those that have, by their ranks in the world; the same on all that run it.
        """

        def without(transport: Transport, all_flags: list[int]) -> Any:
            pairs = zip(transport.ranks, all_flags, strict=True)
            return work(transport, [rank for rank, is_there in pairs if not is_there])

        name = f"{self.name}.{what}"
        return self.engine.submit(
            name, signature, without, flags=1, join_descriptor=LEFT_OUT
        ).wait()

    def run_unless_joined(self, what: str, work: Callable[[Transport], Any]) -> Any:
        """Run it on all ranks together; return None, on all alike, where one of them has joined."""
        return self.run_without_joined(
            what, [], lambda transport, joined: None if joined else work(transport)
        )


def peers_in(here: World, process_set: ProcessSet, parameters: Iterable[str]) -> Peers:
    """Return the peers in a world; ValueError where the process set is not registered there.

    parameters: their names, which the peers are named by.
    """
    members = process_set.registered()
    name = f"gradients.{here.name_optimizer(parameters, members.ranks)}"
    if here.rank not in members.ranks:
        return Peers(here, here.engine, name, [here.rank], takes_part=False)
    return Peers(here, process_set.engine, name, members.ranks, takes_part=True)
