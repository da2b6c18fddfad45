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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray

from collectives.transports import Transport

from ...exchange.buckets.arrays import from_array, to_array
from ...optim.weights import norm_of
from .round_exchange import RoundExchange


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
