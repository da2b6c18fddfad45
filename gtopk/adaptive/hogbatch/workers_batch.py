"""The batches that a worker claims in an epoch, and the step that it takes with each.

ClaimedBatches: the sampler of its DataLoader, which asks for one batch after another.

at first     the next places of the epoch's order, as many as the worker's current size
all taken    unfinished places of workers that died or left the loop
loop left    places claimed but not handed out are given back to workers that still compute

WorkersBatch: the worker's current batch, until its one step is taken.

hand-over    fast classes: the shared model is copied into the worker's own
script       forward, backward
step         in place, with the gradients of the shared model (slow) or of the copy (fast)
end          the ledger notes it as done, and the sizes learn the time that it took

Updates with gradients that are not finite are skipped: they would ruin the model for all workers.

Writer: how a worker's steps reach the shared model; Audit: how much of them races have lost.

slow classes    the worker's parameters are the shared ones
fast classes    they are its own copy, replaced with the shared ones during a step

So every step, of any optimizer, works in place on the current model and optimizer state; only the
gradient is old.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Sampler

from ...exchange.buckets.buckets import are_finite
from ...optim.step_checks import SkipCounter
from ...runtime.coordinator import Work
from ..current_batch import LearningRate, Memory
from ..local_steps import WallClock, replace_step, require_batch
from ..options import Job
from .ledger import WorkerTable
from .node import Node
from .options import HogbatchOptions
from .shared_model import DeviceCopy, SharedModel, require_in_place
from .sizes import Sizer, memory_of


class ClaimedBatches(Sampler[list[int]]):
    """Yields the indices of one worker's batches; a DataLoader may draw some in advance."""

    def __init__(
        self, node: Node, sizer: Sizer, options: HogbatchOptions, clock: WallClock
    ) -> None:
        self._node, self._table, self._ledger = node, node.table, node.ledger
        self._sizer, self._options, self._clock = sizer, options, clock
        self._order: Sequence[int] = ()
        self._claimed: deque[Sequence[int]] = deque()  # not handed out yet
        self._unfinished: Sequence[int] = ()  # unfinished by others, for the next iteration

    def begin(self, order: Sequence[int]) -> None:
        """Begin an epoch with this order of samples."""
        self._order, self._unfinished = order, ()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of batches as they are claimed; after `reclaim`, only its samples."""
        return self._yield_claimed(self._unfinished) if self._unfinished else self._claim_all()

    def reclaim(self) -> bool:
        """Claim samples that others did not finish; tell whether there are any.

        The next iteration yields them. Waits while others compute.
        """
        with self._clock.waiting():
            self._unfinished = self._ledger.reclaim(self._sizer.size)
        return bool(self._unfinished)

    def hand_out(self) -> Sequence[int]:
        """Return the places of the next batch."""
        return self._claimed.popleft()

    def give_back(self) -> None:
        """Give samples that were claimed but not handed out back to the other workers."""
        for places in self._claimed:
            self._ledger.give_back(places)
        self._claimed.clear()

    def _claim_all(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after another until everything is claimed."""
        while True:
            if self._options.lock_step:
                with self._clock.waiting():
                    self._ledger.take_turn()
            claim = self._ledger.claim(self._next_size())
            yield from self._yield_claimed(claim)
            if not claim:
                break
        if self._options.lock_step:
            self._ledger.pass_turn()

    def _yield_claimed(self, places: Sequence[int]) -> Iterator[list[int]]:
        if places:
            self._claimed.append(places)
            yield [self._order[place] for place in places]

    def _next_size(self) -> int:
        table = self._table
        counts = self._node.weighted_updates(self._options.beta)
        size = self._sizer.next(counts[table.place], [counts[place] for place in table.others()])
        table["size"] = size
        if self._sizer.thresholds is not None:
            table["smallest"], table["largest"] = self._sizer.thresholds
        return size


_LOST_AFTER: Final = 3  # updates in a row; later ones cannot repair a model that is not finite


class SkippedUpdates(SkipCounter):
    """Counts one worker's skipped updates; raises after too many in a row."""

    def note(
        self, rank: int, trained: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]
    ) -> None:
        """Count a skipped update.

        Raises FloatingPointError if the model itself is not finite any more, or if more updates in
        a row were skipped than are allowed.
        """
        self.count += 1
        lost = [names[p] for p in trained if not are_finite([p.detach()])]
        if lost and self._in_a_row + 1 >= _LOST_AFTER:
            raise FloatingPointError(
                f"rank {rank}: the shared model is no longer finite, in {lost[0]!r}, and no update "
                "can repair it: resume from a checkpoint, with a lower learning rate"
            )
        self.lengthen(
            lambda n: (
                f"rank {rank}: {n} updates in a row were skipped, the last because the gradient of "
                f"{next(names[p] for p in trained if not are_finite(gradients_of(p)))!r} is not "
                "finite"
            )
        )


def gradients_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return a parameter's gradient, if it has one."""
    return [] if parameter.grad is None else [parameter.grad]


class Audit:
    """Sums up one worker's steps of the parameters, to find out how much was lost.

        the first model + every worker's steps - the model now = lost

    An addition is lost if two workers read an element, both add, and the last write wins. Only with
    float64 parameters is rounding a small part of the result.
    """

    def __init__(self, shared: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._shared = shared
        self._initial = [tensor.double().clone() for tensor in self._shared]
        self._steps = [torch.zeros_like(each) for each in self._initial]
        self._distance = 0.0

    @torch.no_grad()
    def apply_step(self, apply: Callable[[], None]) -> None:
        """Compute a step on a copy of the parameters, record it, and add it to them at once."""
        shared = [parameter.data for parameter in self._parameters]
        before = [tensor.clone() for tensor in shared]
        for parameter, content in zip(self._parameters, before, strict=True):
            parameter.data = content.clone()
        apply()
        steps = [p.data - content for p, content in zip(self._parameters, before, strict=True)]
        for parameter, tensor, step in zip(self._parameters, shared, steps, strict=True):
            parameter.data = tensor
            tensor.add_(step)
        for total, step in zip(self._steps, steps, strict=True):
            total.add_(step)
            self._distance += float(step.double().abs().sum())

    def lost_share(self, run: Callable[[str, Sequence[str], Work], Any]) -> float:
        """Return the lost share of all steps, in L1; all ranks call it together.

        run: the loader's function for an operation of all ranks.
        """
        steps = torch.cat([each.reshape(-1) for each in self._steps]).numpy()
        sums = np.append(steps, self._distance)
        run("audit", [f"{len(sums)} numbers"], lambda transport, _: transport.allreduce(sums))
        now = torch.cat([tensor.double().reshape(-1) for tensor in self._shared])
        begin = torch.cat([each.reshape(-1) for each in self._initial])
        missing = begin + torch.from_numpy(sums[:-1]) - now
        return float(missing.abs().sum()) / max(float(sums[-1]), 1e-300)


class Writer:
    """Applies one worker's steps to the shared model; its row counts updates and staleness.

    last_staleness: others' updates between the last hand-over and the update that followed.
    """

    def __init__(
        self,
        shared: SharedModel,
        table: WorkerTable,
        trained: Sequence[torch.nn.Parameter],
        states: Sequence[dict[str, Any]],
        optimizer: torch.optim.Optimizer,
        *,
        copies: bool,
        audits: bool,
    ) -> None:
        """Share the optimizer's state, and the parameters; copies: keep own parameters."""
        self._shared, self._table = shared, table
        self._trained, self._optimizer = trained, optimizer
        shared.map_state(trained, states, optimizer)
        self._copy = DeviceCopy(shared, trained) if copies else None
        if self._copy is None:
            shared.map_parameters(trained)
        self._audit = Audit(shared.parameters, trained) if audits else None
        self._version_read = 0  # the model's updates at the last hand-over
        self.last_staleness = 0

    def check(self) -> None:
        """Raise RuntimeError if the script has replaced tensors of parameters or state."""
        tensors = self._copy.tensors if self._copy is not None else self._shared.tensors
        require_in_place(self._shared.layout, tensors, self._trained, self._optimizer)

    def publish(self) -> None:
        """Share what the script has written into a fast worker's parameters since the last step."""
        if self._copy is not None:
            self._copy.publish()

    def copy_for_next_batch(self) -> None:
        """Copy the current model into a fast worker's parameters, for the next batch."""
        self.refresh()
        self._version_read = self._table.total("updates")

    def refresh(self, *, waits: bool = False) -> None:
        """Copy the current model into a fast worker's parameters; waits: until that is done."""
        if self._copy is not None:
            self._copy.refresh()
            if waits:
                self._copy.wait()

    def update(self, apply: Callable[[], None]) -> None:
        """Update the model with a step that `apply` takes on the shared parameters."""
        table = self._table
        # Copied first: only the step itself counts as a write that another may overlap.
        with (
            self._copy.on_shared_memory() if self._copy is not None else nullcontext(),
            table.writing(),
        ):
            if self._audit is not None:
                self._audit.apply_step(apply)
            else:
                apply()
        self.last_staleness = table.total("updates") - self._version_read
        table.add("staleness", self.last_staleness)
        table["stalest"] = max(table["stalest"], self.last_staleness)
        table.add("updates", 1)

    def audited(self, run: Callable[[str, Sequence[str], Work], Any]) -> float:
        """Return the `lost_share`; raise ValueError without an audit."""
        if self._audit is None:
            raise ValueError("nothing was audited: create the loader with adapt(..., audit=True)")
        return self._audit.lost_share(run)


class WorkersBatch:
    """One worker's current batch; it replaces `optimizer.step` with a step for this batch.

    places: the batch's places in the epoch's order; empty without a current batch.
    memory: computes the batch's loss and gradients, in parts if the memory is too small.
    """

    def __init__(
        self,
        job: Job[HogbatchOptions],
        mode: str,
        node: Node,
        trained: Sequence[torch.nn.Parameter],
        writer: Writer,
        sizer: Sizer,
    ) -> None:
        self._options, self._optimizer, self._mode = job.options, job.optimizer, mode
        self._rank = job.world.rank
        self._node, self._table, self._ledger = node, node.table, node.ledger
        self._trained, self._device = trained, trained[0].device
        policy = job.optimizer.step_policy
        self._names = policy.names
        self._skipped = SkippedUpdates(policy.options.max_skipped_steps)
        self._writer, self._sizer = writer, sizer
        self.memory = Memory(self._rank)
        # Merges average the nodes' models, so each must move as far as the global batch would.
        reference = job.options.global_batch / node.nodes
        self._rate = LearningRate(job.optimizer, job.options.lr_scaling, reference)
        self._began = self._counted = 0
        self.places: Sequence[int] = ()
        self._wrapped_step = replace_step(job.optimizer, mode, self._step)

    def begin(self) -> None:
        """Start counting the time of a round."""
        self._counted = time.perf_counter_ns()

    def count_time(self) -> None:
        """Add the time within the round so far; called with every batch, like the busy time."""
        before, self._counted = self._counted, time.perf_counter_ns()
        self._table.add("in_rounds", self._counted - before)

    def make_current(self, places: Sequence[int]) -> None:
        """Make a batch the current one, and copy the shared model for a fast worker."""
        self.places = places
        self._writer.copy_for_next_batch()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._began = time.perf_counter_ns()

    def leave(self) -> None:
        """Finish the batch; count it as unused if the script took no step for it."""
        if self.places:
            self._table.add("unused", 1)
            self._finish_batch()

    def give_back(self) -> None:
        self._ledger.give_back(self.places)
        self.places = ()

    def _step(self) -> None:
        """Update the shared model with the gradients of the batch."""
        require_batch(self.places, self._rank, self._mode)
        samples = len(self.places)
        self._rate.scale(samples, None)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        if self._options.loss_reduction == "sum":
            for gradient in gradients:
                gradient.div_(samples)
        if are_finite(gradients):
            self._writer.update(self._apply)
            self._table.add("samples", samples)
            self._skipped.end_row()
        else:
            self._table.add("skipped", 1)
            self._skipped.note(self._rank, self._trained, self._names)
        self._finish_batch()
        self._node.merging.poll()

    def _apply(self) -> None:
        with self._optimizer.skip_synchronize():
            self._wrapped_step()

    def _finish_batch(self) -> None:
        spent = time.perf_counter_ns() - self._began
        self.count_time()
        self._table.add("busy", spent)
        size = len(self.places)
        # After the update: if this worker dies before it, others compute the batch again.
        self._ledger.finish(self.places)
        self.places = ()
        if self._device.type == "cuda":
            self._sizer.note_memory(size, *memory_of(self._device))
        if self.memory.max_samples is not None:
            self._sizer.limit(self.memory.max_samples)
        self._sizer.note(size, spent / 1e9)
        if self._options.lock_step:
            self._ledger.pass_turn()
