"""Settings: what the environment says about cycles, the cache, fusion and stalls."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from ... import settings

_SHORTEST_IDLE_SECONDS: Final = 0.02


class Settings(NamedTuple):
    """How an engine works.

    cycle_seconds:            how long a burst of submissions is waited for after the last of them.
    cache_capacity:           names that are known by a number; the least of all ranks' counts.
    fusion_threshold_bytes:   of arrays that are reduced as one; 0: none are; the least counts.
    stall_warning_seconds:    after which a rank that waits for others says so; infinity: never.
    stall_shutdown_seconds:   after which it ends the job; infinity: never.
    idle_seconds:             after which a rank with nothing to do looks what the others wait for.
    """

    cycle_seconds: float = 1e-3
    cache_capacity: int = 1024
    fusion_threshold_bytes: int = 64 << 20
    stall_warning_seconds: float = 60.0
    stall_shutdown_seconds: float = math.inf
    idle_seconds: float = 10.0

    def within(self, timeout_seconds: float) -> Settings:
        """Return the settings with an idle time well below all that waits are limited by."""
        limits = self.stall_warning_seconds, self.stall_shutdown_seconds, timeout_seconds
        idle = min(self.idle_seconds, min(limits) / 4)
        return self._replace(idle_seconds=max(idle, _SHORTEST_IDLE_SECONDS))


def settings_from(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings; raise ValueError for a number that is none, or below 0."""
    unchecked = settings.STALL_CHECK_DISABLE.read(environ)
    warning = settings.STALL_CHECK_TIME.read(environ)
    shutdown = settings.STALL_SHUTDOWN_TIME.read(environ)
    return Settings(
        cycle_seconds=settings.CYCLE_TIME.read(environ) / 1e3,
        cache_capacity=int(settings.CACHE_CAPACITY.read(environ)),
        fusion_threshold_bytes=int(settings.FUSION_THRESHOLD.read(environ)),
        stall_warning_seconds=math.inf if unchecked else warning or math.inf,
        stall_shutdown_seconds=math.inf if unchecked else shutdown or math.inf,
    )
