"""Logs: how the logger "gtopk" speaks where the script has said nothing of logging.

    gtopk: rank 0: compression of 25,557,032 elements begins with gtopk density=0.001 ...

On stderr; from rank 0 what is worth knowing, from the others what is amiss there. GTOPK_LOG, one of
debug, info, warning, error and off, is for all ranks alike. Handlers of the script's own, on the
root logger or on "gtopk", take its place.

Standard streams: some may be closed (by a daemon), or take few letters, or colours.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import Final, TextIO

from collectives.transports import transport

from .. import settings

_IN_ASCII: Final = {"µ": "u", "μ": "u", "×": "x", "\u2009": " ", "\u202f": " ", "\xa0": " "}  # noqa: RUF001
_SPELT: Final = "gtopk-spelt"


def spell_in_any_encoding() -> None:
    """Have stdout and stderr write what their encoding lacks in ASCII: no output is an error then.

    A few characters have an ASCII spelling ("us" for microseconds), all others are escaped.
    """
    codecs.register_error(_SPELT, _spelt)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # what stands in for a stream has none
        if reconfigure is not None:
            reconfigure(errors=_SPELT)


def _spelt(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    first = error.object[error.start]
    if first in _IN_ASCII:
        return _IN_ASCII[first], error.start + 1
    one = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    return codecs.lookup_error("backslashreplace")(one)


def occupy_closed_descriptors() -> None:
    """Open what is closed of descriptors 0, 1 and 2 on the null device.

    Else a socket or a pipe that is opened next gets such a number, and a child process, which has
    its own standard streams there, does not inherit it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def flush() -> None:
    """Flush stdout and stderr, as far as this process has them."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # the reader is gone; closed
                stream.flush()


def wants_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether to write colours: to a terminal, unless NO_COLOR says no (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_log = logging.getLogger("gtopk")

# `extra` of what all ranks say alike: without GTOPK_LOG only rank 0's is shown.
EVERYWHERE: Final = {"everywhere": True}


class _Spoken(logging.Handler):
    """Writes to stderr, a line in one write, unless the root logger has handlers of its own.

    set_level: whether the logger's level is ours.
    """

    def __init__(self, rank: int, all_ranks: bool) -> None:
        """all_ranks: say also what other ranks say, too."""
        super().__init__()
        self._whose = f"rank {rank}"
        self._is_echo = rank > 0 and not all_ranks
        self.set_level = False

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; some messages begin with the rank by themselves."""
        said = super().format(record)
        begins = said.startswith((f"{self._whose}:", f"{self._whose} "))
        return f"gtopk: {said if begins else f'{self._whose}: {said}'}"

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        if self._is_echo and getattr(record, "everywhere", False):
            return
        try:
            print(f"{self.format(record)}\n", end="", file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def speak(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Have this rank's logger speak, unless the script has seen to that.

    Raises ValueError for a GTOPK_LOG that is no level.
    """
    asked = settings.LOG.read(environ)
    fall_silent()
    if any(not isinstance(each, logging.NullHandler) for each in _log.handlers):
        return
    handler = _Spoken(rank, all_ranks=bool(asked))
    _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        usual = logging.INFO if rank == 0 else logging.WARNING
        _log.setLevel(_LEVELS[asked] if asked else usual)
        handler.set_level = True


def say(text: str, level: int = logging.INFO, environ: Mapping[str, str] = os.environ) -> None:
    """Print a line of the library's own, unless GTOPK_LOG asks for less.

    For what is said before `init` has made the logger speak, too.
    """
    if level >= _LEVELS.get(settings.LOG.text(environ).lower(), logging.INFO):
        transport.say(text)


def fall_silent() -> None:
    """Let the logger be as it was before `speak`."""
    for handler in _log.handlers[:]:
        if isinstance(handler, _Spoken):
            _log.removeHandler(handler)
            if handler.set_level:
                _log.setLevel(logging.NOTSET)
