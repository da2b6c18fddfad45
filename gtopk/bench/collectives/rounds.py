"""Rounds: the contenders of a case take turns; a go's time is that of the slowest rank.

    round 1   gtopk   topk-allgather   dense-library   ...
    round 2   gtopk   topk-allgather   dense-library   ...

    a go      rest | barrier | reduce | tell the time     begun behind the barrier, by its own clock

So all of them see the same moods of machine and network. Who has used up its budget of seconds
sits out the rest of the rounds. Links rest before a go, as they do while gradients are computed:
what a token bucket lets pass at once, it has ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from collectives.transports import Transport
from collectives.vector import Array, SparseVector

from ...replay.invented_picks import picks
from .cases import Case
from .checks import check_agreement, check_conservation, digest
from .contenders import Contender, Task
from .library import Reckoning

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
    measured.counted = own and (contender.selective or transport.counts_allreduce)


def entries(update: SparseVector | Array) -> int:
    """Return how many coordinates an update changes."""
    return update.entries if isinstance(update, SparseVector) else int(np.count_nonzero(update))


def interface_bytes(interface: str | None) -> float:
    """Return what a network interface has sent since it came up; 0 where none is named."""
    if interface is None:
        return 0.0
    return float(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
