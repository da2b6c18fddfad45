"""Mode "balanced": synchronous steps; one global batch is divided so that all ranks end together.

rank 0  |==== 128 ====| exchange |==== 128 ====| exchange |      sizes differ, but their sum is
rank 1  |==== 64 =====| exchange |==== 64 =====| exchange |      fixed, so the training is the same
rank 2  |==== 32 =====| exchange |==== 32 =====| exchange |      as with equal batches
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from collectives.kernels import squared_norm
from collectives.vector import Array

from ..exchange.buckets.parameters import trained_by
from ..optim.gradient_checks import loss_scale
from ..optim.samples import whole_number
from .controller import Controller, Window
from .current_batch import CurrentBatch, LearningRate, Memory
from .loader_base import LoaderBase, is_over
from .local_steps import require_one_pass
from .noise_scale import GradientCopy, Noise, NoiseAverage, estimate
from .options import BalancedOptions, Job
from .partitioning.cuts import Cut, Limits, Plan, round_sizes
from .sources import open_source, require_same_samples
from .throughput import (
    GradientTimer,
    Measurements,
    equal_finish,
    next_total,
    summarise,
)

_log = logging.getLogger("gtopk")
# Finite, so that it can be divided into grains and gathered as an integer.
_NO_BOUND: Final = 1 << 40  # samples


class Decision(NamedTuple):
    """A change of the ranks' sizes.

    step: the first step with these sizes.
    seconds: each rank's seconds per batch in the window before, with the earlier sizes.
    """

    step: int
    sizes: list[int]
    seconds: list[float]


class BalancedLoader(LoaderBase[BalancedOptions]):
    """Yields this rank's batches, and gives the optimizer the size of each.

    Take one step with each batch. Compute it with `backward` if it may not fit into memory, and
    call `drain` on every rank before a `state_dict` in the middle of an epoch. See
    `BalancedOptions` to tune it.

    decisions: every change of the sizes so far.
    """

    def __init__(self, job: Job[BalancedOptions]) -> None:
        options, world = job.options, job.world
        super().__init__(job, "balanced")
        self._require_one_pass()
        # Equal sizes for now: the bounds are known only after all ranks have exchanged theirs,
        # below.
        self._plan = Plan(self._equal_sizes(options.global_batch))
        self._source = open_source(job.loader, self._plan, world.rank, job.order, options.seed)
        self._memory = Memory(world.rank)
        self._timer = job.timer or GradientTimer(job.optimizer)
        self._current_batch = CurrentBatch.of(job.optimizer)
        self._rate = LearningRate(job.optimizer, options.lr_scaling, options.global_batch)
        self._noise = NoiseAverage()
        self._targets_goodput = options.policy == "goodput"
        needs_noise = self._targets_goodput or options.lr_scaling == "adascale"
        probe_interval = options.noise_every or (100 if needs_noise else 0)
        # The gradient of a single rank does not show its noise: see `noise_scale.estimate`.
        self._probe_interval = probe_interval if world.size > 1 else 0
        self._copy = GradientCopy(trained_by(job.optimizer)) if self._probe_interval else None
        self._lead, self._max_sizes = self._gather_limits()  # prefetched steps; largest sizes
        self._limits = self._limits_of(options.global_batch)
        self._limits.check()
        sizes = round_sizes([float(size) for size in self._plan.at(0)], self._limits)
        self._plan.change(0, sizes)
        self._controller = Controller(sizes, self._limits, options.interval)
        self.step = 0  # finished batches, over all epochs
        self._seconds: list[float] = []  # of each batch in the open window
        self._exchanges: list[float] = []  # seconds of its steps' exchanges; "goodput" only
        self._cut: Cut | None = None  # of the current batch
        self._has_warned = False  # that ranks may read different streams
        self.decisions: list[Decision] = []

    def _require_one_pass(self) -> None:
        require_one_pass(
            self._optimizer,
            "mode 'balanced' weighs a step's gradients by the samples of one batch",
            "; for more samples a step use a larger global_batch, and loader.backward(loss_of, "
            "batch) where a batch does not fit into memory",
        )

    def _gather_limits(self) -> tuple[int, list[int]]:
        """Return the most steps that a rank prefetches, and every rank's largest size."""
        own = [self._source.lead, self._options.max_batch or _NO_BOUND]
        records = self._run_first(
            [self._source.signature], lambda transport, all_flags: transport.gather_object(own)
        )
        return max(lead for lead, _ in records), [most for _, most in records]

    def _join_next_world(self) -> None:
        """Join the next world, with rank 0's sizes, if this loader's world has ended.

        An interrupted epoch starts again, unless a state is loaded that holds its position. Raises
        RuntimeError if this rank or the number of ranks has changed.
        """
        next_world = self._next_world()
        if next_world is None:
            return
        if self._cut is not None:
            self._abandon()
        self._world = next_world
        self._lead, self._max_sizes = self._gather_limits()
        self._epochs.start = 0
        # Some ranks may have been a step ahead when the last world failed.
        own_state = self._state()
        state = self._run(
            "state", [], lambda transport, all_flags: transport.broadcast_object(own_state)
        )
        self._load_sizes({**state, "seconds": [], "exchanges": []})
        self._noise.load_state_dict(state["noise"])
        self._epochs.set(state["epochs"]["epoch"])

    def _equal_sizes(self, samples: int) -> list[int]:
        """Return each rank's share of a global batch, as equal as the grain allows."""
        ranks = self._world.size
        limits = Limits(samples, [0] * ranks, [samples] * ranks, self._options.grain)
        return round_sizes([samples / ranks] * ranks, limits)

    def _limits_of(self, samples: int) -> Limits:
        """Return the limits of the sizes in a global batch."""
        grain = self._options.grain
        # A grain that does not fit into memory is computed in parts.
        most = [min(max(each // grain, 1) * grain, samples) for each in self._max_sizes]
        equal, least = self._equal_sizes(samples), self._options.min_batch
        # A least size above an equal share, or above a rank's memory, could not be met.
        low = [min(least, *each) for each in zip(equal, most, strict=True)]
        return Limits(samples, low, most, grain)

    def _check_stream(self, columns: Array) -> None:
        """Raise HorovodInternalError, on every rank, if ranks read different streams.

        Warns once, on rank 0, if the columns do not show it.
        """

        is_confirmed = self._run(
            "stream", [], lambda transport, all_flags: require_same_samples(transport, columns)
        )
        if not (is_confirmed or self._has_warned):
            self._has_warned = True
            if self._world.rank == 0:
                _log.warning(
                    "adapt cannot check that all ranks read the same stream: in its first step, "
                    "every column either has a single value (such as one class) or differs between "
                    "ranks, because of random augmentation or because the ranks read different "
                    "samples. Make sure that the data set yields the same samples, in the same "
                    "order, on all ranks, without sharding by rank. To enable the check, shuffle "
                    "the classes, or augment in collate_fn"
                )

    @property
    def sizes(self) -> list[int]:
        """Return the ranks' sizes in the current batch; between batches, those in the next one."""
        return list(self._cut.sizes if self._cut else self._plan.at(self.step))

    @property
    def noise(self) -> Noise | None:
        """Return the averaged gradient noise; None before the first probe."""
        return self._noise.value

    def __len__(self) -> int:
        """Return the number of steps in an epoch; raise TypeError for a stream."""
        steps = self._source.steps(0)
        if steps is None:
            raise TypeError("a loader of an iterable data set has no length")
        return steps

    def _batches(self) -> Generator[Any, None, None]:
        self._join_next_world()
        # Again: a script may have called set_backward_passes_per_step in the meantime.
        self._require_one_pass()
        if self._cut is not None:
            self._abandon()
        with self._epochs.iterate() as (epoch, start):
            signature = [f"sample {start} of epoch {epoch}, at step {self.step}"]
            self._run("epoch", [*signature, *self._source.open(epoch)])
            # Workers may have prefetched in an unfinished iteration; those steps are cut again.
            self._plan.drawn = self.step
            for cut, batch in self._source.begin(epoch, self.step, start, self._check_stream):
                self._begin_batch(cut)
                try:
                    yield batch
                except GeneratorExit:  # the script has left the loop
                    self._current_batch.leave(cut)
                    raise
                self._current_batch.finish(cut)
                self.drain()

    def _begin_batch(self, cut: Cut) -> None:
        self._cut = cut
        # Before the batch is handed out: a state taken in the loop's body counts it, as `_state`
        # does.
        self._epochs.reach(cut.start + cut.total)
        self.num_samples = cut.sizes[self._world.rank]
        reduction = self._options.loss_reduction
        self._current_batch.make_current(cut, self.num_samples, reduction, self._world)
        self._rate.scale(cut.total, self._noise.value)
        # A probe is a collective. All ranks are at the same step, so either all probe or none does.
        if self._copy is not None and self.step % self._probe_interval == 0:
            self._copy.arm(trained_by(self._optimizer), loss_scale(self._optimizer.scaler))
        # Last, so that the batch's time includes none of the above.
        self._timer.start(self.num_samples)

    def _abandon(self) -> None:
        """Drop the batch that was current when a script left the loop."""
        self._timer.elapsed_seconds()
        if self._copy is not None:
            self._copy.disarm()
        self._finish_batch()

    def _finish_batch(self) -> None:
        self._cut = None
        self.step += 1

    def _decide(self) -> None:
        """Gather every rank's window, and change the sizes of steps that are not cut yet."""
        sizes_before = self._plan.at(self.step - 1)
        seconds = summarise(self._seconds) if self._seconds else 0.0
        exchange = summarise(self._exchanges) if self._exchanges else 0.0
        self._seconds.clear()
        self._exchanges.clear()
        own_window = [seconds, self._memory.max_samples or _NO_BOUND, exchange]
        records = self._run(
            "window", [], lambda transport, all_flags: transport.gather_object(own_window)
        )
        windows = [
            Window(size, seconds, int(most))
            for size, (seconds, most, _) in zip(sizes_before, records, strict=True)
        ]
        if any(window.size and not window.seconds for window in windows):
            # A rank computed no gradients, or only a partial step. Measure another whole window, or
            # every step from now on would decide.
            self._controller.measuring_from = self.step
            return
        # At least one rank has prefetched the steps before that, so they are cut already.
        effective_step = self.step + self._lead
        sizes = self._controller.decide(windows, self.step, effective_step)
        # A bound never rises again: a size that did not fit once is not tried again.
        self._max_sizes = [
            min(a, window.max_samples) for a, window in zip(self._max_sizes, windows, strict=True)
        ]
        if self._targets_goodput and self._noise.is_reliable:
            # The least is the exchange alone: the rank that came last waited for nobody.
            sizes = self._goodput_sizes(min(each for *_, each in records), effective_step)
        if tuple(sizes) != sizes_before:
            self._change(effective_step, sizes, [window.seconds for window in windows])

    def _goodput_sizes(self, exchange_seconds: float, effective_step: int) -> list[int]:
        """Return the sizes from a step on, for the global batch that policy "goodput" chooses."""
        assert self._noise.value is not None
        costs, current_total = self._controller.costs(), self._limits.total
        reference = self._options.global_batch
        measurements = Measurements(costs, exchange_seconds, self._noise.value.scale, reference)
        totals = self._options.totals()
        # Totals beyond the memory of all ranks have no sizes, even below max_global_batch.
        feasible = sum(self._limits_of(totals[-1]).highest())
        totals = range(totals.start, min(totals.stop, feasible + 1), totals.step)
        total = next_total(measurements, self._limits_of, totals, current_total)
        if total == current_total:
            return self._controller.sizes
        self._limits = self._limits_of(total)
        sizes = equal_finish(costs, self._limits)
        self._controller.resize(self._limits, sizes, effective_step)
        return sizes

    def _change(self, step: int, sizes: Sequence[int], seconds: list[float]) -> None:
        self._plan.change(step, sizes)
        self.decisions.append(Decision(step, list(sizes), seconds))
        if self._world.rank == 0:
            _log.info(
                "adaptive batches: from step %d on batch sizes are %s (ranks 0 to %d); in the last "
                "window the ranks took %s ms",
                step,
                ", ".join(map(str, sizes)),
                len(sizes) - 1,
                ", ".join(f"{1e3 * each:.3g}" for each in seconds),
            )

    def _probe(self, gradient: torch.Tensor, cut: Cut) -> None:
        """Estimate the gradient's noise from one dense sum over the ranks."""
        size = self.num_samples
        if self._options.loss_reduction == "sum":
            gradient = gradient / max(size, 1)
        weight = size / cut.total
        square = weight * float(gradient @ gradient)
        # L is appended, so that one allreduce gives both sums.
        sums = np.append(weight * gradient.numpy(), square)
        signature = [f"gradients of {sums.size - 1} values"]
        self._run("noise", signature, lambda transport, all_flags: transport.allreduce(sums))
        if np.isfinite(sums).all() and sum(size > 0 for size in cut.sizes) > 1:
            # With the kernels' sum: learning rates depend on it, so all ranks must get the same
            # bits.
            square_of_mean = squared_norm(sums[:-1])
            self._noise.add(estimate(float(sums[-1]), square_of_mean, cut.sizes))

    def set_global_batch(self, samples: int) -> None:
        """Set the samples of a step, from the first step on that is not cut yet.

        Every rank must call it with the same number. Raises ValueError if the ranks' bounds do not
        allow it, TypeError for a number that is not whole, and HorovodInternalError on every rank
        if the ranks' numbers differ.
        """
        self._join_next_world()
        samples = whole_number("a global batch", samples)
        # Before the range check: ranks with different numbers must all raise the same error.
        self._run("global_batch", [f"a global batch of {samples} samples"])
        if samples < 1:
            raise ValueError(f"a global batch must have at least 1 sample, got {samples}")
        limits = self._limits_of(samples)
        scale = samples / self._limits.total
        sizes = round_sizes([scale * size for size in self._controller.sizes], limits)
        # The current batch and the batches that workers prefetch are cut already.
        step = self.step + (self._cut is not None) + self._lead
        # Only now: `round_sizes` has raised if the bounds do not allow the number.
        self._limits = limits
        self._controller.resize(limits, sizes, step)
        self._seconds.clear()
        self._exchanges.clear()
        self._plan.change(step, sizes)

    def backward(self, loss_of: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        """Compute a batch's loss and gradients, in parts if the memory is too small.

        Call it in place of `loss_of(batch).backward()`. A size that did not fit bounds this rank's
        sizes from the next window on.
        """
        # A placeholder's samples do not count; it is computed whole.
        size = max(self.num_samples, 1)
        return self._memory.backward(loss_of, batch, size, self._options.loss_reduction == "sum")

    def drain(self) -> None:
        """Finish the current batch after its step; every rank must call it.

        Call it before `state_dict` in the middle of an epoch, so that the state is complete.
        """
        self._join_next_world()
        if self._cut is None:
            return
        seconds = self._timer.elapsed_seconds()
        if self._copy is not None and (gradient := self._copy.disarm()) is not None:
            self._probe(gradient, self._cut)
        # An epoch's last step may be smaller than planned, which would look like a faster rank.
        is_full_step = self._cut.sizes == self._plan.at(self._cut.step)
        if seconds is not None and is_full_step and self._controller.counts(self.step):
            self._seconds.append(seconds)
            if self._targets_goodput and (step := self._optimizer.last_step) is not None:
                self._exchanges.append(self._timer.exchanged(step))
        self._finish_batch()
        # Depends on the step alone, not on this rank's times: either all ranks gather or none does.
        if self._controller.is_due(self.step):
            self._decide()

    def _state(self) -> dict[str, Any]:
        """Return the position of the next batch, and the state that sizes depend on.

        It is the same on all ranks, except for this rank's seconds in the open window. An epoch
        that the script left counts as over, unless its world has ended too: the next world can
        continue it.
        """
        done = self.step + (self._cut is not None)
        return {
            "ranks": self._world.size,
            "global_batch": self._limits.total,
            "global_batch_given": self._options.global_batch,  # the initial one
            "step": done,
            "epochs": self._epochs.state_dict(before_leaving=is_over(self._world)),
            "plan": self._plan.state_dict(done),
            "controller": self._controller.state_dict(),
            "seconds": list(self._seconds),
            "exchanges": list(self._exchanges),
            "noise": self._noise.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Resume where another loader stopped.

        Sizes start equal if the number of ranks or the global_batch given to this loader differs.
        If bounds such as max_batch differ, the sizes are cut to them. Raises ValueError if this
        loader's bounds do not allow the state's global batch.
        """
        self._epochs.close()
        self._join_next_world()  # joining the next world later would lose the loaded state
        if self._cut is not None:
            self._abandon()  # this batch belongs to the earlier state
        given = self._options.global_batch
        if (state["ranks"], state.get("global_batch_given", given)) == (self._world.size, given):
            self._load_sizes(state)
        self._noise.load_state_dict(state["noise"])

    def _load_sizes(self, state: dict[str, Any]) -> None:
        """Resume with another loader's sizes, cut to the bounds of this one."""
        # Checked first: a state that does not fit must not change anything.
        limits = self._limits_of(state["global_batch"])
        limits.check()
        planned = state["plan"]["sizes"]
        bounded = [round_sizes(sizes, self._limits_of(sum(sizes))) for sizes in planned]
        self.step = state["step"]
        self._plan.load_state_dict({**state["plan"], "sizes": bounded}, self.step)
        self._limits = self._controller.limits = limits
        self._controller.load_state_dict(state["controller"])
        self._seconds = list(state["seconds"])
        self._exchanges = list(state["exchanges"])
        if bounded != planned:  # the open window was measured with other sizes
            since = max(self.step, state["plan"]["steps"][-1])
            self._controller.resize(limits, bounded[-1], since)
            self._seconds.clear()
            self._exchanges.clear()
