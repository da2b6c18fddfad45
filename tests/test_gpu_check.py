"""The GPU check: its runner loses no result, and its parts that need no GPU work."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives import kernels
from collectives.kernels.device import cuda as cuda_machine
from tests.collectives import fake_cuda
from tests.collectives.kernels.device import machine_on_host
from tests.matrix import some_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests/gpu_check"

HANGS = "import time\ndef deep_down():\n    time.sleep(600)\ndeep_down()"
# In a session of its own, as mpirun and torchrun start their ranks.
LEAVES_A_CHILD = """
import subprocess, sys
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleeper, start_new_session=True).pid)
"""
DEAF = "import signal, time\nsignal.signal(signal.SIGABRT, signal.SIG_IGN)\ntime.sleep(600)"
RECORDS = """
import json, os
with open(os.environ["GPU_CHECK_RESULTS"], "a") as file:
    file.write(json.dumps({"seconds": os.environ["GPU_CHECK_SECONDS"]}) + "\\n")
    file.write('{"one": {"another": 1}\\n')
    file.write('{"half a li')
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports one of the check's files, as its programs do."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


class CheckRun:
    """A run of stages in a folder, and its results there."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.module, self.folder = module, folder

    def run(
        self, *groups: dict[str, str | list[str]], budget: float = 60, limit: float = 30
    ) -> bool:
        """Run groups of stages; each is a Python program or a command, by the stage's name."""
        runner = self.module.Runner(
            self.folder / "out", self.folder / "work", budget, dict(os.environ), self.folder
        )
        return runner.run([[self._stage(n, c, limit) for n, c in each.items()] for each in groups])

    def _stage(self, name: str, command: str | list[str], limit: float) -> Any:
        words = [sys.executable, "-c", command] if isinstance(command, str) else command
        return self.module.Stage(name, limit, words)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        lines = (self.folder / "out/summary.jsonl").read_text().splitlines()
        return {row["stage"]: row for row in map(json.loads, lines)}

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: row["outcome"] for name, row in self.rows.items()}

    def log(self, name: str) -> str:
        with tarfile.open(self.folder / "out/logs.tar.gz") as archive:
            file = archive.extractfile(f"{name}.log")
            assert file is not None
            return file.read().decode()


@pytest.fixture
def check_run(program: Callable[[str], Any], tmp_path: Path) -> CheckRun:
    return CheckRun(program("runner"), tmp_path)


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_failed_stage_does_not_stop_the_others(check_run: CheckRun) -> None:
    succeeded = check_run.run(
        {"first": "print('said')", "fails": "print('before')\nraise SystemExit(3)"},
        {"missing": ["/no/such/program"], "cannot be here": "raise SystemExit(77)"},
        {"last": "print('to the end')"},
    )
    assert not succeeded
    assert check_run.outcomes == {
        "first": "ok",
        "fails": "failed",
        "missing": "failed",
        "cannot be here": "skipped",
        "last": "ok",
    }
    rows = check_run.rows
    assert (rows["fails"]["exit_code"], rows["fails"]["said"]) == (3, "before")
    assert "cannot be started" in check_run.log("missing")
    assert check_run.log("last") == "to the end\n"


def test_run_of_passed_and_skipped_stages_succeeds(check_run: CheckRun) -> None:
    assert check_run.run({"well": "", "skipped": "raise SystemExit(77)"})


@pytest.mark.matrix
def test_hanging_stage_is_killed_and_logs_its_tracebacks(check_run: CheckRun) -> None:
    assert not check_run.run({"hangs": HANGS, "deaf": DEAF}, {"next": ""}, limit=4)
    assert check_run.outcomes == {"hangs": "timed out", "deaf": "timed out", "next": "ok"}
    assert "in deep_down" in check_run.log("hangs")
    assert check_run.rows["deaf"]["exit_code"] == -signal.SIGKILL


@pytest.mark.parametrize("then", some_of(["", "import time; time.sleep(600)"], ""))
def test_processes_left_behind_by_a_stage_are_killed(check_run: CheckRun, then: str) -> None:
    check_run.run({"parent": f"{LEAVES_A_CHILD}\n{then}"}, limit=30 if not then else 5)
    assert not alive(int(check_run.log("parent").split()[0]))
    if not then:  # if the stage hangs, SIGABRT may already have ended the child
        assert check_run.rows["parent"]["left_behind"] == 1


def test_process_of_another_runs_stage_is_not_killed(check_run: CheckRun) -> None:
    other = {**os.environ, "GPU_CHECK_STAGE": "another run/parent"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=other) as p:
        check_run.run({"parent": LEAVES_A_CHILD})
        assert p.poll() is None
        p.communicate(b"\n")
    assert p.returncode == 0


def test_stages_beyond_the_budget_are_reported_as_not_run(
    check_run: CheckRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_run.module, "LEAST_SECONDS", 0.1)
    assert not check_run.run({"first": HANGS}, {"second": ""}, budget=1)
    assert check_run.outcomes == {"first": "timed out", "second": "not run"}
    assert check_run.rows["first"]["limit"] <= 1
    assert check_run.rows["second"]["said"] == "the budget is spent"


def test_results_are_collected_despite_unreadable_lines(check_run: CheckRun) -> None:
    check_run.run({"two words": RECORDS}, {"none": ""}, limit=30)
    results = json.loads((check_run.folder / "out/results.json").read_text())
    assert results == {"two_words": [{"seconds": "30"}, {"unreadable": '{"one": {"another": 1}'}]}


def check(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the check with these arguments."""
    return subprocess.run(
        [
            *(sys.executable, FOLDER / "run.py", "--device=cpu", "--out", tmp_path / "out"),
            *("--work", tmp_path / "work", *words),
        ],
        env={**os.environ, "GTOPK_ADVICE": "off"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_sigterm_stops_running_stages_and_is_reported(tmp_path: Path) -> None:
    command = (sys.executable, FOLDER / "run.py", "--device=cpu", "transformer", "features")
    folders = ("--out", tmp_path / "out", "--work", tmp_path / "work")
    with subprocess.Popen([*command, *folders], stdout=subprocess.PIPE, text=True) as job:
        log = tmp_path / "work/logs/features.log"  # started first, and takes long
        while job.poll() is None and not (log.exists() and log.stat().st_size):
            os.sched_yield()
        job.send_signal(signal.SIGTERM)
        job.communicate()
    assert job.returncode == 128 + signal.SIGTERM
    rows = [json.loads(s) for s in (tmp_path / "out/summary.jsonl").read_text().splitlines()]
    assert [(row["stage"], row["outcome"]) for row in rows] == [("features", "stopped")]


def test_list_prints_stages_in_order(tmp_path: Path) -> None:
    shown = check(tmp_path, "--list").stdout.splitlines()
    assert shown[0] == "facts 170 s"
    assert [line.rpartition(" ")[0].rpartition(" ")[0] for line in shown][-3:] == [
        "racecheck",
        "counters",
        "transformer",
    ]
    on_gpu = check(tmp_path, "--list", "--device=cuda").stdout.splitlines()
    assert "memcheck 70 s  |  racecheck 70 s" in on_gpu
    assert on_gpu.index("bench 100 s") < on_gpu.index("transformer 110 s")


def test_unknown_stage_is_an_error_that_lists_the_stages(tmp_path: Path) -> None:
    job = check(tmp_path, "bench", "no such")
    assert job.returncode == 2
    assert job.stderr.startswith("run.py: no stage is named no such; there are: facts, core, ")


ON_A_CPU = {
    **dict.fromkeys(("facts", "core", "bench", "kernels", "library", "nccl of one"), "ok"),
    **dict.fromkeys(("features", "pool", "mpirun 2", "torchrun 2", "transformer"), "ok"),
    **dict.fromkeys(("mpirun 4", "torchrun 4", "hogbatch"), "ok"),
    **dict.fromkeys(("warm", "memcheck", "racecheck", "counters"), "skipped"),
}
LONG = (
    "mpirun 2",
    "mpirun 4",
    "torchrun 2",
    "torchrun 4",
    "hogbatch",
    "features",
    "transformer",
    "bench",
)
QUICK = [name for name in ON_A_CPU if name not in LONG]


@pytest.mark.parametrize("stage", some_of(ON_A_CPU, *QUICK))
def test_stage_runs_on_a_cpu(tmp_path: Path, stage: str) -> None:
    job = check(tmp_path, stage)
    with tarfile.open(tmp_path / "out/logs.tar.gz") as archive:
        (member,) = archive.getmembers()
        file = archive.extractfile(member)
        assert file is not None
        log = file.read().decode()
    row = json.loads((tmp_path / "out/summary.jsonl").read_text())
    assert (row["stage"], row["outcome"]) == (stage, ON_A_CPU[stage]), log
    assert row["left_behind"] == 0
    assert job.returncode == 0


def test_every_stage_is_tested_on_a_cpu(program: Callable[[str], Any]) -> None:
    stages = program("stages")
    everywhere = [s.name for group in stages.groups("cpu", ROOT) for s in group]
    assert sorted(everywhere) == sorted(ON_A_CPU)
    on_gpu = {s.name for group in stages.groups("cuda", ROOT) for s in group}
    assert on_gpu - set(everywhere) == {"mpirun laws"}


def test_every_file_with_gpu_tests_is_in_a_stage(program: Callable[[str], Any]) -> None:
    stages = program("stages")
    named = (stages.KERNELS, stages.NCCL, *stages.LIBRARY)
    marked = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "@pytest.mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)
    ]
    assert len(marked) > 6
    assert [path for path in marked if not path.startswith(named)] == []


# ---- parts that need a GPU, on a model of one


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, shared_folder: Path) -> Iterator[Any]:
    """CuPy's model, with the kernels compiled for the host."""
    library = machine_on_host.build(shared_folder / "kernels", cuda_machine.THREADS)
    with fake_cuda.with_kernels(monkeypatch, library, gpus=1):
        yield cuda_machine.cupy()


def test_small_set_is_bit_identical_to_the_reference(
    program: Callable[[str], Any], model: Any
) -> None:
    program("small_set").work(model)


REPORT = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","mark<float>","gpu__time_duration.sum","us","70.1"
"0","mark<float>","dram__bytes_read.sum","Mbyte","204"
"1","expand<float>","gpu__time_duration.sum","us","10"
"""
WIDE = """==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum"
"","","us"
"0","mark<float>","70.1"
"""


def test_counters_cover_steps_with_and_without_a_guess(
    program: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = program("counters")
    had_guess: list[bool] = []  # of each step

    def select(residual: Any, gradient: Any, k: int, guess: float) -> Any:
        had_guess.append(guess > 0)
        return kernels.accumulate_and_select(residual, gradient, k, guess)

    own = SimpleNamespace(accumulate_and_select=select, clear_at=kernels.clear_at)
    monkeypatch.setattr(counters, "kernels", own)
    counters.work(20_000, "cpu", had_guess.clear)
    assert had_guess == [True] * counters.WATCHED + [False]


def test_counter_report_is_parsed(program: Callable[[str], Any]) -> None:
    rows = program("counters").rows
    assert rows(REPORT.splitlines()) == [
        {
            "kernel": "mark<float>",
            "gpu__time_duration.sum": "70.1 us",
            "dram__bytes_read.sum": "204 Mbyte",
        },
        {"kernel": "expand<float>", "gpu__time_duration.sum": "10 us"},
    ]
    assert rows(WIDE.splitlines())[-1] == {
        "kernel": "mark<float>",
        "gpu__time_duration.sum": "70.1",
    }
    assert rows(["==ERROR== no permission"]) == []


def test_every_kernel_of_a_selection_is_timed(
    program: Callable[[str], Any], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = program("kernel_times")
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(timing, "spin", lambda: None)
    monkeypatch.setattr(timing.CudaMachine, "capture", lambda machine, launches: launches)
    monkeypatch.setattr(model.cuda, "Event", lambda **options: event)
    monkeypatch.setattr(model.cuda, "get_elapsed_time", lambda *pair: 1.5, raising=False)
    drawn = SimpleNamespace(
        standard_normal=lambda size, dtype: model.asarray(
            np.random.default_rng(0).standard_normal(size, dtype)
        )
    )
    random = SimpleNamespace(default_rng=lambda seed: drawn)
    monkeypatch.setattr(model, "random", random, raising=False)
    monkeypatch.setattr(model, "copyto", lambda to, array: None, raising=False)
    rows = timing.kernel_times(300_000, 300, 3)
    assert {"copy", "step as a graph", "step launched, waited for", "kernel mark"} < set(rows)
    assert {"merge, waited for", "pack blocks, waited for", "round to bf16, waited for"} < set(rows)
    assert rows["kernel mark"] == {"median": 1500, "min": 1500, "max": 1500}
