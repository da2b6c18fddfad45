"""Page: one page of text over HTTP, for whoever asks, at a cost that no visitor can raise.

One thread serves all. A visit ends after some seconds, whatever was said or taken by then; when too
many are here at once, the one that came first has to go.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

_VISITS: Final = 16  # at once
_CALLS: Final = 1024  # that wait to be accepted
_VISIT_SECONDS: Final = 5.0
_REQUEST_BYTES: Final = 8192

Address = tuple[str, int]


class Page:
    """Answers GET of `paths` with what `text` returns, from now until `close`.

    address: where it listens; of port 0, the port that was free.
    Raises OSError, or OverflowError of ports beyond 65535, where it cannot listen.
    """

    def __init__(
        self, address: Address, paths: tuple[str, ...], content_type: str, text: Callable[[], str]
    ) -> None:
        self._paths, self._type, self._text = paths, content_type, text
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=_CALLS)
        self.address: Address = address[0], self._socket.getsockname()[1]
        self._visits: dict[asyncio.StreamWriter, None] = {}  # who came first is first
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="gtopk-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._receive, sock=self._socket, limit=_REQUEST_BYTES, backlog=_VISITS
        )
        self._socket.listen(_CALLS)  # asyncio's backlog is also how many it accepts at a time
        await self._closing.wait()
        # Who is half in comes in first: a closed server would leave such a socket open.
        self._loop.remove_reader(self._socket)
        while len(asyncio.all_tasks()) > 1:
            for visit in self._visits:
                visit.transport.abort()
            await asyncio.sleep(0)
        server.close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._visits[writer] = None
        if len(self._visits) > _VISITS:
            first = next(iter(self._visits))
            del self._visits[first]
            first.transport.abort()
        try:
            await asyncio.wait_for(self._answer(reader, writer), _VISIT_SECONDS)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # it went, sent no request, or took too long
        finally:
            writer.transport.abort()
            self._visits.pop(writer, None)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        method, path, *_ = [*request.decode("latin-1").split("\r\n")[0].split(" "), "", ""]
        if method != "GET":
            status, text = HTTPStatus.METHOD_NOT_ALLOWED, f"GET {self._paths[-1]}\n"
        elif path.partition("?")[0] not in self._paths:
            status, text = HTTPStatus.NOT_FOUND, f"GET {self._paths[-1]}\n"
        else:
            status, text = HTTPStatus.OK, self._text()
        body = text.encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {self._type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        writer.close()
        await writer.wait_closed()  # it has taken all
