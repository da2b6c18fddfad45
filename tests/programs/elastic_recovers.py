"""Run on any number of ranks, all of which survive: after a failure all try again together.

With GTOPK_ELASTIC_DIR, first complete the job of elastic_job.py that left its commits there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import elastic_job
import torch
from checks import raises, run_tests, same_bits_everywhere, same_everywhere

import gtopk.torch as hvd
from gtopk.errors import HostsUpdatedInterrupt
from gtopk.runtime.world import world
from gtopk.torch.elastic.base import _ATTEMPTS

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LAST = SIZE - 1


def disagree() -> None:
    """Fail on every rank."""
    shape = 1 + (RANK == LAST)
    raises(
        hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(shape), name="apart"), "apart"
    )
    hvd.allreduce(torch.ones(shape), name="apart")


def fail_here() -> None:
    """Fail on one rank, while the others wait for it in an operation."""
    if RANK == LAST:
        raise hvd.HorovodInternalError("an idea of this rank's own")
    hvd.allreduce(torch.ones(3), name="with all")


def make_state(**objects: Any) -> hvd.elastic.TorchState:
    torch.manual_seed(RANK)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1),
        model.named_parameters(),
        hvd.Compression.gtopk(density=0.3),
        groups=2,
    )
    return hvd.elastic.TorchState(model, optimizer, **objects)


def take_steps(state: hvd.elastic.TorchState, count: int) -> None:
    for step in range(count):
        state.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + RANK)
        state.model(torch.randn(2, 3, generator=generator)).square().sum().backward()
        state.optimizer.step()


def train(fail: Callable[[], None]) -> tuple[hvd.elastic.TorchState, list[int]]:
    """Return a state after 6 steps, 2 of them taken twice, and the values of `done` meanwhile."""
    state = make_state(done=0, log=[])
    seen: list[int] = []

    @hvd.elastic.run
    def attempt(state: hvd.elastic.TorchState) -> None:
        seen.append(state.done)
        for _ in range(state.done // 2, 3):
            take_steps(state, 2)
            state.done += 2
            state.log.append(state.done)
            if len(seen) == 1 and state.done == 4:
                fail()
            state.commit()

    attempt(state)
    return state, seen


def test_ranks_that_disagree_return_to_the_last_commit() -> None:
    undisturbed, seen = train(lambda: None)
    assert seen == [0]
    for fail in (disagree, fail_here) if SIZE > 1 else (fail_here,):
        begun = world.current().step
        state, seen = train(fail)
        assert seen == [0, 2]
        assert (state.done, state.log) == (6, [2, 4, 6])
        for parameter, expected in zip(
            state.model.parameters(), undisturbed.model.parameters(), strict=True
        ):
            assert same_bits_everywhere(parameter)
            assert torch.equal(parameter, expected)
        assert state.optimizer.last_step.step == begun + 5  # lost ones count once


def test_process_sets_survive_an_elastic_reset() -> None:
    if SIZE < 3:
        return
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.remove_process_set(hvd.add_process_set([0, 1]))  # numbers are not used twice
    ends = hvd.add_process_set([0, LAST])
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), process_set=ends
    )

    @hvd.elastic.run
    def attempt(state: hvd.elastic.TorchState) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + RANK**2)).sum().backward()
            optimizer.step()
        state.attempts += 1
        state.commit()
        if state.attempts == 1:
            raise hvd.HorovodInternalError("as if a link broke")

    attempt(hvd.elastic.TorchState(model, optimizer, attempts=0))
    assert ends.process_set_id == 2
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights[0], weights[LAST])
    assert not torch.equal(weights[0], weights[1])
    assert hvd.add_process_set([1, LAST]).process_set_id == 3
    assert hvd.remove_process_set(ends)


def test_failure_at_every_elastic_attempt_becomes_an_error() -> None:
    attempts = []

    @hvd.elastic.run
    def attempt(state: hvd.elastic.ObjectState) -> None:
        attempts.append(state.value)
        state.value = RANK
        raise hvd.HorovodInternalError("as always")

    state = hvd.elastic.ObjectState(value="begun")
    raises(hvd.HorovodInternalError, lambda: attempt(state), "as always")
    assert attempts == ["begun"] * _ATTEMPTS


def test_host_update_on_one_rank_interrupts_all() -> None:
    state = hvd.elastic.ObjectState(value=RANK)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    values: list[int] = []

    @hvd.elastic.run
    def attempt(state: hvd.elastic.ObjectState, *arguments: int) -> int:
        values.append(state.value)
        if len(values) <= 2 and RANK == LAST:
            state.on_hosts_updated(len(values), [2, 1][len(values) - 1])  # added; removed
        state.value = 10 + RANK
        state.commit()
        assert len(values) == 3
        return sum(arguments)

    assert attempt(state, 3, 4) == 7
    # After the first, all get rank 0's value; after the second, every rank keeps its own.
    assert values == [0, 10, 10 + RANK]
    assert resets == [SIZE, SIZE]
    state.check_host_updates()
    state.on_hosts_updated(1, 2)  # outdated
    state.check_host_updates()


def test_elastic_run_passes_other_errors_through() -> None:
    @hvd.elastic.run
    def attempt(state: hvd.elastic.State) -> None:
        """Say so."""
        raise KeyError("mine")

    raises(KeyError, lambda: attempt(hvd.elastic.ObjectState()), "mine")
    assert attempt.__doc__ == "Say so."
    assert HostsUpdatedInterrupt(True).skip_sync is True


def test_unpicklable_elastic_object_is_named() -> None:
    class Opaque:
        pass

    state = hvd.elastic.TorchState(settings={"a": [Opaque()]})
    raises(TypeError, state.sync, "Opaque at ['settings']['a'][0]", "GTOPK_ALLOW_PICKLE=1")


def test_elastic_sync_copies_rank_0s_state() -> None:
    state = make_state(rank=RANK, lists={"a": [RANK]})
    state.scheduler = None
    take_steps(state, 1)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter += RANK
    state.sync()
    assert (state.rank, state.lists) == (0, {"a": [0]})
    assert all(same_bits_everywhere(parameter) for parameter in state.model.parameters())
    own = state.optimizer.state_dict()
    assert own.pop("gtopk")["held"].keys() == {RANK}  # each rank keeps its own residual
    assert same_everywhere(repr(own))


if __name__ == "__main__":
    if "GTOPK_ELASTIC_DIR" in os.environ:
        trained = elastic_job.train(lambda epoch, batch: None)
        print(f"rank {RANK} of {SIZE}: {trained}\n", end="", flush=True)
        del os.environ["GTOPK_ELASTIC_DIR"]
    run_tests(globals())
    hvd.barrier()
    print(f"rank {RANK}: every failure was survived\n", end="", flush=True)
    hvd.shutdown()
