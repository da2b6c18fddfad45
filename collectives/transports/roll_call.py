"""Roll call: the ranks of this start agree on a word that no earlier ranks have used.

A launcher's store outlives the ranks that it restarts: entries of earlier ranks are still there.
The launcher gives the new ranks no number of the start that is equal on all hosts, as an agent of
torchrun counts only the restarts that it has seen itself.

    rank r    here-r = a word of its own              in the call?    WORD-r = here
    rank 0                  call = WORD, all of those words           all here?     WORD-go = begin

Two processes with the same rank overwrite each other's word again and again: the one that notices
it first tells the other, and both end.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from ..errors import CollectiveError, MismatchError, PeerTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CALL: Final = "call"
_LOOK_SECONDS: Final = 0.01  # between two looks at the store
_TIMES: Final = 10  # a process that is ending overwrites a word less often than this


def call_roll(store: Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Return a word that all ranks of this start get, and no others.

    Raises PeerTimeoutError, which names the ranks that did not come; MismatchError where another
    process has this rank, too.
    """
    begun, called = time.monotonic(), ""
    own = f"{secrets.token_hex(8)}@{socket.gethostname()}:{os.getpid()}"
    seen: Counter[str] = Counter()
    here = [f"here-{each}" for each in range(size)]
    try:
        before = _last_call(store)
        store.set(here[rank], own)
        while True:
            answers = [f"{called}-{each}" for each in range(size)]
            if rank == 0 and store.check(here):
                words = [word.decode() for word in store.multi_get(here)]
                # A word has changed since the call: that rank started anew, or was written over.
                # Call anew.
                if [called, *words] != _last_call(store):
                    called = secrets.token_hex(8)
                    store.set(_CALL, " ".join([called, *words]))
                elif store.check(answers):
                    store.set(f"{called}-go", "begin")
            called, *words = _last_call(store)
            if len(words) == size and words[rank] == own:
                store.set(f"{called}-{rank}", "here")
                if store.check([f"{called}-go"]):
                    return called
            else:
                seen[store.get(here[rank]).decode()] += 1
                del seen[own]
                began = len(words) == size and store.check([f"{called}-go"])
                if began and [called, *words] != before:
                    seen[words[rank]] += _TIMES  # it was called in this start, and answered
                _require_no_twin(store, f"rank {rank} of {size}", own, seen)
                store.set(here[rank], own)  # a rank that is ending may have written over it
            if time.monotonic() - begun > timeout_seconds:
                raise missing_ranks_error(store, rank, begun, here, answers)
            time.sleep(_LOOK_SECONDS)
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise missing_ranks_error(store, rank, begun, here) from None


def _require_no_twin(store: Store, name: str, own: str, seen: Counter[str]) -> None:
    """Raise MismatchError where another process writes its word in the place of this one's.

    seen: how often each other word was found there.
    """
    twin = next((word for word, times in seen.items() if times >= _TIMES), "")
    if twin:
        store.set(f"twin of {twin}", own)
    elif store.check([f"twin of {own}"]):
        twin = store.get(f"twin of {own}").decode()
    if twin:
        here, there = (word.rpartition("@")[2].replace(":", ", pid ") for word in (own, twin))
        raise MismatchError(
            f"two processes are {name}: this one (host {here}) and another (host {there}); give "
            "each a number of its own, 0 to the number of ranks - 1 (RANK), and each job a port of "
            "its own (MASTER_PORT)"
        )


def _last_call(store: Store) -> list[str]:
    """Return the word of the last call, and those of the ranks it calls."""
    return store.get(_CALL).decode().split(" ") if store.check([_CALL]) else [""]


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
