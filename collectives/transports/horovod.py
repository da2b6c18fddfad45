"""The transport over Horovod: its alltoall carries the messages.

An alltoall needs every rank, a message only two. So a thread on each rank calls one alltoall after
another, the ticks; a tick carries everything queued for each peer since the last one:

    awake  done   part of the byte stream from this rank to that peer, up to a limit:
    u8     u8     tag i64, size i64, the message's bytes; tag ...

Ticks follow each other at once while any rank is awake (waits for a message, or has some to send).
While all ranks compute they slow down, so that no rank waits long for one that takes no part.
Channels and subsets share the ticks; tags tell them apart. The ticks end together, on the first one
in which all ranks are done: each has departed, and knows that all others have.

Horovod ends on all ranks as soon as one shuts it down. So an operation ends on all ranks together:
otherwise a rank that has finished could end Horovod while others still need it.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import numpy as np

from ..vector import Array
from .carrier import Carrier, Mailbox
from .departure import DepartureNotice
from .polling import wait_until
from .transport import Transport, end_process

_HEADER: Final = struct.Struct("<qq")
_DEPARTURE: Final = -1  # not the tag of any stream
_FLAG_BYTES: Final = 2
TICK_BYTES: Final = 1 << 30  # for all peers together, as Horovod counts in int32
_opened = itertools.count()  # equal on all ranks, which open their transports in the same order
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.05


class HorovodTransport(Carrier):
    """The ranks of an initialized Horovod.

    horovod: the module horovod.torch; version: Horovod's.
    """

    name = "horovod"
    mailbox: Mailbox

    def __init__(self, horovod: Any, version: str, timeout_seconds: float = 600.0) -> None:
        import torch

        self._torch = torch
        self._horovod = horovod
        self._version = version
        self._tick_name = f"gtopk-{next(_opened)}.tick"
        super().__init__(self._horovod.rank(), self._horovod.size())
        self.timeout_seconds = timeout_seconds
        self.mailbox = Mailbox(timeout_seconds)
        self._outgoing: list[list[Array]] = [[] for _ in range(self.size)]
        self._queued_bytes, self._carried_bytes = [0] * self.size, [0] * self.size
        self._incoming = [_Incoming() for _ in range(self.size)]
        self._queue_lock = threading.Lock()
        self._awake = threading.Event()
        self._has_departed = False
        self._ticker = threading.Thread(target=self._run_ticks, name="gtopk-ticks", daemon=True)
        self._ticker.start()
        hosts = self.gather_object(socket.gethostname())
        self._neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        self._queue(stream.tag, message, to)
        return lambda: None  # the message has been copied

    def _queue(self, tag: int, message: Array, to: int) -> None:
        if to == self.rank:
            self.mailbox.put(tag, to, np.array(message))
            return
        header = np.frombuffer(_HEADER.pack(tag, message.size), np.uint8)
        with self._queue_lock:
            self._outgoing[to].append(np.concatenate([header, message]))
            self._queued_bytes[to] += header.size + message.size
        self._awake.set()

    def conclude_on(self, stream: Transport) -> None:
        peers = [rank for rank in stream.ranks if rank != self.rank]
        for peer in peers:
            self._queue(stream.tag, np.empty(0, np.uint8), peer)
        ends = {peer: self._queued_bytes[peer] for peer in peers}
        # Wait for the peers' empty messages, so that none ends the operation before all arrive.
        for peer in peers:
            self.mailbox.pop(stream, peer)

        def carried() -> Literal[True] | None:
            all_carried = all(self._carried_bytes[peer] >= end for peer, end in ends.items())
            return all_carried or None

        wait_until(carried, stream, peers, self.timeout_seconds)

    def receive_on(self, stream: Transport, source: int) -> Array:
        self._awake.set()
        return super().receive_on(stream, source)

    def _run_ticks(self) -> None:
        """Tick until all ranks are done or Horovod has ended."""
        pause_seconds = _SHORTEST_PAUSE_SECONDS
        try:
            while True:
                anybody_awake, all_done = self._tick()
                if all_done:
                    return
                if anybody_awake:
                    pause_seconds = _SHORTEST_PAUSE_SECONDS
                else:
                    self._awake.wait(pause_seconds)
                    pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        except Exception as error:
            lost = DepartureNotice({}, f"Horovod has ended: {str(error).splitlines()[0]}")
            for peer in range(self.size):
                if peer != self.rank:
                    # Keep the reason of peers that have announced their departure.
                    self._left.setdefault(peer, lost)
            self.mailbox.wake()

    def _tick(self) -> tuple[bool, bool]:
        """Exchange queued messages; return whether any rank is awake, and whether all are done."""
        # Clear before reading the queues: a message queued from here on sets it again and skips
        # the pause.
        self._awake.clear()
        done = self._has_departed and len(self._left) >= self.size - 1
        limit = TICK_BYTES // self.size
        with self._queue_lock:
            parts = [_take(queue, limit) for queue in self._outgoing]
            sending = any(self._outgoing) or any(part.size for part in parts)
        awake = sending or self.mailbox.has_waiters
        flags = np.array([awake, done and not sending], np.uint8)
        blocks = [np.concatenate([flags, part]) for part in parts]
        received, splits = self._horovod.alltoall(
            self._torch.from_numpy(np.concatenate(blocks)),
            splits=self._torch.tensor([block.size for block in blocks], dtype=self._torch.int32),
            name=self._tick_name,
        )
        for peer, part in enumerate(parts):
            self._carried_bytes[peer] += part.size
        ends = np.cumsum(splits.numpy())[:-1]
        received_blocks = np.split(received.numpy(), ends)
        for source, block in enumerate(received_blocks):
            for tag, message in self._incoming[source].feed(block[_FLAG_BYTES:]):
                if tag == _DEPARTURE:
                    self.note(source, DepartureNotice.decode(message))
                    self.mailbox.wake()
                else:
                    self.mailbox.put(tag, source, message)
        return any(block[0] for block in received_blocks), all(
            block[1] for block in received_blocks
        )

    def announce_departure(self, reason: str) -> None:
        if self._has_departed:
            return
        notice = self.departure_notice(reason).encode()
        for peer in range(self.size):
            if peer != self.rank:
                self._queue(_DEPARTURE, notice, peer)
        # Set after queueing the notices: a tick that found this rank done earlier would be the last
        # one.
        self._has_departed = True

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        remaining = super().leave(reason, leave_timeout_seconds)
        if not remaining:
            self._ticker.join()  # the last ticks tell the others that this rank is done
        return remaining

    def abort(self, exit_code: int, reason: str = "") -> None:
        """End this process; mpirun and horovodrun then end the others."""
        end_process(exit_code)

    def neighbours(self) -> list[int]:
        return self._neighbours

    def own_library(self) -> str:
        return f"Horovod {self._version}"


class _Incoming:
    """The byte stream from one peer, which ticks may split anywhere."""

    def __init__(self) -> None:
        self._buffered: list[Array] = []
        self._buffered_bytes = 0
        self._needed_bytes = _HEADER.size

    def feed(self, part: Array) -> Iterator[tuple[int, Array]]:
        """Add bytes; yield the tag and content of each complete message."""
        if part.size:
            self._buffered.append(part)
            self._buffered_bytes += part.size
        # Join the parts only once a message is complete: joining at every tick would copy a long
        # one many times.
        while self._buffered_bytes >= self._needed_bytes:
            whole = np.concatenate(self._buffered)  # a copy, which the message may keep
            tag, size = _HEADER.unpack_from(whole.data)
            self._needed_bytes = _HEADER.size + size
            if whole.size < self._needed_bytes:
                self._buffered = [whole]
                return
            yield tag, whole[_HEADER.size : self._needed_bytes].copy()
            rest = whole[self._needed_bytes :]
            self._buffered, self._buffered_bytes = [rest], rest.size
            self._needed_bytes = _HEADER.size


def _take(queue: list[Array], limit: int) -> Array:
    """Remove up to `limit` bytes from the front of a queue."""
    taken: list[Array] = [np.empty(0, np.uint8)]
    room = limit
    while queue and room:
        first = queue.pop(0)
        taken.append(first[:room])
        if first.size > room:
            queue.insert(0, first[room:])
        room -= taken[-1].size
    return np.concatenate(taken)


def open_horovod(timeout_seconds: float) -> HorovodTransport:
    """Join the ranks of Horovod; initialize it if needed."""
    try:
        import horovod
        import horovod.torch
    except ImportError as error:
        raise ImportError(
            f"transport 'horovod' needs Horovod with its torch extension ({error}): "
            "HOROVOD_WITH_PYTORCH=1 pip install horovod"
        ) from error
    if not horovod.torch.is_initialized():
        horovod.torch.init()
    return HorovodTransport(horovod.torch, horovod.__version__, timeout_seconds)
