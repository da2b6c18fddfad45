"""ReplicaCheck: looks now and then whether replicas are apart, and does what was asked for then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch

from collectives.transports import Transport

from ...runtime.coordinator.agreement import name_ranks
from ...runtime.logs import EVERYWHERE
from ...runtime.world import world
from ...telemetry.run_record import recorder_of
from ..reducer import Reducer
from .healing import pack, put_in, spread_majority
from .replicas import Parted, checksums, compare, require_the_same

_log = logging.getLogger("gtopk")

Look = Callable[[Transport], list[Parted]]

EVERY: Final = 100  # where nobody says
_STAY: Final = (
    "on_divergence='warn': they stay so. Begin with broadcast_parameters, and change parameters "
    "alike on all ranks"
)


class ReplicaCheck:
    """One rank's part in it; all take their steps alike.

    every: steps with an update, whoever of the ranks has joined by then; 0: never. None: the usual
        number, and no error unless it is asked for: nobody asked for the check.
    divergences: checks that found replicas apart, and did not end in an error.
    """

    def __init__(
        self,
        reducer: Reducer,
        every: int | None,
        on_divergence: Literal["error", "warn", "heal"] | None,
    ) -> None:
        self._reducer = reducer
        self._every = EVERY if every is None else every
        self._on_divergence = on_divergence or ("warn" if every is None else "error")
        self._is_due = False
        self.divergences = 0

    def await_step(self, updates: bool) -> None:
        """Know whether to look when the step that begins has ended; updates: it has an update.

        Only those count, as all ranks count them: one that has joined has taken fewer itself, and
        one where a step failed may have.
        """
        steps = self._reducer.progress.steps
        # After the first, too: that is where a forgotten broadcast shows.
        is_time = self._every > 0 and (steps == 1 or steps % self._every == 0)
        self._is_due = updates and is_time and self._reducer.peers.size > 1

    def after_step(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Look, where it is time, and heal the parameters and the optimizer's state of them.

        Replicas of ranks that have joined are apart, as they should be: nobody looks then.
        Raises HorovodInternalError, on every rank alike, where that is an error or the end of it.
        """
        if (look := self.begin()) is not None:
            self.end(self._reducer.peers.run_unless_joined("replicas", look), state)

    def begin(self) -> Look | None:
        """Return what all ranks run together to look at parameters as they are; None: no time to.

        It is time until `end`. The look raises MismatchError, on every rank alike, where that was
        asked for.
        """
        if not self._is_due:
            return None
        parameters, is_error = self._reducer.names, self._on_divergence == "error"
        own, names = checksums(parameters), list(parameters.values())

        def look(transport: Transport) -> list[Parted]:
            if is_error:
                require_the_same(transport, own, names)
                return []
            return compare(transport, own, names)

        return look

    def end(
        self, parted: Sequence[Parted] | None, state: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Do what was asked for with what a look has found; None: nobody looked."""
        self._is_due = False
        if not parted:
            return
        self.divergences += 1
        heals = self._on_divergence == "heal"
        became = self._heal(parted, state) if heals else _STAY
        more = f", and {len(parted) - 1} more parted" if len(parted) > 1 else ""
        here = world.current()
        _log.warning(
            "rank %d: the replicas are not the same at step %d: %s%s; %s",
            here.rank,
            here.step,
            parted[0].describe(),
            more,
            became,
            extra=EVERYWHERE,
        )
        if (recorder := recorder_of(here)) is not None:
            recorder.note_parted([each.name for each in parted], heals)

    def _heal(self, parted: Sequence[Parted], state: Mapping[torch.Tensor, dict[str, Any]]) -> str:
        """Make the parameters that parted those of most ranks again; return what was done."""
        parameters = self._reducer.names
        own = pack(parameters, [each.name for each in parted], state)
        ranks, mended = self._reducer.peers.run(
            "replicas.heal", [], lambda transport, all_flags: spread_majority(transport, own)
        )
        put_in(parameters, mended, state)
        again, names = checksums(parameters), list(parameters.values())
        self._reducer.peers.run(
            "replicas.healed", [], lambda t, all_flags: require_the_same(t, again, names)
        )
        has = "has" if len(ranks) == 1 else "have"
        return f"healed: {name_ranks(ranks)} {has} what most ranks have, the optimizer's state too"
