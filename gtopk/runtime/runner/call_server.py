"""CallServer: sends each rank of gtopk.run its call, and receives its report.

    rank -> server    its rank           8 bytes
    server -> rank    preparation, call  two messages (call.pack)
    rank -> server    report             one message (collect)

The connection is authenticated: both ends know the job's secret, and bytes from any other sender
are an error.

    each     nonce 32                                     random, to prevent replays
    message  length 8 | MAC 32 | content | MAC 32

A MAC is the HMAC-SHA256 of the sending side, the message's number, and its length or content. The
key is made from the secret and both nonces. Memory for the content is allocated only after the
length's MAC is verified. Contents are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

from ... import settings
from ..launch import LaunchError
from ..liveness.heartbeat import address_towards

_log = logging.getLogger("gtopk")

_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<Q")
_MAC_HEADER: Final = struct.Struct("<?Qs")  # whether the accepting end sends; message number; part
_REPLY_SECONDS: Final = 10.0  # for messages that a peer can send at once


class UnauthenticatedError(ConnectionError):
    """The message is not from an end that knows the secret, or was changed on the way."""


class AuthenticatedConnection:
    """One end of a connection; the other end has the same secret.

    accepted: whether this end accepted the connection, rather than opened it.
    Raises UnauthenticatedError or TimeoutError, and closes the connection, if the other end sends
    no nonce.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, accepted: bool) -> None:
        self._connection = connection
        self._accepted = accepted
        self._sent = self._received = 0
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            connection.settimeout(_REPLY_SECONDS)
            connection.sendall(own_nonce)
            peer_nonce = self._read(_NONCE_BYTES, time.monotonic() + _REPLY_SECONDS)
        except BaseException:
            connection.close()
            raise
        # The same order at both ends.
        nonces = peer_nonce + own_nonce if accepted else own_nonce + peer_nonce
        self._key = hmac.digest(secret, b"gtopk channel" + nonces, "sha256")

    def send(self, content: bytes) -> None:
        length = _LENGTH.pack(len(content))
        macs = [
            self._mac(self._accepted, self._sent, part, text)
            for part, text in ((b"l", length), (b"c", content))
        ]
        self._sent += 1
        # No timeout: long arguments take as long as the link needs.
        self._connection.settimeout(None)
        self._connection.sendall(b"".join([length, macs[0], content, macs[1]]))

    def receive(self, max_bytes: int | None = None, *, without_timeout: bool = True) -> bytes:
        """Return the next message.

        without_timeout: wait without a limit; else 10 seconds.
        Raises UnauthenticatedError if the other end did not send it, or if it is too long.
        """
        deadline = None if without_timeout else time.monotonic() + _REPLY_SECONDS
        length = self._read(_LENGTH.size, deadline)
        self._check(b"l", length, deadline)
        (size,) = _LENGTH.unpack(length)
        if max_bytes is not None and size > max_bytes:
            raise UnauthenticatedError(f"a message may have {max_bytes} bytes here, got {size}")
        content = self._read(size, deadline)
        self._check(b"c", content, deadline)
        self._received += 1
        return content

    def close(self) -> None:
        self._connection.close()

    def _check(self, part: bytes, text: bytes, deadline: float | None) -> None:
        expected = self._mac(not self._accepted, self._received, part, text)
        # Compare in constant time, so that timing does not reveal the right MAC.
        if not hmac.compare_digest(self._read(_MAC_BYTES, deadline), expected):
            raise UnauthenticatedError(
                "the other end does not know the secret, or the message was changed on the way"
            )

    def _mac(self, by_accepted: bool, number: int, part: bytes, text: bytes) -> bytes:
        return hmac.digest(self._key, _MAC_HEADER.pack(by_accepted, number, part) + text, "sha256")

    def _read(self, size: int, deadline: float | None) -> bytes:
        content = bytearray()
        while len(content) < size:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError(f"expected {size} bytes within {_REPLY_SECONDS:g} s")
            self._connection.settimeout(remaining)
            chunk = self._connection.recv(min(size - len(content), 1 << 20))
            if not chunk:
                raise UnauthenticatedError("the other end has closed the connection")
            content += chunk
        return bytes(content)


RANK: Final = struct.Struct("<q")
_BACKLOG: Final = 4096  # connections that wait to be accepted
_RETRY_SECONDS: Final = 0.1  # pause before accepting again if too many files are open


class CallServer:
    """Sends the same call to every rank and collects the reports, with one thread per rank.

    connected: the ranks that have connected.
    disconnected: those that have disconnected again, in that order.
    reports: by rank. `changed` guards all three.
    """

    def __init__(self, ranks: int, messages: Sequence[bytes], host: str = "127.0.0.1") -> None:
        self.changed = threading.Condition()
        self.connected: set[int] = set()
        self.disconnected: list[int] = []
        self.reports: dict[int, bytes] = {}
        self._ranks = ranks
        self._messages = messages
        self._warned_hosts: set[str] = set()  # hosts with a printed refusal
        self._closed = False
        self._secret = secrets.token_bytes(32)
        self._server = socket.create_server((host, 0), backlog=_BACKLOG)
        self._address = f"{host}:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="gtopk-run-calls", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """Return the variables that let ranks find the call server and authenticate."""
        return {
            settings.RUN_ADDRESS.name: self._address,
            settings.RUN_SECRET.name: self._secret.hex(),
        }

    def close(self) -> None:
        """Stop accepting connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, unlike `close`
        self._thread.join()
        self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, (host, _) = self._server.accept()
            except OSError:  # closed, or out of file descriptors because of other clients
                time.sleep(0.0 if self._closed else _RETRY_SECONDS)
                continue
            # One thread each: a silent client must not keep ranks waiting.
            threading.Thread(target=self._receive, args=(client, host), daemon=True).start()

    def _receive(self, client: socket.socket, host: str) -> None:
        try:
            connection = AuthenticatedConnection(client, self._secret, accepted=True)
        except OSError as error:
            self._refuse(host, error)
            return
        rank = None
        try:
            (number,) = RANK.unpack(connection.receive(RANK.size, without_timeout=False))
            with self.changed:
                # A second connection for a rank gets nothing: the first has the call.
                if not 0 <= number < self._ranks or number in self.connected:
                    return
                rank = number
                self.connected.add(rank)
                self.changed.notify()
            for message in self._messages:
                connection.send(message)
            report = connection.receive()
            with self.changed:
                self.reports[rank] = report
                self.changed.notify()
        except (OSError, struct.error) as error:  # `disconnected` has a rank that died
            if rank is None:
                self._refuse(host, error)
        finally:
            connection.close()
            if rank is not None:
                with self.changed:
                    self.disconnected.append(rank)
                    self.changed.notify()

    def _refuse(self, host: str, error: Exception) -> None:
        """Print that another client connected, once for each host."""
        with self.changed:
            # Once for each host: a port scan must not fill the log.
            has_warned = host in self._warned_hosts
            self._warned_hosts.add(host)
        if not has_warned:
            _log.warning("gtopk.run: refused a connection from %s, not a rank: %s", host, error)


def fetch_call(
    address: str, secret: str, rank: int
) -> tuple[AuthenticatedConnection, bytes, bytes]:
    """Return the connection to the call server, and the server's two messages for this rank."""
    host, _, port = address.rpartition(":")
    stream = socket.create_connection((host, int(port)))
    connection = AuthenticatedConnection(stream, bytes.fromhex(secret), accepted=False)
    try:
        connection.send(RANK.pack(rank))
        return connection, connection.receive(), connection.receive()
    except OSError:
        connection.close()
        raise


def own_address(other: str) -> str:
    """Return this host's address as seen from another host."""
    try:
        return address_towards(other)
    except OSError as error:
        raise LaunchError(f"no route to host '{other}': {error}") from None
