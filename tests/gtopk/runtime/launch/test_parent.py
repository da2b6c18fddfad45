"""Find the launcher's process that started this one, and detect its end."""

from __future__ import annotations

import os
import socket

import pytest

from gtopk.runtime.launch import job as parent
from gtopk.runtime.launch.job import Launched, launcher, launcher_has_ended, torchrun_agent
from tests.started import under

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "launchers", "agents"),
    [
        (TORCHRUN, True, True),
        (OPEN_MPI, True, False),
        (TORCHRUN | OPEN_MPI, True, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False, False),  # a shell, which may end before them
        ({}, False, False),
    ],
)
def test_launcher_is_the_parent_of_a_launched_process(environ, launchers, agents) -> None:
    assert under(environ, launcher) == os.getppid() * launchers
    assert under(environ, torchrun_agent) == os.getppid() * agents
    assert not under(environ, launcher_has_ended)


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI])
def test_launcher_has_ended_when_the_parent_has_changed(monkeypatch, environ) -> None:
    another = os.getpid()
    monkeypatch.setattr(os, "getppid", lambda: another)
    assert under(environ, launcher_has_ended)
    assert not under({}, launcher_has_ended)


def test_launcher_has_ended_when_open_mpis_daemon_does_not_listen() -> None:
    """Although its orphans got another parent before they could check."""
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        host, port = daemon.getsockname()
        address = {"PMIX_SERVER_URI41": f"prterun-node7-4711@0.0;tcp4://{host}:{port}"}
        assert not under(OPEN_MPI | address, launcher_has_ended)
    assert under(OPEN_MPI | address, launcher_has_ended)
    assert not under(
        OPEN_MPI | {"PMIX_SERVER_URI41": "pmix-server;usock:/tmp/pmix"}, launcher_has_ended
    )
    assert not under(TORCHRUN | OPEN_MPI | address, launcher_has_ended), (
        "of a job in which torchrun was started"
    )


def test_launcher_of_a_forked_process_has_not_ended() -> None:
    child = os.fork()
    if not child:
        os._exit(under(TORCHRUN, launcher_has_ended))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("environ", "of_parent", "expected"),
    [
        ({"RANK": "1", "LOCAL_WORLD_SIZE": "4"} | TORCHRUN, "", 4),
        ({"RANK": "0", "LOCAL_WORLD_SIZE": "1"} | TORCHRUN, "", 0),  # it waits for nobody
        ({"RANK": "1", "LOCAL_WORLD_SIZE": "4"}, "", 0),  # set by hand
        ({"RANK": "1"} | TORCHRUN, "", 0),
        ({"RANK": "1", "LOCAL_WORLD_SIZE": "4"} | TORCHRUN, "none", 0),  # this rank's shell
        ({"RANK": "1", "LOCAL_WORLD_SIZE": "4"} | TORCHRUN, None, 0),  # another user's
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"} | OPEN_MPI, "", 3),
        ({"PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}, "", 2),
        ({"PMI_RANK": "1"}, "", 0),  # srun's
        ({"HOROVOD_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}, "", 0),
    ],
)
def test_ranks_here_counts_the_launchers_ranks_on_this_host(
    monkeypatch, environ, of_parent, expected
) -> None:
    monkeypatch.setattr(parent, "variable_of", lambda pid, name: of_parent)
    variable = next(name for name in environ if name.endswith("RANK"))
    job = Launched("launcher", 1, 4, (variable, "SIZE"))
    assert under(environ, parent.ranks_here, job) == expected
