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

from collectives.errors import MismatchError, PeerError
from collectives.transports import Transport
from collectives.transports.transport import say

from ..agreement import agree, name_ranks
from ..exceptions import HorovodInternalError
from ..fusion import Dense, reduce_alone
from .observer import Observer
from .operation import Operation, StandIn, Work

_PATIENCE_SECONDS: Final = 5.0  # what peers get to leave a job that cannot go on
_LOOK_SECONDS: Final = 0.2  # how often an idle engine looks whether the program has ended


class Engine:
    """Runs operations on one transport until it is closed, or a peer is gone."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.activity = "idle"
        self.stand_in: StandIn | None = None
        self._observers: tuple[Observer, ...] = ()
        self.on_program_end: Callable[[], str] = lambda: "its program ended"
        self._queue: queue.SimpleQueue[Operation | str] = queue.SimpleQueue()
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        self._over: PeerError | None = None
        self._closed = False
        self._failed = False
        self._owner = threading.current_thread()
        # A daemon: no thread of a library keeps a program alive that wants to end.
        self._thread = threading.Thread(target=self._run, name="gtopk-engine", daemon=True)
        self._thread.start()

    def observe(self, observer: Observer) -> None:
        """Tell an observer what happens from now on."""
        self._observers = (*self._observers, observer)

    def ignore(self, observer: Observer) -> None:
        """Tell an observer nothing any more."""
        self._observers = tuple(each for each in self._observers if each != observer)

    def submit(
        self,
        name: str,
        facts: Sequence[str],
        work: Work,
        vote: int = 0,
        *,
        recipe: bytes | None = None,
        fusion: Sequence[Dense] = (),
    ) -> Operation:
        """Queue an operation; every rank must submit the same names in the same order.

        facts:  what must be equal on all ranks besides the name, in words: an error quotes those
                that differ.
        vote:   int64 that may differ; `work` gets every rank's, before it does anything.
        recipe: what a rank that has joined needs to take part, equal on all ranks; None: it cannot.
        fusion: arrays to be reduced before `work` is called; see gtopk/fusion.py.
        Raises ValueError when an operation of this name is still in flight, HorovodInternalError
        after `close`.
        """
        operation = Operation(name, facts, vote, work, recipe, fusion)
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

    def close(self, reason: str, failed: bool = False) -> None:
        """Run what was submitted, tell the peers that this rank leaves, and wait for theirs.

        failed: this rank, or the job, cannot go on: who does not leave soon is not waited for, and
        the job is ended.
        """
        with self._lock:
            self._closed = True
            self._failed = failed
            self._queue.put(reason)
        self._thread.join()

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
        if self._over is None and not self._failed:
            self.transport.leave(reason)
            return
        staying = self.transport.leave(reason, _PATIENCE_SECONDS)
        if staying and self.transport.name != "local":
            say(f"rank {self.transport.rank} ends the job; {name_ranks(staying)} went on")
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
            for dense in operation.fusion:
                reduce_alone(dense, self.transport)
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
