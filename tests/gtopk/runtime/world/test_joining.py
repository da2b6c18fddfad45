"""Choose and join the transport from the launcher's variables.

torchrun and mpirun are real; horovodrun and srun are SIMULATED with the same variables.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gtopk.runtime.launch import launched_by
from gtopk.runtime.world.joining import join, missing_ranks_warning, transport_for
from tests.matrix import some_of
from tests.started import STARTED_PATH, under

PROGRAMS = Path(__file__).parents[3] / "programs"
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
HOROVODRUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
AGENT = {"TORCHELASTIC_RUN_ID": "none"}
LAUNCHER_VARIABLES = [*OPEN_MPI, *PMI, *TORCHRUN, *HOROVODRUN, *SRUN, *AGENT, "PMIX_RANK"]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch) -> None:
    for variable in (*LAUNCHER_VARIABLES, "GTOPK_TRANSPORT", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("environ", "transport"),
    [
        ({}, "local"),
        (OPEN_MPI, "mpi"),
        (PMI, "mpi"),
        (SRUN | {"PMIX_RANK": "1"}, "mpi"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, "mpi"),
        (TORCHRUN, "torch.distributed"),
        (TORCHRUN | AGENT | SRUN | {"PMIX_RANK": "0"}, "torch.distributed"),
        (TORCHRUN | AGENT | SRUN | PMI, "torch.distributed"),
        (TORCHRUN | AGENT | OPEN_MPI, "torch.distributed"),
        (HOROVODRUN, "torch.distributed"),
        (HOROVODRUN | {"PMIX_RANK": "0"}, "torch.distributed"),
        (SRUN, "torch.distributed"),
        (SRUN | {"PMIX_RANK": ""}, "torch.distributed"),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, "local"),
        (OPEN_MPI | {"GTOPK_TRANSPORT": "torch.distributed"}, "torch.distributed"),
        (TORCHRUN | {"GTOPK_TRANSPORT": "mpi"}, "mpi"),
        (TORCHRUN | {"GTOPK_TRANSPORT": ""}, "torch.distributed"),
    ],
)
def test_transport_follows_from_launcher_and_setting(
    environ: dict[str, str], transport: str
) -> None:
    requested = environ.get("GTOPK_TRANSPORT", "")
    assert under(environ, lambda: transport_for(launched_by(), requested)) == transport


@pytest.mark.parametrize("gpu_transport", ["nccl", "staged"])
def test_gpu_transport_opens_over_the_launchers_transport(monkeypatch, gpu_transport: str) -> None:
    opened = []

    def open_transport(name: str, *timeouts: float, bootstrap: Any = None) -> Any:
        opened.append((name, bootstrap))
        return name

    monkeypatch.setattr("gtopk.runtime.world.joining.open_transport", open_transport)
    monkeypatch.setenv("GTOPK_TRANSPORT", gpu_transport)
    assert join() == gpu_transport
    assert opened == [("local", None), (gpu_transport, "local")]
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    opened.clear()
    assert join() == gpu_transport
    assert opened == [("mpi", None), (gpu_transport, "mpi")]


@pytest.mark.parametrize(
    ("environ", "size", "launcher"),
    [
        (OPEN_MPI, 1, "Open MPI's mpirun has started (OMPI_COMM_WORLD_SIZE=2)"),
        (TORCHRUN, 1, "torchrun has started (WORLD_SIZE=2)"),
        (OPEN_MPI, 2, None),
        ({}, 1, None),
    ],
)
def test_local_transport_under_a_launcher_warns_on_rank_0_alone(
    environ: dict[str, str], size: int, launcher: str | None
) -> None:
    first = {name: "0" if name.endswith("RANK") else value for name, value in environ.items()}
    warning = under(first | {"GTOPK_TRANSPORT": "local"}, missing_ranks_warning, size)
    assert (warning is None) == (launcher is None)
    if warning is not None and launcher is not None:
        assert (
            f"GTOPK_TRANSPORT=local makes a world of 1 in each of the 2 processes that {launcher}"
            in warning
        )
        assert warning.endswith("unset GTOPK_TRANSPORT to train one model together")
    assert (
        under(environ | {"GTOPK_TRANSPORT": "local"}, missing_ranks_warning, size) is None
    )  # of rank 1


@pytest.mark.parametrize("rank", ["0", "3"])
def test_world_of_one_under_another_librarys_launcher_raises(rank: str) -> None:
    with pytest.raises(RuntimeError, match="gtopk doctor") as caught:
        under({"PMI_RANK": rank, "PMI_SIZE": "4"}, missing_ranks_warning, 1)
    expected = "a world of 1 in each of the 4 processes that a PMI launcher has started"
    assert expected in str(caught.value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_mpi_transport_under_torchrun_raises_with_advice(rank: str) -> None:
    with pytest.raises(RuntimeError, match=r"unset GTOPK_TRANSPORT .*, or .*: mpirun -n 2 "):
        under(TORCHRUN | {"RANK": rank, "GTOPK_TRANSPORT": "mpi"}, missing_ranks_warning, 1)


def test_nccl_without_cupy_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setenv("GTOPK_TRANSPORT", "nccl")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"transport 'nccl' needs cupy.*cupy-cuda12x"):
        join()


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GTOPK_TRANSPORT must be one of .*, got 'pigeon'"):
        transport_for(None, "pigeon")


@pytest.mark.parametrize(
    "environ",
    [
        HOROVODRUN,
        HOROVODRUN | dict.fromkeys(TORCHRUN, ""),
        OPEN_MPI | {"GTOPK_TRANSPORT": "torch.distributed"},
    ],
)
def test_error_names_a_launcher_that_sets_no_rendezvous_address(monkeypatch, environ) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    text = "started this process as rank 1 of 2 and sets no rendezvous address: set MASTER_ADDR"
    with pytest.raises(RuntimeError, match=text):
        join()


def test_join_uses_the_programs_own_process_group() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        transport = join()
        assert (transport.name, transport.size) == ("torch.distributed", 1)
        transport.leave("done")
    finally:
        torch.distributed.destroy_process_group()


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("GTOPK_TRANSPORT", "mpi")
    with pytest.raises(ImportError, match="pip install mpi4py"):
        join()


# ---- real ranks


def places_and_weights(output: str) -> tuple[list[str], set[str]]:
    """Parse the output of trains.py: the ranks' places, in order, and the hashes of weights."""
    lines = sorted(line.split() for line in output.splitlines() if "cross" in line)
    return [" ".join(words[:-1]) for words in lines], {words[-1] for words in lines}


@pytest.mark.parametrize("ranks", some_of([1, 3], 3))
def test_torchrun_and_mpirun_train_to_identical_weights(mpirun, torchrun, ranks: int) -> None:
    by_mpi = mpirun(ranks, "trains.py")
    by_torch = torchrun(ranks, "trains.py")
    assert (by_mpi.returncode, by_torch.returncode) == (0, 0), by_mpi.stderr + by_torch.stderr
    _, mpi_weights = places_and_weights(by_mpi.stdout)
    places, torch_weights = places_and_weights(by_torch.stdout)
    assert len(mpi_weights) == 1
    assert torch_weights == mpi_weights
    name = "torch.distributed" if ranks > 1 else "local"
    assert places == [f"{name} {r}/{ranks} local {r}/{ranks} cross 0/1" for r in range(ranks)]


@pytest.mark.parametrize("over", some_of(["torchrun", "group"], "group"))
def test_world_of_some_ranks_starts_without_the_others(torchrun, over: str) -> None:
    job = torchrun(3, "worlds_of_some.py", over, timeout=60, GTOPK_START_TIMEOUT="30")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("well") == 3


def start(ranks: int, started: int, variables: Callable[[int], dict[str, str]]) -> list[str]:
    """Start trains.py on the first `started` of `ranks` ranks; return the output of each."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "trains.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": STARTED_PATH, **variables(rank)},
        )
        for rank in range(started)
    ]
    try:
        return [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def as_srun(ranks: int) -> Callable[[int], dict[str, str]]:
    return lambda rank: {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
        "GTOPK_START_TIMEOUT": "60",
    }


def test_ranks_of_a_simulated_srun_train() -> None:
    places, weights = places_and_weights("".join(start(2, 2, as_srun(2))))
    assert places == [f"torch.distributed {r}/2 local {r}/2 cross 0/1" for r in range(2)]
    assert len(weights) == 1


@pytest.fixture
def horovodruns_server(key_value_server) -> Iterator[Callable[[int], dict[str, str]]]:
    host, port = key_value_server
    return lambda rank: {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "GTOPK_START_TIMEOUT": "60",
    }


def test_ranks_of_a_simulated_horovodrun_train(horovodruns_server) -> None:
    places, weights = places_and_weights("".join(start(2, 2, horovodruns_server)))
    assert places == [f"torch.distributed {r}/2 local {r}/2 cross 0/1" for r in range(2)]
    assert len(weights) == 1


def test_every_rank_names_the_rank_that_does_not_arrive() -> None:
    def variables(rank: int) -> dict[str, str]:
        return as_srun(3)(rank) | {"SLURM_STEP_ID": "1", "GTOPK_START_TIMEOUT": "8"}

    for rank, output in enumerate(start(3, 2, variables)):
        text = (
            rf"PeerTimeoutError: rank {rank} of 3 has waited [\d.]+ s at the start for (rank 2|the)"
        )
        assert re.search(text, output), output


def test_error_names_the_address_when_rank_0_does_not_arrive() -> None:
    def variables(rank: int) -> dict[str, str]:
        return as_srun(2)(1) | {"SLURM_STEP_ID": "2", "GTOPK_START_TIMEOUT": "3"}

    (output,) = start(2, 1, variables)
    assert re.search(
        r"PeerTimeoutError: rank 1 could not reach localhost:\d+, .* in 3\.?\d* s: ", output
    )
