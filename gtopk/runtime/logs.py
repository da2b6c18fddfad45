"""Logs: print the logger "gtopk" where the script has not configured logging.

    gtopk: rank 0: compression of 25,557,032 elements begins with gtopk density=0.001 ...

Output goes to stderr: info and above on rank 0, warnings and above on the other ranks. GTOPK_LOG
(debug, info, warning, error or off) sets one level for all ranks. If the script has installed
handlers on the root logger or on "gtopk", only those are used.
"""

from __future__ import annotations

import logging
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

# `extra` of messages that all ranks log alike: without GTOPK_LOG only rank 0 prints them.
EVERYWHERE: Final = {"everywhere": True}


class _StderrHandler(logging.Handler):
    """Writes each record to stderr in one write, unless the root logger has handlers.

    set_level: whether `install_handler` has set the logger's level.
    """

    def __init__(self, rank: int, all_ranks: bool) -> None:
        """all_ranks: whether ranks other than 0 print the messages that all ranks log alike."""
        super().__init__()
        self._prefix = f"rank {rank}"
        self._skips_everywhere = rank > 0 and not all_ranks
        self.set_level = False

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, prefixed with the rank unless the message already begins with it."""
        text = super().format(record)
        has_prefix = text.startswith((f"{self._prefix}:", f"{self._prefix} "))
        return text if has_prefix else f"{self._prefix}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        # Checked for each record: the script may configure logging after `init`.
        if logging.getLogger().handlers:
            return
        if self._skips_everywhere and getattr(record, "everywhere", False):
            return
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            transport.print_line(text)


def install_handler(rank: int) -> None:
    """Add this rank's handler to the logger, unless the script has added one.

    Raises ValueError if GTOPK_LOG is not a valid level.
    """
    level = settings.LOG.read()
    remove_handler()
    if any(not isinstance(each, logging.NullHandler) for each in _log.handlers):
        return
    handler = _StderrHandler(rank, all_ranks=bool(level))
    _log.addHandler(handler)
    # Keep a level that the script has set.
    if _log.level == logging.NOTSET:
        default_level = logging.INFO if rank == 0 else logging.WARNING
        _log.setLevel(_LEVELS[level] if level else default_level)
        handler.set_level = True


def print_line(text: str, level: int = logging.INFO) -> None:
    """Print a line of the library's, unless GTOPK_LOG asks for less.

    Also works before `init` has called `install_handler`.
    """
    if level >= _LEVELS.get(settings.LOG.text().lower(), logging.INFO):
        transport.print_line(text)


def remove_handler() -> None:
    """Restore the logger as it was before `install_handler`."""
    for handler in _log.handlers[:]:
        if isinstance(handler, _StderrHandler):
            _log.removeHandler(handler)
            if handler.set_level:
                _log.setLevel(logging.NOTSET)
