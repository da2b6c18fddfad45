"""Probes of the network: the interface between hosts, and gtopk's own ports.

Ranks of several hosts would find each other over the interface. A port must not be bound to an
address of the public internet:

    heartbeat    UDP, on the interface that is named, or by the route to the other hosts
    calls        of gtopk.run with ranks on other hosts: TCP, by the route to them
    meeting      MASTER_ADDR, where that is this host and no torchrun serves it: TCP
    metrics      GTOPK_PROMETHEUS: TCP

MPI's, gloo's and NCCL's ports are theirs. A router or a cloud that passes calls from a public
address on to a private one is not seen from here.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ... import settings
from ...runtime.liveness.address import OURS, THEIRS, Choice, choose, interfaces
from .basics import Finding, State

INTERFACE: Final = "interface"

# Begin the names of interfaces that lead to containers on this host, and to no other host.
INNER: Final = ("docker", "br-", "veth", "virbr", "cni", "lxc", "podman")


def look_at_interface() -> Finding:
    """Probe which interface the heartbeat would hear on, and whether others could be meant."""
    host = socket.gethostname()
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        resolved = ""
    return judge_interface(choose(False), interfaces(), host, resolved, os.environ)


def judge_interface(
    choice: Choice,
    found: Mapping[str, str],
    host: str,
    resolved: str,
    environ: Mapping[str, str] = os.environ,
) -> Finding:
    """Say what was chosen, and how to choose another where that may be wrong.

    found: addresses by interface; resolved: what the host's name stands for; "" for nothing.
    """
    outer = {name: each for name, each in found.items() if not each.startswith("127.")}
    chosen = next((name for name, each in outer.items() if each == choice.address), "")
    if choice.address and not chosen:
        detail = f"the heartbeat hears on the loopback, by {choice.by}: no other host reaches it"
        return Finding(INTERFACE, State.WARN, detail, f"for several hosts: unset {choice.by}")
    if not chosen:
        detail = "only the loopback has an address: ranks of this host alone find each other"
        return Finding(INTERFACE, State.WARN, detail, "bring a network up: ip -brief address")
    detail = f"between hosts the heartbeat hears on {chosen} ({choice.address}), by {choice.by}"
    others = {name: each for name, each in outer.items() if name != chosen}
    if others:
        detail += f"; there are also {_listed(others)}"
    wrong = _what_is_wrong(chosen, others, host, resolved, environ)
    if not wrong:
        return Finding(INTERFACE, State.OK, detail)
    real = [name for name in (chosen, *others) if not name.startswith(INNER)]
    advice = " ".join(f"{variable}={(real or [chosen])[0]}" for variable in (OURS, *THEIRS))
    return Finding(
        INTERFACE,
        State.WARN,
        f"{detail}; {'; '.join(wrong)}",
        f"for several hosts: export {advice}",
    )


def _what_is_wrong(
    chosen: str, others: Mapping[str, str], host: str, resolved: str, environ: Mapping[str, str]
) -> list[str]:
    named = [variable for variable in (OURS, *THEIRS) if environ.get(variable)]
    wrong = []
    if chosen.startswith(INNER):
        wrong.append(f"{chosen} leads to containers of this host, not to other hosts")
    elif not named and any(not name.startswith(INNER) for name in others):
        wrong.append("none is named, and the transport may choose another one")
    if not environ.get("GLOO_SOCKET_IFNAME") and (not resolved or resolved.startswith("127.")):
        stands_for = f"stands for {resolved}" if resolved else "stands for no address"
        wrong.append(f"this host's name, '{host}', {stands_for}, where gloo looks for it")
    return wrong


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in found.items())


NAME: Final = "ports"

_IPV6: Final = Path("/proc/net/if_inet6")
_EVERYWHERE: Final = "0.0.0.0"


class Port(NamedTuple):
    """A port that would be opened: what for, at which address, by whose choice; a better choice.

    instead: variables to export, in place of what chose the address; none where none is known.
    """

    what: str
    address: str
    by: str
    instead: Sequence[str] = ()


def look_at_ports() -> Finding:
    """Probe whether the internet may reach what gtopk would listen on."""
    own = own_addresses()
    return judge_ports(ports(_choice(), own), own)


def ports(
    choice: Choice, own: Sequence[tuple[str, str]], environ: Mapping[str, str] = os.environ
) -> list[Port]:
    """Return the ports that ranks on several hosts would open here.

    choice: of the heartbeat's address; own: (interface, address) of this host.
    """
    found = []
    private = next((each for each in own if _is_private(*each)), None)
    if choice.address and settings.HEARTBEAT_TIMEOUT.text(environ) != "0":
        what = "the heartbeat (UDP)"
        if choice.by not in (OURS, *THEIRS):
            what += " and the call server of gtopk.run (TCP)"
        named = [f"{variable}={private[0]}" for variable in (OURS, *THEIRS)] if private else []
        found.append(Port(what, choice.address, choice.by, named))
    if address := _meeting(own, environ):
        moved = [f"MASTER_ADDR={private[1]}"] if private else []
        found.append(Port("where ranks meet (TCP)", address, "MASTER_ADDR", moved))
    if settings.PROMETHEUS.read(environ):
        # Here, as it needs NumPy, without which the other findings still count.
        from ...telemetry.start import settings_from

        asked = settings_from(environ).prometheus
        if asked is not None and (address := _resolved(asked.host)):
            inside = [f"GTOPK_PROMETHEUS={asked.port}"]
            found.append(Port("metrics (TCP)", address, settings.PROMETHEUS.name, inside))
    return found


def judge_ports(found: Sequence[Port], own: Sequence[tuple[str, str]]) -> Finding:
    """Say which of the ports the internet may reach."""
    names = {address: f"{address} ({interface})" for interface, address in own}
    reached = [(port, public) for port in found if (public := _public(port.address, own))]
    if not reached:
        where = [f"{port.what} at {names.get(port.address, port.address)}" for port in found]
        detail = "none of gtopk's own would be at a public address"
        return Finding(NAME, State.OK, f"{detail}: {', '.join(where)}" if where else detail)
    said = [
        f"{port.what} at {' and '.join(names.get(each, each) for each in public)}, by {port.by}"
        for port, public in reached
    ]
    advice = "let a firewall pass none but the job's hosts"
    if better := " ".join(dict.fromkeys(each for port, _ in reached for each in port.instead)):
        advice += f", or: export {better}"
    return Finding(NAME, State.WARN, f"the internet may reach {'; '.join(said)}", advice)


def own_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of this host, those of IPv6 last."""
    found = list(interfaces().items())
    lines = _IPV6.read_text().splitlines() if _IPV6.exists() else []
    for digits, *_, interface in map(str.split, lines):
        found.append((interface, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def _choice() -> Choice:
    try:
        return choose(False)
    except ValueError:  # an interface that is not there, as "interface" says
        return Choice("", "")


def _meeting(own: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> str:
    """Return where rank 0 would have the ranks meet, if it is here; else ""."""
    name = environ.get("MASTER_ADDR", "")
    if not name or not environ.get("MASTER_PORT") or environ.get("TORCHELASTIC_RUN_ID"):
        return ""
    address = _resolved(name)
    if address.startswith("127."):  # of a name that hosts have for themselves: at all addresses
        return address if name == "localhost" or name.startswith("127.") else _EVERYWHERE
    return address if address in (each for _, each in own) else ""


def _resolved(name: str) -> str:
    """Return the address that a name stands for; "" for none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _public(address: str, own: Sequence[tuple[str, str]]) -> list[str]:
    """Return the public addresses at which a port is that is bound to this one."""
    bound = ipaddress.ip_address(address)
    if not bound.is_unspecified:
        return [address] if bound.is_global else []
    here = [ipaddress.ip_address(each) for _, each in own]
    return [str(each) for each in here if each.version == bound.version and each.is_global]


def _is_private(interface: str, address: str) -> bool:
    """Tell whether other hosts, and they alone, may be reached there."""
    found = ipaddress.ip_address(address)
    away = not (found.is_global or found.is_loopback or found.is_link_local)
    return found.version == 4 and away and not interface.startswith(INNER)
