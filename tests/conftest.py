"""Worlds for tests: threads in this process, or real ranks under mpirun."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from collectives.transports import LocalTransport, Transport, local_world, run_ranks
from collectives.transports.horovod import HorovodTransport
from collectives.transports.torch_distributed import TorchDistributedTransport
from gtopk.runtime.launch import LaunchTimeoutError, rank_environment, run
from tests.started import LIGHT, PROGRAMS, RANKS_PATH, ROOT, Job, finished, stacks_before

T = TypeVar("T")
os.environ.setdefault("GTOPK_ADVICE", "off")  # else each start of ranks measures its links first

# No deadline: a busy machine is no failure. Each run draws new cases, so half of the usual 100
# suffice.
settings.register_profile(
    "busy", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")

# `make test &` in a script starts everything with SIGINT ignored; programs would not end on it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, which would double the time.

    Freeze what was collected: it stays to the end, and later collections need not visit it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: make horovod")


@pytest.fixture(autouse=True, scope="session")
def light() -> Iterator[None]:
    """Start processes with a light torch. Set only here: xdist's workers need all of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", LIGHT, prepend=os.pathsep)
        yield


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Check that every test restores the logger: other tests wait for messages it might hide."""
    log = logging.getLogger("gtopk")

    def state() -> tuple[object, ...]:
        return log.level, log.propagate, log.disabled, list(log.handlers), list(log.filters)

    before = state()
    yield
    assert state() == before, "the test must restore the logger 'gtopk'"


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of this test run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., Job]:
    """Run `mpirun(ranks, program, *arguments)`: a file of tests/programs, or a path from the root.

    An uncaught exception on any rank ends the program with an exit code that is not 0.
    """

    def start(
        ranks: int, program: str, *arguments: str, timeout: float = 120, **variables: str
    ) -> Job:
        path = PROGRAMS / program if (PROGRAMS / program).exists() else ROOT / program
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as errors:
            environment = {"PYTHONPATH": RANKS_PATH, **stacks_before(timeout), **variables}
            for name, value in environment.items():
                patch.setenv(name, value)
            timed_out: LaunchTimeoutError | None = None
            try:
                code = run(
                    ranks,
                    [sys.executable, str(path), *arguments],
                    on_line=lines.append,
                    timeout_seconds=timeout,
                    errors=errors,
                )
            except LaunchTimeoutError as error:
                timed_out = error
            errors.seek(0)
            stderr = errors.read().decode(errors="replace")
        if timed_out is not None:
            pytest.fail(f"{timed_out}; their stderr so far:\n{stderr}")
        return Job(code, "\n".join(lines), stderr)

    return start


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., Job]:
    """Run `torchrun(ranks, program, *arguments)`, as `mpirun` does; restarts: how often at most."""

    def start(
        ranks: int,
        program: str,
        *arguments: str,
        timeout: float = 120,
        restarts: int = 0,
        **variables: str,
    ) -> Job:
        path = PROGRAMS / program if (PROGRAMS / program).exists() else ROOT / program
        command = [
            *(sys.executable, str(PROGRAMS / "light_torchrun.py"), "--standalone"),
            *(f"--max-restarts={restarts}", f"--nproc-per-node={ranks}"),
            *(str(path), *arguments),
        ]
        return finished(command, timeout, {**stacks_before(timeout), **variables})

    return start


@pytest.fixture(scope="session")
def forked() -> Callable[..., Job]:
    """Run `forked(ranks, program, *arguments)`, as `torchrun` does; torch is loaded only once.

    For tests of what ranks do while they run. Use `torchrun` to test how they start and end.
    """

    def start(
        ranks: int, program: str, *arguments: str, timeout: float = 120, **variables: str
    ) -> Job:
        launcher, path = PROGRAMS / "forked.py", PROGRAMS / program
        command = [sys.executable, str(launcher), str(ranks), str(path), *arguments]
        return finished(command, timeout, variables)

    return start


@pytest.fixture(scope="session")
def horovodrun() -> Callable[..., Job]:
    """Run `horovodrun(ranks, options, program, *arguments)`, as `mpirun` does.

    The prefix that horovodrun adds to each printed line is removed.
    """

    def start(
        ranks: int, options: list[str], program: str, *arguments: str, timeout: float = 150
    ) -> Job:
        path = PROGRAMS / program if (PROGRAMS / program).exists() else ROOT / program
        folder = Path(sys.executable).parent  # first on the PATH, as in an activated environment
        command = [
            *(str(folder / "horovodrun"), *options, "-np", str(ranks)),
            *(sys.executable, str(path), *arguments),
        ]
        search_path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        job = finished(command, timeout, {**rank_environment(ranks), "PATH": search_path})
        prefix = re.compile(r"^\[(?:1,)?\d+\]<stdout>: ?", re.MULTILINE)
        return job._replace(stdout=prefix.sub("", job.stdout))

    return start


class FakeHorovods:
    """The state that the ranks of one process share, instead of Horovod's own threads.

    over: whether Horovod was shut down; it changes for all ranks at once, at the barrier.
    """

    def __init__(self, size: int) -> None:
        self.board: list[list[torch.Tensor]] = [[] for _ in range(size)]
        self.is_shutting_down = self.over = False
        self.meet = threading.Barrier(size, self._update)

    def _update(self) -> None:
        self.over = self.over or self.is_shutting_down


class FakeHorovod:
    """The part of horovod.torch that the transport uses, for the ranks of one process."""

    def __init__(self, rank: int, shared: FakeHorovods) -> None:
        self._rank, self._shared = rank, shared

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._shared.board)

    def shutdown(self) -> None:
        self._shared.is_shutting_down = True

    def alltoall(
        self, tensor: torch.Tensor, splits: torch.Tensor, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.0002)  # Horovod's cycle
        board, meet = self._shared.board, self._shared.meet
        board[self._rank] = list(torch.split(tensor.clone(), splits.tolist()))
        meet.wait()
        if self._shared.over:
            raise RuntimeError("Horovod has been shut down.")
        received = [blocks[self._rank] for blocks in board]
        meet.wait()
        sizes = torch.tensor([block.numel() for block in received], dtype=splits.dtype)
        return torch.cat(received), sizes


def fake_horovods(size: int) -> list[FakeHorovod]:
    shared = FakeHorovods(size)
    return [FakeHorovod(rank, shared) for rank in range(size)]


@pytest.fixture(scope="session")
def in_world() -> Callable[..., list[object]]:
    """Run `in_world(kind, size, program)`: `program(transport)` on threads of such a world."""

    def run(
        kind: str, size: int, program: Callable[[Transport], T], timeout_seconds: float = 30
    ) -> list[T]:
        if kind == "local":
            return run_ranks(local_world(size, timeout_seconds), program)
        store, horovods = torch.distributed.HashStore(), fake_horovods(size)

        def rank(number: LocalTransport) -> T:
            if kind == "horovod":
                transport = HorovodTransport(horovods[number.rank], "stand-in", timeout_seconds)
            else:
                transport = TorchDistributedTransport(
                    store, number.rank, ["here"] * size, timeout_seconds, 30
                )
            try:
                result = program(transport)
            except BaseException as error:
                transport.leave(f"it raised {type(error).__name__}: {error}", 5)
                raise
            staying = transport.leave("its program ended", 30)
            assert not staying
            return result

        return run_ranks(local_world(size, timeout_seconds), rank)

    return run


@pytest.fixture
def threads() -> Callable[..., list[object]]:
    """Run `threads(size, program)`: `program(transport)` on `size` ranks of a local world."""

    def run(size: int, program: Callable[[LocalTransport], object]) -> list[object]:
        return run_ranks(local_world(size, timeout_seconds=30), program)

    return run


@pytest.fixture
def unread_stderr() -> Callable[[Callable[[], object]], bool]:
    """Tell whether `work` returns in `unread_stderr(work)`, although nobody reads stderr.

    Meanwhile descriptor 2 is a full pipe, so that a write blocks forever.
    """

    def returns(work: Callable[[], object]) -> bool:
        before = os.dup(2)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(1 << 12))
        os.set_blocking(writer, True)
        os.dup2(writer, 2)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(20)
        has_returned = not thread.is_alive()
        os.dup2(before, 2)
        for file in (reader, writer, before):  # closing the reader wakes blocked threads
            os.close(file)
        thread.join()
        return has_returned

    return returns


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(20191)
