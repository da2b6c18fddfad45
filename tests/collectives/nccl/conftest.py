"""A machine with GPUs, modelled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives import fake_cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.Cuda]:
    """A machine with 8 GPUs, on which nothing may go wrong."""
    cuda = fake_cuda.Cuda(gpus=8)
    fake_cuda.install(monkeypatch, cuda)
    yield cuda
    cuda.off.set()
    cuda.change()
    assert cuda.wrongs == []
