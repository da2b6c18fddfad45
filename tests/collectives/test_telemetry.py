"""Profiler ranges: none without a profiler, torch's and NVTX's while one runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from collectives.telemetry import profiled


def test_profiled_makes_no_range_and_imports_no_torch_without_profiler() -> None:
    program = (
        "import sys\n"
        "from collectives.telemetry import profiled\n"
        "with profiled('merge'):\n    pass\n"
        "assert profiled('merge') is profiled('select')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert profiled("merge") is profiled("select")  # also when torch is imported


def test_torch_profiler_records_ranges_of_another_thread() -> None:
    ready, done = threading.Event(), threading.Event()

    def exchange() -> None:
        ready.wait()
        with profiled("exchange"), profiled("merge"):
            torch.ones(3).sum()
        done.set()

    thread = threading.Thread(target=exchange)
    thread.start()
    everyone = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everyone) as seen:
        ready.set()
        done.wait()
    thread.join()
    parents = {event.name: event.cpu_parent for event in seen.events()}
    assert parents["gtopk::merge"].name == "gtopk::exchange"
    assert parents["aten::ones"].name == "gtopk::merge"


def test_gpu_process_pushes_and_pops_nvtx_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranges: list[Any] = []
    nvtx = SimpleNamespace(range_push=ranges.append, range_pop=lambda: ranges.append("pop"))
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    with pytest.raises(KeyError), profiled("exchange"), profiled("merge"):
        raise KeyError
    assert ranges == ["gtopk::exchange", "gtopk::merge", "pop", "pop"]
