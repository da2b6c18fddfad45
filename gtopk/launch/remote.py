"""How Open MPI's mpirun starts ranks on other hosts: over ssh, with this process's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import LaunchError
from .hosts import Host
from .mpirun import Mpi

# Of this host, this shell or this job, and of no use to another.
_STAYS: re.Pattern[str] = re.compile(
    r"(OMPI|PMIX|PMI|PRTE|SLURM|SSH|XDG|BASH_FUNC)_.*|_|DISPLAY|HOME|HOSTNAME|LOGNAME|LS_COLORS|"
    r"OLDPWD|PWD|SHELL|SHLVL|TERM|TMPDIR|USER"
)


def refuse_other_than_open_mpi(mpi: Mpi) -> None:
    """Raise LaunchError for an MPI whose way to other hosts is not known here."""
    if mpi.vendor != "Open MPI":
        raise LaunchError(
            f"starting ranks on other hosts needs Open MPI's mpirun, found {mpi}; start the script "
            "with that MPI's own launcher, and let it call hvd.init() in place of gtopk.run"
        )


def host_options(hosts: Sequence[Host], environ: Mapping[str, str]) -> list[str]:
    """Return the options of mpirun for these hosts, to which the environment goes along."""
    places = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    names = [
        name
        for name in sorted(environ)
        if re.fullmatch(r"[A-Za-z_]\w*", name) and not _STAYS.fullmatch(name)
    ]
    return ["--host", places, *(word for name in names for word in ("-x", name))]


def ssh_environment(port: int | None, identity_file: str | None) -> dict[str, str]:
    """Return the variables that tell Open MPI 4 and 5 how to call ssh."""
    arguments = []
    if port is not None:
        arguments += ["-p", str(port)]
    if identity_file is not None:
        arguments += ["-i", identity_file]
    if not arguments:
        return {}
    text = " ".join(arguments)
    return {"PRTE_MCA_plm_ssh_args": text, "OMPI_MCA_plm_rsh_args": text}


def interface_environment(interfaces: str) -> dict[str, str]:
    """Return the variables that keep MPI, NCCL and gloo to these interfaces ("eth0,eth1")."""
    return {
        "OMPI_MCA_btl_tcp_if_include": interfaces,
        "OMPI_MCA_oob_tcp_if_include": interfaces,
        "PRTE_MCA_prte_if_include": interfaces,
        "NCCL_SOCKET_IFNAME": interfaces,
        "GLOO_SOCKET_IFNAME": interfaces,
    }
