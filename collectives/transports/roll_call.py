"""Roll call: the ranks that are here now agree on a word that no earlier ranks have used.

A launcher's store outlives the ranks that it restarts. What they have written there still stands,
and nothing that the new ones are told numbers their start alike on all hosts: an agent of torchrun
counts only the restarts that it has seen itself.

    rank r    here-r = a word of its own              in the call?    WORD-r = here
    rank 0                  call = WORD, all of those words           all here?     WORD-go = begin
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

from ..errors import PeerTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CALL: Final = "call"
_LOOK_SECONDS: Final = 0.01  # between two looks at the store


def call_roll(store: Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Return a word that all ranks of this start get, and they alone.

    Raises PeerTimeoutError, which names the ranks that did not come.
    """
    begun, own, called = time.monotonic(), secrets.token_hex(8), ""
    here = [f"here-{each}" for each in range(size)]
    try:
        store.set(here[rank], own)
        while True:
            answers = [f"{called}-{each}" for each in range(size)]
            if rank == 0 and store.check(here):
                words = [word.decode() for word in store.multi_get(here)]
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
                store.set(here[rank], own)  # a rank that is ending may have written over it
            if time.monotonic() - begun > timeout_seconds:
                raise not_all_here(store, rank, begun, here, answers)
            time.sleep(_LOOK_SECONDS)
    except RuntimeError as error:
        if isinstance(error, PeerTimeoutError):
            raise
        raise not_all_here(store, rank, begun, here) from None


def _last_call(store: Store) -> list[str]:
    """Return the word of the last call, and those of the ranks it calls."""
    return store.get(_CALL).decode().split(" ") if store.check([_CALL]) else [""]


def not_all_here(store: Store, rank: int, begun: float, *keys: list[str]) -> PeerTimeoutError:
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
        absent = "the others, and where the ranks meet nobody answers any more"
    waited = time.monotonic() - begun
    return PeerTimeoutError(
        f"rank {rank} of {size} has waited {waited:.3g} s at the start for {absent}: start every "
        "rank, with the same address to meet at"
    )
