"""The engine: one thread that owns a transport and runs the operations all ranks are ready for.

It works in cycles. In a cycle every rank announces the operations that became ready on it since the
last cycle (Announcement), and all ranks enter them in identical tables (ReadinessTable). Operations
that all ranks are ready for run at once (Execution), in the same order on all ranks, whatever the
order of submission.

A cycle is a collective: it lasts until the last rank takes part. A rank takes part

    when it has something to announce
        and a caller waits for it   at once
        and no caller waits         once no submission came for the cycle time, or a burst of
                                    submissions has lasted 5 cycle times: a burst is one cycle
    when it is ready for an operation that others are not ready for
        and others wait for it      after a growing pause
        and nobody waits for it     at once: it has nothing else to do
    otherwise                       after the idle time, to learn what others wait for

So a rank that others wait for takes part after a pause or the idle time, unless it has something to
announce. Meanwhile the waiting ranks block in the cycle without spinning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from collectives.errors import CollectiveError, PeerError
from collectives.transports import Transport
from collectives.transports.transport import print_line

from ...errors import HorovodInternalError
from .agreement import name_ranks
from .execution import Execution, Finished, Settings, Stalls, settings_from
from .fusion import Dense, layout_of
from .operation import (
    Announcement,
    Event,
    Observer,
    Operation,
    OperationSpec,
    Request,
    ShadowWork,
    Work,
    do_nothing,
    gather_announcements,
)
from .readiness_table import PROGRAM_ENDED, CycleOutcome, ReadinessTable, ReadyOperation

SET_REMOVED: Final = "removed its process set"  # a reason for `close`
_LEAVE_TIMEOUT_SECONDS: Final = 5.0  # for peers to leave a job that cannot go on
_POLL_SECONDS: Final = 0.2  # how often an idle engine checks whether the program has ended
_STUCK_SECONDS: Final = 0.5  # a thread that has waited this long will not submit anything soon
_EXIT_SECONDS: Final = 5.0  # for exit handlers, while peers may already wait for this rank
_LONGEST_BURST_CYCLES: Final = 5  # a longer burst of submissions is split
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 2e-4, 8e-3
_PAUSE_GROWTH: Final = 1.5


class Engine:
    """Runs operations on one transport until it is closed, or a rank is gone.

    The owner sets these:

    shadow_work: makes a joined rank's work, for operations with a join descriptor.
    departure_notice: takes the reason why this rank leaves; returns it with this rank's step and
              place, as sent to the peers.
    where: returns this rank's current step, for errors.
    ranks_may_leave: whether the other ranks continue when one dies while no operation runs.
    finishes_later: called when the program has ended, before the rank leaves by itself. True: this
              rank still has unfinished work; it stays, and the engine asks again later. False: it
              has none, or the call has submitted the operations that finish it.

    failure:   the error that stopped the engine because a rank is gone; None while it runs.
    failed_in: the operation that failed on this rank, which then runs no other; "": none.
    """

    def __init__(self, transport: Transport, settings: Settings | None = None) -> None:
        self.transport = transport
        self.departure_notice: Callable[[str], str] = lambda how: how
        self.where: Callable[[], str] = lambda: ""
        self.failed_in = ""
        self.shadow_work: ShadowWork | None = None
        self.ranks_may_leave = False
        self.finishes_later: Callable[[], bool] = lambda: False
        self.cycles = 0
        self.settings = (settings or settings_from()).limit_idle(transport.timeout_seconds)
        self._limits = self.settings.cache_capacity, self.settings.fusion_threshold_bytes
        # Shared with submitting threads; guarded by the lock.
        self._changed = threading.Condition()
        self._submitted: list[Operation] = []
        self._pending: dict[str, Operation] = {}
        self._requests: dict[str, Request] = {}
        self._joining: Operation | None = None
        self._urgent = self._ended = False  # ended: without a failure
        self._submitters: set[int] = set()  # threads
        self._waited_for: dict[int, str] = {}  # by thread: the operation that it last waited for
        self._closing: str | None = None
        self._program_ended = False  # but threads that never submitted go on
        self._exit_seen = 0.0  # when the main thread was first seen to have ended
        self._leave_timeout_seconds: float | None = None
        self._remaining: list[int] = []
        self.failure: PeerError | None = None
        self._table = ReadinessTable(transport.ranks, self.settings.cache_capacity)
        self._execution = Execution(transport, self._finish_operations)
        self.stalls = Stalls(self.settings, transport)
        self._announced: dict[str, Operation] = {}  # announced, but not done
        self._announced_joining = self._announced_leaving = False
        self._negotiating: set[str] = set()  # names with a "begin negotiate" event, but no end yet
        self._waiting_in = ""
        self._broken = False  # an operation failed, and other ranks may not know
        self._cycle_ended = time.perf_counter()
        self._pause_seconds = _SHORTEST_PAUSE_SECONDS
        self._owner = threading.current_thread()
        # A daemon thread does not keep the process alive after the program ends.
        self._thread = threading.Thread(target=self._run, name="gtopk-engine", daemon=True)
        self._thread.start()

    @property
    def activity(self) -> str:
        """The operation that runs or is waited for, for errors; "idle" if none."""
        return self._execution.activity or self._waiting_in or "idle"

    def add_observer(self, observer: Observer) -> None:
        """Call an observer with every event from now on."""
        self._execution.observers += (observer,)

    def remove_observer(self, observer: Observer) -> None:
        """Stop calling an observer."""
        remaining = (each for each in self._execution.observers if each != observer)
        self._execution.observers = tuple(remaining)

    def submit(
        self,
        name: str,
        signature: Sequence[str],
        work: Work,
        flags: int = 0,
        *,
        join_descriptor: bytes | None = None,
        fusion: Sequence[Dense] = (),
    ) -> Operation:
        """Begin an operation; it runs once every rank has submitted one with this name.

        signature: texts that must be equal on all ranks, like the name; an error quotes those that
                differ.
        flags:   int64 that may differ; `work` gets every rank's, and must not change the list.
        join_descriptor: bytes from which a joined rank makes its part (`shadow_work`), equal on all
                ranks; None: joined ranks cannot take part.
        fusion: arrays to reduce before `work` is called; see fusion.py.
        Raises ValueError if an operation with this name is in flight, HorovodInternalError after
        `close`.
        """
        spec = OperationSpec(tuple(signature), join_descriptor, tuple(map(layout_of, fusion)))
        request = Request(name, spec, flags)
        operation = Operation(request, self.transport.size, work, fusion, self._wake, self._where)
        with self._changed:
            self._refuse_when_closed(f"'{name}'")
            if self._joining is not None:
                raise ValueError(f"'{name}' cannot begin: this rank's join() is still pending")
            if name in self._pending:
                raise ValueError(
                    f"'{name}' is still in flight: requested to reduce, gather or broadcast a "
                    "tensor with the same name as another tensor that is currently being "
                    "processed; synchronize it first, or pass another name"
                )
            if self.failure is not None:
                self._broken = True
                operation.finish(error=self.failure)
                return operation
            self._submitters.add(threading.get_ident())
            operation.request = self._intern(request)
            self._pending[name] = operation
            self._submitted.append(operation)
            # Only the first of a burst wakes the engine, which then waits for the end of it.
            if len(self._submitted) == 1:
                self._changed.notify()
        return operation

    def join(self) -> Operation:
        """Join: until every rank has joined, the engine takes part in what the others submit.

        The operation's result is the last rank to join, the same on all ranks. Until then `submit`
        raises ValueError.
        """
        request = Request("join", OperationSpec((), None, ()), 0)
        size = self.transport.size
        operation = Operation(request, size, do_nothing, (), self._wake, self._where)
        with self._changed:
            self._refuse_when_closed("join")
            if self._joining is not None:
                raise ValueError("join() is already pending on this rank")
            if self.failure is not None:
                self._broken = True
                operation.finish(error=self.failure)
                return operation
            self._joining = operation
            self._changed.notify()
        return operation

    def joined(self) -> list[int]:
        """Return the ranks known here to have joined, as world ranks."""
        return self._table.joined_ranks()

    def close(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        """Leave: run the operations submitted here and on all ranks, and notify the others.

        On the transport of all ranks, also wait for the others to leave. Their operations that
        need this rank fail.
        leave_timeout_seconds: how long to wait for the others in any case, without ending the job.
        Returns the ranks that have not left.
        """
        with self._changed:
            self._closing = self._closing or reason
            self._leave_timeout_seconds = leave_timeout_seconds
            self._changed.notify()
        self._thread.join()
        return self._remaining

    def _intern(self, request: Request) -> Request:
        """Return an earlier object equal to this one, so that comparisons can use identity."""
        before = self._requests.get(request.name)
        if before == request:
            return before
        if len(self._requests) > self._limits[0]:
            self._requests.clear()  # names that are used only once would accumulate
        self._requests[request.name] = request
        return request

    def _refuse_when_closed(self, what: str) -> None:
        if self._program_ended:
            raise HorovodInternalError(
                f"gtopk has shut down, as the main thread ended: {what} cannot begin; join the "
                "training threads in the main thread (thread.join())"
            )
        if self._closing is not None:
            why, when = "gtopk has been shut down", "after another init()"
            if self._closing == SET_REMOVED:
                why, when = "its process set was removed", "for another set"
            raise HorovodInternalError(f"{why}: {what} cannot begin; create a new optimizer {when}")

    def _wake(self, operation: Operation) -> threading.Event | None:
        """Begin the next cycle at once; return the operation's end event, or None if it is done."""
        with self._changed:
            if operation.done:
                return None
            # Under the lock: `finish` checks once, and would never set an event made later.
            operation.finished = operation.finished or threading.Event()
            self._waited_for[threading.get_ident()] = operation.name
            if not self._urgent:
                self._urgent = True
                self._changed.notify()
            return operation.finished

    def _where(self) -> str:
        """Return `where()`; looked up on each call, as the owner sets it after engine start."""
        return self.where()

    def _run(self) -> None:
        while self._wait_for_cycle():
            self._cycle()
        self._fail_all(self.failure or PeerError("gtopk has been shut down"))
        with self._changed:
            # Operations no longer run; leave the transport when this rank closes or its program
            # ends.
            while self._closing is None:
                self._changed.wait(_POLL_SECONDS)
                self._leave_if_program_ended()
            reason = self._closing
        if self.transport.path == ():  # the transport of all ranks, not of a process set
            self._leave(reason)

    def _wait_for_cycle(self) -> bool:
        """Wait until a cycle is due and return True; return False if none will follow."""
        with self._changed:
            while self.failure is None and not self._ended:
                wait_seconds = self._next_cycle_time() - time.perf_counter()
                if wait_seconds <= 0:
                    return True
                self._changed.wait(min(wait_seconds, _POLL_SECONDS))
                self._leave_if_program_ended()
            return False

    def _next_cycle_time(self) -> float:
        """Return when the next cycle is due; see the table at the top."""
        settings, rank = self.settings, self.transport.rank
        if self._submitted:
            if self._urgent or self._closing is not None or self.transport.size == 1:
                return 0.0
            burst_seconds = _LONGEST_BURST_CYCLES * settings.cycle_seconds
            return min(
                self._submitted[-1].submitted + settings.cycle_seconds,
                self._submitted[0].submitted + burst_seconds,
            )
        if self._closing is not None and not self._announced_leaving:
            return 0.0
        if self._joining is not None and not self._announced_joining:
            return 0.0
        if not self._table.waits(rank):
            return self._cycle_ended + settings.idle_seconds
        if not self._table.is_waited_for(rank):
            return 0.0
        return self._cycle_ended + self._pause_seconds

    def _leave_if_program_ended(self) -> None:
        """Leave if the program has ended but one of its threads keeps the process alive.

        The rank stays for threads that have submitted operations, as they may submit more. It does
        not wait for other threads, which may sleep for ever. If there is none, exit handlers run,
        which may submit operations, too; the last one leaves.
        """
        if self._closing is not None:
            return
        if threading.main_thread().is_alive() or self._owner.is_alive():
            return
        threads = [t for t in threading.enumerate() if t.is_alive() and not t.daemon]
        self._exit_seen = self._exit_seen or time.perf_counter()
        is_exiting = not threads and time.perf_counter() - self._exit_seen < _EXIT_SECONDS
        submits = any(thread.ident in self._submitters for thread in threads)
        if is_exiting or submits or self.finishes_later():
            return
        self._program_ended = True
        self._closing = self.departure_notice(PROGRAM_ENDED)

    def _cycle(self) -> None:
        with self._changed:
            submitted, self._submitted = self._submitted, []
            self._urgent = False
            joins = self._joining is not None and not self._announced_joining
            leaves = self._closing if not self._announced_leaving else None
        begun = time.perf_counter()
        for operation in submitted:
            operation.announced = begun
            self._announced[operation.name] = operation
        self._announced_joining |= joins
        self._announced_leaving |= leaves is not None
        self._waiting_in = next(iter(self._announced), "join" if self._announced_joining else "")
        try:
            announcement = self._announcement(submitted, joins, leaves)
            with self.transport.operation(self._waiting_in or "a cycle"):
                gathered = gather_announcements(self.transport, announcement, self._table.slots)
            self._apply(gathered)
        except BaseException as error:
            self._abandon(error)
        self.cycles += 1
        self._cycle_ended = time.perf_counter()
        self._waiting_in = ""

    def _announcement(
        self, submitted: Sequence[Operation], joins: bool, leaves: str | None
    ) -> Announcement:
        requests = [operation.request for operation in submitted]
        announcement = self._table.announcement_of(requests, self.transport.rank)
        # A leaving rank waits for the others without a limit.
        waiting: Iterable[Operation] = () if self._announced_leaving else self._announced.values()
        expired = self.stalls.expired(waiting, self._table)
        stuck = None if submitted else self._stuck_operation()
        if not (joins or leaves is not None or expired or stuck is not None or self.cycles == 0):
            return announcement
        limits = self._limits if self.cycles == 0 else ()
        return announcement._replace(
            joins=joins, leaves=leaves, expired=expired, stuck=stuck, limits=limits
        )

    def _stuck_operation(self) -> str | None:
        """Return the operation that the only submitting thread has awaited for 0.5 s, if any."""
        with self._changed:  # another thread may submit its first operation meanwhile
            # With several threads, another one may submit what the other ranks wait for.
            if len(self._submitters) != 1:
                return None
            (thread,) = self._submitters
            operation = self._announced.get(self._waited_for.get(thread, ""))
        if operation is None or operation.finished is None:
            return None
        is_long = time.perf_counter() - operation.announced > _STUCK_SECONDS
        return operation.name if is_long else None

    def _apply(self, announcements: Sequence[Announcement]) -> None:
        """Enter the announcements in the table, and act on the outcome."""
        # Before any slot is assigned: unequal capacities would give unequal slot numbers.
        if self.cycles == 0:
            self._limits = tuple(map(min, zip(*(s.limits for s in announcements), strict=True)))
            self._table.capacity = self._limits[0]
        now = time.perf_counter()
        if self._execution.observers:
            self._notify_ready(announcements, now)
        outcome = self._table.enter(announcements)
        longer_pause = min(self._pause_seconds * _PAUSE_GROWTH, _LONGEST_PAUSE_SECONDS)
        self._pause_seconds = _SHORTEST_PAUSE_SECONDS if outcome.has_changes else longer_pause
        if self._execution.observers:
            self._notify_negotiated(outcome, now)
        for name, error in outcome.refused:
            self._refuse(name, error)
        self._execute(outcome.ready, now)
        if outcome.joined is not None:
            self._finish_joining(outcome.joined)
        # All ranks raise this in the same cycle, while no operation runs between them.
        if outcome.expired is not None:
            raise PeerError(outcome.expired)
        if outcome.left is not None:
            self._stop_after_departure(*outcome.left)
        self.stalls.warn(self._announced.values(), self._table)

    def _execute(self, ready: Sequence[ReadyOperation], agreed: float) -> None:
        for each in ready:
            operation = self._announced.get(each.name)
            if operation is not None:
                operation.agreed = agreed
        self._execution.run(ready, self._announced, self._limits[1], self.shadow_work)

    def _refuse(self, name: str, error: CollectiveError) -> None:
        operation = self._announced.get(name)
        if operation is not None:
            self._broken |= isinstance(error, PeerError) and not self._announced_leaving
            self._finish_operations([(operation, None, error)])

    def _finish_operations(self, outcomes: Sequence[Finished]) -> None:
        """Set the operations' outcomes, and free their names."""
        with self._changed:
            for operation, result, error in outcomes:
                del self._announced[operation.name], self._pending[operation.name]
                operation.finish(result, error)

    def _finish_joining(self, last: int) -> None:
        with self._changed:
            if self._joining is not None:
                self._joining.finish(last)
            self._joining = None
            self._announced_joining = False

    def _stop_after_departure(self, rank: int, reason: str) -> None:
        """Begin no further cycle, as a rank left without failure; all ranks stop in this cycle."""
        with self._changed:
            self._ended = True
            if not self._announced_leaving:
                self.failure = PeerError(f"rank {rank} left ({reason}): gtopk has been shut down")

    def _abandon(self, error: BaseException) -> None:
        """Stop: the peers are inside an operation that this rank did not complete.

        They would take messages of this rank's next operation for messages of that one.
        """
        cause = error if isinstance(error, PeerError) else None
        self.failed_in = self.activity
        text = f"failed in {self.failed_in}: {type(error).__name__}: {error}"
        self._broken = True
        with self._changed:
            self.failure = cause or PeerError(f"this rank {text}")
        self._execution.activity = ""
        self.transport.announce_departure(str(error) if cause else self.departure_notice(text))

    def _fail_all(self, error: PeerError) -> None:
        """Fail all pending operations, including any submitted while the engine ended."""
        with self._changed:
            # So nobody waits for ever: a later `submit` sees `failure`, earlier ones are pending.
            self.failure = error
            unfinished = [*self._pending.values()]
            unfinished += [] if self._joining is None else [self._joining]
            self._pending.clear()
            self._submitted.clear()
            self._joining = None
            self._broken |= bool(unfinished) and not self._announced_leaving
            for operation in unfinished:
                operation.finish(error=error)

    def _leave(self, reason: str) -> None:
        leave_timeout_seconds = self._leave_timeout_seconds
        # Where ranks may leave, the others can go on after a failed operation.
        if leave_timeout_seconds is None and self._broken and not self.ranks_may_leave:
            leave_timeout_seconds = _LEAVE_TIMEOUT_SECONDS
        self._remaining = self.transport.leave(reason, leave_timeout_seconds)
        ends_job = self._leave_timeout_seconds is None and not self.ranks_may_leave
        if self._remaining and ends_job and self.transport.name != "local":
            why = f"{name_ranks(self._remaining)} did not shut down"
            print_line(f"rank {self.transport.rank} ends the job: {why}")
            self.transport.abort(1, f"ended it: {why}")

    def _notify_ready(self, announcements: Sequence[Announcement], now: float) -> None:
        self._execution.notify(Event("mark", "cycle", "", now))
        for rank, announcement in zip(self.transport.ranks, announcements, strict=True):
            for name in self._table.names_in(announcement):
                if name not in self._negotiating:
                    self._negotiating.add(name)
                    self._execution.notify(Event("begin", "negotiate", name, now))
                self._execution.notify(Event("mark", "ready", name, now, rank))

    def _notify_negotiated(self, outcome: CycleOutcome, now: float) -> None:
        for name, *_ in (*outcome.ready, *outcome.refused):
            if name in self._negotiating:
                self._negotiating.remove(name)
                self._execution.notify(Event("end", "negotiate", name, now))
