"""BucketExchanges: an exchange for each bucket of DDP or FSDP, and the residual of each parameter.

PassTransaction: all buckets of a backward pass count, or none.

DDP rebuilds its buckets after the first step, unless it is to find unused parameters; FSDP's have
the parameters with gradients in a pass. The residual moves along, parameter by parameter; that of a
frozen parameter, or of one in no bucket now, is kept apart.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from collectives.ranges import profiled
from collectives.transports import Transport

from ..exchange.bucket_exchange import BucketExchange
from ..exchange.exchange import Exchanged
from ..exchange.residual import AGE, OWNER_ERROR, ROWS
from ..exchange.residual_state import ResidualState, without_owner_errors


class BucketExchanges:
    """A BucketExchange for each bucket so far; `bucket_exchange_of` returns it.

    open_bucket_exchange: makes one of a parameter that is the whole bucket, and of the parameters
        that it stands for.
    """

    def __init__(
        self,
        open_bucket_exchange: Callable[
            [torch.nn.Parameter, Sequence[torch.Tensor]], BucketExchange
        ],
    ) -> None:
        self._open_bucket_exchange = open_bucket_exchange
        # By the identities of their parameters.
        self._bucket_exchanges: dict[tuple[int, ...], BucketExchange] = {}
        # By parameter: its bucket, its number there, and where it begins.
        self._bucket_of: dict[torch.Tensor, tuple[BucketExchange, int, int]] = {}
        # Of parameters without a bucket, and of frozen ones; elements in the order of memory.
        self._residuals: dict[torch.Tensor, ResidualState] = {}

    def __len__(self) -> int:
        return len(self._bucket_exchanges)

    def parameters(self) -> set[torch.Tensor]:
        """Return the parameters of all buckets, and of the state that was loaded last."""
        return {*self._bucket_of, *self._residuals}

    def in_order(self) -> list[torch.Tensor]:
        """Return the parameters of all buckets, as they came: in the same order on all ranks."""
        return list(self._bucket_of)

    def knows(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Tell whether all these parameters were in a bucket, or in a state that was loaded."""
        return all(p in self._bucket_of or p in self._residuals for p in parameters)

    def bucket_exchange_of(
        self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> BucketExchange:
        """Return the exchange of a bucket, with the residual of its parameters."""
        # By identity: `_bucket_of` keeps the parameters alive, so no other tensor gets one's id.
        key = tuple(map(id, parameters))
        if key not in self._bucket_exchanges:
            for parameter in parameters:
                if parameter in self._bucket_of:
                    self._take_out(self._bucket_of[parameter][0])
            # Not of the buffer's own memory: DDP allocates others, and this one would be kept.
            whole = stand_in(buffer, buffer.numel())
            bucket_exchange = self._open_bucket_exchange(whole, parameters)
            starts = itertools.accumulate((p.numel() for p in parameters), initial=0)
            for index, (parameter, start) in enumerate(zip(parameters, starts, strict=False)):
                self._bucket_of[parameter] = bucket_exchange, index, start
            self._bucket_exchanges[key] = bucket_exchange
        self._exclude_frozen(parameters, buffer)
        return self._bucket_exchanges[key]

    def _exclude_frozen(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Set frozen parameters' gradients to zero, and keep their residuals out of the bucket."""
        for parameter, gradient in zip(parameters, split(buffer, parameters), strict=True):
            if not parameter.requires_grad:
                # Whatever DDP has there must neither be sent nor join the residual.
                gradient.zero_()
                if parameter not in self._residuals:
                    self._residuals[parameter] = self._copy_of(parameter)
                    self._put_in(parameter, {})
            elif parameter in self._residuals:
                self._put_in(parameter, self._residuals.pop(parameter))

    def _take_out(self, bucket_exchange: BucketExchange) -> None:
        """Dissolve a bucket, and keep its residual until other buckets have its parameters."""
        moved = [
            parameter
            for parameter, (home, *_) in self._bucket_of.items()
            if home is bucket_exchange
        ]
        for parameter in moved:
            if parameter not in self._residuals:
                self._residuals[parameter] = self._copy_of(parameter)
            del self._bucket_of[parameter]
        self._bucket_exchanges = {
            key: each for key, each in self._bucket_exchanges.items() if each is not bucket_exchange
        }

    def _put_in(self, parameter: torch.Tensor, residuals: ResidualState) -> None:
        """Replace the residual of a parameter in its bucket."""
        views = self._views(parameter)
        # An owner's error that has no place in this bucket joins the residual: nothing is lost.
        if OWNER_ERROR not in views:
            residuals = without_owner_errors(residuals)
        for what, part in views.items():
            part.copy_(residuals[what]) if what in residuals else part.zero_()
        residual = self._bucket_of[parameter][0].exchange.residual
        assert residual is not None
        residual.is_empty = False
        # Another bucket, or another number of ranks, has other owners for the same entries.
        residual.may_be_misplaced |= OWNER_ERROR in residuals

    def _copy_of(self, parameter: torch.Tensor) -> ResidualState:
        return {what: part.clone() for what, part in self._views(parameter).items()}

    def _views(self, parameter: torch.Tensor) -> ResidualState:
        """Return views of a parameter's part of its bucket's residual, in the order of memory."""
        return self._views_in(*self._bucket_of[parameter], parameter.numel())

    @staticmethod
    def _views_in(
        bucket_exchange: BucketExchange, index: int, start: int, length: int
    ) -> ResidualState:
        residual = bucket_exchange.exchange.residual
        assert residual is not None
        views = {}
        for what, tensor in residual.after_last_step().items():
            if what == AGE:
                views[what] = tensor[index]
            elif what == ROWS:
                first = sum(residual.rows[:index])
                views[what] = tensor[first : first + residual.rows[index]]
            else:
                views[what] = tensor[start : start + length]
        return views

    def residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return each parameter that has a residual, and a view of it in the parameter's shape."""
        for parameter, parts in self._residuals.items():
            if "residual" in parts:
                yield parameter, as_shaped(parts["residual"], parameter)  # type: ignore[misc]
        for parameter, (bucket_exchange, _, start) in self._bucket_of.items():
            residual = bucket_exchange.exchange.residual
            if parameter in self._residuals or residual is None or residual.is_empty:
                continue
            part = residual.after_last_step()["residual"][start : start + parameter.numel()]
            yield parameter, as_shaped(part, parameter)  # type: ignore[misc]

    def residual_of(self, parameter: torch.Tensor, *, is_trained: bool) -> ResidualState:
        """Return copies of the residual of a parameter, in its shape.

        For a trained parameter that was in no bucket yet it has the parts of a first residual:
        torch's DCP loads only parts that a state has.
        """
        own = self._residuals.get(parameter)
        if own is None and parameter in self._bucket_of:
            own = self._views(parameter)
        elif own is None and is_trained and parameter.numel() and not parameter.is_complex():
            whole = stand_in(parameter, parameter.numel())
            alone = self._open_bucket_exchange(whole, [parameter])
            own = self._views_in(alone, 0, 0, parameter.numel())
        return {
            what: (part if what in (AGE, ROWS) else as_shaped(part, parameter)).clone(
                memory_format=torch.contiguous_format
            )
            for what, part in (own or {}).items()
        }

    def put_residuals(self, residuals: dict[torch.Tensor, ResidualState]) -> None:
        """Replace all residuals, given in their parameters' shapes, from the next step on."""
        # Buckets are made anew: the next pass may bring others, which take the residuals from here.
        self._bucket_exchanges, self._bucket_of, self._residuals = {}, {}, {}
        for parameter, parts in residuals.items():
            for what, tensor in parts.items():
                if what in (AGE, ROWS):
                    self._residuals.setdefault(parameter, {})[what] = tensor.clone()
                    continue
                part = torch.empty(parameter.numel(), dtype=tensor.dtype, device=parameter.device)
                as_shaped(part, parameter).copy_(tensor)
                self._residuals.setdefault(parameter, {})[what] = part


class BucketFlags:
    """The flags of a bucket's operation."""

    NOT_FINITE: Final = 1  # this rank's gradients are not finite
    PREEMPTED: Final = 2  # this rank had SIGTERM


def flags_of(bucket_exchange: BucketExchange) -> int:
    """Return NOT_FINITE where this rank's gradients are not; 0 where the exchange finds that."""
    return (
        BucketFlags.NOT_FINITE
        if bucket_exchange.checks_finite_first and not bucket_exchange.all_finite()
        else 0
    )


class PassTransaction:
    """Exchanges the buckets of a step; undoes them all where a gradient or a sum is not finite.

    Gradients that were handed back cannot be recalled. So the bucket that failed, and all that
    follow it, are made NaN: the optimizer's user sees that and skips the whole step. The residual
    is then, to the bit, what it was before the step.

    not_finite: the places of the ranks whose gradients of the last bucket were not finite: the
        same on all ranks.
    """

    def __init__(self) -> None:
        self.not_finite: list[int] = []
        self._exchanged: list[BucketExchange] = []
        self._void = False

    def run(
        self, bucket_exchange: BucketExchange, transport: Transport, all_flags: Sequence[int]
    ) -> Exchanged | None:
        """Replace a bucket's gradients by the agreed sum, or by NaN.

        Returns what the exchange did, its select_seconds with those of applying; None where the
        step was void already, and nothing was exchanged.
        """
        # A module that is used twice in a pass is exchanged twice: `undo` must go back to before
        # the first time.
        again = bucket_exchange in self._exchanged
        self._exchanged.append(bucket_exchange)
        self.not_finite = [n for n, flags in enumerate(all_flags) if flags & BucketFlags.NOT_FINITE]
        self._void |= bool(self.not_finite)
        exchanged = None
        # Whether the step is void follows from all ranks' flags and sums: all exchange, or none.
        if not self._void:
            if not again:
                bucket_exchange.snapshot()
            exchanged = bucket_exchange.reduce(transport)
            # The update is the same on all ranks, and so is this verdict: all gather here, to name
            # the ranks; where none says so, finite gradients had a sum that is not.
            if not exchanged.finite:
                self._void = True
                said = transport.gather_object(not bucket_exchange.all_finite())
                self.not_finite = [place for place, is_theirs in enumerate(said) if is_theirs]
        if self._void:
            self.drop()
            with bucket_exchange.bucket.on_stream():
                bucket_exchange.bucket.poison()
            return exchanged
        begun = time.perf_counter()
        with profiled("apply"), bucket_exchange.bucket.on_stream():
            bucket_exchange.exchange.apply(bucket_exchange.bucket)
        assert exchanged is not None
        seconds = exchanged.select_seconds + time.perf_counter() - begun
        return replace(exchanged, select_seconds=seconds)

    def drop(self) -> None:
        """Make the step void: the residual becomes what it was before."""
        self._void = True
        for bucket_exchange in self._exchanged:
            bucket_exchange.undo()

    @property
    def is_void(self) -> bool:
        """Whether the step does not count on any rank."""
        return self._void

    @property
    def buckets(self) -> int:
        """How many buckets were handed over in this step."""
        return len(self._exchanged)

    def close(self) -> bool:
        """End the step, and tell whether it counted."""
        counted = not self._void
        for bucket_exchange in self._exchanged:
            # A void step was undone: there is nothing to commit.
            bucket_exchange.commit()
            bucket_exchange.release_gradients()
        self._exchanged, self._void = [], False
        return counted


def as_shaped(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return elements in the order of memory as a view in the parameter's shape."""
    # A parameter may be channels_last, or have gaps: its gradient in a bucket has none.
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)


def stand_in(like: torch.Tensor, length: int) -> torch.nn.Parameter:
    """Return a parameter of this length, in the memory of one element; dtype, device as `like`."""
    return torch.nn.Parameter(like.detach().new_empty(1).expand(length))


def split(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return each parameter's part of a bucket, elements in the order of memory."""
    parts: Sequence[torch.Tensor] = buffer.split([p.numel() for p in parameters])
    return parts
