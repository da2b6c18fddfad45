"""The desk: where each rank gets its call and leaves its report.

    rank -> desk    its rank           8 bytes
    desk -> rank    preparation, call  two messages (call.pack)
    rank -> desk    report             one message (report)

The listener knows its ranks by the job's secret (`channel`), and hears nothing of anybody else's.
"""

from __future__ import annotations

import contextlib
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
from .channel import Channel

_log = logging.getLogger("gtopk")

RANK: Final = struct.Struct("<q")
_BACKLOG: Final = 4096  # ranks, and strangers, that call at once
_BREATH_SECONDS: Final = 0.1  # until connections can be accepted again, where there were too many


class Desk:
    """Hands the same call to every rank and collects their reports; a thread for each of them.

    came, left, reports: the ranks that have come, those that have gone, in that order, and what
    they reported. Guarded by `changed`.
    """

    def __init__(self, ranks: int, messages: Sequence[bytes], host: str = "127.0.0.1") -> None:
        self.changed = threading.Condition()
        self.came: set[int] = set()
        self.left: list[int] = []
        self.reports: dict[int, bytes] = {}
        self._ranks = ranks
        self._messages = messages
        self._refused: set[str] = set()  # hosts, told of once each
        self._closed = False
        self._secret = secrets.token_bytes(32)
        self._server = socket.create_server((host, 0), backlog=_BACKLOG)
        self._address = f"{host}:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="gtopk-run-desk", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """Return the variables by which ranks find the desk, and are known there."""
        return {
            settings.RUN_ADDRESS.name: self._address,
            settings.RUN_SECRET.name: self._secret.hex(),
        }

    def close(self) -> None:
        """Receive nobody any more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` does not
        self._thread.join()
        self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                visitor, (host, _) = self._server.accept()
            except OSError:  # closed; or strangers hold all the files that this process may have
                time.sleep(0.0 if self._closed else _BREATH_SECONDS)
                continue
            threading.Thread(target=self._receive, args=(visitor, host), daemon=True).start()

    def _receive(self, visitor: socket.socket, host: str) -> None:
        try:
            channel = Channel(visitor, self._secret, accepted=True)
        except OSError as error:
            self._refuse(host, error)
            return
        rank = None
        try:
            (number,) = RANK.unpack(channel.receive(RANK.size, patiently=False))
            with self.changed:
                if not 0 <= number < self._ranks or number in self.came:
                    return
                rank = number
                self.came.add(rank)
                self.changed.notify()
            for message in self._messages:
                channel.send(message)
            report = channel.receive()
            with self.changed:
                self.reports[rank] = report
                self.changed.notify()
        except (OSError, struct.error) as error:  # of a rank that has died, `left` tells
            if rank is None:
                self._refuse(host, error)
        finally:
            channel.close()
            if rank is not None:
                with self.changed:
                    self.left.append(rank)
                    self.changed.notify()

    def _refuse(self, host: str, error: Exception) -> None:
        """Say that somebody else came, once for each host."""
        with self.changed:
            known = host in self._refused
            self._refused.add(host)
        if not known:
            _log.warning("gtopk.run: a visitor from %s is no rank and is refused: %s", host, error)


def visit(address: str, secret: str, rank: int) -> tuple[Channel, bytes, bytes]:
    """Return the channel to the desk, and the two messages that it has for this rank."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    channel = Channel(connection, bytes.fromhex(secret), accepted=False)
    try:
        channel.send(RANK.pack(rank))
        return channel, channel.receive(), channel.receive()
    except OSError:
        channel.close()
        raise


def own_address(other: str) -> str:
    """Return the address under which this host is reached from another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))  # sends nothing
        except OSError as error:
            raise LaunchError(f"there must be a way to host '{other}', got: {error}") from None
        address: str = probe.getsockname()[0]
    return address
