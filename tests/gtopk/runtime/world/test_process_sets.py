"""Process sets after a rank joins, or after the world ends."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.runtime.coordinator import execution
from gtopk.runtime.world import world
from gtopk.runtime.world.membership import Members


@pytest.fixture(autouse=True)
def _dynamic(monkeypatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


@pytest.mark.parametrize("ranks", [3, 4])
def test_error_names_the_member_of_a_process_set_that_left(threads, ranks: int) -> None:
    leaver = ranks - 1

    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            pair = hvd.add_process_set([0, leaver])
            if transport.rank == 0:
                with pytest.raises(hvd.HorovodInternalError, match=f"rank {leaver} left"):
                    hvd.allreduce(torch.ones(1), process_set=pair)

    threads(ranks, program)


def test_process_set_works_after_a_rank_outside_it_has_left(threads) -> None:
    def program(transport: LocalTransport) -> float:
        with world.entered(transport):
            pair = hvd.add_process_set([0, 1])
            if transport.rank == 2:
                return 0.0
            with pytest.raises(hvd.HorovodInternalError, match="rank 2 left"):
                hvd.barrier()
            for _ in range(3):
                total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair)
            return total.item()

    assert threads(3, program) == [2.0, 2.0, 0.0]


def test_process_set_operation_raises_when_a_member_has_joined(capfd, monkeypatch) -> None:
    """As in Horovod, join concerns all ranks; a warning comes long before the error."""
    monkeypatch.setattr(execution, "_EARLY_WARNING_SECONDS", 0.1)

    def program(transport: LocalTransport) -> str:
        with world.entered(transport):
            pair = hvd.add_process_set([0, 1])
            waits = partial(hvd.allreduce, torch.ones(1), process_set=pair)
            with pytest.raises(hvd.HorovodInternalError) as error:
                (waits if transport.rank == 1 else hvd.join)()
            return str(error.value)

    errors = run_ranks(local_world(3, timeout_seconds=2), program)
    assert all(
        "; rank 0 called join(), which covers operations of all ranks" in text for text in errors
    )
    warning = r"rank 1 has waited [\d.]+ s for rank 0 in .*; rank 0 called join.*; ready: rank 1"
    assert re.search(warning, capfd.readouterr().err)


def test_optimizer_of_a_removed_process_set_raises(threads) -> None:
    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            pair = hvd.add_process_set([0, 1])
            model = torch.nn.Linear(2, 1)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(plain, process_set=pair)
            hvd.remove_process_set(pair)
            model(torch.ones(2)).backward()
            if transport.rank == 2:  # never in the set
                optimizer.step()
                return
            with pytest.raises(hvd.HorovodInternalError, match="its process set was removed: '"):
                optimizer.step()

    threads(3, program)


def test_copied_process_set_works_like_the_original(threads) -> None:
    """Optimizers are copied together with their process set."""

    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            for original in (hvd.global_process_set, hvd.add_process_set([0])):
                twin = copy.deepcopy(original)
                assert twin.ranks == original.ranks
                assert twin.size() == original.size()
                if twin.included():
                    hvd.barrier(twin)

    threads(2, program)


def test_process_set_is_unregistered_when_another_world_reuses_its_id(threads) -> None:
    stale = hvd.ProcessSet([1])

    def first(transport: LocalTransport) -> None:
        with world.entered(transport):
            own = stale if transport.rank == 0 else hvd.ProcessSet([1])
            hvd.add_process_set(own)

    def second(transport: LocalTransport) -> None:
        with world.entered(transport):
            hvd.add_process_set([0])
            assert stale.size() is None
            with pytest.raises(ValueError, match="is not registered"):
                hvd.barrier(stale)

    threads(2, first)
    assert stale.process_set_id == 1
    threads(2, second)


def test_optimizer_of_an_unregistered_process_set_is_refused(threads) -> None:
    """Otherwise each rank would train alone."""
    never, once = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 1])

    def optimizer_of(process_set: hvd.ProcessSet) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        return hvd.DistributedOptimizer(sgd, process_set=process_set)

    def first(transport: LocalTransport) -> torch.optim.Optimizer:
        with world.entered(transport):
            with pytest.raises(ValueError, match=r"is not registered: pass it to hvd\.init"):
                optimizer_of(never)
            hvd.add_process_set(once)
            return optimizer_of(once)

    optimizers = threads(3, first)

    def second(transport: LocalTransport) -> None:
        with world.entered(transport):
            for _ in range(2):
                with pytest.raises(ValueError, match=r"is not registered.*after another init\(\)"):
                    optimizers[transport.rank].step()

    threads(3, second)


def test_ranks_that_change_different_sets_get_an_error_and_keep_their_sets(threads) -> None:
    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            is_first = transport.rank == 0
            pair, rest = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
            sides = r"rank 0: remove set 1 of ranks \[0, 1\]; ranks 1, 2: "
            with pytest.raises(hvd.HorovodInternalError, match=f"{sides}remove set 2 of ranks"):
                hvd.remove_process_set(pair if is_first else rest)
            change = hvd.remove_process_set if is_first else hvd.add_process_set
            with pytest.raises(hvd.HorovodInternalError, match=rf"{sides}add ranks \[0\]"):
                change(pair if is_first else [0])
            last = hvd.add_process_set([0, 2])
            assert last.process_set_id == 3
            for each in filter(hvd.ProcessSet.included, (pair, rest, last)):
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=each).item() == 2.0

    threads(3, program)


def test_process_set_carried_over_by_recovery_may_be_added_again(threads) -> None:
    """A function under elastic.run restarts, including the lines that add its sets."""

    def program(transport: LocalTransport) -> None:
        with world.entered(transport) as here:
            here.reopen_sets({0: here.sets[0], 3: Members((1, 2), None)}, made=3)
            again = hvd.add_process_set([2, 1])
            assert again.process_set_id == 3
            with pytest.raises(ValueError, match="process set 3 already has the ranks"):
                hvd.add_process_set([1, 2])
            assert hvd.add_process_set([0, 2]).process_set_id > 3

    threads(3, program)


def test_init_with_a_refused_process_set_leaves_no_world_behind() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"all of 0\.\.0"):
            hvd.init(process_sets=[hvd.ProcessSet([0, 5])])
        assert not hvd.is_initialized()
