"""AgreedRates: the learning rates that a round is applied with, the same on all ranks.

    round         |--- 5 ---|--- 6 ---|   a schedule that follows loader.round
    rank 0 steps  | o  o  o | o  o  o |   its script has seen round 6, whose rates are for all
    rank 1 steps  | o     o .  nothing    has nothing left to compute, and stays behind until it has

So who has seen the newest round says the rates. Those who have must say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from collectives.errors import MismatchError
from collectives.transports import Transport

from ..agreement import describe_mismatch, gather_words


class AgreedRates:
    """One rank's learning rates, and those of the round that was reduced last.

    seen: the newest round that this rank's script can have changed its rates for.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self._groups = param_groups
        self._agreed: list[float] = []
        self.seen = 0

    def said(self) -> list[str]:
        """Return what this rank has to say of a round that it ends now."""
        return [str(self.seen), *(repr(float(group["lr"])) for group in self._rated())]

    def agree(self, transport: Transport, said: list[str]) -> None:
        """Know the rates from what all ranks say; MismatchError, on all of them, if they differ."""
        told = gather_words(transport, said)
        newest = max(int(seen) for seen, *_ in told)
        rates = {rank: each[1:] for rank, each in enumerate(told) if int(each[0]) == newest}
        first = next(iter(rates.values()))
        if any(each != first for each in rates.values()):
            what = "the learning rate of a round"
            by_rank = {rank: [what, ", ".join(each)] for rank, each in rates.items()}
            raise MismatchError(
                f"{describe_mismatch(by_rank)}. In mode 'abs' ranks have unlike numbers of "
                "micro-batches: step a schedule with the rounds, by `while scheduler.last_epoch < "
                "loader.round: scheduler.step()` after optimizer.step(), or once an epoch"
            )
        self._agreed = [float(rate) for rate in first]

    @contextmanager
    def set(self) -> Iterator[None]:
        """Let the optimizer's rates be the agreed ones meanwhile."""
        groups = self._rated()
        own = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._agreed, strict=False):
            if float(group["lr"]) != rate:
                group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate

    def _rated(self) -> list[dict[str, Any]]:
        return [group for group in self._groups if "lr" in group]
