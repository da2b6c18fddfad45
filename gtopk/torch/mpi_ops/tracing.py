"""The timeline: a record of what the ranks do, written while they run."""

from __future__ import annotations

from ... import settings
from ...recording import timeline
from ...world.world import current


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to record, on rank 0, into a file in Chrome's trace format.

    mark_cycles: also when the ranks agreed on what to do next.
    Raises ValueError where HOROVOD_TIMELINE is neither DYNAMIC nor a file.
    """
    here = current()
    if not settings.HOROVOD_TIMELINE.read():
        raise ValueError(
            "start_timeline needs HOROVOD_TIMELINE in the environment: DYNAMIC, or a file"
        )
    timeline.start(here, file_path, mark_cycles)


def stop_timeline() -> None:
    """End the record."""
    here = current()
    timeline.stop(here)
