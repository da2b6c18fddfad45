"""Replica: one rank's own model, the center that all ranks agree on, and the merge of both.

    x_i = z + o_i        replica i: the center z, and the offset it has come from there

Normalized merging, dense (T keeps all) or compressed by top-k:

    s_i = T(w_i o_i)     S, r_i = reduce(s_i)          the weights w_i sum to one
    z' = z + S           o_i' = (w_i o_i - s_i + r_i) / w_i

Entries that are not sent stay in the replica, as its offset: the local gradient sees them, so
nothing is applied twice. Kept outside the replica and added at the next merge, like residuals of
gradients, they diverge at rates where this is stable. Law: z' + sum w_i o_i' = z + sum w_i o_i.
Where all is sent, every replica becomes the weighted mean. Weights that change between merges also
change the weight of an old offset.

Elastic merging (EASGD, Zhang, Choromanska and LeCun 2015, arXiv 1412.6651; SMA of CROSSBOW,
Koliousis et al. 2019) pulls replica and center towards each other:

    s_i = T(f o_i)       S, r_i = reduce(s_i)          f: the force
    z' = z + S           x_i' = x_i - (s_i - r_i)      law: z' + sum x_i' = z + sum x_i

Either may give the center momentum: z' gains m (z - the center before it), and so do the replicas
that follow it.

RoundExchange: reduces a round's sums by the optimizer's compression, with a residual.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from collectives.transports import Transport

from ..compression import ErrorFeedback, Shards
from ..exchange.bucket_exchange import open_bucket_exchange
from ..exchange.buckets.arrays import from_array, to_array, view_tensor
from ..exchange.exchange import Exchanged, Progress
from ..optim.samples import LocalClip, norm_of


class TimedReduction(NamedTuple):
    """A reduction's result, apply included, and when it began and ended, by time.perf_counter."""

    exchanged: Exchanged
    began: float
    ended: float


class RoundExchange:
    """One rank's side of a round's exchange: `capture_sums`, then `reduce` on the engine's thread.

    bucket_exchange: holds the sums, in a bucket, and reduces them.
    progress: counts reductions that had an update.
    Raises ValueError for adam_correction, as sums and offsets are reduced here, not gradients of
    single steps, and for shards.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], compression: Any) -> None:
        if isinstance(compression, ErrorFeedback) and compression.adam_correction:
            raise ValueError(
                "adam_correction is for a gradient that every rank has in every step: modes 'abs', "
                "'hogbatch' and 'adaptive-hogbatch' exchange sums and models; wrap Adam itself"
            )
        if isinstance(compression, Shards):
            raise ValueError(
                "Compression.shards is not for the modes of adapt but 'balanced', which do not "
                "save owner errors: use that, or Compression.gtopk"
            )
        self._clip = LocalClip([], None)
        self.progress = Progress()
        self.bucket_exchange = open_bucket_exchange("", parameters, [], compression, self.progress)
        self._last_reduction: TimedReduction | None = None

    @property
    def signature(self) -> str:
        """Return the text that must be equal on all ranks."""
        return self.bucket_exchange.signature

    @property
    def _residuals(self) -> dict[str, torch.Tensor]:
        residual = self.bucket_exchange.residual
        return {} if residual is None else residual.after_last_step()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of residual and velocity, [n] on the host, and the exchange's progress.

        They are None where everything is sent, and without momentum correction.
        """
        residuals = self._residuals
        return {
            **{
                name: residuals[name].to("cpu", copy=True) if name in residuals else None
                for name in ("residual", "velocity")
            },
            "steps": self.progress.steps,
            "regions": self.bucket_exchange.record()["regions"],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the residual of another exchange of as many elements, and resume from its steps.

        All ranks do so before the next reduction. Raises ValueError for a residual where this
        compression keeps none.
        """
        residuals = self._residuals
        # Before anything is changed: a state that does not fit must leave the residual as it is.
        for name in ("residual", "velocity"):
            if state[name] is not None and name not in residuals:
                raise ValueError(
                    f"this compression keeps no {name}, and the state has one, which would be "
                    "lost; load it with the compression it was saved with"
                )
        for name, tensor in residuals.items():
            tensor.zero_() if state[name] is None else tensor.copy_(state[name])
        if (residual := self.bucket_exchange.residual) is not None:
            residual.is_empty = state["residual"] is None
            # Entries may be here now that another rank is to go on with; all ranks load together.
            residual.may_be_misplaced = True
        self.progress.steps = state["steps"]
        self.bucket_exchange.resume(state)

    @property
    def residual_views(self) -> list[torch.Tensor] | None:
        """Return the residual by parameter, as views of its memory; None where it is empty."""
        residual = self.bucket_exchange.residual
        if residual is None or residual.is_empty:
            return None
        return self.bucket_exchange.bucket.split(view_tensor(residual.values))

    def clear_residual(self) -> None:
        """Clear the residual, which its caller has taken over."""
        if (residual := self.bucket_exchange.residual) is not None:
            residual.clear()

    def capture_sums(
        self, sums: Sequence[torch.Tensor | None], allowed_norm: float | None = None
    ) -> bool:
        """Capture a rank's sums, one for each parameter; return whether they are finite.

        allowed_norm: this rank's part of the update is shortened to its share of this norm.
        """
        self._clip = LocalClip(sums, allowed_norm)
        self.bucket_exchange.capture_gradients(1.0, 1.0, sums)
        return self.bucket_exchange.all_finite()

    def reduce(
        self, transport: Transport, weight: float, share: float = 1.0
    ) -> list[torch.Tensor] | None:
        """Return the update, the sum over ranks of weight * sums; None where it overflows.

        Then the residual is as it was before. share: this rank's share of the update, for clipping.
        """
        bucket = self.bucket_exchange.bucket
        # Not when the sums were captured: weight and share follow from all ranks' counts, known
        # only now.
        bucket.weight = weight * self._clip.factor(weight, share)
        began = time.perf_counter()
        # Before the exchange adds this round's sums: an overflow is known only at its end.
        self.bucket_exchange.snapshot()
        exchanged = self.bucket_exchange.reduce(transport)
        reduced = time.perf_counter()
        if exchanged.finite:
            self.bucket_exchange.apply_sum()
        else:
            self.bucket_exchange.undo()
        # In both cases: a stale snapshot would bring back an earlier round.
        self.bucket_exchange.commit()
        ended = time.perf_counter()
        # Applying reads and writes what was selected, and is reported with it.
        select_seconds = exchanged.select_seconds + ended - reduced
        self._last_reduction = TimedReduction(
            replace(exchanged, select_seconds=select_seconds), began, ended
        )
        if not exchanged.finite:
            return None
        self.progress.steps += 1
        return bucket.gradients

    def pop_reduction(self) -> TimedReduction | None:
        """Return the last reduction's result, once; None if there was none since the last call."""
        ran, self._last_reduction = self._last_reduction, None
        return ran


class Replica:
    """A rank's parameters between merges: `prepare`, `exchange`, then `merge` or `pull`.

    center: z, by parameter; the same bits on every rank.
    was_center: whether it was the center after the last merge; else it keeps an offset.
    reduction: reduces offsets to S.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], compression: Any, momentum: float = 0.0
    ) -> None:
        """momentum: the center's momentum m."""
        self.parameters = list(parameters)
        self._own: Sequence[torch.Tensor] = self.parameters  # a copy of them, while `at_center`
        self.center = self._copy()
        self.was_center = True
        self._momentum = momentum
        self._before = self._copy() if momentum else []
        self.reduction = RoundExchange(self.parameters, compression)

    def _copy(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self._own]

    @property
    def is_at_center(self) -> bool:
        """Tell whether the parameters show the center at the moment."""
        return self._own is not self.parameters

    def norm(self) -> float:
        """Return |w|_2 / n of its n parameters; not finite where one is not."""
        return norm_of(self._own) / sum(tensor.numel() for tensor in self._own)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the replica to the center: its own offset is lost."""
        torch._foreach_copy_(list(self._own), self.center)
        self._show_center()

    def _show_center(self) -> None:
        """Copy the current center into the parameters, within `at_center`."""
        if self.is_at_center:
            torch._foreach_copy_(list(self.parameters), self.center)

    def offsets(self) -> list[torch.Tensor]:
        """Return the replica's offset from the center, by parameter."""
        return list(torch._foreach_sub([tensor.detach() for tensor in self._own], self.center))

    def prepare(self) -> bool:
        """Take the offsets for a merge; return whether they are finite, else reset the replica."""
        finite = self.reduction.capture_sums(self.offsets())
        if not finite:
            self.reset()
            # Again, of zeros now: the other ranks reduce, and this one has to take part.
            self.reduction.capture_sums(self.offsets())
        return finite

    def exchange(self, transport: Transport, weight: float) -> list[torch.Tensor] | None:
        """Return S, reduced from all ranks' weighted offsets; None where it is not finite."""
        return self.reduction.reduce(transport, weight)

    @torch.no_grad()
    def merge(self, update: list[torch.Tensor] | None, weight: float) -> None:
        """Move the center by S, and the replica to the center plus the offset that it did not send.

        update: None, on all ranks: every replica becomes the center as it was.
        weight: 0: this replica becomes the center, too.
        """
        if update is not None:
            self._move_center(update)
        self.reset()
        unsent = self.reduction.residual_views
        self.was_center = update is None or unsent is None or not weight
        if unsent is not None and not self.was_center:
            # The residual is of weighted offsets: o' = (w o - s + r) / w.
            torch._foreach_add_(list(self._own), _like(unsent, self.center), alpha=1 / weight)
        self.reduction.clear_residual()

    @torch.no_grad()
    def pull(self, update: list[torch.Tensor] | None, force: float) -> None:
        """Move the center by S, and the replica towards the center by the part that it has sent.

        update: None, on all ranks: every replica becomes the center as it was.
        force: 0: this replica becomes the center, too.
        """
        self.was_center = update is None or not force
        if update is None:
            self.reduction.clear_residual()
            self.reset()
            return
        # Before the center moves: what was reduced are offsets from where it is now.
        moved = torch._foreach_mul(self.offsets(), force)
        unsent = self.reduction.residual_views
        if unsent is not None:
            torch._foreach_sub_(moved, _like(unsent, self.center))
        torch._foreach_sub_(list(self._own), moved)
        self._move_center(update)
        if force:
            self._show_center()
        else:
            self.reset()
        self.reduction.clear_residual()

    def _move_center(self, update: list[torch.Tensor]) -> None:
        if not self._momentum:
            torch._foreach_add_(self.center, _like(update, self.center))
            return
        step = torch._foreach_sub(self.center, self._before)
        # Before the center moves: the next momentum is from here.
        torch._foreach_copy_(self._before, self.center)
        torch._foreach_mul_(step, self._momentum)
        torch._foreach_add_(step, _like(update, self.center))
        torch._foreach_add_(self.center, step)

    @contextmanager
    def at_center(self) -> Iterator[None]:
        """Show the center in the parameters meanwhile; other methods use the replica's own copy."""
        # May be nested: `drain` within `merged` works on the copy that the outer context shows.
        outer = self._own
        self._own = self._copy()
        with torch.no_grad():
            self._show_center()
        try:
            yield
        finally:
            with torch.no_grad():
                # Also what a drain or a loaded state has changed meanwhile.
                torch._foreach_copy_(list(outer), self._own)
            self._own = outer

    def weighted_offset(self, weight: float) -> NDArray[Any]:
        """Return this replica's offset times its weight, as a copy on the host: [n]."""
        return to_array(torch.cat([each.reshape(-1) for each in self.offsets()]) * weight)

    @torch.no_grad()
    def collapse(self, offset: NDArray[Any] | None = None) -> None:
        """Move the center by the sum of all ranks' weighted offsets, and become the center."""
        if offset is not None:
            start = 0
            for center in self.center:
                part = offset[start : start + center.numel()]
                center.add_(from_array(part, center))
                start += center.numel()
        self.reset()
        self.was_center = True

    def state_dict(self) -> dict[str, Any]:
        """Return the replica's state: the center, the one before, and its own parameters.

        Call it before steps after a merge, unless the replica was the center after it.
        """
        return {
            "center": [tensor.clone() for tensor in self.center],
            "before": [tensor.clone() for tensor in self._before],
            "own": [] if self.was_center else self._copy(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load another replica's state."""
        torch._foreach_copy_(self.center, list(state["center"]))
        if self._before:
            torch._foreach_copy_(self._before, list(state["before"] or state["center"]))
        torch._foreach_copy_(list(self._own), list(state["own"] or state["center"]))
        # Within `at_center` the parameters show the loaded center at once.
        self._show_center()
        self.was_center = not state["own"]


def _like(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in the dtypes of others."""
    return [tensor.to(other.dtype) for tensor, other in zip(tensors, others, strict=True)]
