"""Fixtures: a fake of horovodrun's key-value server, and CUDA kernels for fake GPU memory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gtopk.runtime.world.joining import Address
from tests.gtopk import posing


@pytest.fixture
def key_value_server() -> Iterator[Address]:
    """Serve values under paths with PUT and GET, like horovodrun."""
    values: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200, b"")

        def do_GET(self) -> None:
            found = self.path in values
            self.answer(200 if found else 404, values.get(self.path, b""))

        def answer(self, code: int, value: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(value)))
            self.end_headers()
            self.wfile.write(value)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Address("127.0.0.1", server.server_port)
        server.shutdown()


@pytest.fixture(scope="session")
def kernels(shared_folder: Path) -> Any:
    """The CUDA kernels, compiled for the host: for `posing.pose`."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here to compile the kernels for the host with")
    return posing.compile_kernels(shared_folder / "kernels")
