"""One page over HTTP; clients cannot increase its cost."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from gtopk.telemetry import sinks
from gtopk.telemetry.sinks import Address, Endpoint

STRANGERS = {
    "nothing": b"",
    "a letter": b"G",
    "half a request": b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    "garbage": bytes(range(256)) * 256,
    "a line without end": b"GET /" + b"x" * 100_000,
    "a handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Endpoint]:
    """Return a function that opens an endpoint with a text as metrics."""

    def opened(text: str) -> Endpoint:
        monkeypatch.setattr(sinks.Metrics, "text", lambda metrics: text)
        return Endpoint(Address("127.0.0.1", 0), rank=0)

    return opened


@pytest.fixture
def served(says: Callable[[str], Endpoint]) -> Iterator[Endpoint]:
    page = says("well\n" * 3)
    yield page
    page.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(page.address, 5)


def get(page: Endpoint, path: str = "/metrics", method: str = "GET") -> str:
    url = f"http://127.0.0.1:{page.address.port}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_open(stranger: socket.socket) -> bool:
    """Tell whether the other side keeps it open; discard received data."""
    stranger.settimeout(0.01)
    with contextlib.suppress(TimeoutError):
        try:
            while stranger.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return False
    return True


def test_who_asks_is_answered(served: Endpoint) -> None:
    assert get(served, "/metrics") == get(served, "/") == get(served, "/?x=1") == "well\n" * 3
    for path, method, code in (("/else", "GET", 404), ("/metrics", "POST", 405)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(served, path, method)
        assert refused.value.code == code
        assert refused.value.read() == b"GET /metrics\n"


@pytest.mark.parametrize("said", STRANGERS)
def test_strangers_hold_neither_threads_nor_descriptors(served: Endpoint, said: str) -> None:
    """Two hundred clients at once would otherwise each take a thread and a descriptor."""
    assert get(served)
    threads, before = threading.enumerate(), descriptors()
    with contextlib.ExitStack() as strangers:
        for _ in range(200):
            stranger = strangers.enter_context(socket.create_connection(served.address, 10))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(STRANGERS[said])
        assert get(served) == "well\n" * 3
        assert set(threading.enumerate()) <= set(threads)
        assert descriptors() - 200 - before <= 3 * sinks._MAX_CONNECTIONS
    assert get(served) == "well\n" * 3


def test_a_visit_ends_though_a_word_comes_now_and_then(monkeypatch, served: Endpoint) -> None:
    monkeypatch.setattr(sinks, "_CONNECTION_SECONDS", 0.3)
    with socket.create_connection(served.address, 10) as stranger:
        begun = time.monotonic()
        while is_open(stranger):
            assert time.monotonic() - begun < 30
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"x")


def test_who_takes_nothing_of_a_long_page_has_to_go(monkeypatch, says) -> None:
    monkeypatch.setattr(sinks, "_CONNECTION_SECONDS", 0.3)
    long = says("x" * (1 << 26))
    before = descriptors()
    with socket.create_connection(long.address, 10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        begun = time.monotonic()
        while descriptors() > before + 1 or time.monotonic() - begun < 0.3:
            assert time.monotonic() - begun < 30
            time.sleep(0.05)
    long.close()


def test_what_closes_ends_who_is_there(says) -> None:
    page = says("")
    with socket.create_connection(page.address, 10) as stranger:
        stranger.sendall(b"GET")
        page.close()
        assert not is_open(stranger)
