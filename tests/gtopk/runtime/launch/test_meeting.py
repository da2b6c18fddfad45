"""The rendezvous of ranks under launchers without MPI."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError

import pytest

from collectives import PeerTimeoutError
from gtopk.runtime.liveness.heartbeat import address_towards
from gtopk.runtime.world import joining
from gtopk.runtime.world.joining import (
    Address,
    HorovodrunServer,
    first_node,
    horovodrun_server,
    master,
    srun_address,
)
from tests.started import under


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[007-012,30],m1", "n007"),
        ("n[3,5]", "n3"),
        ("rack-2-n[10-11]-ib,m[1-2]", "rack-2-n10-ib"),
        ("gpu07.example.org", "gpu07.example.org"),
    ],
)
def test_first_node_reads_slurms_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",", "n[1-", "a b"])
def test_invalid_list_of_nodes_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="no list of nodes"):
        first_node(nodes)


def test_srun_address_is_the_first_node_and_own_port_of_a_step() -> None:
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-4]"}
    assert under(job, srun_address) == Address("n1", 20000 + 16 * 4711 % 10000)
    step = job | {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_STEP_ID": "2"}
    assert under(step, srun_address) == Address("n3", 20002 + 16 * 4711 % 10000)


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "1"}, {"SLURM_JOB_NODELIST": "n1"}])
def test_incomplete_slurm_variables_raise_with_advice(environ: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match="set MASTER_ADDR and MASTER_PORT"):
        under(environ, srun_address)


def test_master_address_needs_both_variables() -> None:
    assert under({"MASTER_ADDR": "n1", "MASTER_PORT": "7"}, master) == Address("n1", 7)
    assert under({"MASTER_ADDR": "n1"}, master) is None
    assert under({"MASTER_ADDR": "n1", "MASTER_PORT": ""}, master) is None
    assert under({"MASTER_ADDR": "", "MASTER_PORT": "7"}, master) is None
    with pytest.raises(ValueError, match=r"MASTER_PORT must be a whole number, .* got 'any'"):
        under({"MASTER_ADDR": "n1", "MASTER_PORT": "any"}, master)


def test_horovodruns_server_returns_the_address_that_rank_0_published(key_value_server) -> None:
    server = HorovodrunServer(key_value_server)
    assert address_towards(*server.address) == "127.0.0.1"
    with pytest.raises(
        PeerTimeoutError, match=r"rank 1 has waited 0\.3 s .* for rank 0, which has not"
    ):
        server.fetch(1, 0.3)
    server.publish(Address("10.0.0.1", 4711), 5)
    assert server.fetch(1, 5) == Address("10.0.0.1", 4711)


ANSWER = b"HTTP/1.0 200 OK\r\n\r\n10.0.0.1:4711"


@contextmanager
def answering(*answers: bytes | None) -> Iterator[HorovodrunServer]:
    """Answer connections in turn, repeating the last answer; None: send nothing for a while."""
    held = []

    def serve() -> None:
        for answer in itertools.chain(answers, itertools.repeat(answers[-1])):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            if answer is not None:
                with contextlib.suppress(OSError):  # the client may be gone
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield HorovodrunServer(Address(*listener.getsockname()))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    "first", [None, b"", b"no HTTP\r\n\r\n", b"HTTP/1.0 503 Service Unavailable\r\n\r\n"]
)
def test_server_that_is_slow_or_busy_or_hangs_up_is_asked_again(monkeypatch, first) -> None:
    monkeypatch.setattr(joining, "_REQUEST_SECONDS", 0.5)
    with answering(first, ANSWER) as server:
        assert server.fetch(1, 60) == Address("10.0.0.1", 4711)
    with answering(first, ANSWER) as server:
        server.publish(Address("10.0.0.1", 4711), 60)


def test_server_that_cuts_its_answer_off_is_asked_again(monkeypatch) -> None:
    with answering(b"HTTP/1.0 200 OK\r\n\r\n", ANSWER) as server:
        assert server.fetch(1, 60) == Address("10.0.0.1", 4711)


def test_error_names_an_unreachable_server_after_the_timeout() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # but does not listen
        address = Address(*nobody.getsockname())
        server = HorovodrunServer(address)
        with pytest.raises(PeerTimeoutError, match=rf"rank 2 .* 0\.2 s .* {address}.* refused"):
            server.fetch(2, 0.2)
        with pytest.raises(PeerTimeoutError, match=rf"rank 0 .* 0\.2 s .* {address}.* refused"):
            server.publish(Address("10.0.0.1", 4711), 0.2)


def test_server_that_refuses_is_not_asked_again() -> None:
    forbidden = b"HTTP/1.0 403 Forbidden\r\n\r\n"
    with answering(forbidden) as server, pytest.raises(HTTPError, match="403"):
        server.fetch(1, 60)
    unknown = b"HTTP/1.0 404 Not Found\r\n\r\n"
    with answering(unknown) as server, pytest.raises(HTTPError, match="404"):
        server.publish(Address("10.0.0.1", 4711), 60)


def test_horovodruns_server_needs_two_variables(monkeypatch, key_value_server) -> None:
    host, port = key_value_server
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used
    server = under(
        {"HOROVOD_GLOO_RENDEZVOUS_ADDR": host, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)},
        horovodrun_server,
    )
    server.publish(Address("10.0.0.1", 4711), 5)
    assert server.fetch(1, 5) == Address("10.0.0.1", 4711)
    assert under({"HOROVOD_GLOO_RENDEZVOUS_ADDR": host}, horovodrun_server) is None
