"""A dense step adds the residual with torch, which keeps subnormal numbers, also on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives import SparseVector, local_world, reduce, run_ranks
from collectives.transports import LocalTransport
from gtopk.exchange import residual
from gtopk.exchange.buckets import arrays
from gtopk.exchange.residual import Residual
from tests.gtopk import posing

TINY = float(np.finfo(np.float32).smallest_subnormal)


def check_a_dense_step(device: str) -> None:
    """Add a residual and a velocity to a gradient, all of subnormal numbers."""
    gradient = torch.full((4,), 3 * TINY, device=device)
    held = Residual(4, np.dtype(np.float32), 0.5, gradient.device)
    values, velocity = held.after_last_step().values()
    velocity[1], values[2] = 4 * TINY, 3 * TINY
    held.is_empty = False
    # Shorter than half the velocity.
    assert held.add_fraction_to(residual.Memory.of(gradient).array) == 1.0
    assert (gradient.double() / TINY).tolist() == [3, 5, 6, 3]
    assert (velocity.double() / TINY).tolist() == [3, 5, 3, 3]
    assert (values.double() / TINY).tolist() == [0, 0, 3, 0]


def test_dense_step_on_the_host_adds_residual_and_velocity() -> None:
    check_a_dense_step("cpu")


def test_dense_step_on_fake_gpu_arrays_adds_residual_and_velocity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posing.pose(monkeypatch, None)  # its arrays have no in-place operators
    check_a_dense_step("cpu")


@pytest.mark.parametrize("size", [2, 4, 5])
def test_velocity_of_selected_entries_that_were_dropped_stays(size: int) -> None:
    """Also with masking."""
    length, k = 1000, 10

    def program(transport: LocalTransport) -> tuple[Residual, SparseVector, SparseVector]:
        held = Residual(length, np.dtype(np.float32), momentum=0.9, masked=True)
        gradient = np.random.default_rng(transport.rank).standard_normal(length)
        picked = held.accumulate_and_select(gradient.astype(np.float32), k)
        update, returned = reduce(picked, k, transport, "gtopk")
        held.remove_sent(picked, returned, update)
        return held, picked, update

    ranks = run_ranks(local_world(size), program)
    of_one = np.concatenate([picked.indices for _, picked, _ in ranks])
    for held, picked, update in ranks:
        velocity = held.part("velocity", 0).numpy()
        dropped = ~np.isin(picked.indices, update.indices)
        assert dropped.any()
        np.testing.assert_array_equal(velocity[picked.indices[dropped]], picked.values[dropped])
        unshared = [np.count_nonzero(of_one == index) == 1 for index in picked.indices]
        assert not velocity[picked.indices[~dropped & unshared]].any()
    assert any(
        not held.part("velocity", 0).numpy()[picked.indices].all() for held, picked, _ in ranks
    )


@pytest.fixture(params=["host", "posing"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Residuals in host memory, or in fake GPU memory."""
    if request.param == "posing":
        posing.pose(monkeypatch, request.getfixturevalue("kernels"))
    return request.param


def content(residual: Residual) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in residual.after_last_step().items()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.usefixtures("memory")
def test_undone_steps_leave_residuals_bit_identical(momentum: float) -> None:
    """Undone, repeated or neither: residuals are the same after each step that counts."""
    random = np.random.default_rng(3)
    length, k = 700, 20
    held, undisturbed = (
        Residual(length, np.dtype(np.float32), momentum, masked=bool(momentum)) for _ in range(2)
    )
    nothing = SparseVector.empty(length, np.dtype(np.float32))
    for number in range(8):
        gradient = random.standard_normal(length).astype(np.float32)
        array = residual.Memory.of(torch.from_numpy(gradient)).array
        if number % 3 != 1:
            before = content(held)
            held.snapshot()
            wrong = residual.Memory.of(torch.from_numpy(gradient * np.float32(np.nan))).array
            held.accumulate_and_select(wrong, k)
            assert content(held) == before  # what a checkpoint would save now
            held.restore()
            assert content(held) == before
            held.snapshot()
        picked = held.accumulate_and_select(array, k, 0.5)
        again = undisturbed.accumulate_and_select(array, k, 0.5)
        assert posing.plain(picked.indices).tolist() == posing.plain(again.indices).tolist()
        for each, entries in ((held, picked), (undisturbed, again)):
            each.remove_sent(entries, empty_like(entries, nothing), entries)
            each.drop_snapshot()
        assert content(held) == content(undisturbed)


def empty_like(entries: SparseVector, nothing: SparseVector) -> SparseVector:
    """Return an empty vector in the same kind of memory."""
    return SparseVector(entries.indices[:0], entries.values[:0], nothing.length)


@pytest.mark.parametrize(
    "change", ["add", "add_dense", "subtract_fraction", "clear", "arrays", "velocity"]
)
def test_restore_undoes_every_change_of_a_residual(change: str) -> None:
    held = Residual(6, np.dtype(np.float32), 0.5)
    held.add_dense(torch.arange(6.0))
    before = content(held)
    held.snapshot()
    {
        "add": lambda: held.add(SparseVector(np.array([2], np.int32), np.ones(1, np.float32), 6)),
        "add_dense": lambda: held.add_dense(torch.ones(6)),
        "subtract_fraction": lambda: held.subtract_fraction(0.25),
        "clear": held.clear,
        "arrays": lambda: [array.fill(9) for array in held.arrays()],
        "velocity": lambda: held.add_fraction_to(np.ones(6, np.float32)),
    }[change]()
    assert content(held) == before
    held.restore()
    assert content(held) == before
    assert not held.is_empty


def test_restore_resets_is_empty_and_may_be_misplaced() -> None:
    held = Residual(6, np.dtype(np.float32))
    held.snapshot()
    held.add_dense(torch.ones(6))
    held.may_be_misplaced = False  # as after an exchange that returned everything
    held.restore()
    assert held.is_empty
    assert held.may_be_misplaced


def test_restored_drain_steps_do_not_count() -> None:
    held = Residual(6, np.dtype(np.float32))
    held.add_dense(torch.ones(6))
    for number in range(6):
        held.snapshot()
        held.subtract_fraction(0.25)
        held.drop_snapshot() if number % 2 else held.restore()
    assert held.add_fraction_to(np.zeros(6, np.float32)) == 1 / (residual.MAX_DRAIN_STEPS - 3)


@pytest.mark.parametrize("end", ["restore", "drop_snapshot"])
def test_restore_keeps_what_was_added_after_the_step_ended(end: str) -> None:
    held = Residual(6, np.dtype(np.float32))
    held.snapshot()
    held.add_dense(torch.ones(6))
    getattr(held, end)()
    held.add_dense(torch.ones(6))
    after = content(held)
    held.restore()
    assert content(held) == after
    assert not held.is_empty


def test_restore_uses_the_last_snapshot() -> None:
    held = Residual(6, np.dtype(np.float32))
    for _ in range(2):
        held.snapshot()
        before = content(held)
        held.add_dense(torch.ones(6))
    held.restore()
    assert content(held) == before
    assert not held.is_empty


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_restore_discards_what_the_undone_step_stashed(momentum: float) -> None:
    held = Residual(6, np.dtype(np.float32), momentum, sizes=[4, 2])
    for array in held.arrays():
        array[:] = range(1, 7)
    held.is_empty = False
    before = content(held)
    held.snapshot()
    held.stash([0])
    assert held.has_stashed
    held.restore()
    assert content(held) == before
    held.snapshot()  # a step in which every parameter has a gradient
    held.may_be_misplaced = False
    held.unstash()
    held.drop_snapshot()
    assert content(held) == before
    assert not held.may_be_misplaced
    assert not held.has_stashed


def test_stashed_entries_stay_though_all_others_are_sent() -> None:
    """Some of it may belong to another rank, although all else has been returned."""
    held = Residual(6, np.dtype(np.float32), sizes=[4, 2])
    held.add_dense(torch.arange(1.0, 7.0))
    held.snapshot()
    held.stash([1])
    assert held.values.tolist() == [1, 2, 3, 4, 0, 0]
    held.clear()
    held.may_be_misplaced = False
    held.unstash()
    held.drop_snapshot()
    assert held.values.tolist() == [0, 0, 0, 0, 5, 6]
    assert not held.is_empty
    assert held.may_be_misplaced


def test_ages_are_on_the_host_for_any_default_device() -> None:
    with torch.device("meta"):
        held = Residual(6, np.dtype(np.float32), betas=(0.9, 0.99), sizes=[4, 2])
    assert held.part(residual.AGE, 1).device.type == "cpu"


@pytest.mark.gpu
def test_dense_step_on_a_gpu_keeps_subnormal_numbers() -> None:
    pytest.importorskip("cupy", reason="no cupy here")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    with arrays.current_stream(torch.device("cuda", 0))():
        check_a_dense_step("cuda:0")
