"""A TorchState commits, restores and broadcasts its values, each according to its type."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import local_world, run_ranks
from gtopk.errors import CheckpointError, HorovodInternalError
from gtopk.runtime.world import world
from gtopk.torch.elastic import ElasticSampler, TorchState, base, run_fn, state
from gtopk.torch.elastic.state import (
    LRSchedulerStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
)


def make(rank=0):
    """Return a state with a value of every type."""
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + rank))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = ElasticSampler(range(12), seed=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 * (1 + rank))
    return TorchState(
        model,
        optimizer,
        scheduler=scheduler,
        sampler=sampler,
        scaler=scaler,
        epoch=rank,
        seen=[],
    )


def work(state):
    """Change every value in it."""
    state.optimizer.zero_grad()
    state.model(torch.arange(6.0).reshape(3, 2)).square().sum().backward()
    state.optimizer.step()
    state.scheduler.step()
    state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": state.epoch + 3.0})
    state.sampler.record_batch(0, 2)
    state.epoch += 1
    state.seen.append(state.epoch)


def values_of(state):
    return (
        repr(state.model.state_dict()),
        repr(state.optimizer.state_dict()),
        state.scheduler.state_dict(),
        state.sampler.state_dict(),
        state.scaler.state_dict(),
        state.epoch,
        list(state.seen),
    )


def test_restore_returns_to_the_last_commit_every_time(ranks):
    def program(rank):
        one = make()
        begun = values_of(one)
        work(one)
        one.restore()
        assert values_of(one) == begun
        work(one)
        one.commit()
        committed = values_of(one)
        for _ in range(2):  # later changes must not affect the commit
            work(one)
            assert values_of(one) != committed
            one.restore()
            assert values_of(one) == committed

    ranks(1, program)


def test_sync_gives_all_ranks_rank_0s_values(ranks):
    def program(rank):
        one = make(rank)
        for _ in range(rank + 1):
            work(one)
        one.sync()
        synced = values_of(one)
        work(one)
        one.restore()
        assert values_of(one) == synced
        return synced

    first, *others = ranks(3, program)
    assert others == [first] * 2
    assert first[-2:] == (1, [1])


def test_value_may_be_replaced_by_another_of_its_type(ranks):
    def program(rank):
        one = make()
        other = torch.nn.BatchNorm1d(2)
        torch.nn.init.constant_(other.weight, 7.0)
        one.model = other
        one.epoch = 5
        with torch.no_grad():
            other.weight.zero_()
        one.restore()
        assert one.model is other
        assert other.weight.tolist() == [7.0, 7.0]
        assert one.epoch == 0  # plain objects return to the commit

    ranks(1, program)


def test_state_holds_the_objects_that_it_was_given(ranks):
    def program(rank):
        seen, model = [], torch.nn.Linear(1, 1)
        one = TorchState(model=model, seen=seen)
        assert one.seen is seen
        assert one.model is model
        assert one.optimizer is None
        other = TorchState()
        assert (other.model, other.optimizer) == (None, None)
        other.commit()
        other.sync()

    ranks(1, program)


def test_reset_redistributes_samples_and_runs_callbacks(ranks):
    def program(rank):
        one = make()
        calls = []
        one.register_reset_callbacks([lambda: calls.append(1), lambda: calls.append(2)])
        one.sampler.record_batch(0, 2)
        one.on_reset()
        assert calls == [1, 2]
        assert len(one.sampler) == (12 - 4) // 2

    ranks(2, program)


class Counter:
    """A type unknown to gtopk."""

    def __init__(self, value):
        self.value = value


class CounterHandler(StateHandler):
    """Keep a Counter in memory, like Horovod's own handlers."""

    def __init__(self, counter):
        super().__init__(counter)
        self.save()

    def save(self):
        self._saved = self.value.value

    def restore(self):
        self.value.value = self._saved

    def sync(self):
        self.value.value = hvd.broadcast_object(self.value.value)
        self.save()


@pytest.fixture
def with_counters():
    before = state.get_handler_registry()
    state.set_handler_registry([(Counter, CounterHandler), *before])
    yield
    state.set_handler_registry(before)


@pytest.mark.usefixtures("with_counters")
def test_handler_registry_takes_further_types(ranks, tmp_path, monkeypatch):
    def program(rank):
        one = TorchState(counter=Counter(rank))
        one.sync()
        assert one.counter.value == 0
        one.counter.value = 3
        one.restore()
        assert one.counter.value == 0
        one.counter = Counter(4)
        one.commit()
        assert one.counter.value == 4

    ranks(2, program)
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))
    with pytest.raises(NotImplementedError, match=r"CounterHandler must define saved\(\) and res"):
        ranks(1, program)


def test_handler_registry_begins_with_horovods_types():
    registry = dict(state.get_handler_registry())
    assert registry[torch.nn.Module] is ModelStateHandler
    assert registry[torch.optim.Optimizer] is OptimizerStateHandler
    assert registry[ElasticSampler] is SamplerStateHandler
    assert registry[torch.optim.lr_scheduler.LRScheduler] is LRSchedulerStateHandler


def test_restarted_job_resumes_from_the_last_commit(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))

    def begin(rank):
        one = make(rank)
        one.sync()
        work(one)
        one.commit()
        committed = values_of(one)
        work(one)  # lost
        return committed

    def go_on(rank):
        one = make(rank)
        resets = []
        one.register_reset_callbacks([lambda: resets.append(hvd.size())])
        one.sync()
        resumed = values_of(one)
        work(one)
        one.restore()
        assert values_of(one) == resumed
        one.sync()
        assert values_of(one) == resumed  # the disk is read only once
        left = list(one.sampler)
        one.commit()
        return resumed, resets, left

    committed, *others = ranks(3, begin)
    assert others == [committed] * 2
    (order,) = ranks(1, lambda rank: list(make().sampler))
    unprocessed = sorted(order[3 * 2 :])
    for size, resets in ((3, []), (2, [2])):
        outcomes = ranks(size, go_on)
        assert [resumed for resumed, _, _ in outcomes] == [committed] * size
        # As in Horovod after ranks were added or removed, since learning rates may depend on it.
        assert [calls for _, calls, _ in outcomes] == [resets] * size
        assert sorted(index for *_, left in outcomes for index in left) == unprocessed


def test_commit_of_another_state_is_refused(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))
    ranks(2, lambda rank: TorchState(a=1).commit())

    def program(rank):
        with pytest.raises(ValueError, match=r"commit 1 holds \['a', .* this state \['b', .*DIR"):
            TorchState(b=1).sync()

    ranks(2, program)


class Flaky(ModelStateHandler):
    """A handler that fails once, in this method, like a temporary link failure."""

    failing = ""

    def fail_in(self, method):
        if self.failing == method:
            self.failing = ""
            raise HorovodInternalError("a link was down")

    def sync(self):
        self.fail_in("sync")
        super().sync()

    def resume_here(self, owned, ranks):
        self.fail_in("resume_here")


@pytest.mark.parametrize(("failing", "method"), [([0, 1], "sync"), ([1], "resume_here")])
def test_earlier_jobs_commit_is_loaded_after_a_failed_first_sync(
    ranks, tmp_path, monkeypatch, failing, method
):
    """It fails at the very end: some ranks have succeeded, and the function begins on them."""
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))
    registry = [(torch.nn.Module, Flaky), *state.get_handler_registry()]
    monkeypatch.setattr(state, "_registry", registry)

    def make():
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        return TorchState(model, epoch=0)

    def begin(rank):
        one = make()
        one.sync()
        one.model.weight.data.fill_(5.0)
        one.epoch = 7
        one.commit()

    def go_on(rank):
        flaky, attempts = make(), []
        flaky._handlers["model"].failing = method if rank in failing else ""

        def train(one):
            attempts.append((one.epoch, one.model.weight.item()))
            if rank not in failing and len(attempts) == 1:
                raise HorovodInternalError("rank 1 is not in it")
            one.commit()
            return attempts[-1]

        return run_fn(train, lambda: None)(flaky)

    ranks(2, begin)
    assert ranks(2, go_on) == [(7, 5.0)] * 2
    assert ranks(2, go_on) == [(7, 5.0)] * 2  # from the later commit


def test_recovery_works_when_only_one_rank_had_opened_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))
    opening, worlds = base.open_archive, [local_world(2, timeout_seconds=30) for _ in range(3)]

    def program(transport):
        with ExitStack() as stack:
            attempts: list[int] = []

            def enter():
                stack.close()
                attempts.append(1)
                world_of_all = worlds[len(attempts) - 1][transport.rank]
                stack.enter_context(world.entered(world_of_all))

            def train(one):
                one.epoch += 1
                one.commit()
                return one.epoch

            enter()
            run_fn(train, enter)(TorchState(epoch=6))
            enter()
            again = TorchState(epoch=0)
            return run_fn(train, enter)(again), len(attempts)

    def open_archive(before):
        archive = opening(before)
        if hvd.rank() == 1 and len(list(tmp_path.iterdir())) == 1 and not failed:
            failed.append(1)
            raise HorovodInternalError("a link was down")
        return archive

    failed: list[int] = []
    monkeypatch.setattr(base, "open_archive", open_archive)
    assert run_ranks(local_world(2), program) == [(8, 3)] * 2


def test_every_rank_raises_when_rank_0_cannot_load_the_commit(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))
    ranks(2, lambda rank: TorchState(torch.nn.Linear(1, 1)).commit())

    def program(rank):
        with pytest.raises(CheckpointError, match=r"(?s)cannot be loaded: rank 0 .*size mismatch"):
            TorchState(torch.nn.Linear(2, 1)).sync()

    ranks(2, program)
