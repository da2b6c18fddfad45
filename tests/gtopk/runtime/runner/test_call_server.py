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


def connect(server: CallServer, rank: int) -> tuple[AuthenticatedConnection, bytes, bytes]:
    found = server.environment()
    return fetch_call(found[settings.RUN_ADDRESS.name], found[settings.RUN_SECRET.name], rank)


def test_every_rank_receives_the_call_and_delivers_its_report(server: CallServer) -> None:
    def rank(number: int) -> None:
        connection, *messages = connect(server, number)
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


def test_rank_that_disconnects_without_a_report_is_recorded(server: CallServer) -> None:
    connection, *_ = connect(server, 1)
    assert server.connected == {1}
    connection.close()
    wait_until(server, lambda: server.disconnected == [1])
    assert server.reports == {}


def test_client_without_the_secret_is_refused(server: CallServer) -> None:
    address = server.environment()[settings.RUN_ADDRESS.name]
    with pytest.raises(ConnectionError):
        fetch_call(address, "00" * 32, 0)
    assert server.connected == set()


@pytest.mark.parametrize("number", [-1, 2, 1 << 40])
def test_client_with_an_invalid_rank_is_refused(server: CallServer, number: int) -> None:
    with pytest.raises(ConnectionError):
        connect(server, number)
    assert server.connected == set()


def test_silent_stranger_does_not_block_a_rank(server: CallServer) -> None:
    host, port = server.environment()[settings.RUN_ADDRESS.name].split(":")
    with socket.create_connection((host, int(port))):
        connection, *_ = connect(server, 0)
        connection.close()
    wait_until(server, lambda: server.disconnected == [0])


def test_closed_call_server_refuses_connections(server: CallServer) -> None:
    server.close()
    with pytest.raises(OSError, match="refused"):
        connect(server, 0)
    assert not any(thread.name == "gtopk-run-server" for thread in threading.enumerate())


def test_call_server_of_a_local_job_listens_on_loopback_only(server: CallServer) -> None:
    assert server.environment()[settings.RUN_ADDRESS.name].startswith("127.0.0.1:")
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_own_address_raises_for_an_unknown_host() -> None:
    with pytest.raises(LaunchError, match=r"no route to host 'no\.such\.host\.invalid'"):
        own_address("no.such.host.invalid")


def test_many_strangers_block_no_rank_and_are_logged_once(
    server: CallServer, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = server.environment()[settings.RUN_ADDRESS.name].split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(100)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):
            stranger.sendall(bytes(number) + b"\xff" * 64)
    connection, *_ = connect(server, 0)
    connection.close()
    wait_until(server, lambda: server.disconnected == [0])
    for stranger in strangers:
        stranger.close()
    wait_until(server, lambda: "not a rank" in caplog.text)
    assert caplog.text.count("not a rank") == 1
    assert server.connected == {0}
