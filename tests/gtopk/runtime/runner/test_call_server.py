"""The server serves the ranks of its own job, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gtopk import settings
from gtopk.runtime.launch import LaunchError
from gtopk.runtime.runner.call_server import (
    AuthenticatedConnection,
    CallServer,
    fetch_call,
    own_address,
)

PLENTY_SECONDS = 30.0


@pytest.fixture
def server() -> Iterator[CallServer]:
    made = CallServer(2, [b"preparation", b"call"])
    yield made
    made.close()


def wait_until(server: CallServer, condition: object) -> None:
    deadline = time.monotonic() + PLENTY_SECONDS
    with server.changed:
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline
            server.changed.wait(0.1)


def come(server: CallServer, rank: int) -> tuple[AuthenticatedConnection, bytes, bytes]:
    found = server.environment()
    return fetch_call(found[settings.RUN_ADDRESS.name], found[settings.RUN_SECRET.name], rank)


def test_every_rank_gets_the_call_and_leaves_its_report(server: CallServer) -> None:
    def rank(number: int) -> None:
        connection, *messages = come(server, number)
        assert messages == [b"preparation", b"call"]
        connection.send(bytes([number]))
        connection.close()

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in ranks:
        thread.start()
    wait_until(server, lambda: len(server.disconnected) == 2)
    assert server.reports == {0: b"\0", 1: b"\1"}
    for thread in ranks:
        thread.join()


def test_a_rank_that_goes_without_a_report_is_seen(server: CallServer) -> None:
    connection, *_ = come(server, 1)
    assert server.connected == {1}
    connection.close()
    wait_until(server, lambda: server.disconnected == [1])
    assert server.reports == {}


def test_who_does_not_know_the_secret_gets_nothing(server: CallServer) -> None:
    address = server.environment()[settings.RUN_ADDRESS.name]
    with pytest.raises(ConnectionError):
        fetch_call(address, "00" * 32, 0)
    assert server.connected == set()


@pytest.mark.parametrize("number", [-1, 2, 1 << 40])
def test_a_rank_that_is_none_gets_nothing(server: CallServer, number: int) -> None:
    with pytest.raises(ConnectionError):
        come(server, number)
    assert server.connected == set()


def test_a_stranger_that_says_nothing_keeps_nobody_waiting(server: CallServer) -> None:
    host, port = server.environment()[settings.RUN_ADDRESS.name].split(":")
    with socket.create_connection((host, int(port))):
        connection, *_ = come(server, 0)
        connection.close()
    wait_until(server, lambda: server.disconnected == [0])


def test_a_closed_call_server_receives_nobody(server: CallServer) -> None:
    server.close()
    with pytest.raises(OSError, match="refused"):
        come(server, 0)
    assert not any(thread.name == "gtopk-run-server" for thread in threading.enumerate())


def test_on_one_machine_the_call_server_is_reached_from_there_only(server: CallServer) -> None:
    assert server.environment()[settings.RUN_ADDRESS.name].startswith("127.0.0.1:")
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_a_host_that_cannot_be_found_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"no route to host 'no\.such\.host\.invalid'"):
        own_address("no.such.host.invalid")


def test_a_crowd_of_strangers_keeps_no_rank_out_and_is_told_of_once(
    server: CallServer, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = server.environment()[settings.RUN_ADDRESS.name].split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(100)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):
            stranger.sendall(bytes(number) + b"\xff" * 64)
    connection, *_ = come(server, 0)
    connection.close()
    wait_until(server, lambda: server.disconnected == [0])
    for stranger in strangers:
        stranger.close()
    wait_until(server, lambda: "not a rank" in caplog.text)
    assert caplog.text.count("not a rank") == 1
    assert server.connected == {0}
