"""Rendezvous: the store where the ranks of a torch.distributed transport meet.

rank 0        serves it, on a port that all ranks know
other ranks   connect until it answers: rank 0 may come later than they do
torchrun      serves it itself, before it starts ranks

There the ranks of this start agree on a token that no earlier ranks have used, and learn each
other's hosts. They need the token because a launcher's store outlives the ranks that it restarts,
and keeps their entries. The launcher gives the new ranks no number for the start that is equal on
all hosts: a torchrun agent only counts the restarts that it has seen itself.

    rank r    here-r = a token of its own               in the call?    TOKEN-r = here
    rank 0                call = TOKEN, all those tokens   all here?       TOKEN-go = begin

Two processes with the same rank keep overwriting each other's token: the first to notice it tells
the other, and both end.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from ..errors import CollectiveError, MismatchError, PeerError, PeerTimeoutError
from .polling import call_in_thread, wait_for_call, wait_until
from .transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

T = TypeVar("T")

_ATTEMPT_SECONDS: Final = 2.0  # for one attempt to connect to the store's port
_LEAST_SECONDS: Final = 1.0  # minimum time for the store once the port has answered
# After this time a launcher that refuses all connections, or a store with a lost rank, is gone.
_GONE_SECONDS: Final = 3.0
_BACKLOG: Final = 4096  # ranks that connect at once

# Stores served by this process, by address. Ranks that meet again use the same address, which
# threads of the last world occupy as long as they live.
_served: dict[tuple[str, int], TCPStore] = {}


def import_torch() -> Any:
    """Return torch; raise ImportError if torch or its gloo is missing."""
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

    hosted: True if the launcher serves it before it starts ranks; else rank 0 serves it on this
    port (0: any free one).
    Raises PeerError if nobody serves it, RuntimeError if rank 0 cannot.
    """
    store_class = import_torch().distributed.TCPStore
    timeout = timedelta(seconds=start_timeout_seconds)
    if rank == 0 and not hosted:
        if (host, port) in _served:
            return _served[host, port]
        try:
            # TCPStore would listen on all addresses of this host.
            listener = listen(host, port)
            served: TCPStore = store_class(
                *(host, listener.getsockname()[1]),
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, OSError) as error:
            raise RuntimeError(
                f"rank 0 cannot serve port {port}, where the ranks meet: "
                f"{str(error).splitlines()[0]}"
            ) from error
        _served[host, port] = served
        return served
    begun = time.monotonic()
    try:
        # If nobody listens, TCPStore takes at least twice its timeout; if somebody listens but
        # does not answer, it waits for ever.
        _await_port(host, port, start_timeout_seconds, _GONE_SECONDS if hosted else math.inf)
        reached: TCPStore = call_within(
            max(_LEAST_SECONDS, begun + start_timeout_seconds - time.monotonic()),
            lambda: store_class(
                host, port, is_master=False, wait_for_workers=False, timeout=timeout
            ),
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
        raise PeerTimeoutError(f"{why}; has rank 0, which serves it, started?") from error


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens only on the address that the other ranks connect to.

    If no interface of this host has that address (a service in front of a container), or only
    loopback has (many hosts resolve their own name so), it listens on all interfaces.
    """
    family, *_, address = socket.getaddrinfo(_encoded(host), port, type=socket.SOCK_STREAM)[0]
    address_text = str(address[0])
    if not address_text.startswith("127.") or host == "localhost" or host.startswith("127."):
        try:
            return socket.create_server((address_text, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", port), family=family, backlog=_BACKLOG)


def _encoded(host: str) -> Any:
    """Return a host's name as bytes: for str, Python would load tables of all characters first."""
    return host.encode() if host.isascii() else host


def _await_port(host: str, port: int, seconds: float, refused_seconds: float) -> None:
    """Wait until a connection is accepted there; raise OSError if none was for `seconds`.

    refused_seconds: raise earlier if all connections were refused for this long.
    """
    begun = since = time.monotonic()  # since: all attempts from then on were refused
    pause = 0.05
    while True:
        remaining = begun + seconds - time.monotonic()
        try:
            socket.create_connection(
                (_encoded(host), port), min(_ATTEMPT_SECONDS, max(0.001, remaining))
            ).close()
            return
        except OSError as error:
            now = time.monotonic()
            # Only a running host refuses; one that does not answer may still be starting.
            if not isinstance(error, ConnectionRefusedError):
                since = now
            if now - begun >= seconds or now - since >= refused_seconds:
                raise
        time.sleep(min(pause, max(0.0, begun + seconds - time.monotonic())))
        pause = min(2 * pause, _ATTEMPT_SECONDS / 2)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`; raise TimeoutError, and leave it running in its thread, if too slow."""
    future = call_in_thread(call)
    if not futures.wait([future], seconds).done:
        raise TimeoutError("the port accepts connections, but nothing answers")
    return future.result()


class StoreCounter:
    """A number in the store where the ranks have met."""

    def __init__(self, store: Store, name: str, stream: Transport) -> None:
        self._store = store
        self._name = name
        self._stream = stream

    def add(self, amount: int) -> int:
        """Add, and return the number before that.

        Raises PeerError or PeerTimeoutError if the store does not answer because it is gone, or
        because rank 0 is, which serves it without a launcher.
        """
        stream = self._stream
        who, store = f"rank {stream.ranks[stream.rank]}", "the store where the ranks have met"
        begun = time.monotonic()

        def wait(test: Callable[[], Any]) -> Any:
            # Rank 0 may have left while a launcher's store still answers, so allow a grace period.
            return wait_until(
                test, stream, [0], stream.timeout_seconds, grace_seconds=_GONE_SECONDS
            )

        try:
            # A request to a frozen store, or to a lost host, waits for ever.
            return wait_for_call(lambda: self._store.add(self._name, amount), wait) - amount
        except PeerTimeoutError:
            raise PeerTimeoutError(
                f"{who} has waited {time.monotonic() - begun:.0f} s for {store}, which keeps "
                "the counter and does not answer"
            ) from None
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(
                f"{who} cannot reach {store}, which keeps the counter: {str(error).splitlines()[0]}"
            ) from error


_CALL: Final = "call"
_SHORTEST_POLL_SECONDS: Final = 2e-4  # between two polls of the store
_POLL_SECONDS: Final = 0.01  # the longest, and between two checks of this rank's token
_POLLED: Final = 4  # a poll waits for a quarter of the time since the last news
_MAX_OVERWRITES: Final = 10  # a process that is ending overwrites a token less often than this


class Start(NamedTuple):
    """The ranks' agreement about a start: a unique token, and the host of each rank."""

    token: str
    hosts: list[str]


def agree_on_start(store: Store, rank: int, size: int, timeout_seconds: float) -> Start:
    """Return a token that only the ranks of this start get, and their hosts.

    Raises PeerTimeoutError, which names the ranks that did not come; MismatchError if another
    process has the same rank.
    """
    # When this rank came, when the call last changed, and when to check its own token next.
    begun = changed = checked = time.monotonic()
    # TOKEN of the last call, of the call before the latest check, and of the last one answered.
    current_call = last_call = answered = ""
    own = f"{secrets.token_hex(8)}@{socket.gethostname()}:{os.getpid()}"
    other_tokens: Counter[str] = Counter()  # other tokens found in this rank's place
    token_keys = [f"here-{each}" for each in range(size)]
    try:
        # Read before announcing this rank: a call that it sees again later is from an earlier
        # start.
        old_call = _read_last_call(store)
        store.set(token_keys[rank], own)
        while True:
            answers = [f"{current_call}-{each}" for each in range(size)]
            call = _read_last_call(store, is_there=bool(current_call))
            if rank == 0 and store.check(token_keys):
                tokens = [token.decode() for token in store.multi_get(token_keys)]
                # A token has changed since the call, as that rank restarted or was overwritten:
                # call again.
                if [current_call, *tokens] != call:
                    call = [secrets.token_hex(8), *tokens]
                    store.set(_CALL, " ".join(call))
                elif store.check(answers):
                    store.set(f"{current_call}-go", "begin")
            current_call, *tokens = call
            now = time.monotonic()
            if current_call != last_call:
                last_call, changed = current_call, now
            if len(tokens) == size and tokens[rank] == own:
                if current_call != answered:
                    answered = current_call
                    store.set(f"{current_call}-{rank}", "here")
                if store.check([f"{current_call}-go"]):
                    return Start(
                        current_call, [_place_of(token).rpartition(":")[0] for token in tokens]
                    )
            # Not, or no longer, in the call: another process may have overwritten this rank's
            # token.
            elif now >= checked:
                checked = now + _POLL_SECONDS
                other_tokens[store.get(token_keys[rank]).decode()] += 1
                del other_tokens[own]
                began = len(tokens) == size and store.check([f"{current_call}-go"])
                if began and [current_call, *tokens] != old_call:
                    other_tokens[tokens[rank]] += (
                        _MAX_OVERWRITES  # called in this start, and answered
                    )
                _require_unique_rank(store, f"rank {rank} of {size}", own, other_tokens)
                store.set(token_keys[rank], own)  # a process that is ending may have overwritten it
            if now - begun > timeout_seconds:
                raise missing_ranks_error(store, rank, begun, token_keys, answers)
            # In proportion to the time since the last news, as many ranks poll one store.
            pause = (now - changed) / _POLLED
            time.sleep(min(max(pause, _SHORTEST_POLL_SECONDS), _POLL_SECONDS))
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise missing_ranks_error(store, rank, begun, token_keys) from None


def _require_unique_rank(store: Store, name: str, own: str, other_tokens: Counter[str]) -> None:
    """Raise MismatchError if another process overwrites this one's token with its own.

    other_tokens: how often each was found there.
    """
    twin = next((token for token, count in other_tokens.items() if count >= _MAX_OVERWRITES), "")
    if twin:
        store.set(f"twin of {twin}", own)
    elif store.check([f"twin of {own}"]):
        twin = store.get(f"twin of {own}").decode()
    if twin:
        this, other = (_place_of(token).replace(":", ", pid ") for token in (own, twin))
        raise MismatchError(
            f"two processes are {name}: this one (host {this}) and another (host {other}); give "
            "each a number of its own, 0 to the number of ranks - 1 (RANK), and each job a port of "
            "its own (MASTER_PORT)"
        )


def _place_of(token: str) -> str:
    """Return a token's host and process, separated by a colon."""
    return token.rpartition("@")[2]


def _read_last_call(store: Store, is_there: bool = False) -> list[str]:
    """Return the token of the last call, and the tokens of the called ranks.

    is_there: whether this rank knows that there has been a call.
    """
    return store.get(_CALL).decode().split(" ") if is_there or store.check([_CALL]) else [""]


def missing_ranks_error(
    store: Store, rank: int, begun: float, *keys: list[str]
) -> PeerTimeoutError:
    """Return the error for a rank that has waited since `begun` for every rank to set its key.

    keys: lists with a key for each rank; the error names ranks missing from the first incomplete
        list.
    """
    size, absent = len(keys[0]), "the others to go on"
    try:
        for group in keys:
            if missing := [str(peer) for peer in range(size) if not store.check([group[peer]])]:
                absent = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
                break
    except RuntimeError:
        return waited_error(rank, size, begun)
    return waited_error(rank, size, begun, absent)


_NO_ANSWER: Final = "the others, and the store where the ranks meet no longer answers"


def waited_error(rank: int, size: int, begun: float, absent: str = _NO_ANSWER) -> PeerTimeoutError:
    """Return the error for a rank that has waited since `begun`; default: last for the store."""
    return PeerTimeoutError(
        f"rank {rank} of {size} has waited {time.monotonic() - begun:.3g} s at the start for "
        f"{absent}: start every rank, with the same address to meet at; if it only takes long, set "
        "a larger GTOPK_START_TIMEOUT (seconds)"
    )
