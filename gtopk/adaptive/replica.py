"""Replica: one rank's own model, the center that all ranks agree on, and the merge of both.

    x_i = z + o_i        replica i: the center z, and its offset from there

Normalized merging, dense (T keeps all) or compressed by top-k:

    s_i = T(w_i o_i)     S, r_i = reduce(s_i)          the weights w_i sum to one
    z' = z + S           o_i' = (w_i o_i - s_i + r_i) / w_i

Entries that are not sent stay in the replica, as its offset: the local gradient sees them, so
nothing is applied twice. If they were kept outside the replica and added at the next merge, like
residuals of gradients, training would diverge at rates at which this is stable. Conserved:
z' + sum w_i o_i' = z + sum w_i o_i. If everything is sent, every replica becomes the weighted
mean. When weights change between merges, the weight of an old offset changes too.

Elastic merging (EASGD, Zhang, Choromanska and LeCun 2015, arXiv 1412.6651; SMA of CROSSBOW,
Koliousis et al. 2019) pulls replica and center towards each other:

    s_i = T(f o_i)       S, r_i = reduce(s_i)          f: the force
    z' = z + S           x_i' = x_i - (s_i - r_i)      conserved: z' + sum x_i' = z + sum x_i

Either can give the center momentum: z' gains m (z - the center before it), and so do the replicas
that follow it.

RoundExchange: reduces a round's sums with the optimizer's compression, with a residual.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray

from collectives.transports import Transport

from ..compression import ErrorFeedback, Shards
from ..exchange.bucket_exchange import open_bucket_exchange
from ..exchange.buckets.arrays import from_array, to_array, view_tensor
from ..exchange.exchange import Exchanged, Progress
from ..optim.samples import LocalClip, norm_of


class RoundExchange:
    """One rank's side of a round's exchange: `capture_sums`, then `reduce` on the engine's thread.

    bucket_exchange: holds the sums, in a bucket, and reduces them.
    progress: counts reductions that had an update.
    Raises ValueError for shards, and for adam_correction, because it reduces sums and offsets, not
    gradients of single steps.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], compression: Any) -> None:
        if isinstance(compression, ErrorFeedback) and compression.adam_correction:
            raise ValueError(
                "adam_correction is for a gradient that every rank has in every step: modes 'abs', "
                "'hogbatch' and 'adaptive-hogbatch' exchange sums and models; wrap Adam itself"
            )
        if isinstance(compression, Shards):
            raise ValueError(
                "Compression.shards works only with mode 'balanced' of adapt, because the other "
                "modes do not save owner errors: use 'balanced', or Compression.gtopk"
            )
        self._clip = LocalClip([], None)
        self.progress = Progress()
        self.bucket_exchange = open_bucket_exchange("", parameters, [], compression, self.progress)
        self._last_reduction: tuple[Exchanged, tuple[float, float]] | None = None

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

        Residual and velocity are None if everything is sent; velocity also without momentum
        correction.
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
        """Load the residual of another exchange with as many elements, and resume from its steps.

        All ranks must load before the next reduction. Raises ValueError for a residual if this
        compression keeps none.
        """
        residuals = self._residuals
        # Checked first: a state that does not fit must leave the residual unchanged.
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
            # Entries may now be here that belong on another rank; all ranks load together.
            residual.may_be_misplaced = True
        self.progress.steps = state["steps"]
        self.bucket_exchange.resume(state)

    @property
    def residual_views(self) -> list[torch.Tensor] | None:
        """Return the residual by parameter, as views of its memory; None if it is empty."""
        residual = self.bucket_exchange.residual
        if residual is None or residual.is_empty:
            return None
        return self.bucket_exchange.bucket.split(view_tensor(residual.values))

    def clear_residual(self) -> None:
        """Clear the residual after the caller has taken it over."""
        if (residual := self.bucket_exchange.residual) is not None:
            residual.clear()

    def capture_sums(
        self, sums: Sequence[torch.Tensor | None], allowed_norm: float | None = None
    ) -> bool:
        """Capture a rank's sums, one for each parameter; return whether they are finite.

        allowed_norm: clip this rank's part of the update to its share of this norm.
        """
        self._clip = LocalClip(sums, allowed_norm)
        self.bucket_exchange.capture_gradients(1.0, 1.0, sums)
        return self.bucket_exchange.all_finite()

    def reduce(
        self, transport: Transport, weight: float, share: float = 1.0
    ) -> list[torch.Tensor] | None:
        """Return the update, the sum over ranks of weight * sums; None if it overflows.

        After an overflow the residual is restored. share: this rank's share of the update, for
        clipping.
        """
        bucket = self.bucket_exchange.bucket
        # Only now: weight and share depend on all ranks' counts, which were unknown when the sums
        # were captured.
        bucket.weight = weight * self._clip.factor(weight, share)
        began = time.perf_counter()
        # Before the exchange adds this round's sums: an overflow shows only at its end.
        self.bucket_exchange.snapshot()
        exchanged = self.bucket_exchange.reduce(transport)
        if exchanged.finite:
            exchanged = self.bucket_exchange.apply_at_once(exchanged)
        else:
            self.bucket_exchange.undo()
        # In both cases: a stale snapshot would bring back an earlier round.
        self.bucket_exchange.commit()
        self._last_reduction = exchanged, (began, time.perf_counter())
        if not exchanged.finite:
            return None
        self.progress.steps += 1
        return bucket.gradients

    def pop_reduction(self) -> tuple[Exchanged, tuple[float, float]] | None:
        """Return the last reduction's result and span, once; None if there was none since then."""
        reduction, self._last_reduction = self._last_reduction, None
        return reduction


class Replica:
    """A rank's parameters between merges: `prepare`, `exchange`, then `merge` or `pull`.

    center: z, by parameter; the same bits on every rank.
    was_center: whether the replica was the center after the last merge; else it has an offset.
    reduction: reduces offsets to S.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], compression: Any, momentum: float = 0.0
    ) -> None:
        """momentum: the center's momentum m."""
        self.parameters = list(parameters)
        self._own: Sequence[torch.Tensor] = self.parameters  # in `at_center`: a copy of them
        self.center = self._copy()
        self.was_center = True
        self._momentum = momentum
        self._previous_center = self._copy() if momentum else []
        self.reduction = RoundExchange(self.parameters, compression)
        self._equal_weight = 1.0  # one over the ranks

    def _copy(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self._own]

    @property
    def is_at_center(self) -> bool:
        """Tell whether the parameters show the center now."""
        return self._own is not self.parameters

    def norm(self) -> float:
        """Return |w|_2 / n of its n parameters; not finite if one of them is not."""
        return norm_of(self._own) / sum(tensor.numel() for tensor in self._own)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the replica to the center; its own offset is lost."""
        torch._foreach_copy_(list(self._own), self.center)
        self._show_center()

    def _show_center(self) -> None:
        """In `at_center`, copy the current center into the parameters."""
        if self.is_at_center:
            torch._foreach_copy_(list(self.parameters), self.center)

    def offsets(self) -> list[torch.Tensor]:
        """Return the replica's offset from the center, by parameter."""
        return list(torch._foreach_sub([tensor.detach() for tensor in self._own], self.center))

    def prepare(self) -> bool:
        """Capture the offsets; return whether they are finite; if not, reset the replica."""
        finite = self.reduction.capture_sums(self.offsets())
        if not finite:
            self.reset()
            # Again, now of zeros: the other ranks reduce, so this one must take part.
            self.reduction.capture_sums(self.offsets())
        return finite

    def exchange(self, transport: Transport, weight: float) -> list[torch.Tensor] | None:
        """Return S, reduced from all ranks' weighted offsets; None if it is not finite."""
        self._equal_weight = 1.0 / transport.size
        return self.reduction.reduce(transport, weight)

    def _unsent(self, weight: float) -> list[torch.Tensor] | None:
        """Return what this replica must keep, by parameter; None if that is nothing."""
        unsent = self.reduction.residual_views
        # With weight 0 it sent zeros, but may hold others' entries: errors of rounded sums, or a
        # shard of its node's offsets.
        if unsent is None or not (weight or any(part.any() for part in unsent)):
            return None
        return unsent

    @torch.no_grad()
    def merge(self, update: list[torch.Tensor] | None, weight: float) -> None:
        """Move the center by S, and the replica to the center plus the offset that it did not send.

        update: None, on all ranks: every replica is reset to the old center.
        weight: 0: this replica becomes the center, too, plus entries of others that returned to it.
        """
        if update is not None:
            self._move_center(update)
        self.reset()
        unsent = None if update is None else self._unsent(weight)
        self.was_center = unsent is None
        if unsent is not None:
            # The residual holds weighted offsets: o' = (w o - s + r) / w.
            scale = 1 / (weight or self._equal_weight)
            torch._foreach_add_(list(self._own), _as_like(unsent, self.center), alpha=scale)
        self.reduction.clear_residual()

    @torch.no_grad()
    def pull(self, update: list[torch.Tensor] | None, force: float) -> None:
        """Move the center by S, and the replica towards the center by the part that it has sent.

        update: None, on all ranks: every replica is reset to the old center.
        force: 0: this replica becomes the center, too, plus entries of others that returned to it.
        """
        unsent = None if update is None else self._unsent(force)
        self.was_center = update is None or (not force and unsent is None)
        if update is None:
            self.reduction.clear_residual()
            self.reset()
            return
        # Before the center moves: the reduced offsets are relative to its current position.
        moved = torch._foreach_mul(self.offsets(), force)
        if unsent is not None:
            torch._foreach_sub_(moved, _as_like(unsent, self.center))
        self._move_center(update)
        if force:
            self._show_center()
        else:
            self.reset()
        torch._foreach_sub_(list(self._own), moved)
        self.reduction.clear_residual()

    def _move_center(self, update: list[torch.Tensor]) -> None:
        if not self._momentum:
            torch._foreach_add_(self.center, _as_like(update, self.center))
            return
        step = torch._foreach_sub(self.center, self._previous_center)
        # Before the center moves: the next momentum starts here.
        torch._foreach_copy_(self._previous_center, self.center)
        torch._foreach_mul_(step, self._momentum)
        torch._foreach_add_(step, _as_like(update, self.center))
        torch._foreach_add_(self.center, step)

    @contextmanager
    def at_center(self) -> Iterator[None]:
        """Show the center in the parameters; meanwhile, other methods use a copy of the replica."""
        # May be nested: `drain` within `merged` works on the copy that the outer context shows.
        outer = self._own
        self._own = self._copy()
        with torch.no_grad():
            self._show_center()
        try:
            yield
        finally:
            with torch.no_grad():
                # Includes changes that a drain or a loaded state has made meanwhile.
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

        Call it after a merge, before any step, unless the replica was the center after the merge.
        """
        return {
            "center": [tensor.clone() for tensor in self.center],
            "before": [tensor.clone() for tensor in self._previous_center],
            "own": [] if self.was_center else self._copy(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load another replica's state."""
        torch._foreach_copy_(self.center, list(state["center"]))
        if self._previous_center:
            torch._foreach_copy_(self._previous_center, list(state["before"] or state["center"]))
        torch._foreach_copy_(list(self._own), list(state["own"] or state["center"]))
        # Within `at_center` the parameters show the loaded center at once.
        self._show_center()
        self.was_center = not state["own"]


def _as_like(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in the dtypes of others."""
    return [tensor.to(other.dtype) for tensor, other in zip(tensors, others, strict=True)]
