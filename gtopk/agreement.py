"""Agreement: all ranks say in one small message what they are about to do, before they do it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from collectives.errors import MismatchError
from collectives.transports import Transport

_RECORD: Final = struct.Struct("<16sq")  # what this rank is about to do, hashed; its vote


def agree(transport: Transport, intention: Sequence[str], vote: int) -> list[int]:
    """Return every rank's vote, once all ranks are known to intend the same.

    intention: the operation's name, then its facts.
    Raises MismatchError, with the same text on every rank, that says who intends what.
    """
    text = "\n".join(intention).encode()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    record = np.frombuffer(_RECORD.pack(digest, vote), np.uint8)
    records = [_RECORD.unpack(r.tobytes()) for r in transport.allgather(record)]
    if all(other == digest for other, _ in records):
        return [vote for _, vote in records]
    texts = transport.allgather(np.frombuffer(text, np.uint8))
    raise MismatchError(
        describe_mismatch([t.tobytes().decode(errors="replace").split("\n") for t in texts])
    )


def agreement_bytes(ranks: int) -> int:
    """Return what a rank sends to agree: P-1 records and their sizes, and a count a round."""
    return (ranks - 1) * (_RECORD.size + 8) + 8 * (ranks - 1).bit_length()


def describe_mismatch(intentions: Sequence[Sequence[str]]) -> str:
    """Return the text that says where the ranks' intentions, by rank, part."""
    names = [intention[0] for intention in intentions]
    if len(set(names)) > 1:
        return f"the ranks disagree about their next operation: {_sides(names)}"
    everywhere = set(intentions[0]).intersection(*intentions)
    # The first fact of each rank that the others do not share says it; the rest often follow.
    apart = [next((f for f in facts if f not in everywhere), "less") for facts in intentions]
    if len(set(apart)) == 1:  # all share all of them, in another order
        places = zip(*intentions, strict=True)
        apart = next(list(place) for place in places if len(set(place)) > 1)
    return f"the ranks disagree about {names[0]}: {_sides(apart)}"


def _sides(sayings: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, saying in enumerate(sayings):
        ranks.setdefault(saying, []).append(rank)
    return "; ".join(f"{name_ranks(those)}: {saying}" for saying, those in ranks.items())


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2"."""
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def gather_words(transport: Transport, words: list[str]) -> list[list[str]]:
    """Return every rank's list of names."""
    message = np.frombuffer("\n".join(words).encode(), np.uint8)
    texts = [m.tobytes().decode() for m in transport.allgather(message)]
    return [text.split("\n") if text else [] for text in texts]


def describe_missing(missing: list[list[str]]) -> str:
    """Return the text about gradients that some ranks lack and others have."""
    everywhere = set(missing[0]).intersection(*missing)
    sayings = []
    for name in sorted(set().union(*missing) - everywhere):
        without = [rank for rank, names in enumerate(missing) if name in names]
        sayings.append(f"'{name}' has none on {name_ranks(without)}")
    return (
        f"the ranks disagree about which parameters have a gradient: {', '.join(sayings)}; use the "
        "same parameters on every rank, or pass missing_gradients='zeros' to DistributedOptimizer"
    )
