"""Replica: one rank's own model, the center that all ranks agree on, and the merge of both.

    x_i = z + o_i        replica i: the center z, and the offset it has come from there

Normalized merging, dense (T keeps all) or compressed by top-k:

    s_i = T(w_i o_i)     S, r_i = reduce(s_i)          the weights w_i sum to one
    z' = z + S           o_i' = (w_i o_i - s_i + r_i) / w_i

What is not sent stays in the replica, as its offset: the local gradient sees it, so nothing is
applied twice. Kept beside the replica and added at the next merge, as gradients' residuals are, it
diverges at rates where this is stable. Law: z' + sum w_i o_i' = z + sum w_i o_i. Where all is sent,
every replica becomes the weighted mean. Weights that change between merges change what an old
offset weighs.

Elastic merging (EASGD, Zhang, Choromanska and LeCun 2015, arXiv 1412.6651; SMA of CROSSBOW,
Koliousis et al. 2019) pulls replica and center towards each other:

    s_i = T(f o_i)       S, r_i = reduce(s_i)          f: the force
    z' = z + S           x_i' = x_i - (s_i - r_i)      law: z' + sum x_i' = z + sum x_i

Either may give the center momentum: z' gains m (z - the center before it), and so do the replicas
that follow it.

RoundExchange: a round's sums of gradients, through the optimizer's method, with a residual.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from collectives.algorithms import Regions
from collectives.ranges import profiled
from collectives.transports import Transport

from ...compression import ErrorFeedback, Shards
from ...exchange.buckets.arrays import from_array, to_array, view_tensor
from ...exchange.buckets.buckets import Bucket
from ...exchange.exchange import Exchanged, Progress, SparseExchange
from ...exchange.exchanges import open_exchange
from ...exchange.residual import ResidualSize
from ...optim.samples import LocalClip, norm_of


class Ran(NamedTuple):
    """A reduction's result, apply included, and when it began and ended, by time.perf_counter."""

    exchanged: Exchanged
    began: float
    ended: float


class RoundExchange:
    """One rank's side of a round's exchange: it selects from it, keeps a residual, and gets back.

    bucket:   of the sums; exchange: the way they are reduced.
    progress: how many reductions had an update.
    Raises ValueError for adam_correction, as what is reduced here is no single gradient of a
    rank's, and for shards.
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
        self.bucket = Bucket(parameters)
        self._clip = LocalClip([], None)
        self.progress = Progress()
        self.exchange = open_exchange(self.bucket, compression, self.progress)
        self._ran: Ran | None = None

    @property
    def elements(self) -> int:
        """Return how many values are exchanged."""
        return self.bucket.length

    @property
    def signature(self) -> str:
        """Return what must be equal on all ranks."""
        return self.exchange.signature

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what was not sent yet, [n] on the host, and how far the exchange is.

        residual, velocity: None where all is sent, and without momentum correction.
        """
        residual = self.exchange.residual
        residuals = {} if residual is None else residual.after_last_step()
        regions = self._regions
        return {
            **{
                name: residuals[name].to("cpu", copy=True) if name in residuals else None
                for name in ("residual", "velocity")
            },
            "steps": self.progress.steps,
            "regions": None if regions is None else regions.record(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold back what another exchange of as many elements did, and go on from its steps.

        All ranks do so before the next reduction. Raises ValueError for a residual where this
        compression keeps none.
        """
        residuals = (
            {} if self.exchange.residual is None else self.exchange.residual.after_last_step()
        )
        for name in ("residual", "velocity"):
            if state[name] is not None and name not in residuals:
                raise ValueError(
                    f"this compression keeps no {name}, and the state has one, which would be "
                    "lost; load it with the compression it was saved with"
                )
        for name, tensor in residuals.items():
            tensor.zero_() if state[name] is None else tensor.copy_(state[name])
        if (residual := self.exchange.residual) is not None:
            residual.holds_nothing = state["residual"] is None
            residual.astray = True
        self.progress.steps = state["steps"]
        if self._regions is not None and state["regions"] is not None:
            self._regions.resume(state["regions"])

    @property
    def _regions(self) -> Regions | None:
        exchange = self.exchange
        return exchange.regions if isinstance(exchange, SparseExchange) else None

    @property
    def unsent(self) -> list[torch.Tensor] | None:
        """Return the residual's own memory, by parameter; None where nothing is left in it."""
        residual = self.exchange.residual
        if residual is None or residual.holds_nothing:
            return None
        return self.bucket.split(view_tensor(residual.values))

    def forget(self) -> None:
        """Keep nothing of what was not sent: it is somebody else's now."""
        if self.exchange.residual is not None:
            self.exchange.residual.clear()

    def take(self, sums: Sequence[torch.Tensor | None], allowed_norm: float | None = None) -> bool:
        """Take a rank's sums, one for each parameter; return whether they are finite.

        allowed_norm: their part of the update is shortened to this rank's share of it.
        """
        self._clip = LocalClip(sums, allowed_norm)
        self.bucket.take(1.0, gradients=sums)
        return self.bucket.all_finite()

    def reduce(
        self, transport: Transport, weight: float, share: float = 1.0
    ) -> list[torch.Tensor] | None:
        """Return the update: the sum of weight * sums of all ranks; share: of this rank in it.

        None where it overflows: the residual is then as it was before.
        """
        bucket, residual = self.bucket, self.exchange.residual
        bucket.weight = weight * self._clip.factor(weight, share)
        began = time.perf_counter()
        with bucket.on_stream():
            if residual is not None:
                residual.remember()
            exchanged = self.exchange(bucket, transport)
            reduced = time.perf_counter()
            if exchanged.finite:
                with profiled("apply"):
                    self.exchange.apply(bucket)
            elif residual is not None:
                residual.restore()
        if residual is not None:
            residual.forget()
        ended = time.perf_counter()
        select_seconds = exchanged.select_seconds + ended - reduced
        self._ran = Ran(replace(exchanged, select_seconds=select_seconds), began, ended)
        if not exchanged.finite:
            return None
        self.progress.steps += 1
        return bucket.gradients

    def take_ran(self) -> Ran | None:
        """Return what the last reduction did, once; None where nothing was reduced since then."""
        ran, self._ran = self._ran, None
        return ran

    def residual_size(self) -> ResidualSize | None:
        """Return how large the residual is after the last reduction; reads all of it."""
        residual = self.exchange.residual
        return None if residual is None else residual.residual_size(self.exchange.sent_mass())


class Replica:
    """A rank's parameters between merges.

    center: z, by parameter; the same bits on every rank.
    was_center: whether it was the center after the last merge; else it keeps an offset.
    reduction: what offsets become S by.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], compression: Any, momentum: float = 0.0
    ) -> None:
        """momentum: of the center."""
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
        """Tell whether the parameters are the center's meanwhile."""
        return self._own is not self.parameters

    @property
    def signature(self) -> str:
        """Return what must be equal on all ranks."""
        return self.reduction.signature

    def norm(self) -> float:
        """Return |w|_2 / n of its n parameters; not finite where one is not."""
        return norm_of(self._own) / sum(tensor.numel() for tensor in self._own)

    @torch.no_grad()
    def reset(self) -> None:
        """Become the center again: what this replica has done is lost."""
        torch._foreach_copy_(list(self._own), self.center)
        self._show_center()

    def _show_center(self) -> None:
        """Let the parameters be the center as it is by now, while they are to be the center."""
        if self.is_at_center:
            torch._foreach_copy_(list(self.parameters), self.center)

    def offsets(self) -> list[torch.Tensor]:
        """Return how far the replica is from the center."""
        return list(torch._foreach_sub([tensor.detach() for tensor in self._own], self.center))

    def prepare(self) -> bool:
        """Take the offsets for a merge; return whether they are finite: else become the center."""
        finite = self.reduction.take(self.offsets())
        if not finite:
            self.reset()
            self.reduction.take(self.offsets())
        return finite

    def exchange(self, transport: Transport, weight: float) -> list[torch.Tensor] | None:
        """Return S, of all ranks' offsets times their weights; None where it is not finite."""
        return self.reduction.reduce(transport, weight)

    @torch.no_grad()
    def merge(self, update: list[torch.Tensor] | None, weight: float) -> None:
        """Move the center by S, and the replica to it and what it has not sent.

        update: None, on all ranks: every replica becomes the center as it was.
        weight: 0: this replica becomes the center, too.
        """
        if update is not None:
            self._move_center(update)
        self.reset()
        unsent = self.reduction.unsent
        self.was_center = update is None or unsent is None or not weight
        if unsent is not None and not self.was_center:
            torch._foreach_add_(list(self._own), _like(unsent, self.center), alpha=1 / weight)
        self.reduction.forget()

    @torch.no_grad()
    def pull(self, update: list[torch.Tensor] | None, force: float) -> None:
        """Move the center by S, and the replica by what it has sent of the force.

        update: None, on all ranks: every replica becomes the center as it was.
        force: 0: this replica becomes the center, too.
        """
        self.was_center = update is None or not force
        if update is None:
            self.reduction.forget()
            self.reset()
            return
        moved = torch._foreach_mul(self.offsets(), force)
        unsent = self.reduction.unsent
        if unsent is not None:
            torch._foreach_sub_(moved, _like(unsent, self.center))
        torch._foreach_sub_(list(self._own), moved)
        self._move_center(update)
        if force:
            self._show_center()
        else:
            self.reset()
        self.reduction.forget()

    def _move_center(self, update: list[torch.Tensor]) -> None:
        if not self._momentum:
            torch._foreach_add_(self.center, _like(update, self.center))
            return
        step = torch._foreach_sub(self.center, self._before)
        torch._foreach_copy_(self._before, self.center)
        torch._foreach_mul_(step, self._momentum)
        torch._foreach_add_(step, _like(update, self.center))
        torch._foreach_add_(self.center, step)

    @contextmanager
    def at_center(self) -> Iterator[None]:
        """Let the parameters be the center's meanwhile; all else goes by the replica's own."""
        outer = self._own
        self._own = self._copy()
        with torch.no_grad():
            self._show_center()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(outer), self._own)
            self._own = outer

    def weighted_offset(self, weight: float) -> NDArray[Any]:
        """Return a copy on the host of what this replica keeps, times its weight: [n]."""
        return to_array(torch.cat([each.reshape(-1) for each in self.offsets()]) * weight)

    @torch.no_grad()
    def collapse(self, offset: NDArray[Any] | None = None) -> None:
        """Become the center, moved by all ranks' weighted offsets: nothing is left of them."""
        if offset is not None:
            start = 0
            for center in self.center:
                part = offset[start : start + center.numel()]
                center.add_(from_array(part, center))
                start += center.numel()
        self.reset()
        self.was_center = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last merge, for a replica that is there or was the center."""
        return {
            "center": [tensor.clone() for tensor in self.center],
            "before": [tensor.clone() for tensor in self._before],
            "own": [] if self.was_center else self._copy(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what another replica was."""
        torch._foreach_copy_(self.center, list(state["center"]))
        if self._before:
            torch._foreach_copy_(self._before, list(state["before"] or state["center"]))
        torch._foreach_copy_(list(self._own), list(state["own"] or state["center"]))
        self._show_center()
        self.was_center = not state["own"]


def _like(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in the dtypes of others."""
    return [tensor.to(other.dtype) for tensor, other in zip(tensors, others, strict=True)]
