"""Detect whether MPI accepts GPU memory, from the library's answer and a trial in a child."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives.transports import direct

# The parts of CuPy that a trial needs, in the host's memory, which any MPI accepts.
CUPY = """
import types
from numpy import arange, zeros_like

stream = types.SimpleNamespace(synchronize=lambda: None)
cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
"""


@pytest.mark.parametrize(
    ("exports", "aware"),
    [
        ({}, False),
        ({"MPIX_Query_cuda_support": lambda: 1}, True),
        ({"MPIX_Query_cuda_support": lambda: 0}, False),
        ({"MPIX_GPU_query_support": lambda kind, answer: 1}, False),  # an error code
        ({"MPIX_GPU_query_support": lambda kind, answer: 0}, False),
    ],
)
def test_mpi_library_is_queried_for_cuda_support(monkeypatch, exports, aware) -> None:
    monkeypatch.setattr(direct.ctypes, "CDLL", lambda path: SimpleNamespace(**exports))
    assert direct.claims_cuda("libmpi.so") is aware


def test_mpichs_cuda_support_is_read_from_its_output_argument(monkeypatch) -> None:
    def query_support(kind, answer) -> int:
        answer._obj.value = 1
        return 0

    library = SimpleNamespace(MPIX_GPU_query_support=query_support)
    monkeypatch.setattr(direct.ctypes, "CDLL", lambda path: library)
    assert direct.claims_cuda("libmpi.so") is True


@pytest.mark.parametrize("claim", [True, False])
def test_trial_runs_only_if_the_mpi_library_claims_cuda_support(
    monkeypatch: pytest.MonkeyPatch, claim: bool
) -> None:
    trials = []
    monkeypatch.setattr(direct, "import_module", lambda name: SimpleNamespace(__file__=name))
    monkeypatch.setattr(direct, "claims_cuda", lambda library: claim)
    monkeypatch.setattr(direct, "run_trial", lambda: trials.append(1) or "died: Killed")
    reason = direct.why_staged()
    assert reason.endswith(
        "but a trial died: Killed" if claim else "does not claim to be CUDA-aware"
    )
    assert bool(trials) is claim


@pytest.mark.parametrize(
    ("cupy", "failure"),
    [
        (CUPY, ""),
        (
            f"{CUPY}\nimport os\nzeros_like = lambda array: os.kill(os.getpid(), 11)",
            "died: Segmentation fault",
        ),
        (f"{CUPY}\nimport time\narange = lambda size: time.sleep(60)", "did not end in 5 s"),
        (f"{CUPY}\nimport os\narange = lambda size: os._exit(0)", "ended with exit code 0"),
        (f"{CUPY}\nraise ImportError('no driver')", "ended with exit code 1"),
    ],
    ids=["holds", "crashes", "hangs", "ends", "raises"],
)
def test_trial_failure_in_a_child_process_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cupy: str, failure: str
) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "cupy.py").write_text(cupy)
    monkeypatch.syspath_prepend(tmp_path)
    seconds = 5 if "5 s" in failure else 60
    assert direct.run_trial(seconds) == failure


def test_trial_fails_when_the_received_array_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py")
    unequal = (
        "import numpy\n"
        "class Unequal(numpy.ndarray):\n"
        "    def __eq__(self, other): return numpy.zeros(1, bool)\n"
        "arange = lambda size: numpy.arange(size).view(Unequal)\n"
    )
    (tmp_path / "cupy.py").write_text(f"{CUPY}\n{unequal}")
    monkeypatch.syspath_prepend(tmp_path)
    assert direct.run_trial(60) == "ended with exit code 1"


def test_trial_child_of_a_rank_is_an_mpi_world_of_one(mpirun) -> None:
    job = mpirun(2, "mpi_alone.py")
    assert job.returncode == 0, job.stderr
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("rank"))
    assert lines == ["rank 0 of 2 has a child of 1", "rank 1 of 2 has a child of 1"]


def test_without_launcher_removes_launcher_variables_and_keeps_the_users() -> None:
    user_variables = {
        "OMPI_MCA_pml": "ucx",
        "UCX_TLS": "all",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    launcher_variables = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_MCA_ess": "pmi",
        "OMPI_MCA_orte_ess_num_procs": "2",
        "PMIX_RANK": "0",
        "PMI_SIZE": "2",
        "SLURM_PROCID": "0",
        "HYDI_CONTROL_FD": "3",
    }
    assert direct.without_launcher(user_variables | launcher_variables) == user_variables
