"""PlannedBuckets: an optimizer's buckets, as all ranks planned them."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from collectives.errors import MismatchError
from collectives.transports import Transport

from ..exchange.buckets.parameters import ParameterNames
from ..exchange.exchange import Progress
from ..exchange.residual_state import (
    ResidualState,
    copy_residuals,
    load_residuals,
    nonzero_names,
    residuals_of,
    unmatched,
    validate_residuals,
)
from ..exchange.sparse_gradients import AnyBucketExchange, SparseGradientExchange
from ..runtime.coordinator.agreement import name_ranks
from .bucket_plan import Agreed, Plan
from .options import Options
from .peers import Peers

_log = logging.getLogger("gtopk")


class PlannedBuckets:
    """The buckets of one optimizer, and the residuals of parameters that are in no bucket.

    The latter belong to frozen parameters and to names that no parameter has. `plan` creates the
    buckets. A loaded residual goes into them at once; loaded records and steps wait for the next
    plan, which uses rank 0's: other ranks may have loaded nothing.

    bucket_exchanges: in the order in which backward completes them; empty before the first plan.
    signature: a hash of the plan, equal on all ranks.
    started: the steps before the last plan with a new parameter or a loaded state on any rank.
    """

    def __init__(self, names: ParameterNames, options: Options, progress: Progress) -> None:
        """progress: passed on to the exchanges; a plan sets its steps."""
        self.bucket_exchanges: list[AnyBucketExchange] = []
        self.signature = ""
        self.started = 0
        self._known: set[str] = set()  # names of parameters that were in a plan
        self._names = names
        self._options = options
        self._progress = progress
        self._index: dict[torch.nn.Parameter, int] = {}  # each parameter's bucket
        self._trained: Sequence[torch.nn.Parameter] = ()  # as planned
        self._sparse: set[torch.nn.Parameter] = set()  # the buckets accept their sparse gradients
        self._residuals: dict[str, ResidualState] = {}  # of parameters in no bucket
        self._unmatched: set[str] = set()  # names without a parameter, already warned of
        self._without_momentum: set[str] = set()  # names with sparse gradients, already warned of
        self._records: list[dict[str, Any]] = []  # records of the buckets to resume
        self._loaded_steps: int | None = None  # None: nothing was loaded since the last plan

    def accepts_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Return whether the buckets accept these parameters' gradients, including sparse ones."""
        sparse = [p for p in parameters if (g := p.grad) is not None and g.is_sparse]
        return self._sparse.issuperset(sparse)

    def is_outdated(self, trained: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether this rank needs a new plan to exchange these parameters' gradients."""
        if self._loaded_steps is not None:
            return True
        # Compare by identity: == on tensors compares values, and waits for a GPU.
        if len(trained) == len(self._trained) and all(map(operator.is_, trained, self._trained)):
            return not self.accepts_gradients(trained)
        removed = self._index.keys() - set(trained)  # frozen, or removed from the groups
        if any(self.bucket_exchanges[self._index[parameter]].has_residual for parameter in removed):
            return True  # keep its residual until the parameter is trained again
        planned = [parameter for parameter in trained if parameter in self._index]
        # A new parameter needs no bucket until it has a gradient.
        is_new = any(p.grad is not None for p in trained if p not in self._index)
        return is_new or not self.accepts_gradients(planned)

    def plan(
        self,
        trained: Sequence[torch.nn.Parameter],
        order: Sequence[torch.nn.Parameter],
        peers: Peers,
    ) -> None:
        """Create the buckets, the same on every rank, and load the residuals into them.

        trained: the parameters that may have a gradient; all must have a name.
        order:   parameters with complete gradients, in the order in which they became complete.
        Raises HorovodInternalError, on all ranks alike, if they disagree or one has joined.
        """
        names = [self._names[parameter] for parameter in trained]
        # Copies: the buckets are replaced, and a parameter may move to another one, or to none.
        residuals = {**self._residuals, **copy_residuals(self.bucket_exchanges)}
        plan = Plan(
            self._options,
            trained,
            names,
            order,
            self._sparse_among(trained),
            self._records,
            self.steps,
            nonzero_names(residuals),
            self._loaded_steps is not None or not self._known.issuperset(names),
        )
        signature = plan.signature()
        agreed = _agree_on(plan, signature, peers)
        # If rank 0 has loaded nothing, this rank came later, and had nothing to send.
        is_lost = agreed.are_new[0] and agreed.steps > 0 and not self.steps
        if is_lost and self._options.feedback is not None:
            _log.warning(
                "rank %d of %d has no residual: rank 0 goes on from step %d, and this rank loaded "
                "nothing: what it had not sent is lost; let every rank save its own and load it, "
                "by gtopk.save_checkpoint and gtopk.load_latest",
                peers.rank,
                peers.size,
                agreed.steps,
            )
        self.started = agreed.steps if any(agreed.are_new) else self.started
        self._known.update(names)
        self._progress.steps = agreed.steps
        self.bucket_exchanges = plan.open_bucket_exchanges(
            agreed, peers.name, self._progress, peers.size
        )
        load_residuals(self.bucket_exchanges, residuals)
        # Only if parameters and order are the same: regions are positions in the vector.
        records = {tuple(record["names"]): record for record in agreed.records}
        for bucket_exchange in self.bucket_exchanges:
            if tuple(bucket_exchange.names) in records:
                bucket_exchange.resume(records[tuple(bucket_exchange.names)])
        self._records, self._loaded_steps, self._trained = [], None, trained
        self._residuals = {name: parts for name, parts in residuals.items() if name not in names}
        self._warn_of_unmatched(peers.world.rank)
        if peers.rank == 0:
            self._warn_of_lost_momentum()
        self._sparse = {parameter for each in self.bucket_exchanges for parameter in each.sparse}
        self._index = {
            p: index
            for index, bucket_exchange in enumerate(self.bucket_exchanges)
            for p in bucket_exchange.parameters
        }
        # Hashed, because each bucket's operation carries it.
        text = "\n".join([*signature, *map(str, agreed.parts)])
        self.signature = f"plan {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def drop_buckets(self) -> None:
        """Drop the buckets, which belong to a world that has ended; keep their residuals."""
        if self.bucket_exchanges:
            self._residuals, self._records = self.export_state()
            self.bucket_exchanges, self._index, self._sparse, self._trained = [], {}, set(), ()

    def export_state(self) -> tuple[dict[str, ResidualState], list[dict[str, Any]]]:
        """Return each parameter's residual after the last step, and the buckets' records."""
        if not self.bucket_exchanges:
            return self._residuals, self._records
        residuals = {**self._residuals, **copy_residuals(self.bucket_exchanges)}
        # A loaded state's buckets are created by the next plan.
        if self._loaded_steps is not None:
            return residuals, self._records
        return residuals, [bucket_exchange.record() for bucket_exchange in self.bucket_exchanges]

    def residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each parameter with a residual, and the residual in the parameter's shape.

        In a bucket this is a view of the bucket's memory; before a plan it is the loaded tensor.
        """
        yield from residuals_of(self.bucket_exchanges)
        for parameter, name in self._names.items():
            if parameter not in self._index and "residual" in self._residuals.get(name, {}):
                yield parameter, self._residuals[name]["residual"]

    def import_state(
        self, residuals: Mapping[str, ResidualState], records: list[dict[str, Any]], steps: int
    ) -> None:
        """Replace the residuals; the next plan uses the records and steps that rank 0 loaded.

        Other ranks may load nothing, so the agreed values stay until that plan.
        Raises DamagedError if a tensor does not fit the parameter of its name.
        """
        validate_residuals(residuals, {name: p for p, name in self._names.items()})
        if self.bucket_exchanges:
            load_residuals(self.bucket_exchanges, residuals)
        self._residuals, self._records, self._loaded_steps = dict(residuals), records, steps

    @property
    def steps(self) -> int:
        """Return the number of steps taken, including those before the last loaded state."""
        return self._progress.steps if self._loaded_steps is None else self._loaded_steps

    def _sparse_among(self, trained: Iterable[torch.nn.Parameter]) -> list[str]:
        """Return the names of parameters with sparse gradients, here now or before on any rank."""
        # Include earlier ones: a step may bring this rank no gradient of them.
        return [
            self._names[parameter]
            for parameter in trained
            if (parameter.grad is not None and parameter.grad.is_sparse)
            or parameter in self._sparse
        ]

    def _warn_of_unmatched(self, rank: int) -> None:
        """Warn of residuals without a matching parameter; they are kept, and saved again."""
        new = {
            name: parts for name, parts in self._residuals.items() if name not in self._unmatched
        }
        self._unmatched |= unmatched(
            new,
            self._names.all_names(),
            rank,
            "the optimizer has no parameter of that name; give it the names that the checkpoint "
            "was saved with (named_parameters)",
        ).keys()

    def _warn_of_lost_momentum(self) -> None:
        """Warn of sparse gradients: neither the correction nor the optimizer applies momentum."""
        feedback = self._options.feedback
        if feedback is None or not feedback.corrects:
            return
        sparse = {
            bucket_exchange.names[0]
            for bucket_exchange in self.bucket_exchanges
            if isinstance(bucket_exchange, SparseGradientExchange)
        }
        if new := sorted(sparse - self._without_momentum):
            self._without_momentum |= sparse
            _log.warning(
                "%s is not for sparse gradients, and the wrapped optimizer has no momentum: %s are "
                "trained without it; use sparse_as_dense=True, or leave out the correction",
                f"adam_correction={feedback.adam_correction}"
                if feedback.adam_correction
                else f"momentum_correction={feedback.momentum_correction:g}",
                ", ".join(map(repr, new)),
            )


def _agree_on(plan: Plan, signature: Sequence[str], peers: Peers) -> Agreed:
    """Return the plan of all ranks; raise MismatchError, on all alike, if one has joined."""

    def agree(transport: Transport, joined: list[int]) -> Agreed:
        if joined:
            raise MismatchError(
                f"all ranks plan {peers.name} together, but {name_ranks(joined)} joined: every "
                "rank must take a step before one joins; to add, freeze or unfreeze parameters or "
                "to load a state, wait until all have joined"
            )
        return plan.agree(transport)

    agreed: Agreed = peers.run_without_joined("plan", signature, agree)
    return agreed
