"""Page lock: a GPU copies to and from memory that stays in place at the speed of its bus.

Memory that the workers of a node map is the operating system's to move: CUDA copies it twice, by
way of a buffer of its own, and has the host wait. Each worker registers its own mapping.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import Any, Final

import torch

from collectives.vector import Array

_log = logging.getLogger("gtopk")
_FOR_ALL_CONTEXTS: Final = 1  # cudaHostRegisterPortable


def lock_pages(memory: Array, device: torch.device) -> bool:
    """Register memory with CUDA for as long as the array lives; tell whether that worked.

    Where it did not, copies are as right, and slower: the limit on locked memory (ulimit -l) may
    be too low.
    """
    if device.type != "cuda" or not memory.size:
        return False
    address = memory.ctypes.data
    try:
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, memory.nbytes, _FOR_ALL_CONTEXTS))
    except (RuntimeError, AttributeError, TypeError) as error:
        _log.debug("shared memory could not be page-locked: %s", error)
        return False
    if status:
        _log.debug("shared memory could not be page-locked: CUDA's error %d", status)
        _take_last_error(device)
        return False
    unlock = weakref.finalize(memory, runtime.cudaHostUnregister, address)
    unlock.atexit = False  # CUDA may have ended before
    return True


def _take_last_error(device: torch.device) -> None:
    """Clear CUDA's last error: torch would raise it from the next kernel that it launches."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)
