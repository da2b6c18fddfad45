"""Standard streams: they may be closed (daemons), lack characters, or support colours."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Final, TextIO

_IN_ASCII: Final = {"µ": "u", "μ": "u", "×": "x", "\u2009": " ", "\u202f": " ", "\xa0": " "}  # noqa: RUF001
_ERROR_HANDLER: Final = "gtopk-ascii"
_LINE_SECONDS: Final = 1.0  # how long a write waits for the reader of stderr


def replace_unencodable_characters() -> None:
    """Make stdout and stderr spell characters that their encoding lacks in ASCII, without errors.

    A few characters have an ASCII spelling ("us" for microseconds); all others are escaped.
    """
    codecs.register_error(_ERROR_HANDLER, _replace_in_ascii)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a script's replacement may lack it
        if reconfigure is not None:
            reconfigure(errors=_ERROR_HANDLER)


def _replace_in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if character in _IN_ASCII:
        return _IN_ASCII[character], error.start + 1
    # One character at a time, as the next one may have a spelling.
    single = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    return codecs.lookup_error("backslashreplace")(single)


def occupy_closed_descriptors() -> None:
    """Open any closed descriptor among 0, 1 and 2 on the null device.

    Otherwise the next socket or pipe would get that number, and a child process would not inherit
    it: these numbers are the child's standard streams.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def flush() -> None:
    """Flush stdout and stderr if this process has them."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # The reader is gone, the stream is closed, or a signal handler interrupted a write.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                stream.flush()


def write_line(text: str) -> None:
    """Write a line to descriptor 2 in one write, as several ranks share a pipe.

    Give up waiting after 1 s: a blocked reader must hold up neither the end of a job nor the
    heartbeats. The line is still written once the reader continues.
    """
    line = f"gtopk: {text}\n".encode(errors="replace")
    run_within(lambda: os.write(2, line), _LINE_SECONDS)


def run_within(work: Callable[[], object], seconds: float) -> None:
    """Call a function that may fail or never return; wait for it at most `seconds`."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter can start no more threads
        thread.start()
        thread.join(seconds)


def coloured(text: str, code: str) -> str:
    """Return text in a terminal colour: "31" red, "32" green, "1;32" bold green, "2" dim."""
    return f"\x1b[{code}m{text}\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """Tell whether to write colours: on a terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
