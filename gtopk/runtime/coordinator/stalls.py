"""Stalls: what to say, and when to end, while others are not ready for what this rank is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from collectives.transports import Transport
from collectives.transports.transport import say

from .agreement import name_ranks
from .operation import Operation
from .readiness_table import ReadinessTable
from .settings import Settings

_NAMES_SAID = 3


class Stalls:
    """How long this rank has waited for others, by operation."""

    def __init__(self, settings: Settings, transport: Transport) -> None:
        self._transport = transport
        self._warning_seconds = (
            settings.stall_warning_seconds if transport.announces_waits else math.inf
        )
        self._advice = "a larger GTOPK_TIMEOUT (seconds) waits longer"
        self._limit_seconds = transport.timeout_seconds
        if settings.stall_shutdown_seconds < transport.timeout_seconds:
            self._limit_seconds = settings.stall_shutdown_seconds
            self._advice = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends the job then"
        self._warned: dict[str, float] = {}

    def expired(self, said: Iterable[Operation], table: ReadinessTable) -> dict[str, str]:
        """Return the operations that have waited too long, and the text about each."""
        now = time.perf_counter()
        return {
            operation.name: f"{self._waits(operation, table, now)}; {self._advice}"
            for operation in said
            if now - operation.said > self._limit_seconds
        }

    def warn(self, said: Iterable[Operation], table: ReadinessTable) -> None:
        """Say, now and then, what this rank waits for, and which ranks it waits for."""
        now = time.perf_counter()
        stalled: dict[tuple[int, ...], list[Operation]] = {}
        for operation in said:
            since = self._warned.get(operation.name, operation.said)
            if now - max(since, operation.said) > self._warning_seconds:
                self._warned[operation.name] = now
                stalled.setdefault(tuple(table.missing(operation.name)), []).append(operation)
        for missing, operations in stalled.items():
            ready = [r for r in self._transport.ranks if r not in missing]
            more = [operation.name for operation in operations[1:_NAMES_SAID]]
            others = len(operations) - 1 - len(more)
            names = "".join(f", {name}" for name in more) + (
                f" and {others} more" if others else ""
            )
            say(f"{self._waits(operations[0], table, now)}{names}; ready: {name_ranks(ready)}")

    def _waits(self, operation: Operation, table: ReadinessTable, now: float) -> str:
        rank = self._transport.ranks[self._transport.rank]
        missing = name_ranks(table.missing(operation.name))
        waited = now - operation.said
        return f"rank {rank} has waited {waited:.3g} s for {missing} in {operation.name}"
