"""Node: the workers of one host, and the memory they meet in.

| board: head, a row for each worker | ledger: notes of two rounds | the model |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from collectives.algorithms.nodes import checked_nodes, find_nodes
from collectives.cores import allowed_cores, core_quota
from collectives.transports import Counter, Transport
from collectives.transports.node_memory import NodeMemory
from collectives.vector import Array

from ... import settings
from ...planning import advice
from ...units import count_text
from ..local_training.own_steps import OwnSteps
from ..options import Job
from .board import CLASSES, NAMES, Board, DeviceClass
from .ledger import Ledger
from .merging import Merging
from .options import HogbatchOptions, warn_of_few_cores
from .shared_model import Layout, SharedModel

_ALIGNMENT: Final = 4096
_NOTE: Final = np.dtype(np.int16)
_STRETCHES: Final = 64  # of an epoch, where several nodes take from one counter


class Node:
    """One worker's view of its node.

    nodes:   how many there are.
    ranks:   of the world, by place.
    longest: the most places of a round.
    """

    def __init__(
        self,
        memory: NodeMemory,
        nodes: int,
        ranks: Sequence[int],
        length: int,
        layout: Layout,
    ) -> None:
        self.memory = memory
        self.nodes = nodes
        self.ranks = ranks
        self.longest = length
        self.board = Board(memory)
        regions = Regions.laid_out(len(ranks), length, layout)
        notes = memory.bytes[regions.notes : regions.notes + 2 * length * _NOTE.itemsize]
        self.notes = notes.view(_NOTE).reshape(2, length)
        self.model_bytes = memory.bytes[regions.model : regions.model + layout.size_bytes]
        self.ledger: Ledger
        self.merging: Merging

    def weighted_updates(self, beta: float | str) -> list[float]:
        """Return every worker's updates; a slow one's count for the share that survives."""
        found = []
        for row in self.board.rows:
            updates = float(row["updates"])
            if CLASSES[NAMES[row["kind"]]].is_fast:
                found.append(updates)
            elif isinstance(beta, str):
                found.append(updates - float(row["overlapped"]))
            else:
                found.append(beta * updates)
        return found


class Regions(NamedTuple):
    """The offsets in the shared memory at which the ledger's notes and the model begin and end."""

    notes: int
    model: int
    end: int

    @classmethod
    def laid_out(cls, workers: int, length: int, layout: Layout) -> Regions:
        """Return the regions beside a board of so many workers, for so many places."""
        notes = _up(Board.size_bytes(workers))
        model = notes + _up(2 * length * _NOTE.itemsize)
        return cls(notes, model, model + _up(layout.size_bytes))


def _up(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def join_node(
    job: Job[HogbatchOptions],
    mode: str,
    device_class: DeviceClass,
    layout: Layout,
    parameters: Sequence[torch.nn.Parameter],
    states: Sequence[dict[str, Any]],
    steps: OwnSteps,
) -> Node:
    """Meet the others, share the memory with those of this node, and begin with rank 0's model.

    steps: what merges between nodes cost is counted to.
    Every rank calls it. Raises HorovodInternalError where the ranks' arguments differ, ValueError
    where ranks may leave of several nodes, or their steps are to be audited.
    """
    options, world = job.options, job.world
    length = max(len(job.loader.dataset), 1)  # type: ignore[arg-type]  # an evaluation may have some
    mine = {
        "class": device_class.name,
        "cores": sorted(allowed_cores()),
        "quota": core_quota(),
        "advice": settings.ADVICE.read(),
    }
    rows: list[dict[str, Any]] = []
    hosts: list[list[int]] = []

    def work(transport: Transport, all_flags: list[int]) -> Node:
        rows.extend(transport.gather_object(mine))
        if options.nodes is None:
            nodes = find_nodes(transport)
        else:
            nodes = checked_nodes(options.nodes, transport.size)
        hosts.extend(nodes)
        ranks = next(node for node in nodes if transport.rank in node)
        stream = transport.subset(ranks)
        memory = stream.shared_memory(Regions.laid_out(len(ranks), length, layout).end)
        node = Node(memory, len(nodes), ranks, length, layout)
        shared = SharedModel(node.model_bytes, layout)
        counter: Counter | None = None
        if len(nodes) > 1:
            counter = transport.counter()
        if memory.place == 0:
            shared.fill(parameters, states)
            copy_first(transport, [node[0] for node in nodes], shared.memory)
        node.ledger = Ledger(
            memory,
            node.board,
            node.notes,
            counter,
            stretch=-(-length // _STRETCHES),
            ranks_may_leave=options.ranks_may_leave,
            ranks=ranks,
            timeout_seconds=transport.timeout_seconds,
            why_gone=lambda place: why_gone(transport, ranks[place]),
            on_death=lambda place: transport.lose(ranks[place], "its process has died"),
        )
        node.merging = Merging(node, nodes, shared, length, options.merge_every, counter)
        stream.barrier()  # the model is there
        return node

    signature = [f"mode={mode!r}", f"{length} samples", *options.signature(), *layout.signature]
    node: Node = world.engine.submit(f"adapt.{next(world.sets[0].unnamed)}", signature, work).wait()
    if options.ranks_may_leave and len(hosts) > 1:
        raise ValueError(
            f"ranks_may_leave=True is for the ranks of one host, got those of {len(hosts)}: models "
            "are merged between hosts by operations of all ranks; let elastic commits or "
            "checkpoints start the job again"
        )
    if options.audit and len(hosts) > 1:
        raise ValueError(
            f"audit=True is for the ranks of one host, got those of {len(hosts)}: merges between "
            "hosts change the models, too, and what steps have lost cannot be told from that"
        )
    advises = all(row["advice"] for row in rows)
    if len(hosts) > 1:
        job.optimizer._tell_of_compression(by_mode=True)
    node.merging.open(world, job.optimizer._compression, steps, advises)
    if advises and len(hosts) == 1 < world.size:
        values = sum(parameter.numel() for parameter in parameters)
        advice.say_once(
            world,
            advice.Advice(
                f"{world.size} workers step on {count_text(values)} values in this host's memory: "
                "they exchange no gradients, and compression has nothing to save"
            ),
        )
    if node.memory.place == 0:
        here = [rows[rank] for rank in node.ranks if rows[rank]["class"] != "gpu"]
        cores = {core for row in here for core in row["cores"]}
        if here:
            quota = min(row["quota"] for row in here)
            warn_of_few_cores(
                len(here), min(len(cores), max(1, math.ceil(min(quota, 1 << 20)))), node.ranks
            )
    return node


def copy_first(transport: Transport, leaders: Sequence[int], content: Array) -> None:
    """Make the content of every node's memory that of the first node's."""
    if len(leaders) > 1:
        content[:] = transport.subset(leaders).broadcast(content, 0)


def why_gone(transport: Transport, rank: int) -> str:
    """Return what is known of a rank's end; "" while it goes on, as far as is known."""
    notice = transport.departures().get(rank)
    return notice.reason if notice else ""
