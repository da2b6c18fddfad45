"""The bucket layout: rank 0 decides which parameters go into one bucket, and all ranks follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from collectives.transports import Transport

from ..compression import NoneCompressor
from ..exchange.bucket_exchange import attach_adam, open_bucket_exchange
from ..exchange.buckets.arrays import device_of
from ..exchange.exchange import DenseExchange, Progress, open_residual
from ..exchange.sparse_gradients import SparseGradientExchange
from .bucket_plan import ONE_BUCKET, Part, Sizes, arrange, sizes_for
from .options import Options
from .step_transaction import AnyBucketExchange


class Agreed(NamedTuple):
    """The layout that all ranks go by.

    parts:   the buckets, as rank 0 arranged them.
    steps:   taken by rank 0: a checkpoint may have been loaded on some ranks only.
    records: of the buckets in rank 0's checkpoint.
    unsent:  names of parameters that have a residual on any rank.
    sparse:  names of parameters whose gradients are sparse on any rank.
    """

    parts: list[Part]
    steps: int
    records: list[dict[str, Any]]
    unsent: set[str]
    sparse: set[str]


@dataclass(frozen=True)
class Plan:
    """The inputs of a layout on one rank: `agree` on it, then `open_bucket_exchanges`.

    trained: the parameters that may have a gradient; names: theirs.
    order:  the parameters whose gradients are complete, in that order; others follow.
    sparse: names of parameters whose gradients are sparse tensors on this rank.
    wanted: records of the buckets in a checkpoint; empty: there are none to resume.
    steps:  taken by this rank.
    unsent: names of parameters that have a residual on this rank.
    """

    options: Options
    trained: Sequence[torch.nn.Parameter]
    names: Sequence[str]
    order: Sequence[torch.nn.Parameter]
    sparse: Sequence[str]
    wanted: Sequence[Mapping[str, Any]]
    steps: int
    unsent: Sequence[str]

    def signature(self) -> list[str]:
        """Return the options, shapes, dtypes and strides that must be equal on all ranks."""
        signature = self.options.signature()
        for name, parameter in zip(self.names, self.trained, strict=True):
            said = f"parameter '{name}' {list(parameter.shape)} {parameter.dtype}"
            if not parameter.is_contiguous():
                strides = torch.empty_like(parameter, device="meta").stride()
                said += f" of strides {list(strides)}"
            signature.append(said)
        return signature

    def agree(self, transport: Transport) -> Agreed:
        """Return the layout of rank 0, on every rank; all ranks call it together.

        A parameter that is sparse, or has a residual, on any rank counts as such on all.
        """
        sparse = set().union(*transport.gather_object(list(self.sparse)))
        unsent = set().union(*transport.gather_object(list(self.unsent)))
        # Rank 0's alone: the order in which gradients became complete may differ between ranks.
        mine = self._arrange(sparse, transport.size) if transport.rank == 0 else []
        parts = [[part.how, part.numbers] for part in mine]
        said = transport.broadcast_object([parts, self.steps, list(self.wanted)])
        parts, steps, records = said
        return Agreed(
            [Part(how, numbers) for how, numbers in parts], steps, records, unsent, sparse
        )

    def open_bucket_exchanges(
        self, agreed: Agreed, name: str, progress: Progress, ranks: int
    ) -> list[AnyBucketExchange]:
        """Return the buckets of the agreed parts, with room for unsent residuals; all are empty."""
        parts = agreed.parts
        compressed = sum(self._elements(part) for part in parts if part.how == "compressed") or 1
        # The last bucket begins when backward has ended: it takes no room from the others.
        waiting = [0 if part.how == "sparse" else self._elements(part) for part in parts[:-1]]
        bucket_exchanges = [
            self._open_bucket_exchange(
                part, f"{name}.{index}", progress, compressed, sum(waiting[index:]), ranks
            )
            for index, part in enumerate(parts)
        ]
        for bucket_exchange in bucket_exchanges:
            bucket_exchange.accept_sparse(agreed.sparse)
            if not agreed.unsent.isdisjoint(bucket_exchange.names):
                bucket_exchange.start_draining()
        return bucket_exchanges

    def _elements(self, part: Part) -> int:
        return sum(self.trained[number].numel() for number in part.numbers)

    def _arrange(self, sparse: set[str], ranks: int) -> list[Part]:
        if self.options.sparse_as_dense:
            sparse = set()
        numbers = {parameter: number for number, parameter in enumerate(self.trained)}
        groups, order = self._by_hand(numbers)
        order += [numbers[parameter] for parameter in self.order if parameter in numbers]
        order += reversed(range(len(self.trained)))
        feedback = self.options.feedback
        return arrange(
            list(dict.fromkeys(order)),
            [parameter.numel() for parameter in self.trained],
            self._sizes(ranks),
            groups=groups,
            dense={
                number
                for parameter, number in numbers.items()
                if feedback is not None and feedback.is_dense(self.names[number], parameter)
            },
            sparse={number for number, name in enumerate(self.names) if name in sparse},
        )

    def _by_hand(
        self, numbers: Mapping[torch.nn.Parameter, int]
    ) -> tuple[list[list[int]] | int, list[int]]:
        """Return the buckets that the user or a checkpoint gives, and their parameters' order."""
        groups = self.options.groups
        if isinstance(groups, int):
            return groups, []
        if groups is not None:
            return [[numbers[p] for p in group if p in numbers] for group in groups], []
        places = {name: number for number, name in enumerate(self.names)}
        bucket_exchanges = [
            [places[n] for n in bucket_exchange["names"] if n in places]
            for bucket_exchange in self.wanted
        ]
        return bucket_exchanges, [
            number for bucket_exchange in bucket_exchanges for number in bucket_exchange
        ]

    def _sizes(self, ranks: int) -> Sizes:
        value_bytes = 8 if any(p.dtype == torch.float64 for p in self.trained) else 4
        if ranks == 1:
            return ONE_BUCKET  # there is nothing to hide
        if self.options.bucket_bytes is not None:
            elements = max(1, self.options.bucket_bytes // value_bytes)
            return Sizes(elements, elements)
        elements = sum(parameter.numel() for parameter in self.trained)
        on_gpu = device_of(self.trained).type == "cuda"
        return sizes_for(self.options.compression, elements, ranks, value_bytes, on_gpu=on_gpu)

    def _open_bucket_exchange(
        self,
        part: Part,
        name: str,
        progress: Progress,
        compressed: int,
        waiting: int,
        ranks: int,
    ) -> AnyBucketExchange:
        """Return the bucket of a part.

        compressed: elements of all buckets that are compressed.
        waiting: elements of this bucket and the later ones that become ready during backward.
        """
        parameters = [self.trained[number] for number in part.numbers]
        names = [self.names[number] for number in part.numbers]
        if part.how == "sparse":
            return SparseGradientExchange(name, parameters[0], names[0])
        compression = self.options.compression if part.how == "compressed" else NoneCompressor
        elements = self._elements(part)
        budget_share = elements / compressed if part.how == "compressed" else 1.0
        room_share = elements / waiting if waiting else 1.0
        bucket_exchange = open_bucket_exchange(
            name, parameters, names, compression, progress, budget_share, room_share
        )
        feedback, adam, is_whole = self.options.feedback, self.options.adam, part.how == "dense"
        if feedback is not None and adam is not None:
            attach_adam(bucket_exchange, feedback, adam, ranks, whole=is_whole)
        elif feedback is not None and feedback.corrects and is_whole:
            # The wrapped optimizer has no momentum: these parameters take theirs here, too.
            bucket_exchange.exchange = DenseExchange(
                open_residual(bucket_exchange.bucket, feedback)
            )
        return bucket_exchange
