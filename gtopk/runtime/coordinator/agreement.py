"""Agreement: error texts about disagreements between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

_CHECKPOINT: Final = ".checkpoint."  # part of every checkpoint operation's name
_GRADIENTS: Final = "gradients."  # prefix of every gradient exchange's name
# Advice on uneven batches, by prefix of the operation's name. hvd.join() does not work with the
# first three.
_UNEVEN: Final = {
    "local_sgd.": ", or use inner_steps=None, and call outer_step() on all of them",
    "ddp.": ", or train within DDP's `with model.join():`",
    "fsdp.": "",
    "": ", or have each call hvd.join() when it is done",
}


def describe_mismatch(specs: Mapping[int, Sequence[str]]) -> str:
    """Return the error text that names the difference between the ranks' specs.

    specs: by rank: the operation's name, then its signature. At least two must differ.
    """
    (name,) = {spec[0] for spec in specs.values()}
    first, *others = specs.values()
    shared = set(first).intersection(*others)
    # Quote the first part on each rank that not all share; later differences often follow from it.
    differing = {
        rank: next((part for part in signature if part not in shared), "nothing in its place")
        for rank, signature in specs.items()
    }
    if len(set(differing.values())) == 1:  # all ranks have the same parts in different orders
        positions = zip(*specs.values(), strict=True)
        first_difference = next(position for position in positions if len(set(position)) > 1)
        differing = dict(zip(specs, first_difference, strict=True))
    options = _differing_options(differing)
    if options is None:
        return f"the ranks disagree about {name}: {_ranks_by_text(differing)}"
    sides = _ranks_by_text(options)
    return f"the ranks disagree about {name}: {sides}; all ranks must be given the same"


def _differing_options(signature: Mapping[int, str]) -> dict[int, str] | None:
    """Return each rank's differing options (`name=value`); None if other parts differ, too."""
    words = {rank: text.split() for rank, text in signature.items()}
    if not all("=" in word for own in words.values() for word in own[1:]):
        return None
    common = set.intersection(*map(set, words.values()))
    options = {rank: [w for w in own if w not in common] for rank, own in words.items()}
    if not all(own and all("=" in word for word in own) for own in options.values()):
        return None
    return {rank: " ".join(own) for rank, own in options.items()}


def describe_deadlock(waiting: Mapping[int, str]) -> str:
    """Return the error text for ranks that wait for different operations; waiting: by rank."""
    waits = _ranks_by_text(waiting)
    in_step = [name.startswith(_GRADIENTS) for name in waiting.values()]
    advice = advice_on(waiting.values())
    if not advice and any(in_step) and not all(in_step):
        everywhere = "; call each operation on all ranks, not under `if hvd.rank() == 0`"
        advice = f"{everywhere}{advice_on_uneven(_GRADIENTS)}"
    if all(name.startswith("fsdp.") for name in waiting.values()):
        advice = "; all replicas must use a module in a pass, or none of them"
    return f"the ranks disagree about their next operation: {waits}{advice}"


def advice_on(names: Iterable[str]) -> str:
    """Return advice for operations that only some ranks have begun; "" if none is known."""
    if any(_CHECKPOINT in f".{name}" for name in names):
        return (
            "; every rank must call save_checkpoint and load_latest, even if only rank 0 writes: "
            "do not call them under `if hvd.rank() == 0`"
        )
    return ""


def advice_on_uneven(name: str) -> str:
    """Return advice for a rank that ended or went on before an operation of this name."""
    more = next(text for start, text in _UNEVEN.items() if name.startswith(start))
    return f"; give all ranks equally many batches (drop_last=True, a DistributedSampler){more}"


def _ranks_by_text(texts: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{name_ranks(group)}: {text}" for text, group in ranks.items())


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2"."""
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def describe_missing(missing: Mapping[int, list[str]], most: int | None = None) -> str:
    """Return the error text for gradients that some ranks lack and others have.

    missing: by rank, the names of parameters without a gradient; differs between ranks.
    most: how many parameters to name; None: all.
    """
    everywhere = set.intersection(*map(set, missing.values()))
    texts = []
    for name in sorted(set().union(*missing.values()) - everywhere):
        without = [rank for rank, names in missing.items() if name in names]
        texts.append(f"'{name}' has none on {name_ranks(without)}")
    shown = ", ".join(texts[:most])
    return shown if most is None or len(texts) <= most else f"{shown}, ..."
