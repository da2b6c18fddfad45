"""Execution: runs a cycle's operations in the same order on all ranks.

    ready        a    b    c    d         a, c, d: dense arrays with one key; b: anything else
    run          a c d     b              reduce a, c, d together, then the work of each

Arrays that can be reduced together run at the place of the first of them.

Also here: warnings and limits for stalled operations, and the engine's settings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from collectives.errors import MismatchError
from collectives.transports import Transport
from collectives.transports.transport import print_line

from ... import settings
from .agreement import advice_on, name_ranks
from .fusion import ArrayIndex, Dense, Fuser, all_on_gpu, fuse_arrays, neutral_array
from .operation import Event, EventKind, Observer, Operation, Phase, ShadowWork, Work, do_nothing
from .readiness_table import ReadinessTable, ReadyOperation

_SHORTEST_IDLE_SECONDS: Final = 0.02


class Settings(NamedTuple):
    """The engine's settings.

    cycle_seconds:            a cycle begins once no submission has come for this long.
    cache_capacity:           cache slots for names; the smallest value of all ranks counts.
    fusion_threshold_bytes:   most bytes to reduce together; 0: reduce each array alone; the
                              smallest value of all ranks counts.
    stall_warning_seconds:    a rank that waits longer for others prints a warning; infinity: never.
    stall_shutdown_seconds:   a rank that waits longer ends the job; infinity: never.
    idle_seconds:             how often a rank with nothing to announce takes part in a cycle.
    """

    cycle_seconds: float = 1e-3
    cache_capacity: int = 1024
    fusion_threshold_bytes: int = 64 << 20
    stall_warning_seconds: float = 60.0
    stall_shutdown_seconds: float = math.inf
    idle_seconds: float = 10.0

    def limit_idle(self, timeout_seconds: float) -> Settings:
        """Return settings with an idle time of at most a quarter of the shortest wait limit."""
        limits = self.stall_warning_seconds, self.stall_shutdown_seconds, timeout_seconds
        # Ranks learn in cycles what others wait for; several must fit into the shortest limit.
        idle = min(self.idle_seconds, min(limits) / 4)
        return self._replace(idle_seconds=max(idle, _SHORTEST_IDLE_SECONDS))


def settings_from() -> Settings:
    """Read the settings; raise ValueError for anything but a number of at least 0."""
    is_disabled = settings.STALL_CHECK_DISABLE.read()
    warning = settings.STALL_CHECK_TIME.read()
    shutdown = settings.STALL_SHUTDOWN_TIME.read()
    return Settings(
        cycle_seconds=settings.CYCLE_TIME.read() / 1e3,
        cache_capacity=int(settings.CACHE_CAPACITY.read()),
        fusion_threshold_bytes=int(settings.FUSION_THRESHOLD.read()),
        # 0 stands for never, not for at once.
        stall_warning_seconds=math.inf if is_disabled else warning or math.inf,
        stall_shutdown_seconds=math.inf if is_disabled else shutdown or math.inf,
    )


_MAX_NAMES = 3
# All ranks begin a checkpoint after the same step, and a rank that has joined begins nothing: the
# script is likely wrong.
_EARLY_WARNING_SECONDS: Final = 5.0


class Stalls:
    """Warns about operations that wait for other ranks, and finds those that wait too long.

    joined: on a process set's engine: returns the ranks that have joined the engine of all ranks.
    """

    def __init__(self, settings: Settings, transport: Transport) -> None:
        self._transport = transport
        self.joined: Callable[[], list[int]] = list
        self._warning_seconds = (
            settings.stall_warning_seconds if transport.announces_waits else math.inf
        )
        self._advice = "set a larger GTOPK_TIMEOUT (seconds) to wait longer"
        self._limit_seconds = transport.timeout_seconds
        if settings.stall_shutdown_seconds < transport.timeout_seconds:
            self._limit_seconds = settings.stall_shutdown_seconds
            self._advice = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is exceeded"
        self._warned: dict[str, float] = {}

    def expired(self, announced: Iterable[Operation], table: ReadinessTable) -> dict[str, str]:
        """Return the names of operations that have waited too long, each with an error text."""
        now = time.perf_counter()
        return {
            operation.name: f"{self._wait_text(operation, table, now)}; {self._advice}"
            for operation in announced
            if now - operation.announced > self._limit_seconds
        }

    def warn(self, announced: Iterable[Operation], table: ReadinessTable) -> None:
        """Print waiting operations and the ranks they wait for, once a warning interval.

        Warns early, once, about a checkpoint, with advice, and about ranks that have joined.
        """
        now = time.perf_counter()
        # One line for all operations that wait for the same ranks.
        stalled: dict[tuple[int, ...], list[Operation]] = {}
        joined = {*self.joined()}
        for operation in announced:
            since = max(self._warned.get(operation.name, 0.0), operation.announced)
            seconds = self._warning_seconds
            is_wrong = advice_on([operation.name]) or (
                joined and not joined.isdisjoint(table.missing(operation.name))
            )
            if is_wrong and since == operation.announced and seconds < math.inf:
                seconds = min(seconds, _EARLY_WARNING_SECONDS)
            if now - since > seconds:
                self._warned[operation.name] = now
                stalled.setdefault(tuple(table.missing(operation.name)), []).append(operation)
        for missing, operations in stalled.items():
            ready = [r for r in self._transport.ranks if r not in missing]
            more = [operation.name for operation in operations[1:_MAX_NAMES]]
            others = len(operations) - 1 - len(more)
            names = "".join(f", {name}" for name in more)
            names += f" and {others} more" if others else ""
            advice = advice_on(operation.name for operation in operations)
            waits = self._wait_text(operations[0], table, now)
            print_line(f"{waits}{names}; ready: {name_ranks(ready)}{advice}")

    def _wait_text(self, operation: Operation, table: ReadinessTable, now: float) -> str:
        rank = self._transport.ranks[self._transport.rank]
        missing = table.missing(operation.name)
        waited = now - operation.announced
        who = name_ranks(missing)
        text = f"rank {rank} has waited {waited:.3g} s for {who} in {operation.name}"
        if joined := sorted({*missing} & {*self.joined()}):
            text += (
                f"; {name_ranks(joined)} called join(), which covers operations of all ranks, but "
                "not of a process set: call join() after the set's last operation"
            )
        return text


Finished = tuple[Operation, Any, BaseException | None]  # its result, its error


class Part(NamedTuple):
    """This rank's part in an operation that all ranks run.

    operation: None if this rank has joined and only stands in.
    """

    name: str
    all_flags: list[int]
    dense: Sequence[Dense]
    work: Work
    operation: Operation | None


def part_of(
    ready: ReadyOperation,
    operation: Operation | None,
    shadow_work: ShadowWork | None,
    transport: Transport,
) -> Part:
    """Return this rank's part in an operation on a transport.

    operation: this rank's own; None: it has joined, and did not submit the operation.
    Raises RuntimeError if the operation has no stand-in for a joined rank.
    """
    name, spec, all_flags = ready
    if operation is not None:
        return Part(name, all_flags, operation.fusion, operation.work, operation)
    work: Work = do_nothing  # a joined rank only takes part in the reduction of dense arrays
    if spec.join_descriptor is not None:
        if shadow_work is None:
            raise RuntimeError(
                f"this rank has joined, but has no optimizer to take part in '{name}' with: create "
                "the optimizer on every rank, even on ranks without data"
            )
        work = shadow_work(name, spec.join_descriptor)
    # If one rank has its tensors on the host, all ranks reduce on the host.
    device = transport.tensor_place if all_on_gpu(all_flags) else ""
    return Part(
        name, all_flags, [neutral_array(layout, device) for layout in spec.dense], work, None
    )


class FusionGroup(NamedTuple):
    """A unit of execution: one operation, or arrays of several that are reduced together."""

    parts: list[int]  # indices of the operations, each once
    arrays: list[ArrayIndex]


def fusion_groups(
    ready: Sequence[ReadyOperation], threshold_bytes: int, alone_bytes: int
) -> list[FusionGroup]:
    """Return the groups in their order of execution."""
    # Uses only layouts, flags and sizes, which all ranks share: groups and their order must be the
    # same everywhere, or messages would not match.
    arrays = [
        ArrayIndex(number, place, layout, all_on_gpu(each.all_flags))
        for number, each in enumerate(ready)
        for place, layout in enumerate(each.spec.dense)
    ]
    # A step with only compressed gradients has no dense arrays.
    fused = fuse_arrays(arrays, threshold_bytes, alone_bytes) if arrays else []
    groups = [
        FusionGroup(list(dict.fromkeys(array.operation for array in members)), members)
        for members in fused
    ]
    groups += [
        FusionGroup([number], []) for number, each in enumerate(ready) if not each.spec.dense
    ]
    return sorted(groups, key=lambda group: group.parts[0])


class Execution:
    """Runs operations on a transport.

    finish: called with the outcomes of operations.
    observers: called with every event.
    """

    def __init__(self, transport: Transport, finish: Callable[[Sequence[Finished]], None]) -> None:
        self.transport = transport
        self.finish = finish
        self.observers: tuple[Observer, ...] = ()
        self.activity = ""  # the operation that runs now, or has failed
        self._fuser = Fuser()
        self._planned: tuple[Sequence[ReadyOperation], list[FusionGroup]] = [], []

    def run(
        self,
        ready: Sequence[ReadyOperation],
        operations: Mapping[str, Operation],
        fusion_threshold_bytes: int,
        shadow_work: ShadowWork | None,
    ) -> None:
        """Run and finish operations that all ranks run now.

        operations: those that this rank submitted, by name; it stands in for the others.
        Raises an operation's error if the ranks' messages may no longer match; later operations
        then stay unfinished. A MismatchError occurs on all ranks alike, and only ends its own
        operation.
        """
        parts = [
            part_of(each, operations.get(each.name), shadow_work, self.transport) for each in ready
        ]
        # An operation's arrays may be in several groups. It begins with its first group; its work
        # runs after its last.
        unreduced = [len(part.dense) for part in parts]  # arrays to be reduced
        begun: set[int] = set()
        for group in self._groups(ready, fusion_threshold_bytes):
            members = [parts[number] for number in group.parts]
            self.activity = _title(members)
            finished: list[Finished] = []
            # The result shows an overflowing sum; NumPy's warning would name this line.
            without_warnings = np.errstate(over="ignore", invalid="ignore")
            try:
                with self.transport.operation(self.activity), without_warnings:
                    self._begin([parts[number] for number in group.parts if number not in begun])
                    begun.update(group.parts)
                    if group.arrays:
                        self._reduce(group.arrays, parts, members)
                        for array in group.arrays:
                            unreduced[array.operation] -= 1
                    for number in group.parts:
                        if unreduced[number] == 0:
                            finished += self._run_work(parts[number])
            except BaseException as error:
                done = {operation for operation, _, _ in finished}
                failed = [p.operation for p in members if p.operation and p.operation not in done]
                self.finish(finished + [(operation, None, error) for operation in failed])
                raise
            self.finish(finished)
        self.activity = ""

    def _groups(
        self, ready: Sequence[ReadyOperation], fusion_threshold_bytes: int
    ) -> list[FusionGroup]:
        """Return the groups, from the cache if the table returned the same list as last time."""
        # Compare by identity, which costs nothing: the table makes a new list when a name, a spec
        # or a rank's flags change.
        if self._planned[0] is not ready:
            alone_bytes = self.transport.full_speed_bytes
            self._planned = ready, fusion_groups(ready, fusion_threshold_bytes, alone_bytes)
        return self._planned[1]

    def _begin(self, members: Sequence[Part]) -> None:
        for part in members:
            if part.operation is not None:
                part.operation.begin()
        self._notify("begin", "execute", members)

    def _reduce(
        self, arrays: Sequence[ArrayIndex], parts: Sequence[Part], members: Sequence[Part]
    ) -> None:
        def notify(phase: Phase, what: EventKind) -> None:
            self._notify(phase, what, members)

        dense = [parts[each.operation].dense[each.array] for each in arrays]
        first = arrays[0]
        self._fuser.reduce(dense, first.layout, self.transport, notify, first.on_gpu)
        self._count_traffic(members[0])

    def _run_work(self, part: Part) -> list[Finished]:
        """Run an operation's work; return its outcome, or [] if this rank stands in."""
        result: Any = None
        error: MismatchError | None = None
        try:
            result = part.work(self.transport, part.all_flags)
        except MismatchError as disagreement:  # raised on every rank, so the operation is complete
            error = disagreement
        # Only count what was sent since: `_reduce` has counted the dense arrays' traffic.
        if self.transport.traffic.sent_messages:
            self._count_traffic(part)
        self._notify("end", "execute", [part])
        return [] if part.operation is None else [(part.operation, result, error)]

    def _count_traffic(self, part: Part) -> None:
        traffic = self.transport.traffic.read_and_reset()
        if part.operation is not None:
            part.operation.sent_bytes += traffic.sent_bytes
            part.operation.sent_messages += traffic.sent_messages

    def _notify(self, phase: Phase, what: EventKind, members: Sequence[Part]) -> None:
        if self.observers:
            now = time.perf_counter()
            for part in members:
                self.notify(Event(phase, what, part.name, now))

    def notify(self, event: Event) -> None:
        """Call the observers."""
        for observer in self.observers:
            observer(event)


def _title(members: Sequence[Part]) -> str:
    others = len(members) - 1
    return f"{members[0].name} and {others} more" if others else members[0].name
