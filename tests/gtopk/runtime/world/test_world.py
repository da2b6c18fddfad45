"""Joining a world, or getting the reason why not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world
from gtopk.runtime.world import world

RANK_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_process_without_a_launcher_is_a_world_of_one():
    world.init()
    try:
        alone = world.current()
        assert (alone.rank, alone.size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
        assert (alone.cross_rank, alone.cross_size) == (0, 1)
        world.init()
        assert world.current() is alone
    finally:
        world.shutdown()
    assert not world.is_initialized()


def test_process_forked_from_a_lone_rank_may_join_a_world():
    hvd.init()
    try:
        child = os.fork()
        if not child:
            hvd.init()
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
            hvd.shutdown()
            os._exit(int(total) + hvd.is_initialized())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    finally:
        hvd.shutdown()


def test_ranks_enter_a_world_with_one_message_each(threads):
    """The time of a start is that of its round trips."""

    def program(transport: LocalTransport) -> int:
        with world.entered(transport):
            return transport.traffic.sent_messages

    assert threads(2, program) == [1, 1]


def test_optimizers_of_a_process_set_are_numbered_separately(threads):
    def program(transport: LocalTransport) -> list[str]:
        with world.entered(transport) as here:
            some = [here.name_optimizer(["b", "a"], [0, 2]) for _ in range(2) if here.rank != 1]
            return [*some, here.name_optimizer(["a"], range(3)), here.name_optimizer(["a"])]

    assert threads(3, program) == [
        ["a.of.0.2", "a.of.0.2.2", "a", "a.2"],
        ["a", "a.2"],
        ["a.of.0.2", "a.of.0.2.2", "a", "a.2"],
    ]


def test_current_world_raises_before_init():
    with pytest.raises(ValueError, match=r"gtopk has not been initialized: call hvd.init\(\)"):
        world.current()


def test_one_rank_of_torchrun_is_a_world_of_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    world.init()
    assert world.current().size == 1
    world.shutdown()


def test_local_world_under_mpirun_logs_a_warning(monkeypatch, caplog):
    variables = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "0",
        "GTOPK_TRANSPORT": "local",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world.init()
    try:
        assert world.current().size == 1
    finally:
        world.shutdown()
    (warning,) = caplog.messages
    assert "each trains its own model" in warning


@pytest.mark.parametrize("rank", ["0", "1"])
def test_init_raises_when_the_transport_gives_each_rank_its_own_world(monkeypatch, rank):
    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "GTOPK_TRANSPORT": "mpi"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "join", lambda comm: local_world(1)[0])
    with pytest.raises(RuntimeError, match=r"each trains its own model; unset GTOPK_TRANS"):
        world.init()
    assert not world.is_initialized()


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_invalid_timeout_is_refused(monkeypatch, text):
    monkeypatch.setenv("GTOPK_TIMEOUT", text)
    with pytest.raises(ValueError, match="GTOPK_TIMEOUT must be a number of seconds above 0"):
        world.init()


def test_init_by_an_exit_handler_is_refused():
    code = "import atexit; from gtopk.runtime.world import world; atexit.register(world.init)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stderr.endswith(
        "RuntimeError: gtopk cannot start while the program exits: hvd.init() was called by an "
        "exit handler (atexit); call it before the program ends\n"
    )


def test_ranks_of_one_host_have_one_cross_rank(threads):
    def program(transport: LocalTransport) -> tuple[int, ...]:
        with world.entered(transport) as here:
            return here.local_rank, here.local_size, here.cross_rank, here.cross_size

    assert threads(3, program) == [(rank, 3, 0, 1) for rank in range(3)]


def test_ranks_of_several_hosts_have_local_and_cross_ranks(threads, monkeypatch):
    """Ranks 0, 1, 2 on one host, 3 and 4 on another."""

    def neighbours(self: LocalTransport) -> list[int]:
        return [0, 1, 2] if self.rank < 3 else [3, 4]

    monkeypatch.setattr(LocalTransport, "neighbours", neighbours)

    def program(transport: LocalTransport) -> tuple[int, ...]:
        with world.entered(transport) as here:
            return here.local_rank, here.local_size, here.cross_rank, here.cross_size

    assert threads(5, program) == [
        (0, 3, 0, 2),
        (1, 3, 0, 2),
        (2, 3, 0, 1),
        (0, 2, 1, 2),
        (1, 2, 1, 2),
    ]


def test_import_error_explains_a_file_that_shadows_collectives(tmp_path):
    (tmp_path / "collectives.py").write_text("")
    child = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, '.'); import gtopk"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode != 0
    assert "rename that file or run from another directory" in child.stderr
