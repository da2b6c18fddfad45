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
def between(sockets):
    return lambda secret=SECRET: Between(sockets(), sockets(), secret)


class Between:
    """Two ends, and an attacker who controls the wire between them."""

    def __init__(self, ours, theirs, other_secret):
        self.ours, self.theirs = ours, theirs
        ends = {}

        def open_end(name, stream, secret, accepted):
            ends[name] = AuthenticatedConnection(stream, secret, accepted=accepted)

        threads = [
            threading.Thread(target=open_end, args=("a", self.ours[0], SECRET, False)),
            threading.Thread(target=open_end, args=("b", self.theirs[0], other_secret, True)),
        ]
        for thread in threads:
            thread.start()
        self.pass_on(self.ours[1], self.theirs[1], 32)
        self.pass_on(self.theirs[1], self.ours[1], 32)
        for thread in threads:
            thread.join()
        self.a, self.b = ends["a"], ends["b"]

    def pass_on(self, source, target, size, change=lambda content: content):
        content = source.recv(size, socket.MSG_WAITALL)
        target.sendall(change(content))
        return content

    def hears(self, change):
        """Return what b receives of a's message, changed on the way."""
        self.a.send(b"content")
        self.pass_on(self.ours[1], self.theirs[1], 8 + 32 + 7 + 32, change)
        self.theirs[1].shutdown(socket.SHUT_WR)
        return self.b.receive()


def test_both_ends_hear_each_other(sockets):
    one, other = sockets()
    heard = []

    def accept():
        connection = AuthenticatedConnection(other, SECRET, accepted=True)
        heard.extend([connection.receive(), connection.receive(5)])
        connection.send(b"z" * 3_000_000)
        connection.close()

    thread = threading.Thread(target=accept)
    thread.start()
    caller = AuthenticatedConnection(one, SECRET, accepted=False)
    caller.send(b"")
    caller.send(b"first")
    assert len(caller.receive(without_timeout=False)) == 3_000_000
    thread.join()
    assert heard == [b"", b"first"]
    with pytest.raises(UnauthenticatedError, match="has closed"):
        caller.receive()
    caller.close()


def test_what_is_passed_on_unchanged_is_heard(between):
    assert between().hears(lambda content: content) == b"content"


@pytest.mark.parametrize("place", range(0, 8 + 32 + 7 + 32, 6))
def test_a_message_changed_anywhere_is_refused(between, place):
    def change(content):
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    with pytest.raises(
        UnauthenticatedError,
        match="does not know the secret, or the message was changed on the way",
    ):
        between().hears(change)


def test_a_length_is_not_believed_before_it_was_checked(between):
    """Otherwise anybody could make it allocate all memory."""
    with pytest.raises(UnauthenticatedError, match="does not know the secret"):
        between().hears(lambda content: b"\xff" * 8 + content[8:])


def test_a_message_cut_short_is_refused(between):
    with pytest.raises(UnauthenticatedError, match="has closed"):
        between().hears(lambda content: content[:-1])


def test_neither_a_message_of_before_nor_ones_own_counts(between):
    wire = between()
    wire.a.send(b"content")
    said = wire.pass_on(wire.ours[1], wire.theirs[1], 8 + 32 + 7 + 32)
    assert wire.b.receive() == b"content"
    wire.theirs[1].sendall(said)  # again
    with pytest.raises(UnauthenticatedError):
        wire.b.receive()
    wire = between()
    wire.a.send(b"content")
    wire.pass_on(wire.ours[1], wire.ours[1], 8 + 32 + 7 + 32)  # back to its sender
    with pytest.raises(UnauthenticatedError):
        wire.a.receive()
    with pytest.raises(UnauthenticatedError):  # of another stream
        between().hears(lambda content: said)


def test_another_secret_is_refused(between):
    with pytest.raises(UnauthenticatedError, match="does not know the secret"):
        between(b"another").hears(lambda content: content)


def test_a_message_that_is_too_long_is_refused(between):
    wire = between()
    wire.a.send(b"content")
    wire.pass_on(wire.ours[1], wire.theirs[1], 8 + 32)
    with pytest.raises(UnauthenticatedError, match="may have 6 bytes here, got 7"):
        wire.b.receive(6)


def test_who_says_nothing_or_a_byte_now_and_then_is_left(sockets, monkeypatch):
    monkeypatch.setattr(connection, "_REPLY_SECONDS", 0.05)
    for said in (b"", b"x"):
        one, other = sockets()
        one.sendall(said)
        with pytest.raises(TimeoutError):
            AuthenticatedConnection(other, SECRET, accepted=True)
        assert other.fileno() == -1
