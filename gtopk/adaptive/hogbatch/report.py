"""Reports of a node's workers, and the mean loss of the shared model.

The fast classes evaluate the loss together, in a round of the ledger with batches as its places:
if a worker dies or fails during the round, others compute its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from .ledger import IS_FAST, NAMES, WorkerTable
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

    collate: makes a batch of samples; batch: the number of samples in it.
    refresh: called when no worker updates the model any more.
    loss_of: maps a batch to the mean loss of its samples.
    """
    table, ledger = node.table, node.ledger
    samples = len(dataset)
    batch = max(batch, -(-samples // node.longest))  # the ledger has notes for that many places
    what = f"an evaluation of {samples} samples, {batch} at a time"
    ledger.begin(-(-samples // batch), what, between_nodes=False)
    try:
        refresh()
        rows, parity = table.rows, ledger.round % 2
        own = rows[table.place : table.place + 1]
        while chunks := next_chunks(node):
            for chunk in chunks:
                part = range(chunk * batch, min((chunk + 1) * batch, samples))
                try:
                    loss = float(loss_of(collate(fetch_samples(dataset, part))))
                except BaseException:
                    # Otherwise the others would wait for these places, or the mean would lack them.
                    ledger.give_back(chunks)
                    raise
                own["losses"][0, parity] += loss * len(part)
                own["evaluated"][0, parity] += len(part)
            ledger.finish(chunks)
        total, evaluated = (rows[field][:, parity].sum() for field in ("losses", "evaluated"))
        return float(total) / max(int(evaluated), 1)
    finally:
        ledger.end()


def next_chunks(node: Node) -> Sequence[int]:
    """Return the batch that this worker evaluates next; empty when everything is evaluated.

    A slow worker waits until the fast ones have claimed everything, or have left.
    """
    ledger = node.ledger

    def faster() -> list[int]:
        return faster_workers(node, ledger.round)

    ledger.await_claims(faster)
    chunks = () if faster() else ledger.claim(1)
    return chunks or ledger.reclaim(1)


def faster_workers(node: Node, round: int) -> list[int]:
    """Return the places of the fast workers that a slow one waits for; empty for a fast one."""
    kinds, over = node.table.rows["kind"], node.table.rows["over"]

    def is_fast(place: int) -> bool:
        return IS_FAST[NAMES[kinds[place]]]

    if is_fast(node.table.place):
        return []
    return [place for place in node.table.others() if over[place] < round and is_fast(place)]


def fetch_samples(dataset: Any, samples: Sequence[int]) -> Any:
    """Return samples as a DataLoader does, before it collates them."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(samples))
    return [dataset[sample] for sample in samples]


class WorkerReport(NamedTuple):
    """One worker's counts since the loader was created.

    samples:         in its updates.
    staleness:       mean number of others' updates between a batch's hand-over and its update.
    overlapped:      updates during which another worker wrote to the model, too; only these can
                     have lost a part of themselves.
    skipped, unused: batches with an update that was not finite; batches without a script's step.
    taken_over:      samples that it computed for workers that had died or left the loop.
    busy:            the share of the time within epochs in which it computed and updated.
    size:            size of its next batch.
    """

    rank: int
    device_class: str
    updates: int
    samples: int
    staleness: float
    stalest: int
    overlapped: int
    skipped: int
    unused: int
    taken_over: int
    busy: float
    size: int
    is_present: bool


class Report(NamedTuple):
    """The reports of all workers of a node."""

    workers: list[WorkerReport]

    @property
    def updates(self) -> int:
        """Return the number of updates of the model."""
        return sum(worker.updates for worker in self.workers)

    @property
    def slow_share(self) -> float:
        """Return the share of the updates that the slow classes made."""
        slow = sum(w.updates for w in self.workers if not IS_FAST[w.device_class])
        return slow / max(self.updates, 1)

    @property
    def staleness(self) -> float:
        """Return the mean staleness of all updates."""
        total = sum(worker.staleness * worker.updates for worker in self.workers)
        return total / max(self.updates, 1)

    @property
    def overlapped_share(self) -> float:
        """Return the share of the updates during which another worker wrote, too."""
        return sum(worker.overlapped for worker in self.workers) / max(self.updates, 1)

    def busy(self, device_class: str) -> float:
        """Return the mean busy share of a class; 0 if it has no workers."""
        shares = [w.busy for w in self.workers if w.device_class == device_class]
        return sum(shares) / max(len(shares), 1)

    def lines(self) -> list[str]:
        """Return a table as text."""
        lines = ["rank  class   updates  samples   size  staleness  overlapped   busy"]
        lines += [
            f"{w.rank:4}  {w.device_class:6} {w.updates:8} {w.samples:8} {w.size:6} "
            f"{w.staleness:10.2f} {w.overlapped:11} {w.busy:6.2f}{'' if w.is_present else '  gone'}"
            for w in self.workers
        ]
        return lines


def report_of(table: WorkerTable, ranks: Sequence[int]) -> Report:
    """Return the report from a node's worker table."""
    present = {table.place, *table.others()}
    workers = []
    for place, (rank, row) in enumerate(zip(ranks, table.rows, strict=True)):
        counted = ("updates", "samples", "stalest", "overlapped", "skipped", "unused", "taken_over")
        counts = {field: int(row[field]) for field in counted}
        workers.append(
            WorkerReport(
                rank=rank,
                device_class=NAMES[row["kind"]],
                staleness=float(row["staleness"]) / max(counts["updates"], 1),
                busy=float(row["busy"]) / max(float(row["in_rounds"]), 1.0),
                size=int(row["size"]),
                is_present=place in present,
                **counts,
            )
        )
    return Report(workers)
