"""AgreedSettings: the learning rates and the like that a round is applied with, on all ranks alike.

    round         |--- 5 ---|--- 6 ---|   a schedule that follows loader.round
    rank 0 steps  | o  o  o | o  o  o |   its script has seen round 6, whose rates are for all
    rank 1 steps  | o     o .  nothing    has nothing left to compute, and stays behind until it has

So who has seen the newest round says the settings: all numbers of the optimizer's groups, since
schedules move momentum and betas, too. Those who have must say the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from collectives.errors import MismatchError
from collectives.transports import Transport

from ...runtime.coordinator.agreement import describe_mismatch


class AgreedSettings:
    """One rank's settings, and those of the round that was reduced last.

    seen: the newest round that this rank's script can have changed its settings for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._agreed: list[tuple[int, str, Any]] = []  # number of the group, name, value
        self.seen = 0

    def said(self) -> list[str]:
        """Return what this rank has to say of a round that it ends now."""
        return [str(self.seen), *map(json.dumps, self._own())]

    def agree(self, transport: Transport, said: list[str]) -> None:
        """Know the settings from what all ranks say; MismatchError, on all, where they differ."""
        told = transport.gather_object(said)
        newest = max(int(seen) for seen, *_ in told)
        by_rank = {rank: words for rank, (seen, *words) in enumerate(told) if int(seen) == newest}
        first = next(iter(by_rank.values()))
        if any(words != first for words in by_rank.values()):
            signature = {
                rank: ["the settings of a round", *map(_in_words, words)]
                for rank, words in by_rank.items()
            }
            raise MismatchError(
                f"{describe_mismatch(signature)}. In mode 'abs' ranks have unlike numbers of "
                "micro-batches: step a schedule with the rounds, by `while scheduler.last_epoch < "
                "loader.round: scheduler.step()` after optimizer.step(), or once an epoch"
            )
        self._agreed = [tuple(json.loads(word)) for word in first]

    @contextmanager
    def set(self) -> Iterator[None]:
        """Let the optimizer's settings be the agreed ones meanwhile."""
        before = []
        for number, name, value in self._agreed:
            group = self._optimizer.param_groups[number]
            own = group[name]
            if _number(own) != value:
                group[name] = _like(own, value)
                before.append((group, name, own, group[name]))
        try:
            yield
        finally:
            for group, name, own, agreed in before:
                if group[name] is agreed:  # some optimizers count on in their groups
                    group[name] = own

    def _own(self) -> list[tuple[int, str, Any]]:
        return [
            (number, name, value)
            for number, group in enumerate(self._optimizer.param_groups)
            for name, own in group.items()
            if name != "params" and (value := _number(own)) is not None
        ]


def _in_words(said: str) -> str:
    number, name, value = json.loads(said)
    return f"{name}={value} of group {number}"


def _number(own: object) -> Any:
    """Return a number, or a list of numbers, as JSON has it; None for anything else."""
    if isinstance(own, torch.Tensor) and own.numel() == 1:
        return float(own)
    if isinstance(own, int | float) and not isinstance(own, bool):
        return own
    if isinstance(own, tuple | list):
        numbers = [_number(each) for each in own]
        return None if None in numbers else numbers
    return None


def _like(own: Any, value: Any) -> Any:
    if isinstance(own, torch.Tensor):
        return torch.full_like(own, value)
    if isinstance(own, tuple):
        return tuple(_like(each, number) for each, number in zip(own, value, strict=True))
    return value
