"""What a simulation does not say: who is slow on this machine, and anything twice."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Hush(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if record.module == "stragglers" or said in self._said:
            return False
        self._said.add(said)
        return True


@contextlib.contextmanager
def filtered_logs() -> Iterator[None]:
    """Pass over what is no word on the cluster that is simulated: ranks share these cores."""
    logger, hush = logging.getLogger("gtopk"), _Hush()
    logger.addFilter(hush)
    try:
        yield
    finally:
        logger.removeFilter(hush)
