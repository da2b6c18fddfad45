"""The transport over torch.distributed's gloo: point-to-point messages on its own group.

Gloo needs an upper bound for a message's size from the receiver, sends it only once a receive is
posted, and cannot give up a wait without giving up the whole group. So one thread per peer receives
everything from it into buffers posted ahead, and puts it into the mailbox where the streams wait.
The thread also notices at once that a peer has left or died:

    header            first piece                   further pieces, if any
    tag    size       up to 256 KiB                 256 KiB each but the last
    i64    i64        u8 [min(size, 256 KiB)]       u8 [...]

Each peer has several small buffers, because the notice that a buffer is posted again queues behind
outgoing messages. With one buffer, or one for the whole message, two ranks that swap messages over
a slow link would send them one after the other.

Waiting costs no CPU time: the threads sleep in gloo.

Messages are in host memory, even beside a process group over NCCL; the staged transport sends GPU
messages over gloo.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from ..environment import whole_number
from ..errors import PeerError, PeerTimeoutError
from ..vector import Array
from .carrier import Carrier, Mailbox
from .departure import DepartureNotice
from .reductions import loses_nan
from .rendezvous import (
    Start,
    StoreCounter,
    agree_on_start,
    call_within,
    connect,
    import_torch,
    waited_error,
)
from .transport import Transport, end_process, print_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

T = TypeVar("T")

PIECE_BYTES: Final = 1 << 18  # of a message; the first one follows its header
# From this size per rank on, gloo's own allreduce is faster, twice as fast on one host: it is a
# ring whose 2 (P - 1) messages of 1/P of the array cost a latency each, with no Python in between.
# On 4 and 8 emulated hosts it is level at this size with 15 ms of latency, and ahead with less.
NATIVE_BYTES: Final = 1 << 18
_FULL_SPEED_BYTES: Final = 1 << 23  # 4 MB take 1.1 ns a byte between two ranks, 8 and 16 MB 0.9
_HEADER: Final = struct.Struct("<qq")
_PIECES: Final = 0  # gloo's tag
_POSTED: Final = 4  # buffers per peer
_DEPARTURE, _ABORT, _REDUCED = -1, -2, -3  # tags, in header or mailbox, that no stream has
_FOREVER: Final = timedelta(days=365)
_GRACE_SECONDS: Final = 1.0  # for the last messages to be sent
_NOTHING: Final = np.empty(0, np.uint8)


class TorchDistributedTransport(Carrier):
    """The ranks that meet at a torch.distributed store.

    Call `leave` before the process ends, as a world does. A thread that sleeps in gloo wakes when
    its peer goes. If Python is ending by then, CPython before 3.14 unwinds the thread when it asks
    for the interpreter; a torch destructor turns that into std::terminate, and the process ends
    with SIGABRT.
    """

    name = "torch.distributed"
    mailbox: Mailbox
    counts_allreduce = False
    full_speed_bytes = _FULL_SPEED_BYTES

    def __init__(
        self,
        store: Store,
        rank: int,
        hosts: Sequence[str],
        timeout_seconds: float = 600.0,
        start_timeout_seconds: float = 120.0,
    ) -> None:
        """Connect to the other ranks; hosts: every rank's host name, in rank order."""
        torch = import_torch()
        size = len(hosts)
        super().__init__(rank, size)
        self._torch = torch
        self.store = store  # where the ranks have met
        self._hosts = hosts
        self._neighbours = [peer for peer in range(size) if hosts[peer] == hosts[rank]]
        start_timeout = timedelta(seconds=start_timeout_seconds)
        # This timeout is only for connecting: every later wait sets its own.
        self._group: Any = torch.distributed.ProcessGroupGloo(store, rank, size, start_timeout)
        self.timeout_seconds = timeout_seconds
        self.mailbox = Mailbox(timeout_seconds)
        self._departing: list[Work] | None = None
        self._in_flight: dict[int, list[Work]] = {}  # gloo drops a message when its Work is freed
        self._posted: dict[int, deque[tuple[Work, Tensor]]] = {}
        self._numbers = itertools.count()
        self._posting = threading.Lock()  # keeps the pieces of a message together
        self._listeners = {
            peer: threading.Thread(
                target=self._listen, args=(peer,), name=f"gtopk-from-{peer}", daemon=True
            )
            for peer in range(size)
            if peer != rank
        }
        for listener in self._listeners.values():
            listener.start()

    def _listen(self, source: int) -> None:
        """Put a peer's messages into the mailbox, until it announces its departure or is gone."""
        try:
            notice = self._receive_all(source)
        except Exception as error:
            reason = str(error).split("] ")[-1].split(". ")[0]  # gloo's, without file and advice
            reason = f"its connection is lost: {reason}; host {self._hosts[source]}"
            notice = DepartureNotice({}, reason, lost=True)
        # Before the wake, so that a woken thread finds the notice.
        self.note(source, notice)
        self.mailbox.wake()

    def _receive_all(self, source: int) -> DepartureNotice:
        posted = deque(
            self._post_receive(
                source, self._torch.empty(_HEADER.size + PIECE_BYTES, dtype=self._torch.uint8)
            )
            for _ in range(_POSTED)
        )
        self._posted[source] = posted  # keep as long as the group, which may still fill them
        lost: RuntimeError | None = None
        while True:
            # -1: no header yet, so that a message of 0 bytes also takes a piece.
            message, begin, filled = _NOTHING, _HEADER.size, -1
            while filled < message.size:
                if not posted and lost:
                    raise lost
                work, buffer = posted.popleft()
                # Gloo cannot give up a wait without the whole group; the peer's notice or loss ends
                # it.
                work.wait(_FOREVER)
                inbox: Array = buffer.numpy()
                if filled < 0:
                    tag, size = _HEADER.unpack_from(inbox.data)
                    message, filled = np.empty(size, np.uint8), 0
                piece = message[filled : filled + PIECE_BYTES]
                piece[:] = inbox[begin : begin + piece.size]
                begin, filled = 0, filled + piece.size
                try:
                    # Only after copying the bytes out: gloo may fill the buffer at once.
                    posted.append(self._post_receive(source, buffer))
                except RuntimeError as error:  # the peer is gone; still take what it has sent
                    lost = error
            if tag == _DEPARTURE:
                return DepartureNotice.decode(message)
            if tag == _ABORT:
                reason = message[1:].tobytes().decode(errors="replace")
                activity = f" in {self._activity}" if self._activity else ""
                print_line(
                    f"rank {self.rank} ends{activity}, as rank {source} ended the job{reason}"
                )
                end_process(int(message[0]))
            self.mailbox.put(tag, source, message)

    def _post_receive(self, source: int, buffer: Tensor) -> tuple[Work, Tensor]:
        return self._group.recv([buffer], source, _PIECES), buffer

    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        if to == self.rank:
            self.mailbox.put(stream.tag, to, np.array(message))
            return lambda: None
        try:
            works = self._post(stream.tag, message, to)
        except RuntimeError as error:
            raise self._explain(stream, to, error) from None
        number = next(self._numbers)
        self._in_flight[number] = works

        def finish() -> None:
            begun = time.monotonic()
            try:
                for work in works:
                    work.wait(timedelta(seconds=self.timeout_seconds))
            except RuntimeError as error:
                if time.monotonic() - begun < self.timeout_seconds:
                    raise self._explain(stream, to, error) from None
                raise PeerTimeoutError(
                    f"rank {self.rank} has waited {self.timeout_seconds:.3g} s for rank {to} to "
                    f"take a message in {stream.activity}"
                ) from None
            finally:
                self._in_flight.pop(number, None)
                stream.traffic.count_wait(time.monotonic() - begun)

        return finish

    def _post(self, tag: int, message: Array, to: int) -> list[Work]:
        first = message[:PIECE_BYTES]
        size = _HEADER.size + first.size
        # Name the CPU, as the script may have set another default device.
        head = self._torch.empty(size, dtype=self._torch.uint8, device="cpu")
        outbox: Array = head.numpy()
        _HEADER.pack_into(outbox.data, 0, tag, message.size)
        outbox[_HEADER.size :] = first
        pieces = [head]
        if message.size > PIECE_BYTES:
            writable = message if message.flags.writeable else message.copy()  # torch requires it
            # No copy: the caller keeps the message unchanged until it is sent; see
            # `Endpoint.send`.
            pieces += self._torch.from_numpy(writable[PIECE_BYTES:]).split(PIECE_BYTES)
        with self._posting:
            works = [self._group.send([piece], to, _PIECES) for piece in pieces]
        return works

    def _explain(self, stream: Transport, peer: int, error: Exception) -> PeerError:
        """Return the error about an unreachable peer, with the peer's own reason if it gave one.

        Its notice may still be on the way to the listener.
        """
        self._listeners[peer].join(_GRACE_SECONDS)
        return PeerError(stream.missing(peer) or f"rank {peer} cannot be reached: {error}")

    def allreduce(self, array: Array, reduction: str = "sum") -> None:
        """Reduce in place with gloo's own allreduce if that is faster.

        Its messages cannot be counted; they count by formula, as those of a bandwidth-optimal
        allreduce.
        """
        if self.size == 1:
            return
        # torch 2.1's gloo lacks bfloat16. It sums float16 in float32, as we do.
        uses_messages = array.dtype not in (np.int32, np.int64, np.float16, np.float32, np.float64)
        uses_messages |= loses_nan(reduction, array.dtype.name)
        if uses_messages or array.nbytes < self.native_bytes():
            super().allreduce(array, reduction)
            return
        self.barrier()  # all ranks are here: gloo's call could not be given up if a rank left
        options = self._torch.distributed.AllreduceOptions()
        options.reduceOp = getattr(self._torch.distributed.ReduceOp, reduction.upper())
        options.timeout = _FOREVER  # the mailbox's timeout ends the wait
        try:
            # Gloo's thread puts an empty reply into the mailbox, so that this wait also has the
            # mailbox's timeout and ends when a peer leaves.
            work = self._group.allreduce([self._torch.from_numpy(array)], options)
            reduced = work.get_future()
            reduced.add_done_callback(lambda done: self.mailbox.put(_REDUCED, self.rank, _NOTHING))
            self.mailbox.pop_reply(self, _REDUCED)
            while not reduced.done():  # that was the reply of a call that had timed out
                self.mailbox.pop_reply(self, _REDUCED)
            # The call has ended; `wait` only raises its error.
            work.wait()
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise self._explain_any(error) from None
        self.traffic.count_allreduce(array.size, array.itemsize, self.size)

    def native_bytes(self) -> int:
        return sys.maxsize if self.handles_messages else NATIVE_BYTES * self.size

    def _explain_any(self, error: Exception) -> PeerError:
        """Return the error about the peer whose loss ended an allreduce, once it is known."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while (missing := self.missing(None)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return PeerError(missing or f"rank {self.rank} failed in {self.activity}: {error}")

    def announce_departure(self, reason: str) -> None:
        if self._departing is None:
            self._departing = self._send_to_all(_DEPARTURE, self.departure_notice(reason).encode())

    def _send_to_all(self, tag: int, message: Array) -> list[Work]:
        """Send a last message to all remaining peers."""
        works: list[Work] = []
        for peer in self._listeners:
            try:
                works += self._post(tag, message, peer)
            except RuntimeError:  # this peer is gone
                continue
        return works

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        remaining = super().leave(reason, leave_timeout_seconds)
        _wait_for_last_sends(self._departing or [])
        return remaining

    def abort(self, exit_code: int, reason: str = "") -> None:
        text = f": it {reason}" if reason else ""
        message = np.frombuffer(bytes([exit_code % 256]) + text.encode(), np.uint8)
        # Send the reason first: gloo's threads, which send it, end with the process.
        _wait_for_last_sends(self._send_to_all(_ABORT, message))
        end_process(exit_code)

    def neighbours(self) -> list[int]:
        return self._neighbours

    def counter_on(self, stream: Transport) -> StoreCounter:
        return StoreCounter(self.store, self.name_counter(stream), stream)

    def own_library(self) -> str:
        return f"gloo of torch {self._torch.__version__}"


def open_torch_distributed(
    timeout_seconds: float, start_timeout_seconds: float, ranks: Sequence[int] | None = None
) -> TorchDistributedTransport:
    """Join the ranks of the default process group, or those of torchrun's environment.

    ranks: a subset of them; None: all.
    Creates its own gloo group beside the default one, which may have any backend, so that the
    script's messages cannot mix with gtopk's.
    """
    distributed = import_torch().distributed
    if distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()
    else:
        variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        absent = [name for name in variables if not os.environ.get(name)]
        if absent:
            raise RuntimeError(
                "transport 'torch.distributed' needs a process group, or torchrun's environment; "
                f"{', '.join(absent)} not set: start the ranks with torchrun"
            )
        rank, size = whole_number("RANK", None, least=0), whole_number("WORLD_SIZE", None)
        store = connect(
            os.environ["MASTER_ADDR"],
            whole_number("MASTER_PORT", None, least=0),
            rank,
            start_timeout_seconds,
            hosted=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    return join_at(store, rank, size, timeout_seconds, start_timeout_seconds, ranks)


def join_at(
    store: Store,
    rank: int,
    size: int,
    timeout_seconds: float,
    start_timeout_seconds: float,
    ranks: Sequence[int] | None = None,
) -> TorchDistributedTransport:
    """Join the ranks that meet at a store, which may serve others as well.

    ranks: a subset, the same on each of its ranks; the others need not come. None: all.
    Other ranks, or these, may have met there before: a roll call gives these a token of their own.
    """
    prefix_store, prefix = import_torch().distributed.PrefixStore, "gtopk"
    if ranks is not None:
        prefix += f"-of-{'-'.join(map(str, ranks))}"
        rank, size = ranks.index(rank), len(ranks)
    store = prefix_store(prefix, store)
    begun = time.monotonic()

    def meet(start: Start) -> TorchDistributedTransport:
        return TorchDistributedTransport(
            prefix_store(start.token, store),
            rank,
            start.hosts,
            timeout_seconds,
            start_timeout_seconds,
        )

    try:
        # A request to a frozen store, or to a lost host, waits for ever.
        start = call_within(
            start_timeout_seconds + _GRACE_SECONDS,
            lambda: agree_on_start(store, rank, size, start_timeout_seconds),
        )
        return call_within(start_timeout_seconds + _GRACE_SECONDS, lambda: meet(start))
    except TimeoutError:
        raise waited_error(rank, size, begun) from None


def _wait_for_last_sends(works: list[Work]) -> None:
    """Wait briefly for the last messages to be sent."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for work in works:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        try:
            work.wait(timedelta(seconds=remaining))
        except RuntimeError:  # that peer is gone
            continue
