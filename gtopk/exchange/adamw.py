"""AdamW's steps of each rank's own gradients, divided by a second moment that the ranks share.

    m = beta1 m + (1 - beta1) w g         w: this rank's share of the sum, g: its mean gradient
    v = beta2 v + (1 - beta2) w g^2       its own second moment, inflated by the noise of one rank
    s = second moment of the mean gradient, estimated from a sample of coordinates in every step
    R = the mean gradient's squares over those of this rank's gradient, by rows of a parameter
    V = (1 - q) s + q R v / w             q falls from 1 to a tenth as samples gather
    w u = lr m' / (sqrt(V) + eps)         m', v: less their bias to zero (Kingma and Ba 2015)

The sum of w u over ranks is AdamW's step of the mean gradient, as far as V is that gradient's
second moment. With v / w in its place every rank would divide by the size of its own gradient,
which is larger, and differs from rank to rank. The residual holds steps, with the rate included: a
step that is sent late has the rate of the time when it was made.

The sample is one of SWEEP coordinates (`sampling`): its sum travels as bfloat16, in an allreduce
within the bucket's own operation. s and the mean gradient's row sums are the same on all ranks, and
kept in the optimizer's `state`; m, v and the own row sums belong to one rank, beside its residual.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from collectives.transports import Transport

from .buckets.arrays import from_array, to_array, zeros
from .buckets.buckets import Bucket, split_like, strides_of
from .sampling import SWEEP, Sampling, times_sampled

# Keys of the optimizer's state of a parameter: the number of steps that were sampled; s, which is
# -1 where there is no sample yet; sums of the mean gradient's squares by rows.
STEP, SHARED, SHARED_ROWS = "step", "shared_exp_avg_sq", "shared_row_squares"
# No mean of squares is negative.
UNKNOWN: Final = -1.0

_ROW_DECAY: Final = 0.99
_PRIOR: Final = 2.0  # a rank's own moment counts as much as this number of samples
_LEAST_OWN: Final = 0.1  # the least q
_SMOOTHING: Final = 0.02  # this part of the mean row is added to each row
_PIECE: Final = 1 << 16  # elements that fit a cache with their moments


class Hyper(NamedTuple):
    """AdamW's options of one parameter. l2: weight decay that is added to the gradient (Adam)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    l2: float
    maximize: bool


# For a parameter that is in no group any more: the current step will be void.
GONE: Final = Hyper(0.0, 0.0, 0.0, 1.0, 0.0, False)


class AdamGroups:
    """The parameter groups and the state of an Adam or AdamW whose steps are made by gtopk.

    factor: multiplies the rates of the next step: adapted batches differ in size.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.factor = 1.0

    def read(self, parameters: Sequence[torch.Tensor]) -> list[Hyper | None]:
        """Return the options of these parameters, as they are now; None: steps pass over it."""
        of: dict[torch.Tensor, Hyper] = {}
        for group in self._optimizer.param_groups:
            refuse_amsgrad(group)
            beta1, beta2 = map(float, group["betas"])
            l2 = 0.0 if is_decoupled(group, self._optimizer) else float(group["weight_decay"])
            rate = float(group["lr"]) * self.factor
            one = Hyper(rate, beta1, beta2, float(group["eps"]), l2, bool(group["maximize"]))
            of.update(dict.fromkeys(group["params"], one))
        return [of.get(parameter, GONE) for parameter in parameters]

    def state_of(self, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        """Return the optimizer's own state of a parameter, to be changed in place."""
        state: dict[str, Any] = self._optimizer.state[parameter]
        return state

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values, for weight decay that is added to the gradient."""
        return parameter.detach()


def refuse_amsgrad(group: dict[str, Any]) -> None:
    """Raise ValueError for a parameter group with amsgrad=True."""
    if group["amsgrad"]:
        raise ValueError(
            "amsgrad=True needs the largest second moment of the mean gradient, and no rank knows "
            "that of every coordinate in every step: use amsgrad=False, or adam_steps='after', "
            "which steps with the agreed update and loses accuracy"
        )


def is_decoupled(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether weight decay shrinks parameters, as AdamW's, or is added to gradients."""
    # torch's later Adams have an option for it; of earlier ones the class tells.
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


@dataclass
class OwnMoments:
    """The moments of one rank, changed in place.

    first, second: m and v, [n]; ages: steps of this rank, int64 [p]; rows: row sums of w g^2,
    [all rows]. The last two are on the host.
    """

    first: torch.Tensor
    second: torch.Tensor
    ages: torch.Tensor
    rows: torch.Tensor


class _Before(NamedTuple):
    """The shared state before a step, at the coordinates that it samples."""

    places: torch.Tensor
    shared: torch.Tensor
    rows: torch.Tensor
    steps: list[int]


class AdamSteps:
    """Turns one bucket's gradients into AdamW's steps.

    In every step the program calls `read`, then the engine `make_step`, a collective. `undo` takes
    back what `make_step` has changed since the last `drop_snapshot`.

    ranks: how many exchange the bucket; with one, its own second moment is the mean gradient's.
    """

    def __init__(self, bucket: Bucket, groups: AdamGroups, ranks: int) -> None:
        self.share = 1.0 / ranks  # of this rank in the sum, where no numbers of samples are set
        self._groups, self._ranks = groups, ranks
        self._parameters, self._sizes = bucket.members, bucket.sizes
        self._strides = strides_of(self._parameters)
        self.rows = [rows_of(parameter) for parameter in self._parameters]
        self._sampling = Sampling(self._sizes, self.rows)
        self._shared = zeros(bucket.length, bucket.dtype, bucket.device).fill_(UNKNOWN)
        self._shared_rows = torch.zeros(sum(self.rows), dtype=self._shared.dtype, device="cpu")
        # Views of the two, by parameter: the optimizer's state holds these tensors.
        self._in_state = [
            *zip(self._split(self._shared), self._shared_rows.split(self.rows), strict=True)
        ]
        self._steps = [0] * len(self._sizes)
        self._hypers: list[Hyper | None] = []
        self._aside: Collection[int] = ()  # parameters without a gradient on any rank
        self._before: _Before | None = None
        self.mean_square = 0.0  # the mean gradient's sum of squares, from the last step's sample

    def read(self, own: OwnMoments) -> None:
        """Read the options, and take over state that was loaded into the optimizer."""
        self._hypers, self._aside = self._groups.read(self._parameters), ()
        for number, parameter in enumerate(self._parameters):
            if self._hypers[number] is None:
                continue
            state, (shared, rows) = self._groups.state_of(parameter), self._in_state[number]
            # Another tensor, or none: a state was loaded into the optimizer, or this is the first
            # step.
            if state.get(SHARED) is not shared:
                if SHARED not in state:  # no state yet, or a plain AdamW's
                    self._begin_anew(number, own)
                if SHARED in state:
                    shared.copy_(state[SHARED])
                    rows.copy_(state[SHARED_ROWS])
                elif "exp_avg_sq" in state:
                    self._begin_with(number, state, shared, own)
                state[STEP] = step_count(float(state.get(STEP, 0)))
                state[SHARED], state[SHARED_ROWS] = shared, rows
                if not int(own.ages[number]):
                    self._begin_late(number, int(state[STEP]), own)
            self._steps[number] = int(state[STEP])

    def is_unchanged(self) -> bool:
        """Tell whether the options are still those that `read` has found."""
        return self._hypers == self._groups.read(self._parameters)

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return split_like(flat, self._parameters, self._strides)

    def _begin_anew(self, number: int, own: OwnMoments) -> None:
        """Forget a parameter's moments, this rank's own and those that the ranks share."""
        shared, rows = self._in_state[number]
        shared.fill_(UNKNOWN)
        rows.zero_()
        for moments in (own.first, own.second):
            self._split(moments)[number].zero_()
        own.rows.split(self.rows)[number].zero_()
        own.ages[number] = 0

    def _begin_late(self, number: int, steps: int, own: OwnMoments) -> None:
        """Set the moments of a rank that begins at a step that others have reached before.

        With age 0, its first gradient, freed of its bias, would weigh as much as all that the
        others have gathered.
        """
        shared, rows = self._in_state[number]
        if not steps or bool((shared < 0).any()):
            return  # the others are hardly older: not every coordinate was sampled yet
        seen = 1.0 - (self._hypers[number] or GONE).beta2 ** steps
        self._split(own.second)[number].copy_(shared).mul_(self.share * seen)
        own.rows.split(self.rows)[number].copy_(rows).mul_(self.share)
        own.ages[number] = steps

    def _begin_with(
        self, number: int, state: MutableMapping[str, Any], shared: torch.Tensor, own: OwnMoments
    ) -> None:
        """Go on from the moments of a plain AdamW, which are of the mean gradient."""
        steps, share = int(state[STEP]), self.share
        hyper = self._hypers[number] or GONE
        # Out of the state: a plain Adam that gets it later must find that they are missing.
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
        """Turn the weighted gradient, [n], in place into the weighted step, to be subtracted.

        share: of this rank in the sum; 0: it has no gradient, and its moments stay.
        Returns the seconds of exchanging the sample.
        """
        self._add_decay(gradient, share)
        began = time.perf_counter()
        # Also with a share of 0: the sum of the samples is a collective.
        ratios = self._learn(gradient, share, transport, own.rows)
        seconds = time.perf_counter() - began
        if share:
            own.ages.add_(1)
            # A single rank needs no R, but samples for runs on more ranks from its state.
            self._step(gradient, share, own, ratios if self._ranks > 1 else None)
        return seconds

    def _add_decay(self, gradient: torch.Tensor, share: float) -> None:
        """Add weight decay, and negate to maximize, as Adam does before its moments."""
        for number, (hyper, parameter, part) in enumerate(
            zip(self._hypers, self._parameters, self._split(gradient), strict=True)
        ):
            if hyper is None or number in self._aside:  # decay alone would make a step, too
                continue
            if hyper.maximize:
                part.neg_()
            if hyper.l2 and share:
                values = self._groups.values_of(parameter).to(part.device, part.dtype)
                # Times the share: summed over the ranks, the decay is added once.
                part.add_(values, alpha=share * hyper.l2)

    def _learn(
        self, gradient: torch.Tensor, share: float, transport: Transport, own_rows: torch.Tensor
    ) -> torch.Tensor:
        """Add this step's sample to the shared moment; return R, [all rows], on the host."""
        sample = self._sampling.at(self._steps)
        places = sample.places.to(gradient.device)
        # Half of float32's bytes, and its range: float16 would lose small gradients.
        sent = gradient[places].to(torch.bfloat16)
        on_wire = to_array(sent)
        # A copy, as the sum overwrites `on_wire`.
        mine = from_array(on_wire, sent).to("cpu", self._shared_rows.dtype)
        if self._ranks > 1:
            transport.allreduce(on_wire)
        mean = from_array(on_wire, sent).to(self._shared.dtype)
        squares = mean.square()
        before = self._shared[places]
        # After the allreduce, which may raise, and before the first change.
        self._before = _Before(places, before, self._shared_rows.clone(), self._steps)
        weights = self._sample_weights(sample.numbers).to(before)
        # A first sample has the weight 1, with which lerp returns it to the bit: no trace of
        # UNKNOWN.
        self._shared[places] = torch.lerp(before, squares, weights)
        on_host = squares.cpu()
        self._shared_rows.mul_(_ROW_DECAY).index_add_(0, sample.rows, on_host)
        self.mean_square = SWEEP * float(on_host.sum())  # a sweep has each coordinate once
        own_rows.mul_(_ROW_DECAY)
        if share:
            own_rows.index_add_(0, sample.rows, mine.square_().div_(share))
        self._set_steps([steps + 1 for steps in self._steps])
        if passed_over := [n for n, hyper in enumerate(self._hypers) if hyper is None]:
            self.undo_part(passed_over)
        return self._ratios(own_rows)

    def _sample_weights(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the weight of each new sample in the mean of all its coordinate's samples, [s]."""
        weights = []
        for steps, hyper in zip(self._steps, self._hypers, strict=True):
            # A coordinate has one sample a sweep: Adam's moment would have faded by so much since
            # the last. The divisor frees the mean of its bias to zero, as Adam's.
            decay = (hyper or GONE).beta2 ** SWEEP
            weights.append((1.0 - decay) / (1.0 - decay ** times_sampled(steps + 1)))
        return torch.tensor(weights, dtype=self._shared.dtype, device="cpu")[numbers]

    def _ratios(self, own_rows: torch.Tensor) -> torch.Tensor:
        """Return the squares of the mean gradient over those of this rank, by rows.

        own_rows: this rank's sums times w, of as many samples; w is taken to be the usual share.
        """
        own, mean = own_rows / self.share, self._shared_rows
        if None in self._hypers:  # steps pass over some parameters: no rank has sums of theirs
            trained = torch.tensor([hyper is not None for hyper in self._hypers], device="cpu")
            trained = trained.repeat_interleave(torch.tensor(self.rows, device="cpu"))
            all_ratios = torch.ones_like(own)
            all_ratios[trained] = self._ratios_of(own[trained], mean[trained])
            return all_ratios
        return self._ratios_of(own, mean)

    def _ratios_of(self, own: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        ratio = mean.sum() / own.sum().clamp_min(1e-30)
        more = own.mean() * _SMOOTHING
        # Pulled towards the ratio of all rows: the smaller a row's sums are, the more.
        ratios = (mean + ratio * more) / (own + more + 1e-30)
        # Of equal gradients it is 1, of independent ones 1 / P.
        return ratios.clamp_(0.25 / self._ranks, 1.0)

    def square_of_mean(self) -> float:
        """Return the sum of the mean gradient's sampled squares, of about the last 100 steps."""
        return float(self._shared_rows.sum())

    def _set_steps(self, steps: list[int]) -> None:
        self._steps = steps
        for parameter, hyper, many in zip(self._parameters, self._hypers, steps, strict=True):
            if hyper is not None:
                self._groups.state_of(parameter)[STEP].fill_(many)

    def _step(
        self, gradient: torch.Tensor, share: float, own: OwnMoments, ratios: torch.Tensor | None
    ) -> None:
        vectors = (gradient, own.first, own.second, self._shared)
        parts = zip(*(each.split(self._sizes) for each in vectors), strict=True)
        of_rows = (
            [None] * len(self.rows)
            if ratios is None
            else ratios.to(gradient.device).split(self.rows)
        )
        for age, steps, hyper, rows, ratio, part in zip(
            own.ages.tolist(),
            self._steps,
            self._hypers,
            self.rows,
            of_rows,
            parts,
            strict=True,
        ):
            if hyper is None:
                continue
            bias1, bias2 = 1.0 - hyper.beta1**age, 1.0 - hyper.beta2**age
            times = times_sampled(steps)
            own_part = 1.0 if ratio is None else max(_PRIOR / (_PRIOR + times), _LEAST_OWN)
            for g, m, v, s, r in _pieces(part, rows, ratio):
                m.lerp_(g, 1.0 - hyper.beta1)
                v.mul_(hyper.beta2).addcmul_(g, g, value=(1.0 - hyper.beta2) / share)
                # From here on g is room for the step: m and v have taken in the gradient.
                torch.mul(v, 1.0 / (bias2 * share) if r is None else r / (bias2 * share), out=g)
                # After a whole sweep every coordinate has a sample: no mark has to be looked for.
                if ratio is not None and times > 1:
                    g.mul_(own_part).add_(s, alpha=1.0 - own_part)
                elif ratio is not None:  # some coordinates have no sample yet
                    g.copy_(torch.where(s < 0, g, torch.lerp(s, g, own_part)))
                g.sqrt_().add_(hyper.eps)
                torch.div(m, g, out=g).mul_(hyper.lr / bias1)

    def state_before(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of the optimizer's state as `undo` would leave it; empty: as it is now."""
        if self._before is None:
            return {}
        places, values, rows, steps = self._before
        shared = self._shared.clone()
        shared[places] = values
        views = zip(self._split(shared), rows.split(self.rows), steps, strict=True)
        return {
            parameter: {
                STEP: step_count(float(many)),
                SHARED: of_shared,
                SHARED_ROWS: of_rows.clone(),
            }
            for parameter, (of_shared, of_rows, many) in zip(self._parameters, views, strict=True)
        }

    def undo(self) -> None:
        """Restore the shared state of all parameters from before `make_step`."""
        self.undo_part(range(len(self._sizes)))
        self._before = None

    def exclude(self, numbers: Collection[int]) -> None:
        """Add no decay for these parameters in this step: no rank has a gradient of theirs."""
        self._aside = numbers

    def undo_part(self, numbers: Sequence[int]) -> None:
        """Restore the shared state of some parameters from before `make_step`.

        numbers: of parameters without a gradient on any rank: plain AdamW passes over them, too.
            The same on all ranks.
        """
        if self._before is None:
            return
        places, shared, rows, steps = self._before
        ends = [*itertools.accumulate(self._sizes, initial=0)]
        row_ends = [*itertools.accumulate(self.rows, initial=0)]
        now = list(self._steps)
        for number in numbers:
            mine = (places >= ends[number]) & (places < ends[number + 1])
            self._shared[places[mine]] = shared[mine]
            where = slice(*row_ends[number : number + 2])
            self._shared_rows[where] = rows[where]
            now[number] = steps[number]
        self._set_steps(now)

    def drop_snapshot(self) -> None:
        """Make the step final: `undo` changes nothing from now on."""
        self._before = None


def step_count(steps: float) -> torch.Tensor:
    """Return a number of steps as the optimizer's state has it, where torch's Adam keeps it.

    In float32: the script's default dtype may be of 16 bits, which cannot count beyond 256.
    """
    return torch.tensor(steps, dtype=torch.float32, device="cpu")


def rows_of(parameter: torch.Tensor) -> int:
    """Return how many rows a parameter has; 1 where rows do not follow each other in memory."""
    (stride,) = strides_of([parameter])
    if parameter.dim() < 2 or not parameter.numel() or stride[0] != max(stride):
        return 1
    return parameter.shape[0]


def _pieces(
    vectors: Sequence[torch.Tensor], rows: int, ratio: torch.Tensor | None
) -> Iterator[tuple[Any, ...]]:
    """Return parts of vectors, [rows, row length], and their ratios; they fit a host's cache."""
    if vectors[0].device.type != "cpu" or not vectors[0].numel():
        wide = rows, rows
    else:
        wide = max(1, _PIECE * rows // vectors[0].numel()), _PIECE
    if rows == 1 or ratio is None:
        return zip(*(each.split(wide[1]) for each in vectors), itertools.repeat(ratio))
    split = (each.view(rows, -1).split(wide[0]) for each in vectors)
    return zip(*split, ratio.view(rows, 1).split(wide[0]), strict=True)
