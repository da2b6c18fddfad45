"""Watch: decides which ranks are lost, from the beats that a companion receives or misses.

A beat is a datagram with a rank's state, from one companion to another:

    byte 0            8        12      16      20      24         32        40
         +------------+--------+-------+-------+-------+----------+---------+------+-------------+
         | "GTKBEAT1" | sender | about | state | bytes | sequence | seconds | text | HMAC-SHA256 |
         +------------+--------+-------+-------+-------+----------+---------+------+-------------+
                                               of the text                          of all before

Little-endian. A beat is dropped if its HMAC was not made with the job's secret (another sender), or
if it is not newer than the sender's last one (a copy).

Every rank is watched by log2 of the others:

    a rank tells   rank + 1, rank + 2, rank + 4, ...      modulo the number of ranks: each is
    and watches    rank - 1, rank - 2, rank - 4, ...      watched by log2 of them

Watching starts with a rank's first beat, so a job still runs where a firewall blocks beats. A
companion that could not check for a while (stopped with its rank, or not scheduled) restarts its
peers' timeouts, as it may have missed their beats.

Nothing here communicates, waits or reads a clock.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

_FIELDS: Final = struct.Struct("<8sIIIIQd")
_MAGIC: Final = b"GTKBEAT1"
_HMAC_BYTES: Final = 32
_TEXT_BYTES: Final = 600  # keeps a beat within one packet on any link
BEAT_BYTES: Final = _FIELDS.size + _TEXT_BYTES + _HMAC_BYTES


class State(IntEnum):
    """A rank's state. Any rank may report LOST for another; its own companion sends the rest."""

    ALIVE = 0
    STOPPED = 1
    LEFT = 2  # without a failure: no rank needs it any more
    ENDED = 3  # without having left
    LOST = 4  # dead or silent: the job ends


class Beat(NamedTuple):
    """A message from a rank's companion.

    sequence: grows with each beat of a sender: its monotonic clock in nanoseconds, or the last one
              plus 1 if the clock has not advanced.
    seconds:  how long ago the rank was stopped, ended or lost.
    text:     why it ended or is lost.
    """

    sender: int
    about: int
    state: State
    sequence: int
    seconds: float = 0.0
    text: str = ""

    def encode(self, secret: bytes) -> bytes:
        text = self.text.encode(errors="replace")[:_TEXT_BYTES]
        head = _FIELDS.pack(
            _MAGIC, self.sender, self.about, self.state, len(text), self.sequence, self.seconds
        )
        return head + text + hmac.digest(secret, head + text, "sha256")

    @classmethod
    def decode(cls, datagram: bytes, secret: bytes) -> Beat | None:
        """Parse a datagram; None if it was not signed with the secret."""
        content, signature = datagram[:-_HMAC_BYTES], datagram[-_HMAC_BYTES:]
        if len(content) < _FIELDS.size or len(datagram) > BEAT_BYTES:
            return None
        # Verify before reading any field: anyone can send a datagram to this port.
        if not hmac.compare_digest(signature, hmac.digest(secret, content, "sha256")):
            return None
        magic, sender, about, state, size, sequence, seconds = _FIELDS.unpack_from(content)
        text = content[_FIELDS.size :]
        if magic != _MAGIC or size != len(text) or state not in tuple(State):
            return None
        return cls(sender, about, State(state), sequence, seconds, text.decode(errors="replace"))


_MAX_DELAY_SECONDS: Final = 5.0  # a sequence farther off comes from another host's clock
_MAX_CHECK_GAP: Final = 0.25  # of the timeout: a longer gap between checks restarts timeouts


class Peer(NamedTuple):
    """A rank, its host, and its companion's address; "" if it receives no beats."""

    rank: int
    host: str
    pid: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def distances(size: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... below the number of ranks."""
    distance = 1
    while distance < size:
        yield distance
        distance *= 2


class _PeerState:
    """The last beat from a rank's companion; times are on the caller's clock."""

    def __init__(self) -> None:
        self.sequence = -1
        self.received: float | None = None
        self.stopped: float | None = None  # since when it is stopped
        self.warned = False
        self.left = False


class Watch:
    """One companion's view of all ranks.

    messages: to print; the caller removes printed ones.
    lost: the lost ranks in order of loss, each with its reason; may include this rank.
    lost_at: the time of each loss, as far as known.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        timeout_seconds: float,
        warning_seconds: float,
        now: float,
    ) -> None:
        self.rank = rank
        self.peers = peers
        self._own = peers[rank]
        size = len(peers)
        self.targets = [(rank + distance) % size for distance in distances(size)]
        self.watches = [(rank - distance) % size for distance in distances(size)]
        self.messages: list[str] = []
        self.lost: dict[int, str] = {}
        self.lost_at: dict[int, float] = {}
        self._timeout_seconds = timeout_seconds
        # A warning must come well before the timeout to be of use.
        self._warning_seconds = min(warning_seconds, timeout_seconds / 2)
        self._states = [_PeerState() for _ in peers]
        self._begun = self._checked_at = now
        self._warned_of_unwatched = False

    def receive(self, beat: Beat, now: float) -> None:
        """Process a beat from another companion."""
        if not (beat.sender < len(self.peers) and beat.about < len(self.peers)):
            return
        state = self._states[beat.sender]
        if beat.sender == self.rank or beat.sequence <= state.sequence:
            return
        state.sequence = beat.sequence
        if beat.state is State.LOST:
            by = f"declared lost by {self.peers[beat.sender]}: " if beat.about == self.rank else ""
            self._mark_lost(beat.about, by + beat.text, self._sent_at(beat, now) - beat.seconds)
            return
        state.received = now
        if beat.state is State.STOPPED:
            # Count from the first such beat: the companion of a stopped rank keeps sending them.
            state.stopped = now if state.stopped is None else state.stopped
        elif beat.state is State.LEFT:
            state.left = True
        elif beat.state is State.ENDED:
            self._mark_lost(beat.sender, beat.text, self._sent_at(beat, now) - beat.seconds)
        else:
            if state.warned:
                self.messages.append(f"{self.peers[beat.sender]} responds again")
            state.stopped, state.warned = None, False

    def check_timeouts(self, now: float, own_is_stopped: bool) -> None:
        """Find ranks with overdue beats."""
        gap, self._checked_at = now - self._checked_at, now
        if own_is_stopped or gap > _MAX_CHECK_GAP * self._timeout_seconds:
            for state in self._states:
                state.received = None if state.received is None else now
                state.stopped = None if state.stopped is None else now
            return
        for rank in self.watches:
            state = self._states[rank]
            if state.received is None or state.left or rank in self.lost:
                continue
            since = state.received if state.stopped is None else state.stopped
            if now - since > self._timeout_seconds:
                self._mark_lost(rank, self._describe_loss(rank, now, since), now)
            elif now - since > self._warning_seconds and not state.warned:
                state.warned = True
                self.messages.append(
                    f"{self.peers[rank]}: {self._describe_loss(rank, now, since)}; the job ends "
                    f"when this has lasted {self._timeout_seconds:g} s (GTOPK_HEARTBEAT_TIMEOUT)"
                )
        if not self._warned_of_unwatched and now - self._begun > self._warning_seconds:
            self._warned_of_unwatched = True
            self._warn_of_unwatched()

    def _describe_loss(self, rank: int, now: float, since: float) -> str:
        if self._states[rank].stopped is not None:
            return f"stopped for {now - since:.1f} s (SIGSTOP?)"
        received = [self._states[other].received or self._begun for other in self.watches]
        cause = "its host or its network"
        # If all are silent at once, this host itself may be cut off.
        if len(received) > 1 and max(received) < now - self._warning_seconds:
            cause += f", or that of {self._own}, which receives no heartbeats at all,"
        return f"silent for {now - since:.1f} s: {cause} is down"

    def _sent_at(self, beat: Beat, now: float) -> float:
        """Return when a beat was sent: on the same host, its sequence is the time.

        It may have waited in the socket until this companion was scheduled.
        """
        sent = beat.sequence / 1e9
        same_host = self.peers[beat.sender].host == self._own.host
        return sent if same_host and 0 <= now - sent < _MAX_DELAY_SECONDS else now

    def lost_before(self, when: float) -> int | None:
        """Return the other rank that was lost first, if before `when`; else None."""
        others = {rank: at for rank, at in self.lost_at.items() if rank != self.rank and at < when}
        return min(others, key=others.__getitem__, default=None)

    def _mark_lost(self, rank: int, why: str, when: float) -> None:
        # A report may arrive after the rank has left, and then no longer matters.
        if not self._states[rank].left:
            self.lost.setdefault(rank, why)
            self.lost_at.setdefault(rank, when)

    def _warn_of_unwatched(self) -> None:
        """Add a message about ranks that are not watched because no beat came from them."""
        unwatched = [
            str(self.peers[rank]) for rank in self.watches if self._states[rank].received is None
        ]
        if unwatched:
            self.messages.append(
                f"{self._own} receives no heartbeats from {', '.join(unwatched)} and cannot "
                "detect if it hangs; allow UDP between the hosts or set GTOPK_INTERFACE"
            )
