"""Channel: messages between two that know one secret; what anybody else writes is an error.

    each     nonce 32                                     random, so that nothing can be replayed
    message  length 8 | mark 32 | content | mark 32

A mark is HMAC-SHA256 of who sends, the message's number, and its length or its content, under a key
made of the secret and both nonces. The length is believed, and room made for the content, only
after its mark was right. Contents are not hidden from who can listen.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Final

_NONCE_BYTES: Final = 32
_MARK_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<Q")
_WHO: Final = struct.Struct("<?Qs")  # whether by the one that accepted, the number, the part
_REPLY_SECONDS: Final = 10.0  # for what takes a peer no time to say


class ChannelError(ConnectionError):
    """What came is not from one that knows the secret, or it was changed on the way."""


class Channel:
    """One end of a connection; the other has the same secret.

    accepted: whether this end took the call, rather than made it.
    Raises ChannelError or TimeoutError, the connection closed, where the other end shows no nonce.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, accepted: bool) -> None:
        self._connection = connection
        self._accepted = accepted
        self._sent = self._received = 0
        mine = secrets.token_bytes(_NONCE_BYTES)
        try:
            connection.settimeout(_REPLY_SECONDS)
            connection.sendall(mine)
            other = self._read(_NONCE_BYTES, time.monotonic() + _REPLY_SECONDS)
        except BaseException:
            connection.close()
            raise
        nonces = other + mine if accepted else mine + other
        self._key = hmac.digest(secret, b"gtopk channel" + nonces, "sha256")

    def send(self, content: bytes) -> None:
        """Send a message."""
        length = _LENGTH.pack(len(content))
        marks = [
            self._mark(self._accepted, self._sent, part, text)
            for part, text in ((b"l", length), (b"c", content))
        ]
        self._sent += 1
        self._connection.settimeout(None)
        self._connection.sendall(b"".join([length, marks[0], content, marks[1]]))

    def receive(self, most_bytes: int | None = None, *, patiently: bool = True) -> bytes:
        """Return the next message.

        patiently: wait for it as long as it takes; else for 10 seconds.
        Raises ChannelError for one that the other end has not sent, or that is longer.
        """
        deadline = None if patiently else time.monotonic() + _REPLY_SECONDS
        length = self._read(_LENGTH.size, deadline)
        self._check(b"l", length, deadline)
        (size,) = _LENGTH.unpack(length)
        if most_bytes is not None and size > most_bytes:
            raise ChannelError(f"a message may have {most_bytes} bytes here, got {size}")
        content = self._read(size, deadline)
        self._check(b"c", content, deadline)
        self._received += 1
        return content

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _check(self, part: bytes, text: bytes, deadline: float | None) -> None:
        expected = self._mark(not self._accepted, self._received, part, text)
        if not hmac.compare_digest(self._read(_MARK_BYTES, deadline), expected):
            raise ChannelError("the other end does not know the secret, or somebody is between")

    def _mark(self, by_accepted: bool, number: int, part: bytes, text: bytes) -> bytes:
        return hmac.digest(self._key, _WHO.pack(by_accepted, number, part) + text, "sha256")

    def _read(self, size: int, deadline: float | None) -> bytes:
        content = bytearray()
        while len(content) < size:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"{size} bytes were to come within {_REPLY_SECONDS:g} s")
            self._connection.settimeout(left)
            chunk = self._connection.recv(min(size - len(content), 1 << 20))
            if not chunk:
                raise ChannelError("the other end has closed the connection")
            content += chunk
        return bytes(content)
