"""Runs stages with time limits, in parallel or in turn; a failed stage loses no results.

    budget   |--------------------------- at most so many seconds in all --------------------------|
    groups   | facts | core | bench | kernels      |  ...
                                    | library      |     of one group: side by side
                                    | features  xx |     late: SIGABRT (tracebacks), then SIGKILL

A stage is its own process group, and has a tag in its environment, so that its processes are found
and ended even in other sessions, as the ranks of mpirun and torchrun are.
After each stage its line is on disk (fsync), and its log and its results are in the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import tarfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

SKIPPED = 77  # exit code of a stage that cannot run on this machine
LEAST_SECONDS = 5.0  # no stage begins with less of the budget left
TRACEBACK_SECONDS = 3.0
KILL_SECONDS = 5.0
TAG = "GPU_CHECK_STAGE"


class Stage(NamedTuple):
    """A command, and the seconds it may take."""

    name: str
    seconds: float
    command: Sequence[str]
    environment: Mapping[str, str] = {}


class Row(NamedTuple):
    """A stage's line in the summary.

    outcome: "ok", "failed", "timed out", "skipped" (it cannot run here), "stopped" (the runner
        was told to end) or "not run" (the budget was spent).
    left_behind: the number of its processes that it had not ended.
    """

    stage: str
    outcome: str
    seconds: float
    limit: float
    exit_code: int | None
    left_behind: int
    said: str


class Runner:
    """Runs groups of stages within a budget of seconds.

    out: gets summary.jsonl (a line a stage), results.json (all that stages recorded) and
        logs.tar.gz, each whole after each stage.
    work: for logs and results while they grow; a stage finds the path of the file for its results,
        one JSON object a line, in GPU_CHECK_RESULTS, and the seconds it may take in
        GPU_CHECK_SECONDS.
    """

    def __init__(
        self, out: Path, work: Path, budget: float, environment: Mapping[str, str], cwd: Path
    ) -> None:
        self._deadline = time.monotonic() + budget
        self._out, self._cwd = out, cwd
        self._logs, self._results = work / "logs", work / "results"
        self._environment = environment
        self._run = uuid.uuid4().hex  # other runs on this machine have stages of the same names
        self._writing = threading.Lock()
        self._stopped = threading.Event()
        self.rows: list[Row] = []
        for folder in (out, self._logs, self._results):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, groups: Sequence[Sequence[Stage]]) -> bool:
        """Run the groups one after the other; return whether no stage failed."""
        _without_core_dumps()
        for group in groups:
            with ThreadPoolExecutor(len(group)) as side_by_side:
                running = [side_by_side.submit(self._stage, each) for each in group]
                try:
                    wait(running)
                except BaseException:  # a signal's handler ended the runner
                    self._stopped.set()
                    wait(running)
                    raise
            for each in running:
                each.result()
        return all(row.outcome in ("ok", "skipped") for row in self.rows)

    def _stage(self, stage: Stage) -> None:
        left = self._deadline - time.monotonic()
        limit = min(stage.seconds, left)
        if left < LEAST_SECONDS or self._stopped.is_set():
            said = "stopped" if self._stopped.is_set() else "the budget is spent"
            self._keep(Row(stage.name, "not run", 0.0, stage.seconds, None, 0, said))
            return
        tag = f"{self._run}/{stage.name}"
        name = file_name(stage.name)
        log = self._logs / f"{name}.log"
        results = self._results / f"{name}.jsonl"
        results.unlink(missing_ok=True)
        environment = {
            **self._environment,
            **stage.environment,
            TAG: tag,
            "GPU_CHECK_RESULTS": str(results),
            "GPU_CHECK_SECONDS": f"{limit:.0f}",
            "PYTHONFAULTHANDLER": "1",  # SIGABRT writes the tracebacks of all threads
            "PYTHONUNBUFFERED": "1",
        }
        begun = time.monotonic()
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(
                    stage.command,
                    cwd=self._cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                file.write(f"cannot be started: {error}\n".encode())
                outcome, code, left_behind = "failed", None, 0
            else:
                outcome = self._wait(process, begun + limit)
                if outcome in ("timed out", "stopped"):
                    _end(tag, process, signal.SIGABRT, TRACEBACK_SECONDS)
                left_behind = len([pid for pid in tagged(tag) if pid != process.pid])
                _end(tag, process, signal.SIGKILL, KILL_SECONDS)
                code = process.poll()
        seconds = round(time.monotonic() - begun, 1)
        row = Row(stage.name, outcome, seconds, round(limit, 1), code, left_behind, last_line(log))
        self._keep(row)

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> str:
        while time.monotonic() < deadline:
            if self._stopped.is_set():
                return "stopped"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
                return {0: "ok", SKIPPED: "skipped"}.get(code, "failed")
        return "timed out"

    def _keep(self, row: Row) -> None:
        """Write the summary, results and logs so far."""
        with self._writing:
            self.rows.append(row)
            with (self._out / "summary.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row._asdict()) + "\n")
                _sync(file)
            self._write_results()
            self._pack_logs()
            print(
                f"{row.stage:14} {row.outcome:9} {row.seconds:6.1f} of {row.limit:5.1f} s  "
                f"{row.said}",
                flush=True,
            )

    def _write_results(self) -> None:
        found = {
            path.stem: [_read(line) for line in whole_lines(path)]
            for path in sorted(self._results.glob("*.jsonl"))
        }
        part = self._out / "results.part"
        with part.open("w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
            _sync(file)
        part.replace(self._out / "results.json")

    def _pack_logs(self) -> None:
        part = self._out / "logs.part"
        with tarfile.open(part, "w:gz", compresslevel=3) as archive:
            for path in sorted(self._logs.glob("*.log")):
                with contextlib.suppress(OSError):  # a log that grows while it is read
                    archive.add(path, path.name)
        part.replace(self._out / "logs.tar.gz")


def file_name(stage: str) -> str:
    """Return a file name for a stage."""
    return stage.replace(" ", "_")


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines: the last one of a killed process may be cut."""
    return path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()


def _read(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # ranks wrote at the same time
        return {"unreadable": line}


def last_line(log: Path) -> str:
    """Return the last non-blank line of a log, shortened."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:150] for line in reversed(lines) if line.strip()), "")


def tagged(tag: str) -> list[int]:
    """Return the processes that were started with this tag in their environment."""
    wanted = f"{TAG}={tag}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended, or belongs to another user
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _end(
    tag: str, process: subprocess.Popen[bytes], number: signal.Signals, seconds: float
) -> None:
    """Send a signal to all processes of a stage; wait until they ended, or for `seconds`."""
    deadline = time.monotonic() + seconds
    for pid in tagged(tag):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    while (process.poll() is None or tagged(tag)) and time.monotonic() < deadline:
        time.sleep(0.05)
        if number == signal.SIGKILL:  # also processes that were just starting
            for pid in tagged(tag):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _without_core_dumps() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _sync(file: IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())
