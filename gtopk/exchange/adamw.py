"""AdamW steps of each rank's own gradient, divided by a second moment that the ranks share.

    m = beta1 m + (1 - beta1) w g         w: this rank's weight in the sum, g: its mean gradient
    v = beta2 v + (1 - beta2) w g^2       its own second moment, inflated by one rank's noise
    s = second moment of the mean gradient, estimated from a sample of coordinates in every step
    R = squares of the mean gradient / squares of this rank's gradient, per row of a parameter
    V = (1 - q) s + q R v / w             q falls from 1 as samples accumulate, to 0.19 if beta2
                                          is 0.999, and stays at 2/3 if it is 0.95
    w u = lr m' / (sqrt(V) + eps)         m', v: after bias correction (Kingma and Ba 2015)

Summed over the ranks, w u is AdamW's step of the mean gradient, to the extent that V is the second
moment of that gradient. With v / w instead, every rank would divide by the size of its own
gradient, which is larger and differs between ranks. The residual holds steps, learning rate
included: a step that is sent late keeps the rate of the time when it was computed.

A step samples one of SWEEP sets of coordinates (`sampling`). The sample is summed as bfloat16, in
an allreduce within the bucket's own operation. s and the row sums of the mean gradient are equal on
all ranks and live in the optimizer's `state`. m, v and a rank's own row sums are local, and are
kept with its residual.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from collectives.transports import Transport

from .buckets.arrays import to_array, to_device, view_tensor, zeros
from .buckets.buckets import Bucket, split_like, strides_of
from .sampling import SWEEP, Sampling, times_sampled

# Keys of a parameter's optimizer state: the number of sampled steps; s, which is -1 where no sample
# exists yet; the mean gradient's squares, summed by row.
STEP, SHARED, SHARED_ROWS = "step", "shared_exp_avg_sq", "shared_row_squares"
# A mean of squares is never negative.
UNKNOWN: Final = -1.0

_ROW_DECAY: Final = 0.99
_PRIOR: Final = 2.0  # a rank's own moment counts as much as this many samples
_LEAST_OWN: Final = 0.1  # the minimum of q
_SMOOTHING: Final = 0.02  # this fraction of the mean row is added to each row
_PIECE: Final = 1 << 16  # elements that fit in a cache together with their moments


def weight_of_own(times: int, decay: float) -> float:
    """Return q after so many samples of a coordinate, of which each weighs `decay` times the next.

    The mean of such samples has the error of (1 + decay) / (1 - decay) equal ones at best.
    """
    equal_samples = min(times, (1.0 + decay) / (1.0 - decay))
    return max(_PRIOR / (_PRIOR + equal_samples), _LEAST_OWN)


class Hyper(NamedTuple):
    """AdamW's options for one parameter. l2: weight decay added to the gradient, as in Adam."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    l2: float
    maximize: bool


# For a parameter that was removed from all groups: the current step will be void.
REMOVED: Final = Hyper(0.0, 0.0, 0.0, 1.0, 0.0, False)


class AdamGroups:
    """The parameter groups and state of an Adam or AdamW that gtopk computes the steps of.

    factor: multiplies the learning rates of the next step, because adaptive batches vary in size.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.factor = 1.0

    def read(self, parameters: Sequence[torch.Tensor]) -> list[Hyper | None]:
        """Return the current options of these parameters; None: the step skips this parameter."""
        hyper_of: dict[torch.Tensor, Hyper] = {}
        for group in self._optimizer.param_groups:
            refuse_amsgrad(group)
            beta1, beta2 = map(float, group["betas"])
            l2 = 0.0 if is_decoupled(group, self._optimizer) else float(group["weight_decay"])
            rate = float(group["lr"]) * self.factor
            hyper = Hyper(rate, beta1, beta2, float(group["eps"]), l2, bool(group["maximize"]))
            hyper_of.update(dict.fromkeys(group["params"], hyper))
        return [hyper_of.get(parameter, REMOVED) for parameter in parameters]

    def state_of(self, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        """Return the optimizer's own state of a parameter; the caller may change it in place."""
        state: dict[str, Any] = self._optimizer.state[parameter]
        return state

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values, for weight decay that is added to the gradient."""
        return parameter.detach()


def refuse_amsgrad(group: dict[str, Any]) -> None:
    """Raise ValueError for a parameter group with amsgrad=True."""
    if group["amsgrad"]:
        raise ValueError(
            "amsgrad=True needs the largest second moment of the mean gradient, which ranks only "
            "sample: use amsgrad=False, or adam_steps='after', which steps with the agreed update "
            "and loses accuracy"
        )


def is_decoupled(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether weight decay shrinks parameters (AdamW) or is added to gradients (Adam)."""
    # Newer Adams in torch have an option for it; before, the class decides.
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


@dataclass
class OwnMoments:
    """One rank's moments, updated in place.

    first, second: m and v, [n]; ages: this rank's number of steps, int64 [p]; rows: row sums of
    w g^2, [all rows]. The last two are on the host.
    """

    first: torch.Tensor
    second: torch.Tensor
    ages: torch.Tensor
    rows: torch.Tensor


class _Snapshot(NamedTuple):
    """The shared state before a step, at the coordinates sampled in it."""

    places: torch.Tensor
    shared: torch.Tensor
    rows: torch.Tensor
    steps: list[int]


class AdamSteps:
    """Turn one bucket's gradients into AdamW steps.

    In each step the program calls `read`, and then the engine calls `make_step`, a collective.
    `undo` reverts all changes by `make_step` since the last `drop_snapshot`.

    ranks: how many ranks exchange the bucket. With one, its own second moment is exact.
    """

    def __init__(self, bucket: Bucket, groups: AdamGroups, ranks: int) -> None:
        self.share = 1.0 / ranks  # this rank's weight in the sum, unless sample counts set another
        self._groups, self._ranks = groups, ranks
        self._parameters, self._sizes = bucket.members, bucket.sizes
        self._strides = strides_of(self._parameters)
        self.rows = [rows_of(parameter) for parameter in self._parameters]
        self._sampling = Sampling(self._sizes, self.rows)
        self._shared = zeros(bucket.length, bucket.dtype, bucket.device).fill_(UNKNOWN)
        self._shared_rows = torch.zeros(sum(self.rows), dtype=self._shared.dtype, device="cpu")
        # Views of both, by parameter: the optimizer's state refers to these tensors.
        self._in_state = [
            *zip(self._split(self._shared), self._shared_rows.split(self.rows), strict=True)
        ]
        self._steps = [0] * len(self._sizes)
        self._hypers: list[Hyper | None] = []
        self._excluded: Collection[int] = ()  # parameters that have no gradient on any rank
        self._snapshot: _Snapshot | None = None
        self.mean_square = 0.0  # sum of squares of the mean gradient, from the last step's sample

    def read(self, own: OwnMoments) -> None:
        """Read the options, and adopt state that was loaded into the optimizer."""
        self._hypers, self._excluded = self._groups.read(self._parameters), ()
        for number, parameter in enumerate(self._parameters):
            if self._hypers[number] is None:
                continue
            state, (shared, rows) = self._groups.state_of(parameter), self._in_state[number]
            # A different tensor, or none: a state was loaded into the optimizer, or this is the
            # first step.
            if state.get(SHARED) is not shared:
                if SHARED not in state:  # no state yet, or a plain AdamW's
                    self._reset_moments(number, own)
                if SHARED in state:
                    shared.copy_(state[SHARED])
                    rows.copy_(state[SHARED_ROWS])
                elif "exp_avg_sq" in state:
                    self._import_adam_state(number, state, shared, own)
                state[STEP] = step_count(float(state.get(STEP, 0)))
                state[SHARED], state[SHARED_ROWS] = shared, rows
                if not int(own.ages[number]):
                    self._init_late_joiner(number, int(state[STEP]), own)
            self._steps[number] = int(state[STEP])

    @property
    def frozen(self) -> int:
        """How many of a hook's parameters are frozen, and have no sample."""
        return self._hypers.count(None)

    def is_unchanged(self) -> bool:
        """Return whether the options are still the ones that `read` found."""
        return self._hypers == self._groups.read(self._parameters)

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return split_like(flat, self._parameters, self._strides)

    def _reset_moments(self, number: int, own: OwnMoments) -> None:
        """Reset a parameter's moments: this rank's own and the shared ones."""
        shared, rows = self._in_state[number]
        shared.fill_(UNKNOWN)
        rows.zero_()
        for moments in (own.first, own.second):
            self._split(moments)[number].zero_()
        own.rows.split(self.rows)[number].zero_()
        own.ages[number] = 0

    def _init_late_joiner(self, number: int, steps: int, own: OwnMoments) -> None:
        """Set the moments of a rank that joins at a step that the other ranks have reached.

        At age 0, bias correction would give its first gradient as much weight as all the gradients
        that the other ranks have accumulated.
        """
        shared, rows = self._in_state[number]
        if not steps or bool((shared < 0).any()):
            return  # in the first sweep: some coordinates are not sampled yet
        seen = 1.0 - (self._hypers[number] or REMOVED).beta2 ** steps
        self._split(own.second)[number].copy_(shared).mul_(self.share * seen)
        own.rows.split(self.rows)[number].copy_(rows).mul_(self.share)
        own.ages[number] = steps

    def _import_adam_state(
        self, number: int, state: MutableMapping[str, Any], shared: torch.Tensor, own: OwnMoments
    ) -> None:
        """Continue from the moments of a plain AdamW, which are those of the mean gradient."""
        steps, share = int(state[STEP]), self.share
        hyper = self._hypers[number] or REMOVED
        # Remove them: a plain Adam that gets this state later must notice that they are missing.
        square = state.pop("exp_avg_sq")
        mean = state.pop("exp_avg")
        state.pop("max_exp_avg_sq", None)
        if not steps:
            return
        shared.copy_(square).div_(1.0 - hyper.beta2**steps)
        if not int(own.ages[number]):
            self._split(own.first)[number].copy_(mean).mul_(share)
            self._split(own.second)[number].copy_(square).mul_(share)
            own.ages[number] = steps

    def make_step(
        self, gradient: torch.Tensor, share: float, transport: Transport, own: OwnMoments
    ) -> float:
        """Replace the weighted gradient, [n], in place with the weighted step, to be subtracted.

        share: this rank's weight in the sum; 0 if it has no gradient: its moments then stay.
        Returns the seconds that the exchange of the sample took.
        """
        self._add_decay(gradient, share)
        began = time.perf_counter()
        # Also with a share of 0, because summing the samples is a collective.
        ratios = self._update_shared_moment(gradient, share, transport, own.rows)
        seconds = time.perf_counter() - began
        if share:
            own.ages.add_(1)
            # A single rank needs no R. It samples so that more ranks can resume from its state.
            self._step(gradient, share, own, ratios if self._ranks > 1 else None)
        return seconds

    def _add_decay(self, gradient: torch.Tensor, share: float) -> None:
        """Add weight decay, and negate to maximize, as Adam does before it updates its moments."""
        for number, (hyper, parameter, part) in enumerate(
            zip(self._hypers, self._parameters, self._split(gradient), strict=True)
        ):
            if hyper is None or number in self._excluded:  # decay alone would make a step, too
                continue
            if hyper.maximize:
                part.neg_()
            if hyper.l2 and share:
                values = self._groups.values_of(parameter).to(part.device, part.dtype)
                # Times the share, so that the sum over the ranks adds the decay once.
                part.add_(values, alpha=share * hyper.l2)

    def _update_shared_moment(
        self, gradient: torch.Tensor, share: float, transport: Transport, own_rows: torch.Tensor
    ) -> torch.Tensor:
        """Add this step's sample to the shared moment; return R, [all rows], on the host."""
        sample = self._sampling.at(self._steps)
        places = to_device(sample.places, gradient.device)
        # Half the bytes of float32 with the same range; float16 would lose small gradients.
        message = to_array(gradient[places].to(torch.bfloat16))
        # A copy, because the allreduce overwrites `message`.
        own_sample = view_tensor(message).to(self._shared_rows.dtype)
        if self._ranks > 1:
            transport.allreduce(message)
        # On the host, where the message is: copying squares back from a GPU would wait once more.
        squares = view_tensor(message).to(self._shared_rows.dtype).square_()
        old_values = self._shared[places]
        # After the allreduce, which may raise, but before the first change.
        self._snapshot = _Snapshot(places, old_values, self._shared_rows.clone(), self._steps)
        weights = self._sample_weights(sample.numbers)
        new_values = (to_device(each, places.device) for each in (squares, weights))
        # The first sample has weight 1, for which lerp returns the sample exactly: no trace of
        # UNKNOWN remains.
        self._shared[places] = torch.lerp(old_values, *new_values)
        self._shared_rows.mul_(_ROW_DECAY).index_add_(0, sample.rows, squares)
        self.mean_square = SWEEP * float(squares.sum())  # a sweep samples each coordinate once
        own_rows.mul_(_ROW_DECAY)
        if share:
            own_rows.index_add_(0, sample.rows, own_sample.square_().div_(share))
        self._set_steps([steps + 1 for steps in self._steps])
        if skipped := [n for n, hyper in enumerate(self._hypers) if hyper is None]:
            self.undo_part(skipped)
        return self._ratios(own_rows)

    def _sample_weights(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return each new sample's weight in the mean over all samples of its coordinate, [s]."""
        weights = []
        for steps, hyper in zip(self._steps, self._hypers, strict=True):
            # A coordinate is sampled once per sweep; Adam's moment would have decayed this much in
            # between. The divisor corrects the bias towards zero, as in Adam.
            decay = (hyper or REMOVED).beta2 ** SWEEP
            weights.append((1.0 - decay) / (1.0 - decay ** times_sampled(steps + 1)))
        return torch.tensor(weights, dtype=self._shared.dtype, device="cpu")[numbers]

    def _ratios(self, own_rows: torch.Tensor) -> torch.Tensor:
        """Return the squares of the mean gradient over those of this rank's, by row.

        own_rows: this rank's sums times w, over as many samples; w is assumed to be `share`.
        """
        own, mean = own_rows / self.share, self._shared_rows
        if None in self._hypers:  # skipped parameters: no rank has their sums
            trained = torch.tensor([hyper is not None for hyper in self._hypers], device="cpu")
            trained = trained.repeat_interleave(torch.tensor(self.rows, device="cpu"))
            all_ratios = torch.ones_like(own)
            all_ratios[trained] = self._ratios_of(own[trained], mean[trained])
            return all_ratios
        return self._ratios_of(own, mean)

    def _ratios_of(self, own: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        ratio = mean.sum() / own.sum().clamp_min(1e-30)
        smoothing = own.mean() * _SMOOTHING
        # Shrink towards the ratio of all rows; the smaller a row's sums, the more.
        ratios = (mean + ratio * smoothing) / (own + smoothing + 1e-30)
        # It is 1 for equal gradients and 1 / P for independent ones.
        return ratios.clamp_(0.25 / self._ranks, 1.0)

    def square_of_mean(self) -> float:
        """Return the sum of the mean gradient's sampled squares, over about the last 100 steps."""
        return float(self._shared_rows.sum())

    def _set_steps(self, steps: list[int]) -> None:
        self._steps = steps
        for parameter, hyper, count in zip(self._parameters, self._hypers, steps, strict=True):
            if hyper is not None:
                self._groups.state_of(parameter)[STEP].fill_(count)

    def _step(
        self, gradient: torch.Tensor, share: float, own: OwnMoments, ratios: torch.Tensor | None
    ) -> None:
        vectors = (gradient, own.first, own.second, self._shared)
        ends, row_ends = ([*itertools.accumulate(e, initial=0)] for e in (self._sizes, self.rows))
        on_device = None if ratios is None else to_device(ratios, gradient.device)
        # Excluded parameters take no step: with eps=0 it would be 0 / 0.
        hypers = [None if n in self._excluded else each for n, each in enumerate(self._hypers)]
        options = [*zip(own.ages.tolist(), self._steps, hypers, strict=True)]
        # Neighbours with equal options, usually all parameters, share a GPU's launches.
        for (age, steps, hyper), run in itertools.groupby(range(len(options)), options.__getitem__):
            if hyper is None:
                continue
            numbers = [*run]
            first, end = numbers[0], numbers[-1] + 1
            bias1, bias2 = 1.0 - hyper.beta1**age, 1.0 - hyper.beta2**age
            times = times_sampled(steps)
            ratio, own_part = None, 1.0
            if on_device is not None:
                ratio = on_device[row_ends[first] : row_ends[end]] / (bias2 * share)
                own_part = weight_of_own(times, hyper.beta2**SWEEP)
            spans = [each[ends[first] : ends[end]] for each in vectors]
            sizes, rows = self._sizes[first:end], self.rows[first:end]
            for g, m, v, s, by_rows in _pieces(spans, sizes, rows, ratio):
                m.lerp_(g, 1.0 - hyper.beta1)
                v.mul_(hyper.beta2).addcmul_(g, g, value=(1.0 - hyper.beta2) / share)
                # From here on g is scratch space for the step: m and v include the gradient.
                if ratio is None:
                    torch.mul(v, 1.0 / (bias2 * share), out=g)
                for step, second_moment, each in by_rows:
                    torch.mul(second_moment, each, out=step)
                # After a whole sweep every coordinate has a sample, so UNKNOWN cannot occur.
                if ratio is not None and times > 1:
                    g.mul_(own_part).add_(s, alpha=1.0 - own_part)
                elif ratio is not None:  # some coordinates have no sample yet
                    g.copy_(torch.where(s < 0, g, torch.lerp(s, g, own_part)))
                g.sqrt_().add_(hyper.eps)
                torch.div(m, g, out=g).mul_(hyper.lr / bias1)

    def state_before(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of the state as `undo` would leave it; empty if nothing would change."""
        if self._snapshot is None:
            return {}
        places, values, rows, steps = self._snapshot
        shared = self._shared.clone()
        shared[places] = values
        views = zip(self._split(shared), rows.split(self.rows), steps, strict=True)
        return {
            parameter: {
                STEP: step_count(float(count)),
                SHARED: shared_values,
                SHARED_ROWS: row_values.clone(),
            }
            for parameter, (shared_values, row_values, count) in zip(
                self._parameters, views, strict=True
            )
        }

    def undo(self) -> None:
        """Restore the shared state of all parameters to before `make_step`."""
        self.undo_part(range(len(self._sizes)))
        self._snapshot = None

    def exclude(self, numbers: Collection[int]) -> None:
        """Leave these parameters out of this step: no rank has a gradient for them."""
        self._excluded = numbers

    def undo_part(self, numbers: Sequence[int]) -> None:
        """Restore the shared state of some parameters to before `make_step`.

        numbers: parameters without a gradient on any rank, which plain AdamW skips, too. All ranks
            must pass the same numbers.
        """
        if self._snapshot is None:
            return
        places, shared, rows, steps = self._snapshot
        ends = torch.tensor([*itertools.accumulate(self._sizes, initial=0)], device=places.device)
        bounds = torch.searchsorted(places, ends).tolist()  # places are ascending
        row_ends = [*itertools.accumulate(self.rows, initial=0)]
        counts = list(self._steps)
        for number in numbers:
            sampled = slice(*bounds[number : number + 2])
            self._shared[places[sampled]] = shared[sampled]
            row_slice = slice(*row_ends[number : number + 2])
            self._shared_rows[row_slice] = rows[row_slice]
            counts[number] = steps[number]
        self._set_steps(counts)

    def drop_snapshot(self) -> None:
        """Make the step final: from now on `undo` changes nothing."""
        self._snapshot = None


def step_count(steps: float) -> torch.Tensor:
    """Return a step count as torch's Adam stores it, a tensor on the CPU.

    In float32, because a 16-bit default dtype could not count beyond 256.
    """
    return torch.tensor(steps, dtype=torch.float32, device="cpu")


def rows_of(parameter: torch.Tensor) -> int:
    """Return how many rows a parameter has; 1 if its rows are not contiguous in memory."""
    (stride,) = strides_of([parameter])
    if parameter.dim() < 2 or not parameter.numel() or stride[0] != max(stride):
        return 1
    return parameter.shape[0]


def _pieces(
    vectors: Sequence[torch.Tensor],
    sizes: Sequence[int],
    rows: Sequence[int],
    ratios: torch.Tensor | None,
) -> Iterator[tuple[Any, ...]]:
    """Yield pieces of g, m, v and s, each with views of g and v, [rows, row length], and ratios.

    vectors: of parameters side by side, with these sizes and rows. ratios: one for each row.
    """
    each_ratio = [None] * len(rows) if ratios is None else ratios.split([*rows])
    parts = [*zip(*(each.split([*sizes]) for each in vectors), rows, each_ratio, strict=True)]
    # On a GPU a single piece, as each takes ten launches; on a CPU pieces that fit in its cache.
    if vectors[0].device.type != "cpu":
        by_rows = [
            (g.view(count, -1), v.view(count, -1), ratio.view(count, 1))
            for g, _, v, _, count, ratio in parts
            if ratio is not None
        ]
        yield *vectors, by_rows
        return
    for *part, count, ratio in parts:
        if count == 1 or ratio is None:
            split = zip(*(each.split(_PIECE) for each in part), itertools.repeat(ratio))
        else:
            length = max(1, _PIECE * count // max(1, part[0].numel()))
            of_rows = [*(each.view(count, -1) for each in part), ratio.view(count, 1)]
            split = zip(*(each.split(length) for each in of_rows), strict=True)
        for g, m, v, s, each in split:
            yield g, m, v, s, [] if each is None else [(g, v, each)]
