"""Rendezvous: the store at which ranks meet that torch.distributed joins.

rank 0        serves it, on a port that all ranks know
other ranks   connect until it answers: rank 0 may come later than they do
torchrun      serves it itself, before it starts ranks
"""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..errors import PeerError, PeerTimeoutError
from .polling import call_in_thread, wait_for_call, wait_until
from .transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

T = TypeVar("T")

_CALL_SECONDS: Final = 2.0  # for one attempt to connect to the store's port
_LEAST_SECONDS: Final = 1.0  # at least so long for the store, once the port has answered
# After it a launcher that refuses all connections, or a store whose rank is lost, counts as gone.
_GONE_SECONDS: Final = 3.0
_BACKLOG: Final = 4096  # ranks that call at once

# The stores that this process serves, by address. Ranks that meet again use the same address, which
# threads of the last world keep in use for as long as they live.
_served: dict[tuple[str, int], TCPStore] = {}


def import_torch() -> Any:
    """Return torch; raise ImportError when it, or its gloo, is not there."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"transport 'torch.distributed' needs torch ({error}): pip install torch"
        ) from error
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise ImportError(
            f"transport 'torch.distributed' needs gloo, and torch {torch.__version__} was built "
            "without it: install one of pytorch.org's builds"
        )
    return torch


def connect(
    host: str, port: int, rank: int, start_timeout_seconds: float, *, hosted: bool = False
) -> TCPStore:
    """Return the store where the ranks meet.

    hosted: by the launcher, before it starts ranks; otherwise rank 0 serves it, on this port (0:
    any that is free).
    Raises PeerError when nobody serves it, RuntimeError when rank 0 cannot.
    """
    make = import_torch().distributed.TCPStore
    timeout = timedelta(seconds=start_timeout_seconds)
    if rank == 0 and not hosted:
        if (host, port) in _served:
            return _served[host, port]
        try:
            # TCPStore itself would listen at every address of this host.
            listener = listen(host, port)
            served: TCPStore = make(
                *(host, listener.getsockname()[1]),
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, OSError) as error:
            raise RuntimeError(
                f"rank 0 must serve port {port} for the ranks to meet, and cannot: "
                f"{str(error).splitlines()[0]}"
            ) from error
        _served[host, port] = served
        return served
    begun = time.monotonic()
    try:
        # Where nobody listens, TCPStore takes twice its timeout or more; where somebody listens and
        # does not answer, it waits for ever.
        _await_port(host, port, start_timeout_seconds, _GONE_SECONDS if hosted else math.inf)
        reached: TCPStore = call_within(
            max(_LEAST_SECONDS, begun + start_timeout_seconds - time.monotonic()),
            lambda: make(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
        )
        return reached
    except (RuntimeError, OSError) as error:
        waited = time.monotonic() - begun
        why = (
            f"rank {rank} could not reach {host}:{port}, where the ranks meet, in {waited:.3g} s: "
            f"{str(error).splitlines()[0]}"
        )
        if hosted and waited < start_timeout_seconds:
            raise PeerError(f"{why}; is the launcher, which serves it, gone?") from error
        raise PeerTimeoutError(f"{why}; is rank 0, which serves it, there?") from error


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens only at the address that the other ranks connect to.

    If no interface of this host has that address (a service in front of a container), or only the
    loopback has (the name that many hosts have for themselves), it listens on all interfaces.
    """
    family, *_, address = socket.getaddrinfo(_to_look_up(host), port, type=socket.SOCK_STREAM)[0]
    where = str(address[0])
    if not where.startswith("127.") or host == "localhost" or host.startswith("127."):
        try:
            return socket.create_server((where, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", port), family=family, backlog=_BACKLOG)


def _to_look_up(host: str) -> Any:
    """Return a host's name as bytes: for a text Python would load tables of all letters first."""
    return host.encode() if host.isascii() else host


def _await_port(host: str, port: int, seconds: float, refused_seconds: float) -> None:
    """Wait until a connection is accepted there; raise OSError when none was for `seconds`.

    refused_seconds: raise earlier, when all connections were refused for so long.
    """
    begun = since = time.monotonic()  # since when all calls were refused
    pause = 0.05
    while True:
        remaining = begun + seconds - time.monotonic()
        try:
            socket.create_connection(
                (_to_look_up(host), port), min(_CALL_SECONDS, max(0.001, remaining))
            ).close()
            return
        except OSError as error:
            now = time.monotonic()
            # Only a host that is there refuses; one that does not answer may still be on its way
            # up.
            if not isinstance(error, ConnectionRefusedError):
                since = now
            if now - begun >= seconds or now - since >= refused_seconds:
                raise
        time.sleep(min(pause, max(0.0, begun + seconds - time.monotonic())))
        pause = min(2 * pause, _CALL_SECONDS / 2)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`; raise TimeoutError, and let it go on in its thread, when it takes longer."""
    made = call_in_thread(call)
    if not futures.wait([made], seconds).done:
        raise TimeoutError("somebody listens there, and does not answer")
    return made.result()


class StoreCounter:
    """A number of the store where the ranks have met."""

    def __init__(self, store: Store, name: str, stream: Transport) -> None:
        self._store = store
        self._name = name
        self._stream = stream

    def add(self, amount: int) -> int:
        """Add, and return what the number was before.

        Raises PeerError, or PeerTimeoutError, when the store is gone, or rank 0, which serves it
        where no launcher does, and it does not answer.
        """
        stream = self._stream
        who, store = f"rank {stream.ranks[stream.rank]}", "the store where the ranks have met"
        begun = time.monotonic()

        def wait(test: Callable[[], Any]) -> Any:
            # Rank 0 may have left while a launcher's store still answers: hence the grace.
            return wait_until(
                test, stream, [0], stream.timeout_seconds, grace_seconds=_GONE_SECONDS
            )

        try:
            # A request to a store that is frozen, or whose host is gone, waits for ever.
            return wait_for_call(lambda: self._store.add(self._name, amount), wait) - amount
        except PeerTimeoutError:
            raise PeerTimeoutError(
                f"{who} has waited {time.monotonic() - begun:.0f} s for {store}, which counts for "
                "them and does not answer"
            ) from None
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(
                f"{who} cannot reach {store}, which counts for them: {str(error).splitlines()[0]}"
            ) from error
