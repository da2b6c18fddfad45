"""Probe of the network interface over which ranks of several hosts would find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

from ...runtime.liveness.address import OURS, THEIRS, Choice, choose, interfaces
from .finding import Finding, State

NAME: Final = "interface"

# Begin the names of interfaces that lead to containers on this host, and to no other host.
INNER: Final = ("docker", "br-", "veth", "virbr", "cni", "lxc", "podman")


def look_at_interface() -> Finding:
    """Which interface the heartbeat would hear on, and whether others could be meant."""
    host = socket.gethostname()
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        resolved = ""
    return judge(choose(False), interfaces(), host, resolved, os.environ)


def judge(
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
        return Finding(NAME, State.WARN, detail, f"for several hosts: unset {choice.by}")
    if not chosen:
        detail = "only the loopback has an address: ranks of this host alone find each other"
        return Finding(NAME, State.WARN, detail, "bring a network up: ip -brief address")
    detail = f"between hosts the heartbeat hears on {chosen} ({choice.address}), by {choice.by}"
    others = {name: each for name, each in outer.items() if name != chosen}
    if others:
        detail += f"; there are also {_listed(others)}"
    wrong = _what_is_wrong(chosen, others, host, resolved, environ)
    if not wrong:
        return Finding(NAME, State.OK, detail)
    real = [name for name in (chosen, *others) if not name.startswith(INNER)]
    advice = " ".join(f"{variable}={(real or [chosen])[0]}" for variable in (OURS, *THEIRS))
    return Finding(
        NAME, State.WARN, f"{detail}; {'; '.join(wrong)}", f"for several hosts: export {advice}"
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
