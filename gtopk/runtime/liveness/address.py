"""Address: the address of this host at which its companions receive beats."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from ... import settings

_GET_ADDRESS: Final = 0x8915  # Linux: SIOCGIFADDR
_NAME_BYTES: Final = 15

# The variables that name a job's network interface: gtopk's first, then those of the transports.
OURS: Final = settings.INTERFACE.name
THEIRS: Final = ("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME")

# Nothing is sent there: connecting a UDP socket to it shows which own address the system uses.
_ANYWHERE: Final = "192.0.2.1"  # RFC 5737


class Choice(NamedTuple):
    """An IPv4 address of this host, "" where there is none, and a text that says what chose it."""

    address: str
    by: str


def own_address(one_host: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Return the IPv4 address that the other ranks reach this one at; "" where there is none.

    one_host: whether all ranks are on this host; then it is one that other hosts cannot reach.
    Raises ValueError for an interface that GTOPK_INTERFACE names and this host does not have.
    """
    return choose(one_host, environ).address


def choose(one_host: bool, environ: Mapping[str, str] = os.environ) -> Choice:
    """Return the address, as `own_address` does, and a text that says what chose it."""
    if name := settings.INTERFACE.read(environ):
        address = address_of(name)
        if not address:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"{OURS} must name an interface of this host with an IPv4 address, got {name!r}; "
                f"there are {names}"
            )
        return Choice(address, OURS)
    if one_host:
        return Choice("127.0.0.1", "all ranks on one host")
    for variable in THEIRS:
        for name in environ.get(variable, "").split(","):
            # NCCL writes =eth0 for a name that is to be taken exactly.
            if address := address_of(name.lstrip("=")):
                return Choice(address, variable)
    master = environ.get("MASTER_ADDR", "")
    for other, by in ((master, f"the way to MASTER_ADDR={master}"), (_ANYWHERE, "default route")):
        address = _address_towards(other)
        # A host's own name may lead to its loopback, which no other host reaches.
        if address and not address.startswith("127."):
            return Choice(address, by)
    found = [each for each in interfaces().values() if not each.startswith("127.")]
    return Choice(found[0], "the first there is") if found else Choice("", "")


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, the loopback's included, by name."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address}


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address; "" where there is no such interface, or no address."""
    if len(interface) > _NAME_BYTES:  # the system would cut it to the name of another
        return ""
    request = struct.pack("256s", interface.encode(errors="replace"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str:
    if not host:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, 9))
        except OSError:
            return ""
        address: str = asking.getsockname()[0]
    return address
