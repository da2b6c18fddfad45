"""Run on two ranks or more: operations are matched by name, in whatever order ranks submit them."""

from __future__ import annotations

import time

import light_torch  # noqa: F401

import torch
from checks import raises, run_tests

import gtopk.torch as hvd
from gtopk.runtime.world import world

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
TOTAL = float(sum(range(SIZE)))


def reduce(name: str, length: int = 3) -> int:
    handle: int = hvd.allreduce_async(torch.full((length,), float(RANK)), name=name, op=hvd.Sum)
    return handle


def test_operations_are_matched_by_name_in_any_order() -> None:
    for _ in range(3):
        lengths = {f"tensor {number}": 10**number for number in range(7)}
        names = sorted(lengths, reverse=bool(RANK % 2))
        handles = {name: reduce(name, lengths[name]) for name in names}
        for name in sorted(names):
            assert torch.equal(hvd.synchronize(handles[name]), torch.full((lengths[name],), TOTAL))


def test_operation_may_stay_pending_across_barriers() -> None:
    pending = reduce("late") if RANK != SIZE - 1 else None
    for _ in range(3):
        hvd.barrier()
        hvd.allreduce(torch.ones(2), name="between")
    pending = pending or reduce("late")
    assert float(hvd.synchronize(pending)[0]) == TOTAL


def test_large_tensor_is_reduced_in_place() -> None:
    tensor = torch.full((3_000_000,), float(RANK))
    before = tensor.data_ptr()
    for step in range(1, 3):
        assert hvd.allreduce_(tensor, op=hvd.Sum, name="large") is tensor
        assert torch.equal(tensor, torch.full_like(tensor, TOTAL * SIZE ** (step - 1)))
    assert tensor.data_ptr() == before


def test_joined_ranks_contribute_zeros() -> None:
    engine = world.current().engine
    for _ in range(2):
        for step in range(RANK + 1):
            found = hvd.allreduce(torch.ones(2), name=f"step {step}", op=hvd.Sum)
            assert found.tolist() == [SIZE - step] * 2
        assert engine.join().wait() == SIZE - 1


def test_ranks_waiting_for_different_operations_get_an_error_and_continue() -> None:
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.synchronize(reduce(f"of rank {RANK}")),
        "the ranks disagree about their next operation: ",
        *(f"rank {rank}: allreduce.of rank {rank}" for rank in range(SIZE)),
    )
    hvd.barrier()


def test_stalled_operation_is_warned_of() -> None:
    if RANK == 1:
        time.sleep(1.0)
    hvd.synchronize(reduce("stalled"))


if __name__ == "__main__":
    run_tests(globals())
    if RANK == SIZE - 1:  # the others do not submit it, but may still leave
        reduce("never")
    hvd.shutdown()
    print(f"rank {RANK}: any order will do\n", end="", flush=True)
