"""Node: the workers of one host, and the memory that they share.

| worker table: head, a row for each worker | ledger: notes of two rounds | the model |

NodeMerges: the models of several nodes, merged at intervals while their workers continue.

    node 0   ...updates...| snapshot o_0 = x_0 - z |...updates... | + (z' + o_0' - snapshot) |...
                            \\                                      /
    wire                     |== S = reduce of T(w_i o_i) ========|
                            /                                      \
    node 1   ...updates...| snapshot o_1 = x_1 - z |...updates... | + (z' + o_1' - snapshot) |...

The first worker of each node merges, in the offset form of `replica`: entries that top-k does not
send stay in the node's model. All nodes have equal weights, w_i = 1 / nodes, because a node that
has computed more has already moved further. The change by a merge is added to the node's current
model, so no update is lost or delayed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from collectives.algorithms.hierarchical import checked_nodes, find_nodes
from collectives.cores import own_cores, shared_cores
from collectives.errors import PeerError, PeerTimeoutError
from collectives.transports import Counter, Transport

from ... import settings
from ...optim.expected_step import ExpectedStep
from ...optim.peers import Peers
from ...planning import advice
from ...runtime.coordinator import Engine, Operation, Work
from ...runtime.logs import EVERYWHERE
from ...units import count_text
from ..local_steps import LocalSteps
from ..options import Job
from ..replica import Replica
from .ledger import IS_FAST, NAMES, Ledger, WorkerTable
from .options import HogbatchOptions
from .shared_model import Layout, SharedModel

_log = logging.getLogger("gtopk")

MERGES: Final = 10  # in an epoch, by default
_PAUSE_SECONDS: Final = 1e-3
_REASON_SECONDS: Final = 2.0  # to wait for a failed worker's reason, which may come after its end


class NodeMerges:
    """One worker's part in the merges; only the first worker of each node carries them out.

    merges: number of merges so far, on the first worker of a node.
    """

    def __init__(
        self,
        job: Job[HogbatchOptions],
        node: Node,
        nodes: Sequence[Sequence[int]],
        counter: Counter | None,
        steps: LocalSteps,
        advises: bool,
    ) -> None:
        """Set up the merges, while all nodes' models are equal; all ranks call it together.

        steps: counts the finished merges of this worker.
        advises: rank 0 logs how much compression saves in a merge.
        """
        self._world, self._node, self._steps, self._counter = job.world, node, steps, counter
        self._leaders = [ranks[0] for ranks in nodes]
        self._is_leader = node.memory.place == 0
        self._every = job.options.merge_every or -(-node.longest // MERGES)
        self._merges_due = self._merges_begun = 0  # merges in this epoch
        self._pending: Operation | None = None
        self._engine: Engine | None = None
        self.merges = 0
        if len(nodes) == 1:
            return
        world = self._world
        world.sets_made += 1
        world.open_set(world.sets_made, self._leaders)
        if not self._is_leader:
            return
        self._name = f"hogbatch.{world.sets_made}"
        engine = self._engine = world.sets[world.sets_made].engine
        assert engine is not None
        self._tensors = node.shared.parameters
        self._snapshot = [torch.nn.Parameter(tensor.clone()) for tensor in self._tensors]
        compression = job.optimizer.step_policy.options.compression
        self._replica = Replica(self._snapshot, compression)
        if advises:
            reduction = self._replica.reduction
            peers = Peers(world, engine, self._name, self._leaders, takes_part=True)
            expected = ExpectedStep(compression, reduction.progress, "merge of all nodes")
            expected.measure([reduction.bucket_exchange], peers)

    def begin(self, what: str) -> None:
        """Begin an epoch; the first workers of all nodes compare its name, `what`.

        Raises HorovodInternalError, on each of these workers, if nodes begin different epochs.
        """
        if self._engine is not None:
            operation = self._engine.submit(
                f"{self._name}.epoch", [what], lambda transport, all_flags: None
            )
            self._wait(operation)
            self._steps.note_submit(operation)
        self._merges_due, self._merges_begun = -(-self._node.longest // self._every), 0

    def poll(self) -> None:
        """Apply a merge that has finished, and start one that is due."""
        if self._engine is None:
            return
        if self._pending is not None and self._pending.done:
            self._finish_merge()
        # The last merge of an epoch is left to `end`, because it must include all updates.
        if self._pending is None and self._merges_begun + 1 < self._merges_due:
            place = int(self._node.table.head["next"][0])
            if place >= (self._merges_begun + 1) * self._every:
                self._merge(is_last=False)

    def end(self, left_early: Ledger | None = None) -> None:
        """End an epoch with all merges that are due; the last one includes all updates.

        left_early: the ledger, if this worker's script left the epoch while others may compute.
        """
        if left_early is not None and not left_early.is_healthy:
            return  # no worker continues; an error raised while a generator closes would be lost
        if left_early is not None and len(self._leaders) > 1:
            left_early.await_others()
        if self._engine is not None:
            while self._merges_begun < self._merges_due:
                if self._pending is not None:
                    self._finish_merge()
                self._merge(is_last=self._merges_begun + 1 == self._merges_due)
            self._finish_merge()
            # Last, because it lets the other workers of this node start the next epoch.
            self._node.table.head["merged"][0] = self._node.ledger.round
        elif len(self._leaders) > 1:
            self._await_leader()

    def _wait(self, operation: Operation) -> Any:
        """Wait for an operation of the first workers; if it fails, stop all workers of the node."""
        try:
            return operation.wait()
        except BaseException as error:
            leader = self._world.rank
            self._node.ledger.fail(f"rank {leader}, which merges models between nodes, got {error}")
            raise

    def _merge(self, is_last: bool) -> None:
        """Start a merge of the node's current model."""
        assert self._engine is not None
        self._merges_begun += 1
        self._take_snapshot()
        self._replica.prepare()
        count = self._counter.add(0) if is_last and self._counter is not None else 0

        def work(transport: Transport, all_flags: list[int]) -> tuple[float, Any, int]:
            counts = transport.gather_object(count)
            weight = 1.0 / transport.size
            return weight, self._replica.exchange(transport, weight), max(counts)

        signature = [self._replica.reduction.signature, f"the last one of an epoch: {is_last}"]
        self._is_last = is_last
        self._pending = self._engine.submit(f"{self._name}.merge", signature, work)

    @torch.no_grad()
    def _take_snapshot(self) -> None:
        for own, tensor in zip(self._snapshot, self._tensors, strict=True):
            own.copy_(tensor)
        # Merging changes the snapshot, while workers change the model: add only the change since
        # this copy to the model.
        self._before = [own.detach().clone() for own in self._snapshot]

    @torch.no_grad()
    def _finish_merge(self) -> None:
        """Wait for the running merge, and add its change to the node's model."""
        assert self._pending is not None
        weight, update, count = self._wait(self._pending)
        self._steps.note_submit(self._pending)
        self._steps.note_exchange(self._replica.reduction)
        self._pending = None
        self._replica.merge(update, weight)
        if update is None:  # on all nodes: each keeps its model, and the next merge has its changes
            _log.warning(
                "rank %d: a merge of the nodes' models was skipped: their sum is not finite",
                self._world.rank,
                extra=EVERYWHERE,
            )
        else:
            self._add_changes()
        self.merges += 1
        if self._is_last:
            # No worker claims now, so all nodes read the same count; the next epoch starts there.
            self._node.table.head["base"][0] = count

    def _add_changes(self) -> None:
        with self._node.table.writing():
            for own, before, tensor in zip(
                self._snapshot, self._before, self._tensors, strict=True
            ):
                tensor.add_(own.detach() - before)

    def _await_leader(self) -> None:
        """Wait until the first worker of this node has merged the epoch."""
        node, begun = self._node, time.monotonic()
        transport = self._world.transport
        leader, seconds = node.ranks[0], transport.timeout_seconds
        while True:
            # Read first: between the two reads the worker may merge and its process end.
            is_present = node.memory.is_present(0) and not departure_reason(transport, leader)
            if node.table.head["merged"][0] >= node.ledger.round:
                return
            node.ledger.require_healthy()
            if not is_present:
                until = time.monotonic() + _REASON_SECONDS
                while node.ledger.is_healthy and time.monotonic() < until:
                    time.sleep(_PAUSE_SECONDS)
                node.ledger.require_healthy()
                raise PeerError(
                    f"rank {leader}, which merges its node's model with others, is gone"
                )
            if time.monotonic() > begun + seconds:
                raise PeerTimeoutError(
                    f"rank {self._world.rank} has waited {seconds:g} s for rank {leader} to merge "
                    "its node's model with others"
                )
            time.sleep(_PAUSE_SECONDS)

    def drain(self, run: Callable[[str, Sequence[str], Work], Any]) -> None:
        """Merge densely, so that all nodes have one model; all ranks call it, between epochs.

        run: the loader's function for an operation of all ranks.
        """
        if len(self._leaders) == 1:
            return

        def work(transport: Transport, all_flags: list[int]) -> None:
            if self._is_leader:
                self._merge_all(transport.subset(self._leaders))
            transport.barrier()

        run("drain", [], work)

    @torch.no_grad()
    def _merge_all(self, leaders: Transport) -> None:
        self._take_snapshot()
        offset = self._replica.weighted_offset(1.0 / leaders.size)
        leaders.allreduce(offset)
        self._replica.collapse(offset)
        self._add_changes()


_ALIGNMENT: Final = 4096
_NOTE: Final = np.dtype(np.int16)
_STRETCHES: Final = 64  # in an epoch, if several nodes take from one counter


class Node:
    """One worker's view of its node.

    nodes:   the number of nodes.
    ranks:   the rank in the world of each place.
    longest: the most places that a round may have.
    notes:   of the ledger: int16 [2, longest].
    shared:  the model.
    """

    def __init__(
        self, stream: Transport, nodes: int, ranks: Sequence[int], length: int, layout: Layout
    ) -> None:
        """stream: between the workers of this node, which must all call it together."""
        # The memory: the worker table, the notes, the model.
        first_note = _aligned(WorkerTable.size_bytes(len(ranks)))
        end_of_notes = first_note + 2 * length * _NOTE.itemsize
        model = _aligned(end_of_notes)
        end = model + layout.size_bytes
        self.memory = stream.shared_memory(_aligned(end))
        self.nodes, self.ranks, self.longest = nodes, ranks, length
        self.table = WorkerTable(self.memory)
        self.notes = self.memory.bytes[first_note:end_of_notes].view(_NOTE).reshape(2, length)
        self.shared = SharedModel(self.memory.bytes[model:end], layout)
        self.ledger: Ledger
        self.merging: NodeMerges

    def weighted_updates(self, beta: float | str) -> list[float]:
        """Return every worker's updates; for slow workers, only the share that counts (`beta`)."""
        found = []
        for row in self.table.rows:
            updates = float(row["updates"])
            if IS_FAST[NAMES[row["kind"]]]:
                found.append(updates)
            elif isinstance(beta, str):
                found.append(updates - float(row["overlapped"]))
            else:
                found.append(beta * updates)
        return found


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def join_node(
    job: Job[HogbatchOptions],
    run_first: Callable[[Sequence[str], Work], Any],
    device_class: str,
    layout: Layout,
    parameters: Sequence[torch.nn.Parameter],
    states: Sequence[dict[str, Any]],
    steps: LocalSteps,
) -> Node:
    """Share memory with the workers of this node, and start from rank 0's model.

    run_first: runs the loader's first operation, which also compares the ranks' modes and options.
    steps: counts the costs of merges between nodes.
    Every rank must call it. Raises HorovodInternalError if the ranks' arguments differ, ValueError
    for several nodes if ranks may leave or steps are to be audited.
    """
    options, world = job.options, job.world
    length = max(len(job.loader.dataset), 1)  # type: ignore[arg-type]  # for evaluations
    own_report = {
        "class": device_class,
        "cores": own_cores(),
        "advice": settings.ADVICE.read(),
    }
    Joined = tuple[Node, list[list[int]], Counter | None, list[dict[str, Any]]]

    def work(transport: Transport, all_flags: list[int]) -> Joined:
        rows = transport.gather_object(own_report)
        if options.nodes is None:
            nodes = find_nodes(transport)
        else:
            nodes = checked_nodes(options.nodes, transport.size)
        ranks = next(node for node in nodes if transport.rank in node)
        stream = transport.subset(ranks)
        node = Node(stream, len(nodes), ranks, length, layout)
        # All ranks have found the same nodes, so either all of them create the counter or none.
        counter = transport.counter() if len(nodes) > 1 else None
        if node.memory.place == 0:
            node.shared.fill(parameters, states)
            if len(nodes) > 1:
                leaders, content = transport.subset([node[0] for node in nodes]), node.shared.memory
                content[:] = leaders.broadcast(content, 0)
        node.ledger = Ledger(
            node.memory,
            node.table,
            node.notes,
            counter,
            stretch=-(-length // _STRETCHES),
            ranks_may_leave=options.ranks_may_leave,
            ranks=ranks,
            timeout_seconds=transport.timeout_seconds,
            departure_reason=lambda place: departure_reason(transport, ranks[place]),
            on_death=lambda place: transport.lose(ranks[place], "its process has died"),
        )
        stream.barrier()  # the model is in place
        return node, nodes, counter, rows

    joined: Joined = run_first([f"{length} samples", *layout.signature], work)
    node, hosts, counter, rows = joined
    # After the operation: every rank knows all hosts now, so either all of them raise or none.
    if options.ranks_may_leave and len(hosts) > 1:
        raise ValueError(
            f"ranks_may_leave=True is for the ranks of one host, got those of {len(hosts)}: models "
            "are merged between hosts by operations of all ranks; restart the job from an elastic "
            "commit or a checkpoint instead"
        )
    if options.audit and len(hosts) > 1:
        raise ValueError(
            f"audit=True is for the ranks of one host, got those of {len(hosts)}: merges between "
            "hosts change the models, too, so the audit could not measure the lost updates"
        )
    advises = all(row["advice"] for row in rows)
    if len(hosts) > 1:
        job.optimizer.step_policy.log_compression()
    node.merging = NodeMerges(job, node, hosts, counter, steps, advises)
    if advises and len(hosts) == 1 < world.size:
        values = sum(parameter.numel() for parameter in parameters)
        advice.log_once(
            world,
            advice.Advice(
                f"{world.size} workers update {count_text(values)} values in this host's memory: "
                "they exchange no gradients, so compression saves nothing"
            ),
        )
    if node.memory.place == 0:
        warn_of_few_cores([rows[rank] for rank in node.ranks], node.ranks)
    return node


def warn_of_few_cores(rows: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Warn if a node has more workers on CPUs than cores; rows: the reports of its workers."""
    on_cpus = [row["cores"] for row in rows if row["class"] != "gpu"]
    cores = math.ceil(shared_cores(on_cpus))
    if len(on_cpus) > cores:
        _log.warning(
            "%d workers of hogbatch on CPUs share %d core%s (ranks %s), which makes updates staler "
            "but not faster; start only %d of them",
            len(on_cpus),
            cores,
            "s" * (cores > 1),
            ", ".join(map(str, ranks)),
            cores,
        )


def departure_reason(transport: Transport, rank: int) -> str:
    """Return the known reason of a rank's end; "" if none is known."""
    transport.collect_departures()  # nothing else does, as no operation runs within an epoch
    notice = transport.departures().get(rank)
    return notice.reason if notice else ""
