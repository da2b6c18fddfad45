"""Open MPI's arguments for running ranks on other hosts as on this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gtopk.runtime.launch import LaunchError, Mpi
from gtopk.runtime.launch.job import Host
from gtopk.runtime.runner.ranks import (
    host_options,
    interface_environment,
    refuse_other_than_open_mpi,
    ssh_environment,
)


def test_host_options_export_the_environment_except_this_hosts_own() -> None:
    environ = {
        "PYTHONPATH": "x",
        "MINE": "1",
        "HOME": "/root",
        "SSH_TTY": "",
        "PWD": "/",
        "a-b": "",
    }
    options = host_options([Host("one", 2), Host("two", 1)], environ)
    assert options == ["--host", "one:2,two:1", "-x", "MINE", "-x", "PYTHONPATH"]


def test_ssh_environment_holds_port_and_key() -> None:
    assert ssh_environment(None, None) == {}
    environment = ssh_environment(2222, "/my/key")
    assert set(environment.values()) == {"-p 2222 -i /my/key"}
    assert set(environment) == {"PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"}


def test_interface_environment_names_the_interfaces_to_every_library() -> None:
    assert set(interface_environment("eth0,eth1").values()) == {"eth0,eth1"}


def test_other_hosts_need_open_mpis_mpirun() -> None:
    refuse_other_than_open_mpi(Mpi(Path("mpirun"), "Open MPI", "5.0"))
    with pytest.raises(LaunchError, match=r"needs Open MPI's mpirun, found MPICH 4\.1"):
        refuse_other_than_open_mpi(Mpi(Path("mpirun"), "MPICH", "4.1"))
