"""A connection accepts only messages of its two ends."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import pytest

from gtopk.runtime.runner import call_server as connection
from gtopk.runtime.runner.call_server import AuthenticatedConnection, UnauthenticatedError

SECRET = bytes(range(32))


@pytest.fixture
def sockets():
    """Create pairs of sockets, and close them afterwards."""
    with ExitStack() as opened:

        def pair():
            ends = socket.socketpair()
            for end in ends:
                opened.enter_context(end)
            return ends

        yield pair


@pytest.fixture
def tapped_wire(sockets):
    return lambda secret=SECRET: TappedWire(sockets(), sockets(), secret)


class TappedWire:
    """Two ends, and an attacker who controls the wire between them."""

    def __init__(self, sockets_a, sockets_b, other_secret):
        self.sockets_a, self.sockets_b = sockets_a, sockets_b
        ends = {}

        def open_end(name, stream, secret, accepted):
            ends[name] = AuthenticatedConnection(stream, secret, accepted=accepted)

        threads = [
            threading.Thread(target=open_end, args=("a", self.sockets_a[0], SECRET, False)),
            threading.Thread(target=open_end, args=("b", self.sockets_b[0], other_secret, True)),
        ]
        for thread in threads:
            thread.start()
        self.pass_on(self.sockets_a[1], self.sockets_b[1], 32)
        self.pass_on(self.sockets_b[1], self.sockets_a[1], 32)
        for thread in threads:
            thread.join()
        self.a, self.b = ends["a"], ends["b"]

    def pass_on(self, source, target, size, change=lambda content: content):
        content = source.recv(size, socket.MSG_WAITALL)
        target.sendall(change(content))
        return content

    def received(self, change):
        """Return what b receives of a's message, changed on the way."""
        self.a.send(b"content")
        self.pass_on(self.sockets_a[1], self.sockets_b[1], 8 + 32 + 7 + 32, change)
        self.sockets_b[1].shutdown(socket.SHUT_WR)
        return self.b.receive()


def test_connection_carries_messages_both_ways(sockets):
    one, other = sockets()
    received = []

    def accept():
        connection = AuthenticatedConnection(other, SECRET, accepted=True)
        received.extend([connection.receive(), connection.receive(5)])
        connection.send(b"z" * 3_000_000)
        connection.close()

    thread = threading.Thread(target=accept)
    thread.start()
    caller = AuthenticatedConnection(one, SECRET, accepted=False)
    caller.send(b"")
    caller.send(b"first")
    assert len(caller.receive(without_timeout=False)) == 3_000_000
    thread.join()
    assert received == [b"", b"first"]
    with pytest.raises(UnauthenticatedError, match="has closed"):
        caller.receive()
    caller.close()


def test_unchanged_message_is_received(tapped_wire):
    assert tapped_wire().received(lambda content: content) == b"content"


@pytest.mark.parametrize("place", range(0, 8 + 32 + 7 + 32, 6))
def test_message_changed_at_any_byte_is_refused(tapped_wire, place):
    def change(content):
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    with pytest.raises(
        UnauthenticatedError,
        match="does not know the secret, or the message was changed on the way",
    ):
        tapped_wire().received(change)


def test_changed_length_is_refused_before_memory_is_allocated(tapped_wire):
    """Otherwise a stranger could make the receiver allocate all memory."""
    with pytest.raises(UnauthenticatedError, match="does not know the secret"):
        tapped_wire().received(lambda content: b"\xff" * 8 + content[8:])


def test_truncated_message_is_refused(tapped_wire):
    with pytest.raises(UnauthenticatedError, match="has closed"):
        tapped_wire().received(lambda content: content[:-1])


def test_replayed_reflected_and_foreign_messages_are_refused(tapped_wire):
    wire = tapped_wire()
    wire.a.send(b"content")
    recorded = wire.pass_on(wire.sockets_a[1], wire.sockets_b[1], 8 + 32 + 7 + 32)
    assert wire.b.receive() == b"content"
    wire.sockets_b[1].sendall(recorded)  # again
    with pytest.raises(UnauthenticatedError):
        wire.b.receive()
    wire = tapped_wire()
    wire.a.send(b"content")
    wire.pass_on(wire.sockets_a[1], wire.sockets_a[1], 8 + 32 + 7 + 32)  # back to its sender
    with pytest.raises(UnauthenticatedError):
        wire.a.receive()
    with pytest.raises(UnauthenticatedError):  # of another stream
        tapped_wire().received(lambda content: recorded)


def test_peer_with_another_secret_is_refused(tapped_wire):
    with pytest.raises(UnauthenticatedError, match="does not know the secret"):
        tapped_wire(b"another").received(lambda content: content)


def test_message_over_the_size_limit_is_refused(tapped_wire):
    wire = tapped_wire()
    wire.a.send(b"content")
    wire.pass_on(wire.sockets_a[1], wire.sockets_b[1], 8 + 32)
    with pytest.raises(UnauthenticatedError, match="may have 6 bytes here, got 7"):
        wire.b.receive(6)


def test_connection_closes_when_the_peer_sends_no_complete_handshake(sockets, monkeypatch):
    monkeypatch.setattr(connection, "_REPLY_SECONDS", 0.05)
    for sent in (b"", b"x"):
        one, other = sockets()
        one.sendall(sent)
        with pytest.raises(TimeoutError):
            AuthenticatedConnection(other, SECRET, accepted=True)
        assert other.fileno() == -1
