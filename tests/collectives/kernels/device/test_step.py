"""A step that never waits, against the same step with the host in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import reduce
from collectives.kernels import reference
from collectives.kernels.device.entries import clear_at
from collectives.kernels.device.machine import Scratch
from collectives.kernels.device.selection import accumulate_and_select
from collectives.kernels.device.step import Step
from collectives.transports import local_world

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
        weight = 0.5 + number
        step(alone, machine.put(gradient), weight=weight)
        assert machine.fetched == before
        expected, threshold = accumulate_and_select(
            scratch, watched, machine.put(gradient), K, threshold, weight=weight
        )
        clear_at(scratch, watched, expected.indices)
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
    residual = machine.zeros(SIZE, np.float32)
    step(residual, machine.put(gradient))
    assert step.outcome().kept == 2
    assert not machine.fetch(residual).any()
    assert machine.fetch(step.indices[:2]).tolist() == [3, 4000]


def test_of_one_rank_it_is_the_whole_step(machine: Any) -> None:
    step, residual = Step(machine, SIZE, K, np.float32), machine.zeros(SIZE, np.float32)
    by_hand, transport = np.zeros(SIZE, np.float32), local_world(1)[0]
    for gradient in gradients(3):
        step(residual, machine.put(gradient))
        picked, _ = reference.accumulate_and_select(by_hand, gradient, K)
        update, returned = reduce(picked, K, transport, "gtopk")
        reference.clear_at(by_hand, picked.indices)
        reference.add_at(by_hand, returned)
        assert machine.fetch(step.indices).tolist() == update.indices.tolist()
        assert machine.fetch(step.values).tobytes() == update.values.tobytes()
        assert machine.fetch(residual).tobytes() == by_hand.tobytes()


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
            clear_at(scratch, held, picked.indices)
            expected[:] = held.get()
            assert residual.get().tobytes() == expected.tobytes()
