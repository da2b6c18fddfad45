"""A file has a rank's error, only of this run; writing it never delays the rank."""

from __future__ import annotations

import datetime
import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import gtopk
from collectives.errors import PeerError
from collectives.transports.departure import DepartureNotice
from gtopk import settings
from gtopk.errors import HorovodInternalError
from gtopk.runtime.liveness.heartbeat import LostRank
from gtopk.runtime.world import guard, world
from gtopk.runtime.world.guard import Guard
from tests.started import under

KEYS = {"rank", "size", "host", "pid", "time", "gtopk", "step", "operation", "error", "text"}
KEYS |= {"lost", "traceback"}


def write(folder, error, lost=(), operation="", how="failed"):
    guard.write(str(folder), 1, 2, step=7, operation=operation, how=how, error=error, lost=lost)


class Ending(SystemExit):
    """Replaces the end of the job."""


def fake_world(note_end=lambda how, in_order: None):
    """Return rank 1 of 2, at step 7."""

    def abort(code, how):
        raise Ending(how)

    return SimpleNamespace(
        transport=SimpleNamespace(
            name="mpi",
            rank=1,
            size=2,
            lost=list,
            departures=dict,
            leave=lambda how, seconds: None,
            abort=abort,
        ),
        engine=SimpleNamespace(activity="idle", failed_in="", ranks_may_leave=False),
        step=7,
        advice="",
        where=lambda: "at step 7",
        note_end=note_end,
    )


@pytest.fixture
def short_waits(monkeypatch):
    """Use short waits."""
    monkeypatch.setattr(guard, "_DISK_SECONDS", 0.1)
    monkeypatch.setattr(guard, "_PRINT_SECONDS", 0.05)


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def read(folder, rank=1):
    return json.loads((folder / f"failure_rank{rank}.json").read_text())


def test_relative_failure_folder_stays_where_the_script_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guarding = Guard(fake_world(), None, "failures")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    guarding._record_end("failed", raised(ValueError("wrong")))
    assert read(tmp_path / "failures")["error"] == "ValueError"


def test_failure_folder_is_the_named_one_else_the_run_folder_else_none():
    assert under({}, guard.folder_from) == ""
    assert under({"GTOPK_RUN": "run"}, guard.folder_from) == "run"
    assert under({"GTOPK_RUN": "run", "GTOPK_FAILURE_DIR": "own"}, guard.folder_from) == "own"


def test_failure_file_holds_own_exception_with_its_traceback(tmp_path):
    folder = tmp_path / "new"
    write(folder, raised(ValueError("boom")))
    found = read(folder)
    assert set(found) == KEYS
    assert (found["rank"], found["size"], found["step"]) == (1, 2, 7)
    assert (found["error"], found["text"], found["operation"]) == ("ValueError", "boom", None)
    assert found["traceback"].endswith("ValueError: boom\n")
    assert found["gtopk"] == gtopk.__version__
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(
        found["time"]
    )
    assert abs(age.total_seconds()) < 100
    assert [path.name for path in folder.iterdir()] == ["failure_rank1.json"]


def test_failure_file_names_operation_and_the_lost_rank_that_caused_it(tmp_path):
    error = HorovodInternalError("rank 0 is lost; at step 7")
    write(tmp_path, error, [LostRank(0, "it was killed")], "gradients.0")
    found = read(tmp_path)
    assert (found["operation"], found["text"]) == ("gradients.0", "rank 0 is lost; at step 7")
    assert found["lost"] == [{"rank": 0, "why": "it was killed"}]
    assert found["traceback"] is None


def test_failure_file_of_a_stopped_rank_names_its_end_and_operation(tmp_path):
    write(tmp_path, None, [LostRank(0, "why")], "barrier", "was stopped, in barrier")
    found = read(tmp_path)
    assert (found["error"], found["text"]) == (None, "was stopped, in barrier")
    assert found["operation"] == "barrier"


def test_remove_earlier_removes_only_failure_files_of_an_earlier_run(tmp_path):
    names = [f"failure_rank{rank}.json" for rank in (0, 1, 2, 30)]
    for name in [*names, "rank-00002.jsonl", "failure_ranks.json", "my_failure_rank2.json"]:
        (tmp_path / name).touch()
    # Each rank also removes files of ranks beyond the run's size: its folder may be local.
    guard.remove_earlier(str(tmp_path), 1, 2)
    stays = ["failure_ranks.json", "my_failure_rank2.json", "rank-00002.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failure_rank0.json", *stays]
    guard.remove_earlier(str(tmp_path), 0, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == stays


@pytest.mark.parametrize("folder", ["", "/proc/no/such", "/dev/null"])
def test_unusable_failure_folder_raises_nothing(folder):
    guard.remove_earlier(folder, 0, 2)
    if folder:
        write(folder, ValueError("boom"))


def test_full_disk_raises_nothing_and_leaves_no_partial_failure_file(tmp_path, monkeypatch):
    (tmp_path / "failure_rank1.json").write_text("earlier")

    def fill(beside, path):
        assert Path(beside).parent == Path(path).parent
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fill)
    write(tmp_path, ValueError("boom"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.parametrize("folder_is_named", [True, False])
def test_rank_that_cannot_join_writes_a_failure_file_if_a_folder_is_named(
    tmp_path, monkeypatch, folder_is_named
):
    gone = PeerError("rank 1 of 2 cannot join the others: mpirun, which started it, is gone")

    def join(comm):
        raise gone

    monkeypatch.setattr(world, "join", join)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(settings.FAILURE_DIR.name, str(tmp_path) if folder_is_named else "")
    (tmp_path / "failure_rank1.json").write_text("earlier")
    with pytest.raises(PeerError, match="is gone"):
        world.init()
    if not folder_is_named:
        assert (tmp_path / "failure_rank1.json").read_text() == "earlier"
        return
    found = read(tmp_path)
    assert found.keys() == KEYS
    assert (found["rank"], found["size"], found["operation"]) == (1, 2, "init")
    assert (found["error"], found["text"]) == ("PeerError", str(gone))
    assert found["traceback"] is None


@pytest.mark.parametrize(
    ("of_error", "failed_in", "activity", "operation"),
    [
        ("", "", "idle", None),
        ("", "", "barrier", "barrier"),
        ("", "gradients.1", "idle", "gradients.1"),
        ("gradients.0", "gradients.1", "idle", "gradients.0"),
    ],
)
def test_failure_file_names_the_operation_that_failed_or_runs(
    tmp_path, short_waits, of_error, failed_in, activity, operation
):
    here, error = fake_world(), ValueError("boom")
    here.engine.activity, here.engine.failed_in = activity, failed_in
    if of_error:
        error = HorovodInternalError("boom")
        error.operation = of_error
    with pytest.raises(Ending):
        Guard(here, None, str(tmp_path))._fail(error)
    assert read(tmp_path)["operation"] == operation


def test_rank_writes_its_failure_file_before_it_ends(tmp_path, short_waits):
    with pytest.raises(Ending, match=r"failed at step 7 \(host .*\): ValueError: boom"):
        Guard(fake_world(), None, str(tmp_path))._fail(raised(ValueError("boom")))
    assert read(tmp_path)["error"] == "ValueError"


def fail(failing):
    failing._fail(ValueError("boom"))


def be_stuck(failing):
    """Stay in an operation that does not notice a lost rank."""
    failing.world.engine.activity, failing.world.engine.cycles = "allreduce", 5
    failing._end_if_stuck(LostRank(0, "it is silent"))


def be_preempted(failing):
    failing._on_sigterm(15, None)


@pytest.fixture
def released():
    """An event that ends the wait of a hanging disk."""
    released = threading.Event()
    yield released
    released.set()


@pytest.fixture
def guard_after_loss(short_waits, monkeypatch):
    """Return a function that creates a guard whose heartbeat has lost rank 0."""

    def stop(pid, number):
        raise Ending(f"signal {number}")

    monkeypatch.setattr(guard, "_STUCK_SECONDS", 0.2)
    monkeypatch.setattr(guard.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(guard.os, "kill", stop)

    def make(fake_world, folder=""):
        made = Guard(fake_world, None, folder)
        made._heartbeat = SimpleNamespace(
            lost=lambda seconds=0.0: LostRank(0, "it is silent"), explain=lambda how: None
        )
        return made

    return make


@pytest.mark.parametrize("end", [fail, be_stuck, be_preempted])
@pytest.mark.parametrize("way", ["hangs", "fails"])
def test_rank_ends_although_writing_its_failure_file_hangs_or_fails(
    tmp_path, guard_after_loss, released, monkeypatch, way, end
):
    written = []

    def write(*arguments, **more):
        written.append(arguments)
        if way == "hangs":
            released.wait(30)
        raise MemoryError

    monkeypatch.setattr(guard, "write", write)
    begun = time.monotonic()
    with pytest.raises(Ending):
        end(guard_after_loss(fake_world(), str(tmp_path)))
    assert time.monotonic() - begun < 20
    assert written


@pytest.mark.parametrize("end", [fail, be_stuck, be_preempted])
def test_rank_ends_although_writing_its_run_record_hangs(guard_after_loss, released, end):
    begun = time.monotonic()
    with pytest.raises(Ending):
        end(guard_after_loss(fake_world(lambda how, in_order: released.wait(30))))
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("end", [fail, be_stuck, be_preempted])
def test_run_record_notes_a_failure_as_end_out_of_order(guard_after_loss, end):
    noted = []
    with pytest.raises(Ending):
        end(guard_after_loss(fake_world(lambda how, in_order: noted.append(in_order))))
    assert noted[0] is False


def test_stopped_rank_records_its_end_before_it_waits_long_for_losses(guard_after_loss):
    """mpirun kills its ranks a quarter of a second after Ctrl-C."""
    events = []
    stopped = guard_after_loss(fake_world(lambda how, in_order: events.append(how)))
    stopped._heartbeat.lost = lambda seconds=0.0: events.append(seconds) if seconds else None
    with pytest.raises(Ending):
        stopped._on_sigterm(15, None)
    first, recorded, second, *_ = events
    assert recorded.startswith("was stopped by SIGTERM at step 7")
    assert first < 0.24 <= second


def test_error_line_names_the_step_once(short_waits, capfd):
    error = HorovodInternalError("the ranks disagree; 'x' cannot complete; at step 7")
    with pytest.raises(Ending):
        Guard(fake_world())._fail(error)
    output = capfd.readouterr().err
    assert output.count("at step 7") == 1
    assert (
        "failed at step 7: HorovodInternalError: the ranks disagree; 'x' cannot complete;" in output
    )


def test_failed_rank_prints_nothing_more_on_sigterm(tmp_path, short_waits, capfd, monkeypatch):
    """Once a rank has ended the job, mpirun sends SIGTERM also to failed ranks."""
    signals: list[int] = []
    monkeypatch.setattr(guard.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(guard.os, "kill", lambda pid, number: signals.append(number))
    failed = Guard(fake_world(), None, str(tmp_path))
    with pytest.raises(Ending):
        failed._fail(ValueError("boom"))
    failed._on_sigterm(15, None)
    assert signals == [15]
    assert capfd.readouterr().err.count("gtopk:") == 1
    assert read(tmp_path)["error"] == "ValueError"


def test_each_rank_of_a_job_writes_a_failure_file_without_secrets(mpirun, tmp_path):
    (tmp_path / "failure_rank7.json").touch()
    run_secret = "5ec2e7" * 8
    ending = "exception, once the heartbeat's secret is printed"
    job = mpirun(
        3,
        "ends.py",
        ending,
        "2",
        timeout=60,
        GTOPK_FAILURE_DIR=str(tmp_path),
        GTOPK_RUN_SECRET=run_secret,
    )
    assert job.returncode != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"failure_rank{rank}.json" for rank in range(3)
    ]
    culprit = read(tmp_path, 2)
    assert (culprit["error"], culprit["text"], culprit["step"]) == ("RuntimeError", "boom", 5)
    assert "in end_here" in culprit["traceback"]
    for rank in (0, 1):
        found = read(tmp_path, rank)
        assert (found["rank"], found["size"]) == (rank, 3)
        # On a busy machine, mpirun's SIGTERM may come before this rank notices the loss.
        ends = {
            "HorovodInternalError": "rank 2 left (failed at step 5",
            None: "as rank 2 is lost (failed at step 5",
        }
        assert ends[found["error"]] in found["text"]
        assert found["traceback"] is None
    (heartbeat_secret,) = [
        line.split()[1] for line in job.stdout.splitlines() if line.startswith("secret ")
    ]
    for path in tmp_path.iterdir():
        content = path.read_text()
        assert heartbeat_secret not in content
        assert run_secret not in content


def test_killed_rank_is_named_in_the_failure_files_of_the_others(torchrun, tmp_path):
    job = torchrun(3, "ends.py", "killed", "2", timeout=60, GTOPK_RUN=str(tmp_path))
    assert job.returncode != 0
    files = sorted(tmp_path.glob("failure_rank*"))
    assert files
    assert tmp_path / "failure_rank2.json" not in files
    for path in files:
        found = json.loads(path.read_text())
        first, *ended_by_the_launcher = found["lost"]
        assert first["rank"] == 2
        assert first["why"]
        assert all(other["rank"] in {0, 1} - {found["rank"]} for other in ended_by_the_launcher)


def test_lost_ranks_begin_with_the_first_loss(monkeypatch):
    """By the time the launcher ends the others, some of these are lost too."""

    class Transport(SimpleNamespace):
        name, rank, size = "mpi", 3, 4

        def lost(self):
            return [0, 2]

        def departures(self):
            return {0: DepartureNotice({}, "was stopped by SIGTERM", lost=True)}

    guard = Guard(SimpleNamespace(transport=Transport()))
    alone = [LostRank(0, "was stopped by SIGTERM"), LostRank(2, "reported lost by another rank")]
    assert guard._lost_ranks() == alone
    first = LostRank(2, "its process has died")
    guard._heartbeat = SimpleNamespace(lost=lambda: first)
    assert guard._lost_ranks() == [first, alone[0]]
    guard._heartbeat = SimpleNamespace(lost=lambda: None)
    assert guard._lost_ranks() == alone
