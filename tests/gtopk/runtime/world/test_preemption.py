"""A preempted rank informs the others in its next flags; all know after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world
from gtopk.errors import InvalidCallError
from gtopk.local_sgd import LocalSGD
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from gtopk.runtime.world.guard import Guard
from gtopk.runtime.world.membership import World

STEPS, PREEMPTION_STEP = 6, 3


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    return model


def take_a_step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("when", ["before backward", "during backward", "after backward"])
def test_all_ranks_know_of_a_preemption_after_the_same_step(threads, when):
    def program(transport: LocalTransport) -> list[list[int]]:
        model, known = network(), []
        with world.entered(transport) as here:
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                hvd.Compression.gtopk(0.5),
                bucket_bytes=16,
            )
            preempted = gtopk.termination()

            def request_termination(*of_hook: object) -> None:
                if here.step == PREEMPTION_STEP and here.rank in (1, 2):
                    here.termination_requested = True

            if when == "during backward":
                model[1].weight.register_hook(request_termination)
            for _ in range(STEPS):
                optimizer.zero_grad()
                if when == "before backward":
                    request_termination()
                model(torch.ones(3, 4)).square().sum().backward()
                if when == "after backward":
                    request_termination()
                optimizer.step()
                known.append(preempted.ranks)
                assert bool(preempted) == bool(preempted.ranks)
        return known

    expected: list[list[int]] = [[]] * PREEMPTION_STEP + [[1, 2]] * (STEPS - PREEMPTION_STEP)
    assert threads(3, program) == [expected] * 3


def test_joined_rank_learns_of_a_preemption(threads):
    def program(transport: LocalTransport) -> list[int]:
        model = network()
        with world.entered(transport) as here:
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
            )
            for _ in range(STEPS - 3 * (here.rank == 1)):
                here.termination_requested = here.step == STEPS - 1
                take_a_step(model, optimizer)
            hvd.join()
            return here.preempted

    assert threads(2, program) == [[0], [0]]


def test_local_sgd_announces_a_preemption_with_its_outer_step(threads):
    def program(transport: LocalTransport) -> list[bool]:
        model, known = network(), []
        with world.entered(transport) as here:
            optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.01), inner_steps=3)
            for step in range(6):
                here.termination_requested = here.rank == 0 and step > 0
                take_a_step(model, optimizer)
                known.append(bool(gtopk.termination()))
            assert optimizer.outer_steps == 2
        return known

    assert threads(2, program) == [[False, False, True, True, True, True]] * 2


def test_ask_tells_all_ranks_of_a_preemption_without_a_step(threads):
    def program(transport: LocalTransport) -> list[bool]:
        with world.entered(transport) as here:
            preempted = gtopk.termination()
            before = preempted.ask()
            here.termination_requested = here.rank == 2
            return [before, preempted.ask()]

    assert threads(3, program) == [[False, True]] * 3


def test_sigterm_is_announced_at_the_next_step_and_the_block_exits():
    model = network()
    was = signal.getsignal(signal.SIGTERM)
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def program() -> None:
            with gtopk.termination() as preempted:
                take_a_step(model, optimizer)
                os.kill(os.getpid(), signal.SIGTERM)
                assert signal.getsignal(signal.SIGTERM) == was  # another one ends it at once
                assert not preempted
                take_a_step(model, optimizer)
                assert preempted

        with pytest.raises(SystemExit) as ended:
            program()
        assert ended.value.code == 143
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_after_the_last_step_is_printed(capfd):
    model = network()
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with gtopk.termination():
            take_a_step(model, optimizer)
            os.kill(os.getpid(), signal.SIGTERM)
        assert "received SIGTERM after the last step" in capfd.readouterr().err
        with pytest.raises(SystemExit), gtopk.termination():  # the next block's steps report it
            take_a_step(model, optimizer)


def test_block_restores_the_handler_without_sigterm_and_passes_errors_on(capfd):
    was = signal.getsignal(signal.SIGTERM)
    with world.entered(local_world(1)[0]):
        with gtopk.termination() as preempted:
            assert signal.getsignal(signal.SIGTERM) != was
            assert not preempted
        assert signal.getsignal(signal.SIGTERM) == was

        def fail() -> None:
            with gtopk.termination() as preempted:
                os.kill(os.getpid(), signal.SIGTERM)
                assert preempted.ask()
                raise KeyError  # an error while saving must be reported

        with pytest.raises(KeyError):
            fail()
    assert "rank 0 of 1 (host " in capfd.readouterr().err


def test_termination_needs_init_and_the_main_thread():
    with pytest.raises(InvalidCallError):
        gtopk.termination()
    errors = []

    def enter() -> None:
        with world.entered(local_world(1)[0]):
            try:
                with gtopk.termination():
                    pass
            except ValueError as error:
                errors.append(str(error))

    thread = threading.Thread(target=enter, name="another")
    thread.start()
    thread.join()
    (error,) = errors
    assert "in the main thread" in error
    assert "'another'" in error


def test_sigterm_during_rejoin_is_kept(monkeypatch):
    reopen = World.reopen_sets

    def interrupted(self: World, *arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # the new world exists, its state does not yet
        reopen(self, *arguments)

    monkeypatch.setattr(World, "reopen_sets", interrupted)
    world.init()
    try:
        with gtopk.termination():
            world.rejoin()
            assert world.current().termination_requested
    finally:
        world.shutdown()


@pytest.mark.parametrize("before", ["nothing", "the guard's", "the script's"])
def test_process_forked_within_the_block_handles_sigterm_as_before_it(before: str) -> None:
    handlers: dict[str, Any] = {
        "nothing": signal.SIG_DFL,
        "the guard's": Guard.__new__(Guard)._on_sigterm,
        "the script's": lambda number, frame: os._exit(7),
    }
    with world.entered(local_world(1)[0]):
        signal.signal(signal.SIGTERM, handlers[before])
        with gtopk.termination(), gtopk.termination():
            reads, writes = os.pipe()
            child = os.fork()
            if not child:
                os.write(writes, b"x")
                while True:
                    signal.pause()
            os.read(reads, 1)  # by now it has begun
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
    if before == "the script's":
        assert os.waitstatus_to_exitcode(status) == 7
    else:
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
