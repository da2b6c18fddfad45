"""Evaluation: the mean loss of all samples at the shared model, by the fast classes together.

It is a round of the ledger, whose places are batches: who dies or fails in it is made up for, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from .device_classes import CLASSES, NAMES
from .node import Node

BATCH: Final = 4096  # samples


def mean_loss(
    node: Node,
    dataset: Any,
    collate: Callable[[Any], Any],
    batch: int,
    refresh: Callable[[], None],
    loss_of: Callable[[Any], torch.Tensor],
) -> float:
    """Return the mean of all samples' losses; all workers of the node call it together.

    collate: makes a batch of samples; batch: of how many.
    refresh: called once no worker updates the model any more.
    loss_of: from a batch to the mean loss of its samples.
    """
    board, ledger = node.board, node.ledger
    samples = len(dataset)
    batch = max(batch, -(-samples // node.longest))  # as many places as there are notes
    what = f"an evaluation of {samples} samples, {batch} at a time"
    ledger.begin(-(-samples // batch), what, between_nodes=False)
    try:
        refresh()
        rows, parity = board.rows, ledger.round % 2
        own = rows[board.me : board.me + 1]
        while chunks := next_chunks(node):
            for chunk in chunks:
                part = range(chunk * batch, min((chunk + 1) * batch, samples))
                try:
                    loss = float(loss_of(collate(fetch(dataset, part))))
                except BaseException:
                    ledger.give_back(chunks)
                    raise
                own["losses"][0, parity] += loss * len(part)
                own["evaluated"][0, parity] += len(part)
            ledger.finish(chunks)
        total, evaluated = (rows[word][:, parity].sum() for word in ("losses", "evaluated"))
        return float(total) / max(int(evaluated), 1)
    finally:
        ledger.end()


def next_chunks(node: Node) -> Sequence[int]:
    """Return what this worker is to evaluate next; nothing: everything is evaluated.

    A slow worker waits until the fast ones have claimed everything, or have left.
    """
    ledger = node.ledger

    def of() -> list[int]:
        return before(node, ledger.round)

    ledger.await_claims(of)
    chunks = () if of() else ledger.claim(1)
    return chunks or ledger.reclaim(1)


def before(node: Node, round: int) -> list[int]:
    """Return the places of the workers that evaluate before this one may: the fast of the others.

    Nobody evaluates before a fast one.
    """
    kinds, over = node.board.rows["kind"], node.board.rows["over"]

    def is_fast(place: int) -> bool:
        return CLASSES[NAMES[kinds[place]]].is_fast

    if is_fast(node.board.me):
        return []
    return [place for place in node.board.others() if over[place] < round and is_fast(place)]


def fetch(dataset: Any, samples: Sequence[int]) -> Any:
    """Return samples as a DataLoader does, before it collates them."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(samples))
    return [dataset[sample] for sample in samples]
