"""Logs: how the logger "gtopk" speaks where the script has said nothing of logging.

    gtopk: rank 0: compression of 25,557,032 elements begins with gtopk density=0.001 ...

On stderr; from rank 0 what is worth knowing, from the others what is amiss there. GTOPK_LOG, one of
debug, info, warning, error and off, is for all ranks alike. Handlers of the script's own, on the
root logger or on "gtopk", take its place.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Final

from collectives.transports import transport

from .. import settings

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
