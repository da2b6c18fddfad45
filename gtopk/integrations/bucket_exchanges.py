"""BucketExchanges: an exchange for each bucket of DDP or FSDP, and the residual of each parameter.

DDP rebuilds its buckets after the first step, unless it is to find unused parameters; FSDP's have
the parameters with gradients in a pass. The residual moves along, parameter by parameter; that of a
frozen parameter, or of one in no bucket now, is kept apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..compression import GTopK, Shards, SparseCompression
from ..exchange.bucket_exchange import BucketExchange
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
        # By the identities of their parameters
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
        if OWNER_ERROR not in views:
            residuals = without_owner_errors(residuals)
        for what, part in views.items():
            part.copy_(residuals[what]) if what in residuals else part.zero_()
        residual = self._bucket_of[parameter][0].exchange.residual
        assert residual is not None
        residual.is_empty = False
        residual.may_be_misplaced |= (
            OWNER_ERROR in residuals
        )  # owners differ in other buckets, or ranks

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
        self._bucket_exchanges, self._bucket_of, self._residuals = {}, {}, {}
        for parameter, parts in residuals.items():
            for what, tensor in parts.items():
                if what in (AGE, ROWS):
                    self._residuals.setdefault(parameter, {})[what] = tensor.clone()
                    continue
                part = torch.empty(parameter.numel(), dtype=tensor.dtype, device=parameter.device)
                as_shaped(part, parameter).copy_(tensor)
                self._residuals.setdefault(parameter, {})[what] = part


def compression_of(
    hook: str, compression: object, density: float, options: Mapping[str, Any]
) -> SparseCompression:
    """Return a hook's compression: the one that was given, else gTop-k.

    hook: its name in errors. options: of Compression.gtopk, besides the density.
    Raises ValueError for a compression together with options, for one that hooks do not take, and
    for per-parameter dense rules; also the errors of Compression.gtopk.
    """
    if compression is None:
        compression = GTopK(density, **options)
    elif given := [*options] + ["density"] * (
        density != GTopK.density
    ):  # the default of hooks, too
        raise ValueError(
            f"give compression or the options of gTop-k, not both: got {', '.join(sorted(given))} "
            f"beside {compression!r}"
        )
    if not isinstance(compression, GTopK | Shards):
        raise ValueError(
            f"{hook} takes Compression.gtopk(...) or Compression.shards(...), got "
            f"{compression!r}; DistributedOptimizer takes all of them"
        )
    if compression.dense or compression.dense_vectors or compression.dense_under:
        raise ValueError(
            f"{hook} exchanges whole buckets, so per-parameter dense rules are not supported; "
            "leave out dense, dense_vectors and dense_under"
        )
    return compression


def as_shaped(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return elements in the order of memory as a view in the parameter's shape."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)


def stand_in(like: torch.Tensor, length: int) -> torch.nn.Parameter:
    """Return a parameter of this length, in the memory of one element; dtype, device as `like`."""
    return torch.nn.Parameter(like.detach().new_empty(1).expand(length))


def split(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return each parameter's part of a bucket, elements in the order of memory."""
    parts: Sequence[torch.Tensor] = buffer.split([p.numel() for p in parameters])
    return parts
