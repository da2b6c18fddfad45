"""Jobs that are made to fail: started for real, watched, and searched for remains."""

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
    """The job has ended, and what was waited for was not said."""


class Job:
    """A job that runs.

    said: all that it has printed so far, a line each.
    pids: of its ranks, as they said.
    """

    def __init__(self, process: subprocess.Popen[bytes], ranks: int, mark: str, folder: Path):
        self.process = process
        self.ranks = ranks
        self.said: list[str] = []
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
                self.said.append(text)
                if match := re.search(r"\brank (\d+) is (\d+)$", text):
                    self.pids[int(match[1])] = int(match[2])
                self._changed.notify_all()
        with self._changed:
            self._reading = False
            self._changed.notify_all()

    def text(self) -> str:
        return "\n".join(self.said)

    def hear(self, pattern: str, seconds: float = 90.0, times: int = 1) -> list[re.Match[str]]:
        """Return so many matches of what is said, as soon as they were."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = [m for line in self.said if (m := re.search(pattern, line))]
                if len(found) >= times:
                    return found
                if not self._reading:
                    raise Ended(f"no {pattern!r} in:\n{self.text()}")
                remaining = deadline - time.monotonic()
                assert remaining > 0, f"no {pattern!r} after {seconds} s in:\n{self.text()}"
                self._changed.wait(remaining)

    def begin(self) -> int:
        """Return the step from which all ranks train, when they do; note what memory they share."""
        steps = {match[1] for match in self.hear(r"rank \d+ goes on from (\d+)", times=self.ranks)}
        self.note_segments()
        (step,) = steps
        return int(step)

    def note_segments(self) -> None:
        """Note which shared memory the job has."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    if (place := line.find("/dev/shm/")) >= 0:
                        self._segments.add(Path(line[place:].removesuffix(" (deleted)")))

    def send(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; return when."""
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
        """Return those processes that are ranks; their numbers need not be what they said."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                is_python = "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
                if is_python and words[1].startswith(os.fsencode(PROGRAMS)):
                    found.append(pid)
        return found

    def files(self) -> list[Path]:
        """Return what there is of the job's shared memory and temporary files.

        What torchrun is told of an error stays in its folder of logs, as it means it to.
        """
        files = [path for path in self._folder.rglob("*") if not path.is_dir()]
        files = [path for path in files if path.name != "error.json"]
        return files + [path for path in self._segments if path.exists()]

    def end(self, since: float, promised_seconds: float = PROMISED_SECONDS) -> float:
        """Return after how many seconds the ranks had ended; the launcher ends, too."""
        while any(map(is_alive, self.pids.values())):
            waited = time.time() - since
            assert waited < promised_seconds + 20, f"{self.living()} live on:\n{self.text()}"
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
        """Return the ranks that live."""
        return [rank for rank, pid in self.pids.items() if is_alive(pid)]

    def assert_nothing_is_left(self, but_files: bool = False) -> None:
        """Processes, shared memory and temporary files, all of this job's own."""
        deadline = time.monotonic() + 5  # the companions of ranks end a moment after them
        while True:
            files = [] if but_files else self.files()
            left: list[Any] = [*self.processes(), *files]
            if not left:
                return
            assert time.monotonic() < deadline, f"{left} is left of:\n{self.text()}"
            time.sleep(0.05)

    def assert_survivors_name(self, culprit: int, step: int | None, why: str = "") -> None:
        """Each of the others says on a line of its own who is lost, where, at which step, in what.

        why: what else it says of the culprit.
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
            lines = [line for line in self.said if begin.search(line) and named.search(line)]
            assert lines, f"rank {rank} does not name rank {culprit} in:\n{self.text()}"
            line = lines[-1]
            said = re.search(r"at step (\d+)", line)
            assert said, line
            assert step is None or abs(int(said[1]) - step) <= 1, f"{line} is not of step {step}"
            # Not even that where its companion speaks for it: MPICH's mpirun kills the others.
            doing = r"waited for (it )?in \S+|, in \S+, as|computing|cannot be|ends.*, as|a word at"
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
    """Run a command that starts ranks; whatever is left of it is ended afterwards."""
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
