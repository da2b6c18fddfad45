"""Beat: the datagram by which companions tell each other how ranks are.

    byte 0            8        12      16      20      24         32        40
         +------------+--------+-------+-------+-------+----------+---------+------+-------------+
         | "GTKBEAT1" | sender | about | state | bytes | sequence | seconds | text | HMAC-SHA256 |
         +------------+--------+-------+-------+-------+----------+---------+------+-------------+
                                               of the text                          of all before

Little-endian. A beat without the job's secret in its HMAC, or that is no later than the last one of
its sender, is dropped: it is a stranger's, or a copy.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum
from typing import Final, NamedTuple

_FIELDS: Final = struct.Struct("<8sIIIIQd")
_MAGIC: Final = b"GTKBEAT1"
_HMAC_BYTES: Final = 32
_TEXT_BYTES: Final = 600  # a beat fits any link in one packet
BEAT_BYTES: Final = _FIELDS.size + _TEXT_BYTES + _HMAC_BYTES


class State(IntEnum):
    """How a rank is; LOST is said about another rank, the rest by a rank's own companion."""

    ALIVE = 0
    STOPPED = 1
    LEFT = 2  # in good order: nobody needs it any more
    ENDED = 3  # without having left
    LOST = 4  # given up: the job is at its end


class Beat(NamedTuple):
    """What a rank's companion says.

    sequence: grows with each beat of a sender; nanoseconds of its clock, where that is so.
    seconds:  for how long a rank has been stopped, or its end or its loss is past.
    text:     why it ended or is lost.
    """

    sender: int
    about: int
    state: State
    sequence: int
    seconds: float = 0.0
    text: str = ""

    def encode(self, secret: bytes) -> bytes:
        """Return the datagram."""
        text = self.text.encode(errors="replace")[:_TEXT_BYTES]
        head = _FIELDS.pack(
            _MAGIC, self.sender, self.about, self.state, len(text), self.sequence, self.seconds
        )
        return head + text + hmac.digest(secret, head + text, "sha256")

    @classmethod
    def decode(cls, datagram: bytes, secret: bytes) -> Beat | None:
        """Return what a datagram says; None for one that nobody with the secret has made."""
        content, signature = datagram[:-_HMAC_BYTES], datagram[-_HMAC_BYTES:]
        if len(content) < _FIELDS.size or len(datagram) > BEAT_BYTES:
            return None
        if not hmac.compare_digest(signature, hmac.digest(secret, content, "sha256")):
            return None
        magic, sender, about, state, size, sequence, seconds = _FIELDS.unpack_from(content)
        text = content[_FIELDS.size :]
        if magic != _MAGIC or size != len(text) or state not in tuple(State):
            return None
        return cls(sender, about, State(state), sequence, seconds, text.decode(errors="replace"))
