"""The desk: where each rank gets its call and leaves its report.

    rank -> desk    its rank           8 bytes
    desk -> rank    preparation, call  two messages (call.pack)
    rank -> desk    report             one message (report)

The listener knows its ranks by the job's secret (the HMAC challenge of multiprocessing.connection);
of that module's messages only plain bytes are used, never its pickles.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Final

from ..launch import LaunchError

RANK: Final = struct.Struct("<q")
ADDRESS: Final = "GTOPK_RUN_ADDRESS"
SECRET: Final = "GTOPK_RUN_SECRET"


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
        self._secret = secrets.token_bytes(32)
        self._server = socket.create_server((host, 0), backlog=min(ranks, 4096))
        self._address = f"{host}:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="gtopk-run-desk", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """Return the variables by which ranks find the desk, and are known there."""
        return {ADDRESS: self._address, SECRET: self._secret.hex()}

    def close(self) -> None:
        """Receive nobody any more."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` does not
        self._thread.join()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                visitor, _ = self._server.accept()
            except OSError:  # closed
                return
            connection = Connection(visitor.detach())
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        rank = None
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            (number,) = RANK.unpack(connection.recv_bytes(RANK.size))
            with self.changed:
                if not 0 <= number < self._ranks or number in self.came:
                    return
                rank = number
                self.came.add(rank)
                self.changed.notify()
            for message in self._messages:
                connection.send_bytes(message)
            report = connection.recv_bytes()
            with self.changed:
                self.reports[rank] = report
                self.changed.notify()
        except (AuthenticationError, EOFError, OSError, struct.error):
            pass  # a stranger, or a rank that has died: `left` tells
        finally:
            connection.close()
            if rank is not None:
                with self.changed:
                    self.left.append(rank)
                    self.changed.notify()


def visit(address: str, secret: str, rank: int) -> tuple[Connection, bytes, bytes]:
    """Return the connection to the desk, and the two messages that it has for this rank."""
    host, _, port = address.rpartition(":")
    connection = Client((host, int(port)), "AF_INET", authkey=bytes.fromhex(secret))
    connection.send_bytes(RANK.pack(rank))
    return connection, connection.recv_bytes(), connection.recv_bytes()


def own_address(other: str) -> str:
    """Return the address under which this host is reached from another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))  # sends nothing
        except OSError as error:
            raise LaunchError(f"there must be a way to host '{other}', got: {error}") from None
        address: str = probe.getsockname()[0]
    return address
