"""Detect whether MPI accepts GPU memory, from the library's answer and a trial in a child."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives.transports import direct

# So much of CuPy as a try needs, in the host's memory, which any MPI takes.
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
def test_an_mpi_library_is_asked_whether_it_is_cuda_aware(monkeypatch, exports, aware) -> None:
    monkeypatch.setattr(direct.ctypes, "CDLL", lambda path: SimpleNamespace(**exports))
    assert direct.claims_cuda("libmpi.so") is aware


def test_mpichs_answer_is_read_from_where_it_writes_it(monkeypatch) -> None:
    def says_yes(kind, answer) -> int:
        answer._obj.value = 1
        return 0

    library = SimpleNamespace(MPIX_GPU_query_support=says_yes)
    monkeypatch.setattr(direct.ctypes, "CDLL", lambda path: library)
    assert direct.claims_cuda("libmpi.so") is True


@pytest.mark.parametrize("claim", [True, False])
def test_only_a_library_that_claims_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, claim: bool
) -> None:
    tried = []
    monkeypatch.setattr(direct, "import_module", lambda name: SimpleNamespace(__file__=name))
    monkeypatch.setattr(direct, "claims_cuda", lambda library: claim)
    monkeypatch.setattr(direct, "run_trial", lambda: tried.append(1) or "died: Killed")
    said = direct.why_staged()
    assert said.endswith("but a trial died: Killed" if claim else "does not claim to be CUDA-aware")
    assert bool(tried) is claim


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
def test_a_try_fails_in_a_child_and_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cupy: str, failure: str
) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "cupy.py").write_text(cupy)
    monkeypatch.syspath_prepend(tmp_path)
    seconds = 5 if "5 s" in failure else 60
    assert direct.run_trial(seconds) == failure


def test_what_arrives_otherwise_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py")
    unlike = (
        "import numpy\n"
        "class Unlike(numpy.ndarray):\n"
        "    def __eq__(self, other): return numpy.zeros(1, bool)\n"
        "arange = lambda size: numpy.arange(size).view(Unlike)\n"
    )
    (tmp_path / "cupy.py").write_text(f"{CUPY}\n{unlike}")
    monkeypatch.syspath_prepend(tmp_path)
    assert direct.run_trial(60) == "ended with exit code 1"


def test_a_ranks_child_is_a_world_of_its_own(mpirun) -> None:
    job = mpirun(2, "mpi_alone.py")
    assert job.returncode == 0, job.stderr
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("rank"))
    assert said == ["rank 0 of 2 has a child of 1", "rank 1 of 2 has a child of 1"]


def test_what_launchers_say_is_taken_away_and_the_users_settings_stay() -> None:
    users = {"OMPI_MCA_pml": "ucx", "UCX_TLS": "all", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}
    launchers = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_MCA_ess": "pmi",
        "OMPI_MCA_orte_ess_num_procs": "2",
        "PMIX_RANK": "0",
        "PMI_SIZE": "2",
        "SLURM_PROCID": "0",
        "HYDI_CONTROL_FD": "3",
    }
    assert direct.without_launcher(users | launchers) == users
