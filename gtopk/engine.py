"""The engine: one thread that owns the transport and runs operations in the order submitted.

Before an operation moves data, every rank says in one small message what it is about to do. When
they do not all say the same, the operation fails on all of them, with both sides named, and the
next one goes on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from collectives.errors import CollectiveError, MismatchError, PeerError, PeerTimeoutError
from collectives.transports import Traffic, Transport
from collectives.transports.transport import say

from .agreement import agree, name_ranks
from .exceptions import HorovodInternalError

_PATIENCE_SECONDS: Final = 5.0  # what peers get to leave a job that cannot go on
_LOOK_SECONDS: Final = 0.2  # how often an idle engine looks whether the program has ended

# What an operation does: it gets the transport and every rank's vote, in rank order.
Work = Callable[[Transport, list[int]], Any]


class Operation:
    """Something all ranks do together, and its outcome.

    queue_seconds: how long it waited for the operations before it.
    agree_seconds: how long this rank took, and waited, to agree with the others.
    traffic:       what this rank sent for it, agreement included.
    """

    def __init__(self, name: str, facts: Sequence[str], vote: int, work: Work) -> None:
        self.name = name
        self.facts = facts
        self.vote = vote
        self.work = work
        self.submitted = time.perf_counter()
        self.queue_seconds = 0.0
        self.agree_seconds = 0.0
        self.traffic = Traffic()
        self.result: Any = None
        self.error: BaseException | None = None
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._finished.is_set()

    def wait(self) -> Any:
        """Return the result, or raise HorovodInternalError (or what `work` raised)."""
        self._finished.wait()
        if isinstance(self.error, PeerTimeoutError):
            raise HorovodInternalError(
                f"{self.error}; a larger GTOPK_TIMEOUT (seconds) waits longer"
            ) from None
        if isinstance(self.error, CollectiveError):
            raise HorovodInternalError(str(self.error)) from None
        if self.error is not None:
            raise self.error
        return self.result

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome."""
        self.result, self.error = result, error
        self._finished.set()


class Engine:
    """Runs operations on one transport until it is closed, or a peer is gone."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.activity = "idle"
        self.on_program_end: Callable[[], str] = lambda: "its program ended"
        self._queue: queue.SimpleQueue[Operation | str] = queue.SimpleQueue()
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        self._over: PeerError | None = None
        self._closed = False
        self._failed = False
        self._patience_seconds: float | None = None
        self._staying: list[int] = []
        self._owner = threading.current_thread()
        # A daemon: no thread of a library keeps a program alive that wants to end.
        self._thread = threading.Thread(target=self._run, name="gtopk-engine", daemon=True)
        self._thread.start()

    def submit(self, name: str, facts: Sequence[str], work: Work, vote: int = 0) -> Operation:
        """Queue an operation; every rank must submit the same names in the same order.

        facts: what must be equal on all ranks besides the name, in words: an error quotes those
               that differ.
        vote:  what may differ; `work` gets every rank's, before it does anything.
        Raises ValueError when an operation of this name is still in flight, HorovodInternalError
        after `close`.
        """
        operation = Operation(name, facts, vote, work)
        with self._lock:
            if self._closed:
                raise HorovodInternalError(
                    f"gtopk has been shut down: '{name}' cannot begin; after another init(), make "
                    "the optimizer anew"
                )
            if name in self._pending:
                raise ValueError(
                    f"'{name}' is still in flight: requested to reduce, gather or broadcast a "
                    "tensor with the same name as another tensor that is currently being "
                    "processed; synchronize it first, or pass another name"
                )
            self._pending.add(name)
            self._queue.put(operation)
        return operation

    @property
    def failure(self) -> PeerError | None:
        """Return why it takes part no more; None while it can go on."""
        return self._over

    def close(
        self, reason: str, failed: bool = False, patience_seconds: float | None = None
    ) -> list[int]:
        """Run what was submitted, tell the peers that this rank leaves, and wait for theirs.

        failed: this rank, or the job, cannot go on: who does not leave soon is not waited for, and
        the job is ended.
        patience_seconds: wait so long instead, end nothing, and return who has not left.
        """
        with self._lock:
            self._closed = True
            self._failed = failed
            self._patience_seconds = patience_seconds
            self._queue.put(reason)
        self._thread.join()
        return self._staying

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                # The program may have ended while a thread of its own keeps the process alive.
                if threading.main_thread().is_alive() or self._owner.is_alive():
                    continue
                item = self.on_program_end()
            if isinstance(item, str):
                self._refuse_the_rest()
                self._leave(item)
                return
            self._execute(item)

    def _leave(self, reason: str) -> None:
        patience_seconds, ends_the_job = self._patience_seconds, self._patience_seconds is None
        if ends_the_job and (self._failed or self._over is not None):
            patience_seconds = _PATIENCE_SECONDS
        self._staying = self.transport.leave(reason, patience_seconds)
        if self._staying and ends_the_job and self.transport.name != "local":
            say(f"rank {self.transport.rank} ends the job; {name_ranks(self._staying)} went on")
            self.transport.abort(1)

    def _refuse_the_rest(self) -> None:
        """Fail what another thread submitted while the program ended."""
        with self._lock:
            self._closed = True
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, Operation):
                item.finish(error=PeerError("gtopk has been shut down"))

    def _execute(self, operation: Operation) -> None:
        operation.queue_seconds = time.perf_counter() - operation.submitted
        self.activity = operation.name
        self.transport.traffic.take()
        result: Any = None
        error: BaseException | None = None
        try:
            if self._over is not None:
                raise self._over
            with self.transport.operation(operation.name):
                try:
                    result = self._agree_and_work(operation)
                except MismatchError as disagreement:
                    error = disagreement  # on every rank, which thus completes the operation
        except BaseException as raised:
            error = raised
            self._give_up(operation, raised)
        operation.traffic = self.transport.traffic.take()
        self.activity = "idle"
        with self._lock:
            self._pending.discard(operation.name)
        operation.finish(result, error)

    def _agree_and_work(self, operation: Operation) -> Any:
        begun = time.perf_counter()
        votes = agree(self.transport, [operation.name, *operation.facts], operation.vote)
        operation.agree_seconds = time.perf_counter() - begun
        # A sum that overflows is found by its result; NumPy's warning would name this line.
        with np.errstate(over="ignore", invalid="ignore"):
            return operation.work(self.transport, votes)

    def _give_up(self, operation: Operation, error: BaseException) -> None:
        """Take part no more: the peers are inside an operation that this rank did not complete.

        Going on with the next one would pair its messages with theirs of this one.
        """
        if self._over is None:
            cause = error if isinstance(error, PeerError) else None
            text = f"failed in {operation.name}: {type(error).__name__}: {error}"
            self._over = cause or PeerError(f"this rank {text}")
            self.transport.resign(str(error) if cause else text)
