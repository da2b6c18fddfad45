"""A step that never waits, against the same step with the host in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.kernels.device.machine import Scratch
from collectives.kernels.device.selection import accumulate_and_select
from collectives.kernels.device.step import Step

SIZE, K = 5000, 50


def gradients(steps: int) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.standard_normal(SIZE).astype(np.float32) for _ in range(steps)]


def test_steps_without_the_host_are_steps_with_it(machine: Any) -> None:
    step, scratch, threshold = Step(machine, SIZE, K, np.float32), Scratch(machine), 0.0
    alone, watched = (machine.zeros(SIZE, np.float32) for _ in range(2))
    for number, gradient in enumerate(gradients(6)):
        if number == 3:
            gradient[:] *= 100  # the guess is of no use
        before = machine.fetched
        step(alone, machine.put(gradient))
        assert machine.fetched == before
        expected, threshold = accumulate_and_select(
            scratch, watched, machine.put(gradient), K, threshold
        )
        kept, _, following = step.outcome()
        assert (kept, following) == (expected.entries, threshold)
        assert machine.fetch(step.kept).tolist() == [kept]
        assert machine.fetch(step.indices[:kept]).tolist() == expected.indices.tolist()
        assert machine.fetch(step.values[:kept]).tobytes() == expected.values.tobytes()
        assert machine.fetch(alone).tobytes() == machine.fetch(watched).tobytes()


def test_a_step_asks_for_no_memory(on_host: Any) -> None:
    machine = on_host()
    step, residual = Step(machine, SIZE, K, np.float32), machine.zeros(SIZE, np.float32)
    (gradient,) = map(machine.put, gradients(1))
    machine.empty = machine.zeros = None  # a graph keeps its addresses, so none may be new
    step(residual, gradient)
    assert step.outcome().kept == K


def test_fewer_entries_than_k_are_counted(machine: Any) -> None:
    step = Step(machine, SIZE, K, np.float32)
    gradient = np.zeros(SIZE, np.float32)
    gradient[[3, 4000]] = 1, -2
    step(machine.zeros(SIZE, np.float32), machine.put(gradient))
    assert step.outcome().kept == 2
    assert machine.fetch(step.indices[:2]).tolist() == [3, 4000]


@pytest.mark.gpu
def test_a_captured_step_replays(on_gpu: Any) -> None:
    machine = on_gpu
    cupy = pytest.importorskip("cupy")
    step = Step(machine, SIZE, K, np.float32)
    residual, gradient = machine.zeros(SIZE, np.float32), machine.zeros(SIZE, np.float32)
    expected, scratch, threshold = np.zeros(SIZE, np.float32), Scratch(machine), 0.0
    held = machine.zeros(SIZE, np.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        step(residual, gradient)
        stream.begin_capture()
        step(residual, gradient)
        graph = stream.end_capture()
        for values in gradients(4):
            gradient.set(values)
            graph.launch()
            stream.synchronize()
            expected += values
            held.set(expected)
            picked, threshold = accumulate_and_select(
                scratch, held, machine.zeros(SIZE, np.float32), K, threshold
            )
            assert machine.fetch(step.indices).tolist() == machine.fetch(picked.indices).tolist()
