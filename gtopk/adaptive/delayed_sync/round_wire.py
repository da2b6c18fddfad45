"""RoundWire: what the ranks of mode "abs" do together, as operations of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from collectives.transports import Transport

from ...optim.replicas.check import ReplicaCheck
from ...optim.replicas.replicas import Parted
from ...runtime.coordinator import Engine, Work
from ..local_training.own_steps import OwnSteps
from ..local_training.round_exchange import RoundExchange
from ..local_training.spent import Waited
from .agreed_settings import AgreedSettings
from .rounds import Ready, Reduced

_FINITE: Final = 1  # this rank's sums
_MISSES: Final = 2  # some of its parameters have no gradient
_FLAGS: Final = 2  # bits
_COUNT_BITS: Final = 31
_COUNTS: Final = (1 << _COUNT_BITS) - 1


class RoundWire:
    """One rank's end of the wire.

    steps: what the rounds cost is counted to.
    settings: which all ranks agree on with every round.
    replicas: looked at with a round, where it is time: no rank waits for that alone.
    local_clip_norm: what each rank's part of a round's update is shortened to its share of.
    """

    def __init__(
        self,
        name: str,
        exchange: RoundExchange,
        signature: Sequence[str],
        engine: Engine,
        settings: AgreedSettings,
        replicas: ReplicaCheck,
        local_clip_norm: float | None,
        steps: OwnSteps,
    ) -> None:
        self.exchange = exchange
        self._name = name
        self._signature = list(signature)
        self._engine = engine
        self._settings = settings
        self._replicas = replicas
        self._local_clip_norm = local_clip_norm
        self._steps = steps
        self.samples = 0  # of this rank, in the round that is reduced
        self.parted: list[Parted] | None = None  # as it began; None: nobody looked

    def ready(self, samples: int, is_last: bool) -> Waited:
        """Say that this rank may end the round."""

        def work(transport: Transport, all_flags: list[int]) -> Ready:
            return Ready(
                sum(flags >> 1 for flags in all_flags), any(flags & 1 for flags in all_flags)
            )

        return self._submit("ready", [], work, samples << 1 | is_last)

    def reduce(self, sums: list[torch.Tensor | None], samples: int, batches: int) -> Waited:
        """Reduce the sums of a round to their mean."""
        finite = self.exchange.take(sums, self._local_clip_norm)
        missing = [str(place) for place, each in enumerate(sums) if each is None]
        said, look, self.parted = self._settings.said(), self._replicas.begin(), None

        def work(transport: Transport, all_flags: list[int]) -> Reduced:
            counts = [flags >> _FLAGS & _COUNTS for flags in all_flags]
            done = [flags >> _FLAGS + _COUNT_BITS for flags in all_flags]
            culprits = [rank for rank, flags in enumerate(all_flags) if not flags & _FINITE]
            update: Sequence[torch.Tensor | None] | None = None
            if any(counts) and not culprits:
                if look is not None:
                    self.parted = look(transport)
                self._settings.agree(transport, said)
                nowhere: set[str] = set()
                if all(flags & _MISSES for flags in all_flags):
                    nowhere = set.intersection(*map(set, transport.gather_object(missing)))
                total = sum(counts)
                update = self.exchange.reduce(transport, 1.0 / total, samples / total)
                if update is not None and nowhere:  # the optimizer passes over what is None
                    update = [
                        None if str(place) in nowhere and not bool(each.any()) else each
                        for place, each in enumerate(update)
                    ]
            return Reduced(update, counts, done, culprits)

        self._steps.computed()
        self.samples = samples
        return self._submit(
            "gradients",
            [self.exchange.signature, f"compares replicas: {look is not None}", *self._signature],
            work,
            (_FINITE if finite else 0)
            | (_MISSES if missing else 0)
            | samples << _FLAGS
            | batches << _FLAGS + _COUNT_BITS,
        )

    def meet(self, signature: Sequence[str], drains: bool) -> list[int]:
        """Return, of every rank, whether it drains; waits for all of them."""

        def work(transport: Transport, all_flags: list[int]) -> list[int]:
            return list(all_flags)

        all_flags: list[int] = self._submit("pass", signature, work, int(drains)).wait()
        return all_flags

    def _submit(self, what: str, signature: Sequence[str], work: Work, flags: int) -> Waited:
        operation = self._engine.submit(f"{self._name}.{what}", signature, work, flags=flags)
        self._steps.submitted(operation)
        return Waited(operation, self._steps.spent)
