"""Where the ranks of torch.distributed meet, and that their messages are the host's."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from collectives.errors import PeerError, PeerTimeoutError
from collectives.transports import Transport, local_world
from collectives.transports.rendezvous import StoreCounter, connect, listen
from collectives.transports.torch_distributed import _REDUCED, join_at
from collectives.transports.transport import end_process


@pytest.mark.parametrize(
    ("host", "resolved", "listens_at"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node7", "127.0.1.1", "0.0.0.0"),  # what many hosts have for their own name
        ("service", "192.0.2.1", "0.0.0.0"),  # of no interface of this host
    ],
)
def test_store_listens_on_an_address_that_ranks_can_reach(
    monkeypatch: pytest.MonkeyPatch, host: str, resolved: str, listens_at: str
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] == listens_at


def test_store_is_served_at_the_given_address_only() -> None:
    store = connect("127.0.0.1", 0, 0, 10)
    store.set("key", "value")
    assert connect("127.0.0.1", store.port, 1, 10).get("key") == b"value"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), 5)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_connecting_to_an_unserved_store_times_out_as_stated() -> None:
    text = r"rank 1 could not reach 127\.0\.0\.1:\d+, where the ranks meet, in (.*) s: .* refused; "
    text += r"has rank 0, which serves it, started\?$"
    begun = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=text) as raised:
        connect("127.0.0.1", closed_port(), 1, 2.0)
    seconds = re.findall(text, str(raised.value))
    assert 1.99 <= float(*seconds) <= time.monotonic() - begun + 0.01


def test_store_that_starts_late_is_reached() -> None:
    port = closed_port()

    def serve() -> object:
        time.sleep(0.5)
        return connect("127.0.0.1", port, 0, 30)

    with ThreadPoolExecutor() as pool:
        served = pool.submit(serve)
        connect("127.0.0.1", port, 1, 30).set("key", "value")
        assert served.result()


def test_store_of_a_departed_launcher_raises_peer_error_soon(monkeypatch) -> None:
    monkeypatch.setattr("collectives.transports.rendezvous._GONE_SECONDS", 0.2)
    with pytest.raises(PeerError, match=r"refused; is the launcher, which serves it, gone\?$"):
        connect("127.0.0.1", closed_port(), 1, 600, hosted=True)


def test_connecting_to_an_unresponsive_store_times_out() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as frozen,
        pytest.raises(PeerTimeoutError, match=r"in 1\.?\d* s: the port accepts connections, but"),
    ):
        connect("127.0.0.1", frozen.getsockname()[1], 1, 1.0)


SERVE = """
import sys, time, torch
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def frozen_store() -> Iterator[Any]:
    """Return a store whose server answered at first, and is now stopped."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        store = connect("127.0.0.1", int(server.stdout.readline()), 1, 60)
        store.set("key", "value")
        assert store.get("key") == b"value"
        server.send_signal(signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)  # until it has stopped
        yield store
        server.kill()


def test_joining_at_an_unresponsive_store_times_out(frozen_store) -> None:
    text = r"rank 1 of 2 has waited [\d.]+ s at the start for .* no longer answers: start"
    with pytest.raises(PeerTimeoutError, match=text):
        join_at(frozen_store, 1, 2, 30.0, 0.5)


def test_counting_at_an_unresponsive_store_raises_an_error(frozen_store, monkeypatch) -> None:
    _, stream = local_world(2, timeout_seconds=1.0)
    counter = StoreCounter(frozen_store, "number", stream)
    with pytest.raises(PeerTimeoutError, match=r"rank 1 has waited \d+ s for the store where"):
        counter.add(1)
    monkeypatch.setattr("collectives.transports.rendezvous._GONE_SECONDS", 0.1)
    stream.lose(0, "it is silent")
    with pytest.raises(PeerError, match=r"rank 0 is lost \(it is silent\) while rank 1 waited"):
        counter.add(1)


def test_messages_are_on_the_host_for_any_default_device(
    in_world: Callable[..., object],
) -> None:
    def program(transport: Transport) -> list[int]:
        with torch.device("meta"):
            gathered = transport.allgather(np.array([transport.rank], np.uint8))
        return [int(message[0]) for message in gathered]

    assert in_world("torch.distributed", 2, program) == [[0, 1]] * 2


def test_reply_of_an_allreduce_that_timed_out_does_not_end_the_next_one(
    in_world: Callable[..., object],
) -> None:
    def program(transport: Any) -> list[Any]:
        array = np.ones(transport.native_bytes() // 4, np.int32)
        if transport.rank == 0:
            transport.mailbox.put(_REDUCED, 0, np.empty(0, np.uint8))
        else:  # comes so late that rank 0 takes the old reply first
            barrier = transport.barrier
            transport.barrier = lambda: (barrier(), time.sleep(0.3))
        transport.allreduce(array)
        box = transport.mailbox._box(_REDUCED, transport.rank)
        left = [box.get() for _ in range(box.qsize())]
        return [each for each in left if each is not None]  # None: the other rank has left

    assert in_world("torch.distributed", 2, program) == [[], []]


def test_end_process_exits_with_a_broken_output_pipe(monkeypatch):
    class Gone:
        def flush(self) -> None:
            raise BrokenPipeError

    ended: list[int] = []
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(os, "_exit", ended.append)
    end_process(3)
    assert ended == [3]
