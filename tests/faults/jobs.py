"""Real jobs that are made to fail, watched, and checked for leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtopk.runtime.launch import find_mpirun, mpirun_command, rank_environment
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
LAUNCHERS = ("mpirun", "torchrun")
PROMISED_SECONDS = 10.0


class Ended(Exception):
    """The job has ended without printing what was waited for."""


class Job:
    """A running job.

    lines: all that it has printed so far.
    pids: its ranks' process ids, from what they printed.
    """

    def __init__(self, process: subprocess.Popen[bytes], ranks: int, mark: str, folder: Path):
        self.process = process
        self.ranks = ranks
        self.lines: list[str] = []
        self.pids: dict[int, int] = {}
        self._mark = mark
        self._folder = folder
        self._segments: set[Path] = set()
        self._changed = threading.Condition()
        self._reading = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip()
            with self._changed:
                self.lines.append(text)
                if match := re.search(r"\brank (\d+) is (\d+)$", text):
                    self.pids[int(match[1])] = int(match[2])
                self._changed.notify_all()
        with self._changed:
            self._reading = False
            self._changed.notify_all()

    def text(self) -> str:
        return "\n".join(self.lines)

    def expect(self, pattern: str, seconds: float = 90.0, times: int = 1) -> list[re.Match[str]]:
        """Wait until the job has printed `times` lines that match, and return the matches."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = [m for line in self.lines if (m := re.search(pattern, line))]
                if len(found) >= times:
                    return found
                if not self._reading:
                    raise Ended(f"no {pattern!r} in:\n{self.text()}")
                remaining = deadline - time.monotonic()
                assert remaining > 0, f"no {pattern!r} after {seconds} s in:\n{self.text()}"
                self._changed.wait(remaining)

    def begin(self) -> int:
        """Wait until all ranks train, return their first step, and note their shared memory."""
        steps = {
            match[1] for match in self.expect(r"rank \d+ goes on from (\d+)", times=self.ranks)
        }
        self.note_segments()
        (step,) = steps
        return int(step)

    def note_segments(self) -> None:
        """Note the job's shared-memory files."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    if (place := line.find("/dev/shm/")) >= 0:
                        self._segments.add(Path(line[place:].removesuffix(" (deleted)")))

    def send(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; return the time."""
        os.kill(self.pids[rank], number)
        return time.time()

    def processes(self) -> list[int]:
        """Return all living processes of the job, started by the launcher or by a rank."""
        needle = self._mark.encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes() and is_alive(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def rank_processes(self) -> list[int]:
        """Return those processes that are ranks; their ids need not be the printed ones."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                is_python = "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
                if is_python and words[1].startswith(os.fsencode(PROGRAMS)):
                    found.append(pid)
        return found

    def files(self) -> list[Path]:
        """Return the job's shared memory and temporary files that exist.

        torchrun's error.json does not count: torchrun keeps it in its log folder on purpose.
        """
        files = [path for path in self._folder.rglob("*") if not path.is_dir()]
        files = [path for path in files if path.name != "error.json"]
        return files + [path for path in self._segments if path.exists()]

    def end(self, since: float, promised_seconds: float = PROMISED_SECONDS) -> float:
        """Wait for the ranks and the launcher to end; return how long the ranks lived on."""
        while any(map(is_alive, self.pids.values())):
            waited = time.time() - since
            assert waited < promised_seconds + 20, f"{self.living()} still run:\n{self.text()}"
            time.sleep(0.02)
        ended = time.time() - since
        self.process.wait(60)
        self._reader.join(20)
        assert ended < promised_seconds, f"it took {ended:.1f} s:\n{self.text()}"
        return ended

    def close(self) -> None:
        self._reader.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def living(self) -> list[int]:
        """Return the ranks that are alive."""
        return [rank for rank, pid in self.pids.items() if is_alive(pid)]

    def assert_nothing_is_left(self, but_files: bool = False) -> None:
        """Check that none of this job's processes, shared memory and temporary files are left."""
        deadline = time.monotonic() + 5  # the ranks' companions end a moment after them
        while True:
            files = [] if but_files else self.files()
            left: list[Any] = [*self.processes(), *files]
            if not left:
                return
            assert time.monotonic() < deadline, f"{left} left over from:\n{self.text()}"
            time.sleep(0.05)

    def assert_survivors_name(self, culprit: int, step: int | None, why: str = "") -> None:
        """Check that each survivor prints a line on who is lost, where, at which step, and in what.

        why: what the line must also say about the culprit.
        """
        host = re.escape(os.uname().nodename)
        named = re.compile(
            rf"rank {culprit} (is lost|left) \(.*host {host}"
            rf"|as rank {culprit} ended the job: it failed at step \d+ \(host {host}"
            r"|CheckpointError: checkpoint \d+ cannot be written .*: "
            rf"rank {culprit} \(host {host}\): "
        )
        for rank in set(range(self.ranks)) - {culprit}:
            begin = re.compile(rf"gtopk: rank {rank} (of {self.ranks} \(|ends)")
            lines = [line for line in self.lines if begin.search(line) and named.search(line)]
            assert lines, f"rank {rank} does not name rank {culprit} in:\n{self.text()}"
            line = lines[-1]
            match = re.search(r"at step (\d+)", line)
            assert match, line
            assert step is None or abs(int(match[1]) - step) <= 1, f"{line} must name step {step}"
            # A companion that reports for its rank knows less: MPICH's mpirun kills the others.
            doing = (
                r"waited for it in \S+|\) before \S+:|, in \S+, as|computing|ends.*, as"
                r"|cannot (be|complete)|without an error message at"
            )
            assert re.search(doing, line), line
            assert why in line, line


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command(launcher: str, ranks: int, program: Sequence[str]) -> list[str]:
    if launcher == "mpirun":
        mpirun = find_mpirun()
        assert mpirun is not None
        return mpirun_command(mpirun, ranks, program)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"),
        *(f"--nproc-per-node={ranks}", "--no-python", *program),
    ]


@contextmanager
def running(words: Sequence[str], ranks: int, **variables: str) -> Iterator[Job]:
    """Run a command that starts ranks; kill everything that is left of it afterwards."""
    mark = f"GTOPK_TEST_MARK={uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="gtopk-fault-") as folder:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                **rank_environment(ranks),
                "PYTHONPATH": STARTED_PATH,
                "TMPDIR": folder,
                **dict([mark.split("=")]),
                **variables,
            },
        )
        job = Job(process, ranks, mark, Path(folder))
        try:
            yield job
        finally:
            while left := job.processes():
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            process.wait(20)
            job.close()
            for path in job.files():
                path.unlink()


@contextmanager
def start(
    launcher: str, ranks: int, program: str, *arguments: str, **variables: str
) -> Iterator[Job]:
    """Start a program of tests/programs on this host."""
    words = command(launcher, ranks, [sys.executable, str(PROGRAMS / program), *arguments])
    with running(words, ranks, **variables) as job:
        yield job


def plan(folder: Path, fault: Mapping[str, Any] | None = None, **more: Any) -> str:
    """Return the argument of faulty_training.py."""
    return json.dumps({"steps": 40, "every": 5, "folder": str(folder), "fault": fault, **more})
