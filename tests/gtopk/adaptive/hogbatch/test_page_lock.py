"""Shared memory is page-locked if CUDA can, and unlocked when it is freed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gtopk.adaptive.hogbatch.shared_model import lock_pages

CUDA = torch.device("cuda")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The memory registered with a fake CUDA runtime: bytes by address."""
    held: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        held[address] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=held.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return held


def test_memory_stays_page_locked_until_freed(registered: dict[int, int]) -> None:
    memory = np.zeros(4096, np.uint8)
    assert lock_pages(memory, CUDA)
    assert registered == {memory.ctypes.data: 4096}
    del memory
    assert registered == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_page_locked_without_gpu_or_bytes(
    registered: dict[int, int], device: str
) -> None:
    memory = np.zeros(8 if device == "cpu" else 0, np.uint8)
    assert not lock_pages(memory, torch.device(device))
    assert registered == {}


@pytest.mark.parametrize("fault", ["status", "error"])
def test_lock_pages_returns_false_and_clears_error_if_cuda_refuses(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def register(*_: Any) -> int:
        if fault == "error":
            raise RuntimeError("no CUDA here")
        return 712  # cudaErrorHostMemoryAlreadyRegistered

    launched: list[torch.device] = []

    def ones(size: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: of the call before")

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    assert not lock_pages(np.zeros(8, np.uint8), CUDA)
    # CUDA keeps the error; it must be cleared, so that no later kernel reports it.
    assert launched == ([CUDA] if fault == "status" else [])
