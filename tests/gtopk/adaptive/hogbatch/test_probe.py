"""The probe finds the size beyond which larger batches no longer pay."""

from __future__ import annotations

import pytest
import torch

from gtopk.adaptive.hogbatch.sizes import GAIN, Probe, largest_fitting, memory_of


@pytest.mark.parametrize("overhead", [0.0, 1.0, 30.0, 1e9])
def test_doubling_the_found_size_gains_little(overhead: float) -> None:
    probe = Probe(1, 256)

    def speed(size: int) -> float:
        return size / (overhead + size)

    while probe.found is None:
        probe.note(probe.size, probe.size / speed(probe.size))
    assert probe.found == 256 or speed(2 * probe.found) < GAIN * speed(probe.found)
    assert probe.found == 1 or speed(probe.found) >= GAIN * speed(probe.found // 2)


def test_probe_uses_fastest_of_three_batches() -> None:
    probe = Probe(1, 64)
    for seconds in (9.0, 1.0, 9.0, 9.0, 9.0, 1.0):
        probe.note(probe.size, seconds)
    assert probe.found is None
    assert probe.size == 4


def test_probe_gives_a_slow_size_three_more_batches() -> None:
    for later in ([9.0, 9.0, 1.0], [9.0, 9.0, 9.0]):
        probe = Probe(1, 64)
        for seconds in (1.0, 1.0, 1.0, 9.0, 9.0, 9.0):  # the machine was busy
            probe.note(probe.size, seconds)
        assert (probe.found, probe.size) == (None, 2)
        for seconds in later:
            if probe.found is None and probe.size == 2:
                probe.note(2, seconds)
        assert (probe.found, probe.size) == ((None, 4) if 1.0 in later else (1, 1))


def test_probe_ignores_batches_of_another_size() -> None:
    probe = Probe(4, 64)
    probe.note(3, 1.0)  # the last one of an epoch
    probe.note(4, 1.0)
    probe.note(4, 1.0)
    assert probe.size == 4


def test_largest_fitting_size_scales_with_memory_per_sample() -> None:
    assert largest_fitting(8, took_bytes=800, free_bytes=10_000) == 80
    assert largest_fitting(8, took_bytes=800, free_bytes=10) == 1
    assert largest_fitting(8, took_bytes=0, free_bytes=10) > 1000


def test_memory_reserved_by_allocator_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {
        "mem_get_info": (100, 9000),
        "memory_reserved": 700,
        "memory_allocated": 200,
        "max_memory_allocated": 600,
    }
    for name, found in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert memory_of(torch.device("cuda")) == (400, 600)
