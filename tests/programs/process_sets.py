"""Checks for any number of ranks: process sets, join, and worlds of some of the ranks.

Imported by mpi_ops.py, after init; ends in a new world, of all ranks again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import light_torch  # noqa: F401

import torch
from checks import check_close, check_that_the_job_goes_on, raises, same_everywhere

import gtopk.torch as hvd

RANK, SIZE = hvd.rank(), hvd.size()
RANKS = range(SIZE)
ODD = SIZE - 1
EVENS, ODDS = [*RANKS][::2], [*RANKS][1::2]
DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def calls_with(process_set: Any) -> list[Callable[[], Any]]:
    """Return a call of every operation that takes a process set."""
    one, rows = torch.ones(1), torch.ones(SIZE * SIZE)
    return [
        lambda: hvd.allreduce(one, process_set=process_set),
        lambda: hvd.allreduce_(one, process_set=process_set),
        lambda: hvd.allreduce_async(one, process_set=process_set),
        lambda: hvd.allreduce_async_(one, process_set=process_set),
        lambda: hvd.grouped_allreduce([one], process_set=process_set),
        lambda: hvd.grouped_allreduce_([one], process_set=process_set),
        lambda: hvd.grouped_allreduce_async([one], process_set=process_set),
        lambda: hvd.grouped_allreduce_async_([one], process_set=process_set),
        lambda: hvd.sparse_allreduce_async(one.to_sparse(), "x", hvd.Sum, process_set),
        lambda: hvd.allgather(one, process_set=process_set),
        lambda: hvd.allgather_async(one, process_set=process_set),
        lambda: hvd.grouped_allgather([one], process_set=process_set),
        lambda: hvd.grouped_allgather_async([one], process_set=process_set),
        lambda: hvd.broadcast(one, 0, process_set=process_set),
        lambda: hvd.broadcast_(one, 0, process_set=process_set),
        lambda: hvd.broadcast_async(one, 0, process_set=process_set),
        lambda: hvd.broadcast_async_(one, 0, process_set=process_set),
        lambda: hvd.alltoall(rows, process_set=process_set),
        lambda: hvd.alltoall_async(rows, process_set=process_set),
        lambda: hvd.reducescatter(rows, process_set=process_set),
        lambda: hvd.reducescatter_async(rows, process_set=process_set),
        lambda: hvd.grouped_reducescatter([rows], process_set=process_set),
        lambda: hvd.grouped_reducescatter_async([rows], process_set=process_set),
        lambda: hvd.broadcast_object(1, 0, process_set=process_set),
        lambda: hvd.barrier(process_set=process_set),
    ]


def test_global_process_set_has_all_ranks() -> None:
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.ranks) == (0, [*RANKS])
    assert (everyone.size(), everyone.rank(), everyone.included()) == (SIZE, RANK, True)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=everyone).item() == SIZE


def test_unregistered_process_set_cannot_be_used() -> None:
    fresh = hvd.ProcessSet([ODD, 0] if SIZE > 1 else [0])
    assert fresh.ranks == sorted({0, ODD})
    assert (fresh.process_set_id, fresh.mpi_comm) == (None, None)
    assert (fresh.size(), fresh.rank(), fresh.included()) == (None, None, None)
    for call in calls_with(fresh):
        raises(ValueError, call, "is not registered", "add_process_set")


def test_operations_refuse_anything_but_a_process_set() -> None:
    for wrong in (None, "x", [0]):
        for call in calls_with(wrong):
            raises(TypeError, call, "process_set must be a ProcessSet", repr(wrong))


def test_process_set_takes_only_distinct_integer_ranks() -> None:
    assert hvd.ProcessSet(range(SIZE)).ranks == [*RANKS]
    for wrong in (["0"], [0.0], [True], "01", None, 3):
        raises(ValueError, lambda wrong=wrong: hvd.ProcessSet(wrong), "list of process ranks")
    raises(ValueError, lambda: hvd.ProcessSet([0, 0]), "distinct")


def test_process_sets_change_only_if_dynamic() -> None:
    os.environ.pop(DYNAMIC, None)
    raises(ValueError, lambda: hvd.add_process_set([0]), DYNAMIC, "'dynamic'")
    assert hvd.remove_process_set(hvd.global_process_set) is False  # as in Horovod
    os.environ[DYNAMIC] = "1"
    if SIZE > 1:
        added = hvd.add_process_set([0])
        del os.environ[DYNAMIC]
        raises(ValueError, lambda: hvd.remove_process_set(added), DYNAMIC)
        os.environ[DYNAMIC] = "1"
        assert hvd.remove_process_set(added)


def test_process_set_must_be_new_and_of_existing_ranks() -> None:
    raises(ValueError, lambda: hvd.add_process_set([*reversed(RANKS)]), "already")
    for ranks in ([], [SIZE], [-1, 0]):
        raises(ValueError, lambda ranks=ranks: hvd.add_process_set(ranks), f"0..{SIZE - 1}")
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    check_that_the_job_goes_on()
    if SIZE == 1:
        return
    proposed = [0] if RANK == ODD else [ODD]
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.add_process_set(proposed),
        f"ranks [{ODD}]",
        "ranks [0]",
    )
    check_that_the_job_goes_on()


def test_process_sets_operate_independently() -> None:
    if SIZE == 1:
        return
    evens, odds = hvd.add_process_set(hvd.ProcessSet(EVENS)), hvd.add_process_set(ODDS)
    assert len({0, evens.process_set_id, odds.process_set_id}) == 3
    raises(ValueError, lambda: hvd.add_process_set(EVENS[::-1]), "already")
    own_set, other = (odds, evens) if RANK % 2 else (evens, odds)
    ranks = own_set.ranks
    assert ranks == (ODDS if RANK % 2 else EVENS)
    place, members = ranks.index(RANK), len(ranks)
    assert (own_set.size(), own_set.rank(), own_set.included()) == (members, place, True)
    assert (other.size(), other.included()) == (SIZE - members, False)
    raises(ValueError, other.rank, f"rank {RANK} is not in", str(other.ranks))
    for call in calls_with(other):
        raises(ValueError, call, f"rank {RANK} is not in")
    for _ in range(1 + 3 * (RANK % 2)):  # the odd ranks do more
        tensor = torch.full((2,), RANK + 1.0)
        total = sum(rank + 1.0 for rank in ranks)
        assert hvd.allreduce(tensor, op=hvd.Sum, process_set=own_set).tolist() == [total] * 2
        assert hvd.allreduce(tensor, process_set=own_set).tolist() == [total / members] * 2
        hvd.barrier(process_set=own_set)
    check_that_the_job_goes_on()
    exercise(own_set, ranks)
    check_that_the_job_goes_on()
    text = f"process_set_id={evens.process_set_id}, ranks={EVENS}"
    assert text in str(evens)
    for process_set in (evens, odds):
        assert hvd.remove_process_set(process_set) is True
        assert process_set.process_set_id is None
        assert hvd.remove_process_set(process_set) is False
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=own_set), "not registered")
    check_that_the_job_goes_on()


def exercise(own_set: Any, ranks: list[int]) -> None:
    """Check that every kind of operation involves the set's ranks only."""
    own = torch.full((1, 2), float(RANK), requires_grad=True)
    gathered = hvd.allgather(own, process_set=own_set)
    assert gathered[:, 0].tolist() == ranks
    (gathered * (RANK + 1)).sum().backward()
    mean = sum(rank + 1.0 for rank in ranks) / len(ranks)
    check_close(own.grad, torch.full((1, 2), mean))
    root = ranks[-1]  # a rank of the world
    tensor = torch.full((2,), float(RANK))
    assert hvd.broadcast(tensor, root, process_set=own_set).tolist() == [root] * 2
    assert hvd.broadcast_(tensor, root, process_set=own_set).tolist() == [root] * 2
    outsider = next(rank for rank in RANKS if rank not in ranks)
    call = lambda: hvd.broadcast(tensor, outsider, process_set=own_set)  # noqa: E731
    raises(ValueError, call, f"got {outsider}")
    assert hvd.broadcast_object(f"from {RANK}", root, process_set=own_set) == f"from {root}"
    dealt = hvd.alltoall(torch.tensor([100 * RANK + to for to in ranks]), process_set=own_set)
    assert dealt.tolist() == [100 * rank + RANK for rank in ranks]
    rows = torch.arange(len(ranks)) * (RANK + 1)
    part = hvd.reducescatter(rows, op=hvd.Sum, process_set=own_set)
    assert part.tolist() == [ranks.index(RANK) * sum(rank + 1 for rank in ranks)]
    one, two = hvd.grouped_allreduce(
        [torch.ones(1), torch.ones(2)], process_set=own_set, op=hvd.Sum
    )
    assert (one.tolist(), two.tolist()) == ([len(ranks)], [len(ranks)] * 2)
    nan = torch.tensor([torch.nan if root == RANK else 0.0])
    assert hvd.allreduce(nan, op=hvd.Max, process_set=own_set).isnan().all()
    sparse = torch.eye(SIZE)[RANK].to_sparse()
    total = hvd.sparse_allreduce_async(sparse, "eye", hvd.Average, own_set)().to_dense()
    assert total.tolist() == [(rank in ranks) / len(ranks) for rank in RANKS]
    ones = hvd.synchronize(hvd.allgather_async(torch.ones(1), process_set=own_set))
    assert ones.sum() == len(ranks)
    if len(ranks) > 1:
        shape = (3,) if ranks[0] == RANK else (4,)
        raises(
            hvd.HorovodInternalError,
            lambda: hvd.allreduce(torch.ones(shape), name="x", process_set=own_set),
            f"rank {ranks[0]}: torch.float32 [3]",
            "torch.float32 [4]",
        )


def test_consecutive_calls_of_a_process_set_cost_a_cycle_or_two_each() -> None:
    """This holds for all of them: sets come and go, and no call waits for an idle rank's poll."""
    if SIZE == 1:
        return
    dtypes = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
    for _ in range(2):
        for reduce, gathers in (
            (hvd.allreduce, False),
            (hvd.reducescatter, True),
            (lambda own, **o: hvd.grouped_allreduce([own] * 5, **o)[-1], False),
            (lambda own, **o: hvd.grouped_reducescatter([own] * 5, **o)[-1], True),
        ):
            evens, odds = hvd.add_process_set(EVENS), hvd.add_process_set(ODDS)
            own_set = odds if RANK % 2 else evens
            members, begun, calls = len(own_set.ranks), own_set.engine.cycles, 0
            for dtype, dimensions in itertools.product(dtypes, (1, 2, 3)):
                own = torch.ones([4 * members] * dimensions, dtype=dtype)
                result = reduce(own, op=hvd.Sum, process_set=own_set)
                expected = own[: 4 if gathers else None] * members
                assert torch.equal(result, expected), (dtype, dimensions)
                calls += 1
                if dtype.is_floating_point:
                    own.requires_grad_()
                    reduce(own, op=hvd.Sum, process_set=own_set).sum().backward()
                    check_close(own.grad, torch.full_like(own, members))
                    calls += 2
            # If a rank joins a cycle late, the others wait in that cycle, or in one more.
            assert own_set.engine.cycles - begun <= 2 * calls
            for process_set in (odds, evens):
                assert hvd.remove_process_set(process_set)
    check_that_the_job_goes_on()


def test_process_set_waits_only_for_its_own_ranks() -> None:
    """Rank 0 is late in the world while the others continue in their set."""
    if SIZE < 3:
        return
    others = hvd.add_process_set(range(1, SIZE))
    if RANK > 0:
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="late")
        for _ in range(3):
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=others, name="late")
            assert total.item() == SIZE - 1
        assert hvd.poll(handle) is False
        hvd.broadcast_object("done", 1, "told", others)
    else:
        raises(ValueError, lambda: hvd.barrier(others), "rank 0 is not in")
    if RANK == 1:
        assert others.rank() == 0
    hvd.barrier()
    if RANK == 0:
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="late")
    assert hvd.synchronize(handle).item() == SIZE
    assert hvd.remove_process_set(others)


def test_joined_rank_contributes_zeros_until_all_have_joined() -> None:
    steps = 1 + 2 * RANK  # the last rank has the most
    for step in range(steps):
        there = sum(1 for rank in RANKS if step < 1 + 2 * rank)
        tensor = torch.full((2,), 6.0)
        average = hvd.allreduce(tensor, name=f"average.{step}")
        check_close(average, tensor * there / SIZE)
        assert hvd.allreduce(torch.tensor([3]), op=hvd.Sum).item() == 3 * there
        one, two = hvd.grouped_allreduce([torch.ones(1), torch.ones(1).half()], op=hvd.Sum)
        assert (one.item(), two.item()) == (there, there)
        if there < SIZE:
            for call in (
                lambda: hvd.allgather(torch.ones(1), name="rows"),
                lambda: hvd.broadcast(torch.ones(1), RANK, name=f"from {RANK}"),
                lambda: hvd.alltoall(torch.ones(SIZE), name="all"),
                lambda: hvd.reducescatter(torch.ones(SIZE), name="rows"),
            ):
                if there == 1:  # the other operations would need the same names
                    raises(hvd.HorovodInternalError, call, "joined")
    assert hvd.join() == ODD
    assert hvd.join(device=-1) in RANKS
    assert same_everywhere(str(hvd.join(-1)))
    check_that_the_job_goes_on()


# ---- other worlds


def test_process_sets_can_be_passed_to_init() -> None:
    hvd.shutdown()
    os.environ.pop(DYNAMIC, None)
    stale = hvd.ProcessSet([0])
    raises(
        ValueError, lambda: hvd.init(process_sets=[hvd.ProcessSet([0]), stale]), "more than once"
    )
    raises(ValueError, lambda: hvd.init(process_sets="static"), "'dynamic'")
    raises(ValueError, lambda: hvd.init(process_sets=[[0, 1]]), "list of ProcessSet")
    assert hvd.is_initialized() is False
    assert hvd.global_process_set.ranks == []
    raises(ValueError, hvd.global_process_set.size, "has not been initialized")
    first = hvd.ProcessSet([0])
    sets = [first] if SIZE == 1 else [first, hvd.ProcessSet(range(1, SIZE))]
    hvd.init(process_sets=[] if SIZE == 1 else sets)
    if SIZE > 1:
        own_set = sets[RANK > 0]
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own_set).item()
        assert total == (SIZE - 1 if RANK else 1)
        raises(ValueError, lambda: hvd.add_process_set([0, 1]), DYNAMIC)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    assert os.environ[DYNAMIC] == "1"
    if SIZE > 1:
        again = hvd.add_process_set([ODD])
        # Numbers start again: a set of the last world has none in this one.
        assert again.process_set_id == first.process_set_id
        raises(ValueError, lambda: hvd.barrier(first), "not registered")
        hvd.add_process_set(first)
        assert first.included() == (RANK == 0)
    check_that_the_job_goes_on()  # ranks can leave the world although sets still exist


def test_process_set_of_a_communicator_has_its_ranks() -> None:
    if not hvd.mpi_enabled() or SIZE == 1:
        return
    from mpi4py import MPI

    hvd.shutdown()
    part = MPI.COMM_WORLD.Split(RANK % 2, RANK)
    own_set = hvd.ProcessSet(part)
    assert (own_set.ranks, own_set.mpi_comm) == (None, part)
    hvd.init(MPI.COMM_WORLD, process_sets=[own_set])
    assert own_set.ranks == (ODDS if RANK % 2 else EVENS)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own_set).item() == part.size
    check_that_the_job_goes_on()


def test_some_ranks_can_form_a_world() -> None:
    part = []
    if hvd.mpi_enabled():
        from mpi4py import MPI

        part = [MPI.COMM_WORLD.Split(RANK % 2, RANK)]
    hvd.shutdown()
    if SIZE > 1:
        for ranks in ([0, SIZE], [0, 0], [-1]):
            raises(ValueError, lambda ranks=ranks: hvd.init(ranks), f"0..{ODD}")
        raises(ValueError, lambda: hvd.init([0] if RANK else [ODD]), f"lacks rank {RANK}")
    own_ranks = ODDS if RANK % 2 else EVENS
    for world in [own_ranks, *part]:
        hvd.init(world)
        assert (hvd.rank(), hvd.size()) == (own_ranks.index(RANK), len(own_ranks))
        assert hvd.allgather(torch.tensor([RANK])).tolist() == own_ranks
        hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    check_that_the_job_goes_on()
