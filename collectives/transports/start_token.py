"""Start token: the ranks of this start agree on a token that no earlier ranks have used.

They learn each other's hosts by it, too.

A launcher's store outlives the ranks that it restarts: entries of earlier ranks are still there.
The launcher gives the new ranks no number of the start that is equal on all hosts, as an agent of
torchrun counts only the restarts that it has seen itself.

    rank r    here-r = a token of its own               in the call?    TOKEN-r = here
    rank 0                call = TOKEN, all those tokens   all here?       TOKEN-go = begin

Two processes with the same rank overwrite each other's token again and again: the one that notices
it first tells the other, and both end.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from ..errors import CollectiveError, MismatchError, PeerTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CALL: Final = "call"
_SHORTEST_POLL_SECONDS: Final = 2e-4  # between two polls of the store
_POLL_SECONDS: Final = 0.01  # the longest, and between two checks of the token of this rank
_POLLED: Final = 4  # a poll waits for a quarter of the time since the last news
_TIMES: Final = 10  # a process that is ending overwrites a token less often than this


class Start(NamedTuple):
    """What the ranks of a start agree on: a token that no others have, and the host of each."""

    token: str
    hosts: list[str]


def agree_on_start(store: Store, rank: int, size: int, timeout_seconds: float) -> Start:
    """Return a token that all ranks of this start get, and no others, and their hosts.

    Raises PeerTimeoutError, which names the ranks that did not come; MismatchError where another
    process has this rank, too.
    """
    begun = news = checked = time.monotonic()
    called = heard = answered = ""
    own = f"{secrets.token_hex(8)}@{socket.gethostname()}:{os.getpid()}"
    seen: Counter[str] = Counter()
    here = [f"here-{each}" for each in range(size)]
    try:
        # Read before this rank shows itself: a call that it sees again later is of an earlier
        # start.
        before = _read_last_call(store)
        store.set(here[rank], own)
        while True:
            answers = [f"{called}-{each}" for each in range(size)]
            call = _read_last_call(store, is_there=bool(called))
            if rank == 0 and store.check(here):
                tokens = [token.decode() for token in store.multi_get(here)]
                # A token has changed since the call: that rank started anew, or was written over.
                # Call anew.
                if [called, *tokens] != call:
                    call = [secrets.token_hex(8), *tokens]
                    store.set(_CALL, " ".join(call))
                elif store.check(answers):
                    store.set(f"{called}-go", "begin")
            called, *tokens = call
            now = time.monotonic()
            if called != heard:
                heard, news = called, now
            if len(tokens) == size and tokens[rank] == own:
                if called != answered:
                    answered = called
                    store.set(f"{called}-{rank}", "here")
                if store.check([f"{called}-go"]):
                    return Start(called, [_place_of(token).rpartition(":")[0] for token in tokens])
            # Not in the call, or not any more: another process may have written over this rank's
            # token.
            elif now >= checked:
                checked = now + _POLL_SECONDS
                seen[store.get(here[rank]).decode()] += 1
                del seen[own]
                began = len(tokens) == size and store.check([f"{called}-go"])
                if began and [called, *tokens] != before:
                    seen[tokens[rank]] += _TIMES  # it was called in this start, and answered
                _require_unique_rank(store, f"rank {rank} of {size}", own, seen)
                store.set(here[rank], own)  # a rank that is ending may have written over it
            if now - begun > timeout_seconds:
                raise missing_ranks_error(store, rank, begun, here, answers)
            # In proportion to the time since something happened: many ranks ask one store.
            pause = (now - news) / _POLLED
            time.sleep(min(max(pause, _SHORTEST_POLL_SECONDS), _POLL_SECONDS))
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise missing_ranks_error(store, rank, begun, here) from None


def _require_unique_rank(store: Store, name: str, own: str, seen: Counter[str]) -> None:
    """Raise MismatchError where another process writes its token in the place of this one's.

    seen: how often each other token was found there.
    """
    twin = next((token for token, times in seen.items() if times >= _TIMES), "")
    if twin:
        store.set(f"twin of {twin}", own)
    elif store.check([f"twin of {own}"]):
        twin = store.get(f"twin of {own}").decode()
    if twin:
        here, there = (_place_of(token).replace(":", ", pid ") for token in (own, twin))
        raise MismatchError(
            f"two processes are {name}: this one (host {here}) and another (host {there}); give "
            "each a number of its own, 0 to the number of ranks - 1 (RANK), and each job a port of "
            "its own (MASTER_PORT)"
        )


def _place_of(token: str) -> str:
    """Return the host and the process that a token is of, with a colon between."""
    return token.rpartition("@")[2]


def _read_last_call(store: Store, is_there: bool = False) -> list[str]:
    """Return the token of the last call, and those of the ranks it calls.

    is_there: whether there has been one, as this rank knows.
    """
    return store.get(_CALL).decode().split(" ") if is_there or store.check([_CALL]) else [""]


def missing_ranks_error(
    store: Store, rank: int, begun: float, *keys: list[str]
) -> PeerTimeoutError:
    """Return the error of a rank that has waited since `begun` for every rank to set its key.

    keys: lists of a key for each rank; who is absent from the first that is not complete is named.
    """
    size, absent = len(keys[0]), "the others to go on"
    try:
        for group in keys:
            if missing := [str(peer) for peer in range(size) if not store.check([group[peer]])]:
                absent = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
                break
    except RuntimeError:
        return no_answer_error(rank, size, begun)
    return _waited(rank, size, begun, absent)


def no_answer_error(rank: int, size: int, begun: float) -> PeerTimeoutError:
    """Return the error of a rank that has waited since `begun`, last for the store itself."""
    absent = "the others, and where the ranks meet nobody answers any more"
    return _waited(rank, size, begun, absent)


def _waited(rank: int, size: int, begun: float, absent: str) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"rank {rank} of {size} has waited {time.monotonic() - begun:.3g} s at the start for "
        f"{absent}: start every rank, with the same address to meet at"
    )
