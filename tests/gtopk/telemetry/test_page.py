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

from gtopk.settings import Address
from gtopk.telemetry import sinks
from gtopk.telemetry.sinks import Endpoint

STRANGERS = {
    "nothing": b"",
    "a letter": b"G",
    "half a request": b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    "garbage": bytes(range(256)) * 256,
    "a line without end": b"GET /" + b"x" * 100_000,
    "a handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.fixture
def endpoint_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Endpoint]:
    """Return a function that opens an endpoint with a text as metrics."""

    def opened(text: str) -> Endpoint:
        monkeypatch.setattr(sinks.Metrics, "text", lambda metrics: text)
        return Endpoint(Address("127.0.0.1", 0), rank=0)

    return opened


@pytest.fixture
def served(endpoint_with: Callable[[str], Endpoint]) -> Iterator[Endpoint]:
    page = endpoint_with("well\n" * 3)
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


def test_endpoint_serves_metrics_and_rejects_other_requests(served: Endpoint) -> None:
    assert get(served, "/metrics") == get(served, "/") == get(served, "/?x=1") == "well\n" * 3
    for path, method, code in (("/else", "GET", 404), ("/metrics", "POST", 405)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(served, path, method)
        assert refused.value.code == code
        assert refused.value.read() == b"GET /metrics\n"


@pytest.mark.parametrize("kind", STRANGERS)
def test_idle_or_malformed_clients_hold_no_threads_or_descriptors(
    served: Endpoint, kind: str
) -> None:
    """Otherwise two hundred clients at once would each take a thread and a descriptor."""
    assert get(served)
    threads, before = threading.enumerate(), descriptors()
    with contextlib.ExitStack() as strangers:
        for _ in range(200):
            stranger = strangers.enter_context(socket.create_connection(served.address, 10))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(STRANGERS[kind])
        assert get(served) == "well\n" * 3
        assert set(threading.enumerate()) <= set(threads)
        assert descriptors() - 200 - before <= 3 * sinks._MAX_CONNECTIONS
    assert get(served) == "well\n" * 3


def test_connection_is_closed_after_its_limit_despite_trickling_bytes(
    monkeypatch, served: Endpoint
) -> None:
    monkeypatch.setattr(sinks, "_CONNECTION_SECONDS", 0.3)
    with socket.create_connection(served.address, 10) as stranger:
        begun = time.monotonic()
        while is_open(stranger):
            assert time.monotonic() - begun < 30
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"x")


def test_client_that_does_not_read_is_disconnected(monkeypatch, endpoint_with) -> None:
    monkeypatch.setattr(sinks, "_CONNECTION_SECONDS", 0.3)
    long = endpoint_with("x" * (1 << 26))
    before = descriptors()
    with socket.create_connection(long.address, 10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        begun = time.monotonic()
        while descriptors() > before + 1 or time.monotonic() - begun < 0.3:
            assert time.monotonic() - begun < 30
            time.sleep(0.05)
    long.close()


def test_close_disconnects_current_clients(endpoint_with) -> None:
    page = endpoint_with("")
    with socket.create_connection(page.address, 10) as stranger:
        stranger.sendall(b"GET")
        page.close()
        assert not is_open(stranger)
