"""Steps by a replayed graph, against the same steps launched one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import reduce
from collectives.kernels import Momentum, reference
from collectives.kernels.device.entries import clear_at
from collectives.kernels.device.machine import Scratch
from collectives.kernels.device.selection import accumulate_and_select
from collectives.kernels.device.step import MAX_GRAPHS, Step
from collectives.transports import local_world

SIZE, K = 5000, 50


def gradients(steps: int) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.standard_normal(SIZE).astype(np.float32) for _ in range(steps)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_graph_steps_equal_steps_launched_one_by_one(machine: Any, momentum: float) -> None:
    step, scratch, threshold, following = Step(machine, SIZE, K, np.float32), Scratch(machine), 0, 0
    by_graph, by_launches, graph_velocity, launches_velocity = (
        machine.zeros(SIZE, np.float32) for _ in range(4)
    )
    for number, gradient in enumerate(gradients(6)):
        if number == 3:
            gradient[:] *= 100  # the guess is of no use
        weight = 0.5 + number
        parts = [machine.put(gradient[:1001]), machine.put(gradient[1001:])]
        picked, following = step(
            by_graph,
            parts,
            Momentum(graph_velocity, momentum) if momentum else None,
            weight,
            threshold=following,
        )
        expected, threshold = accumulate_and_select(
            scratch,
            by_launches,
            machine.put(gradient),
            K,
            threshold,
            Momentum(launches_velocity, momentum) if momentum else None,
            weight,
        )
        clear_at(scratch, by_launches, expected.indices)
        clear_at(scratch, by_graph, picked.indices)
        assert (picked.entries, following) == (expected.entries, threshold)
        assert machine.fetch(picked.indices).tolist() == machine.fetch(expected.indices).tolist()
        assert machine.fetch(picked.values).tobytes() == machine.fetch(expected.values).tobytes()
        assert machine.fetch(by_graph).tobytes() == machine.fetch(by_launches).tobytes()
        assert machine.fetch(graph_velocity).tobytes() == machine.fetch(launches_velocity).tobytes()


def test_step_alternates_between_two_residual_buffers(machine: Any) -> None:
    step, threshold = Step(machine, SIZE, K, np.float32), 0.0
    current, other = (machine.zeros(SIZE, np.float32) for _ in range(2))
    expected = np.zeros(SIZE, np.float32)
    for gradient in gradients(7):
        before = machine.fetch(current).tobytes()
        picked, threshold = step(current, machine.put(gradient), into=other, threshold=threshold)
        assert machine.fetch(current).tobytes() == before  # kept, in case the step does not count
        from_reference, _ = reference.accumulate_and_select(expected, gradient, K)
        assert machine.fetch(other).tobytes() == expected.tobytes()
        assert machine.fetch(picked.indices).tolist() == from_reference.indices.tolist()
        clear_at(Scratch(machine), other, picked.indices)
        reference.clear_at(expected, from_reference.indices)
        current, other = other, current


def test_third_step_replays_a_graph_and_waits_once(on_host: Any) -> None:
    machine, threshold = on_host(), 0.0
    step, residual = Step(machine, SIZE, K, np.float32), machine.zeros(SIZE, np.float32)
    held = machine.zeros(SIZE, np.float32)  # the gradients stay where they are
    launched_by_hand: list[int] = []
    launch = machine.launch
    machine.launch = lambda *given: (launched_by_hand.append(1), launch(*given))
    for number, gradient in enumerate(gradients(5)):
        held[:] = gradient
        before, so_far, ran = machine.fetched, len(launched_by_hand), len(machine.launched)
        writes: list[int] = []
        write = machine.write
        machine.write = lambda *given, write=write, writes=writes: (writes.append(1), write(*given))
        _, threshold = step(residual, held, weight=0.5, threshold=threshold)
        machine.write = write
        if number >= 2:
            assert machine.launched[ran:] == [
                "begin<float>",
                "mark<float, float, 1>",
                "expand<float, int>",
                "split<float, int>",
            ]
            assert len(launched_by_hand) - so_far == 4  # of the replay; here it is no other
            assert machine.fetched == before + 1
            assert not writes


def test_step_is_exact_with_more_buffers_than_kept_graphs(on_host: Any) -> None:
    machine, threshold = on_host(), 0.0
    step, expected = Step(machine, SIZE, K, np.float32), np.zeros(SIZE, np.float32)
    places = [machine.zeros(SIZE, np.float32) for _ in range(MAX_GRAPHS + 2)]
    current = places[-1]
    for number, gradient in enumerate(gradients(3 * len(places))):
        into = places[number % len(places)]
        picked, threshold = step(current, machine.put(gradient), into=into, threshold=threshold)
        from_reference, _ = reference.accumulate_and_select(expected, gradient, K)
        assert picked.indices.tolist() == from_reference.indices.tolist()
        assert into.tobytes() == expected.tobytes()
        current = into


def test_step_returns_fewer_than_k_entries_when_others_are_zero(machine: Any) -> None:
    step = Step(machine, SIZE, K, np.float32)
    gradient = np.zeros(SIZE, np.float32)
    gradient[[3, 4000]] = 1, -2
    picked, threshold = step(machine.zeros(SIZE, np.float32), machine.put(gradient))
    assert machine.fetch(picked.indices).tolist() == [3, 4000]
    assert threshold == 0.0


def test_step_on_one_rank_equals_the_whole_exchange(machine: Any) -> None:
    step, residual = Step(machine, SIZE, K, np.float32), machine.zeros(SIZE, np.float32)
    from_reference, transport, threshold = np.zeros(SIZE, np.float32), local_world(1)[0], 0.0
    for gradient in gradients(3):
        chosen, threshold = step(residual, machine.put(gradient), threshold=threshold)
        picked, _ = reference.accumulate_and_select(from_reference, gradient, K)
        update, returned = reduce(picked, K, transport, "gtopk")
        reference.clear_at(from_reference, picked.indices)
        reference.add_at(from_reference, returned)
        assert machine.fetch(chosen.indices).tolist() == update.indices.tolist()
        assert machine.fetch(chosen.values).tobytes() == update.values.tobytes()
        clear_at(Scratch(machine), residual, chosen.indices)
        assert machine.fetch(residual).tobytes() == from_reference.tobytes()


@pytest.mark.parametrize(("size", "dtype"), [(SIZE + 1, np.float32), (SIZE, np.float64)])
def test_residual_of_another_length_or_dtype_is_refused(
    machine: Any, size: int, dtype: type
) -> None:
    step, residual = Step(machine, SIZE, K, np.float32), machine.zeros(size, dtype)
    with pytest.raises(ValueError, match=r"for float32 \[5000\], got a residual float"):
        step(residual, machine.put(np.ones(size, dtype)))
    assert not machine.fetch(residual).any()


@pytest.mark.parametrize("what", ["into", "velocity"])
def test_output_memory_of_another_dtype_is_refused(machine: Any, what: str) -> None:
    step, residual = Step(machine, SIZE, K, np.float32), machine.zeros(SIZE, np.float32)
    other = machine.zeros(SIZE, np.float64)
    given = {"into": other} if what == "into" else {"momentum": Momentum(residual, 0.9, into=other)}
    with pytest.raises(ValueError, match=r"memory for the .* float32 \[5000\], got float64"):
        step(residual, machine.zeros(SIZE, np.float32), **given)
