"""The meeting point of ranks whose launcher brings no MPI: torch.distributed's store.

MASTER_ADDR, MASTER_PORT    both set: there (torchrun sets them; anyone may)
horovodrun                  where rank 0 says on horovodrun's own key-value server (HTTP)
srun                        on the step's first node, at port 20000 + (16 job + step) mod 10000
"""

from __future__ import annotations

import http.client
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from collectives.environment import whole_number
from collectives.errors import PeerTimeoutError

T = TypeVar("T")

_KEY: Final = "/gtopk/store"
_ASK_SECONDS: Final = 0.1  # between two looks for rank 0's address
_REQUEST_SECONDS: Final = 5.0
_ADDRESS_BYTES: Final = 300  # a name has 255 at most


class Address(NamedTuple):
    """A host, and a port on it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def master(environ: Mapping[str, str]) -> Address | None:
    """Return the address that MASTER_ADDR and MASTER_PORT name; None without them.

    Raises ValueError for a port that is no number.
    """
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT"):
        return None
    port = whole_number("MASTER_PORT", None, environ=environ, least=0)
    return Address(environ["MASTER_ADDR"], port)


def srun_address(environ: Mapping[str, str]) -> Address:
    """Return where the ranks of a Slurm step meet, as every one of them can tell for itself.

    Raises RuntimeError when Slurm's variables do not say it.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    try:
        job, step = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_STEP_ID", "0"))
        return Address(first_node(nodes), 20000 + (16 * job + step) % 10000)
    except (KeyError, ValueError) as error:
        raise RuntimeError(
            f"srun must say SLURM_JOB_ID and SLURM_STEP_NODELIST for the ranks to meet ({error}); "
            "set MASTER_ADDR and MASTER_PORT to a host of rank 0 and a free port there"
        ) from None


def first_node(nodes: str) -> str:
    """Return the first host of Slurm's list, e.g. n007 of "n[007-012,30],m1".

    Raises ValueError for what is no such list.
    """
    match = re.match(r"([^\s,\[\]]*)(?:\[([^\],-]+)[^\]]*\])?([^\s,\[\]]*)(?:,|$)", nodes)
    if match is None or not match.group(0).strip(","):
        raise ValueError(f"no list of nodes: {nodes!r}")
    return "".join(part or "" for part in match.groups())


class HorovodrunServer:
    """The key-value server with which horovodrun has Horovod's own gloo ranks find each other."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._url = f"http://{address}{_KEY}"
        # A proxy of the environment is for the world outside.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def own_host(self) -> str:
        """Return the address under which this host reaches the server, and others reach it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(self._address)  # sends nothing
            host: str = probe.getsockname()[0]
        return host

    def tell(self, address: Address, timeout_seconds: float) -> None:
        """Say where the ranks meet, as rank 0; raises as `ask`."""
        self._answer(0, "PUT", str(address).encode(), timeout_seconds, bytes)

    def ask(self, rank: int, timeout_seconds: float) -> Address:
        """Return where the ranks meet, once rank 0 has said it; rank: who asks, for an error.

        Raises PeerTimeoutError after the timeout, HTTPError where the server refuses.
        """
        return self._answer(rank, "GET", None, timeout_seconds, _read_address)

    def _answer(
        self,
        rank: int,
        method: str,
        body: bytes | None,
        timeout_seconds: float,
        read: Callable[[bytes], T],
    ) -> T:
        """Return what `read` makes of an answer; who is busy, or cut off, is asked again."""
        request = urllib.request.Request(self._url, body, method=method)
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                with self._opener.open(request, timeout=_REQUEST_SECONDS) as response:
                    return read(response.read(_ADDRESS_BYTES))
            except (OSError, http.client.HTTPException, ValueError) as error:
                code = error.code if isinstance(error, urllib.error.HTTPError) else 0
                is_said_later = (method, code) == ("GET", 404)
                if 400 <= code < 500 and not is_said_later:
                    raise
                if time.monotonic() > deadline:
                    absent = (
                        "rank 0, which has not said where the ranks meet"
                        if is_said_later
                        else f"horovodrun's server at {self._address}, where rank 0 says where the "
                        f"ranks meet: {error}"
                    )
                    raise PeerTimeoutError(
                        f"rank {rank} has waited {timeout_seconds:g} s at the start for {absent}"
                    ) from None
            time.sleep(_ASK_SECONDS)


def _read_address(answer: bytes) -> Address:
    """Raise ValueError for what is none."""
    host, port = answer.decode().rsplit(":", 1)
    return Address(host, int(port))


def horovodrun_server(environ: Mapping[str, str]) -> HorovodrunServer | None:
    """Return horovodrun's server, if it has told of one."""
    try:
        return HorovodrunServer(
            Address(
                environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
                int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]),
            )
        )
    except (KeyError, ValueError):
        return None
