"""Rounds: the contenders of a case take turns; a go's time is that of the slowest rank.

    round 1   gtopk   topk-allgather   dense-library   ...
    round 2   gtopk   topk-allgather   dense-library   ...

    a go      rest | barrier | reduce | tell the time     begun behind the barrier, by its own clock

So all of them see the same moods of machine and network. Who has used up its budget of seconds
sits out the rest of the rounds. Links rest before a go, as they do while gradients are computed:
what a token bucket lets pass at once, it has ready.

Checks: no contender that computes something wrong gets a time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from collectives.errors import CollectiveError
from collectives.transports import Transport
from collectives.vector import Array, SparseVector

from ...replay.invented_picks import picks
from .cases import Case
from .contenders import Contender, Outcome, Task
from .library import Reckoning


class WrongResultError(CollectiveError):
    """A reduction gave a wrong result; its time means nothing."""


def digest(update: SparseVector | Array) -> Array:
    """Return what two updates share when they are the same to the bit, uint8 [16]."""
    hashed = hashlib.blake2b(digest_size=16)
    parts = (update.indices, update.values) if isinstance(update, SparseVector) else (update,)
    for array in parts:
        hashed.update(np.ascontiguousarray(array).view(np.uint8).data)
    return np.frombuffer(hashed.digest(), np.uint8)


def check_agreement(name: str, digests: Sequence[Array]) -> None:
    """Raise WrongResultError unless all ranks have the same update."""
    differ = [rank for rank, each in enumerate(digests) if (each != digests[0]).any()]
    if differ:
        raise WrongResultError(
            f"{name} must leave the same update on all ranks; rank {differ[0]} has another"
        )


def check_conservation(
    name: str, everyones_picks: Sequence[SparseVector], outcome: Outcome, transport: Transport
) -> None:
    """Raise WrongResultError unless what was selected is in the update or has returned.

    Coordinate by coordinate, up to the rounding of the additions. All ranks must call it.
    """
    update, returned = outcome
    if not isinstance(update, SparseVector):
        update = SparseVector.from_dense(update)
    if returned is None:
        returned = SparseVector.empty(update.length)
    after = [update, *_of_all_ranks(returned, transport)]
    indices = np.concatenate([vector.indices for vector in (*everyones_picks, *after)])
    places, place = np.unique(indices, return_inverse=True)
    before = [vector.values.astype(np.float64) for vector in everyones_picks]
    taken = [-vector.values.astype(np.float64) for vector in after]
    lost = np.bincount(place, np.concatenate([*before, *taken]), places.size)
    there = place[: sum(vector.entries for vector in everyones_picks)]
    total = np.bincount(there, np.abs(np.concatenate(before)), places.size)
    bound = len(everyones_picks) * float(np.finfo(np.float32).eps) * total
    wrong = np.flatnonzero(np.abs(lost) > bound)
    if wrong.size:
        raise WrongResultError(
            f"{name} must lose nothing of what is selected; at {wrong.size} coordinates it does, "
            f"the first is {places[wrong[0]]}, where {lost[wrong[0]]:g} are missing"
        )


def _of_all_ranks(vector: SparseVector, transport: Transport) -> list[SparseVector]:
    gathered = [
        transport.allgather(np.ascontiguousarray(part).view(np.uint8))
        for part in (vector.indices, vector.values)
    ]
    return [
        SparseVector(
            np.frombuffer(indices.tobytes(), vector.indices.dtype),
            np.frombuffer(values.tobytes(), vector.values.dtype),
            vector.length,
        )
        for indices, values in zip(*gathered, strict=True)
    ]


REST_SECONDS: Final = 0.02


@dataclass
class Measured:
    """What the goes of one contender took; lists by round.

    cpu_seconds, sent_bytes, sent_messages, interface_bytes: by rank in the last round.
    counted: message by message; else reckoned.
    """

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    sent_messages: list[float] = field(default_factory=list)
    interface_bytes: list[float] | None = None
    updated: int = 0
    counted: bool = False


def measure(
    case: Case,
    contenders: Sequence[Contender],
    transport: Transport,
    library: Reckoning,
    rounds: int,
    budget_seconds: float,
    seed: int,
    interface: str | None,
    progress: Callable[[str], None],
) -> list[Measured]:
    """Return what every contender took; the same on every rank of `transport`.

    Raises WrongResultError when the ranks' updates differ, or a first go loses something.
    """
    everyone = [
        picks(case.distribution, case.length, case.k, rank, seed) for rank in range(transport.size)
    ]
    task = Task(everyone[transport.rank], case.k, transport, library)
    found = [Measured(contender) for contender in contenders]
    for number in range(rounds):
        for measured in found:
            if number == 0 or sum(measured.seconds) < budget_seconds:
                progress(f"{case}: round {number + 1} of {rounds}, {measured.contender.name}")
                go(measured, task, everyone if number == 0 else None, interface)
    return found


def go(
    measured: Measured, task: Task, everyone: Sequence[SparseVector] | None, interface: str | None
) -> None:
    """Let a contender go once; where everyone's picks are given, check that nothing is lost."""
    contender, transport = measured.contender, task.transport
    own = contender.algorithm is not None
    counters = transport.traffic if own else task.library.traffic
    prepared = contender.prepare(task)
    interface_before = interface_bytes(interface)
    time.sleep(REST_SECONDS)
    transport.barrier()
    counters.take()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    outcome = prepared()
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    sent = counters.take()
    report = np.array(
        [
            seconds,
            cpu_seconds,
            sent.sent_bytes,
            sent.sent_messages,
            interface_bytes(interface) - interface_before,
        ]
    )
    reports = transport.allgather(np.concatenate([report.view(np.uint8), digest(outcome.update)]))
    check_agreement(contender.name, [message[report.nbytes :] for message in reports])
    if everyone is not None and contender.conserves:
        check_conservation(contender.name, everyone, outcome, transport)
    rows = [np.frombuffer(message[: report.nbytes].tobytes()) for message in reports]
    everyones_seconds, *by_rank, on_interface = np.stack(rows, axis=1).tolist()
    measured.seconds.append(max(everyones_seconds))
    measured.cpu_seconds, measured.sent_bytes, measured.sent_messages = by_rank
    measured.interface_bytes = on_interface if interface else None
    measured.updated = entries(outcome.update)
    measured.counted = own and (contender.algorithm != "dense" or transport.counts_allreduce)


def entries(update: SparseVector | Array) -> int:
    """Return how many coordinates an update changes."""
    return update.entries if isinstance(update, SparseVector) else int(np.count_nonzero(update))


def interface_bytes(interface: str | None) -> float:
    """Return what a network interface has sent since it came up; 0 where none is named."""
    if interface is None:
        return 0.0
    return float(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
