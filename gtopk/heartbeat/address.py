"""Address: on which of this host's networks a companion hears, and is reached by the others."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from typing import Final

_GET_ADDRESS: Final = 0x8915  # Linux: SIOCGIFADDR
_NAME_BYTES: Final = 15

# Where a job says which interface it talks over; ours first, then the transports'.
_OURS: Final = "GTOPK_INTERFACE"
_THEIRS: Final = ("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME")

# Nothing is sent there; but the system knows which address of its own it would send from.
_ANYWHERE: Final = "192.0.2.1"  # RFC 5737


def own_address(one_host: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Return the IPv4 address that the other ranks reach this one at; "" where there is none.

    one_host: whether all ranks are on this host; no other is let near then.
    Raises ValueError for an interface that GTOPK_INTERFACE names and this host does not have.
    """
    if name := environ.get(_OURS):
        address = address_of(name)
        if not address:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"{_OURS} must name an interface of this host with an IPv4 address, got {name!r}; "
                f"there are {names}"
            )
        return address
    if one_host:
        return "127.0.0.1"
    for variable in _THEIRS:
        for name in environ.get(variable, "").split(","):
            if address := address_of(name.lstrip("=")):
                return address
    for other in (environ.get("MASTER_ADDR", ""), _ANYWHERE):
        address = _address_towards(other)
        if address and not address.startswith("127."):
            return address
    found = (address_of(name) for _, name in socket.if_nameindex())
    return next((address for address in found if address and not address.startswith("127.")), "")


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address; "" where there is no such interface, or no address."""
    if not interface or len(interface) > _NAME_BYTES:
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
