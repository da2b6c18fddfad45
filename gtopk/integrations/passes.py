"""A backward pass of DDP or FSDP, which passes its gradients to the hook bucket by bucket.

BucketExchanges: one exchange per bucket, and the residual of each parameter. PassTransaction:
either all buckets of a pass count, or none. The rest is for DDP only: HookReplicas compares its
replicas; other functions refuse what the hook cannot exchange.

DDP rebuilds its buckets after the first step, unless it must find unused parameters; FSDP's have
the parameters with gradients in a pass. The residual moves along, parameter by parameter; that of a
frozen parameter, or of one that is now in no bucket, is kept separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket, ProcessGroup
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from collectives.transports import Transport

from ..exchange.bucket_exchange import BucketExchange
from ..exchange.buckets.parameters import refuse_complex, require_module
from ..exchange.exchange import Progress
from ..exchange.residual import AGE, OWNER_ERROR, ROWS, Residual
from ..exchange.residual_state import ResidualState, plain_name, without_owner_errors
from ..optim.gradient_checks import ddps_of
from ..optim.peers import Peers
from ..optim.step_checks import ReplicaCheck, require_check
from ..optim.step_transaction import NOT_FINITE, PREEMPTED
from ..optim.wrapped.local_residual import center_of
from ..runtime.coordinator import Operation
from ..runtime.world import process_sets, world
from ..runtime.world.process_sets import ProcessSet, global_process_set
from ..telemetry.step_report import RecordedStep


class BucketExchanges:
    """A BucketExchange for each bucket so far; `bucket_exchange_of` returns it.

    open_bucket_exchange: creates one from a parameter that represents the whole bucket, and the
        parameters in it.
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
        # By parameter: its bucket, and its place in it.
        self._bucket_of: dict[torch.Tensor, tuple[BucketExchange, int]] = {}
        # Of parameters without a bucket, and of frozen ones; elements in memory order.
        self._residuals: dict[torch.Tensor, ResidualState] = {}

    def __len__(self) -> int:
        return len(self._bucket_exchanges)

    def parameters(self) -> set[torch.Tensor]:
        """Return the parameters of all buckets, and of the last loaded state."""
        return {*self._bucket_of, *self._residuals}

    def centers(self) -> dict[torch.Tensor, str]:
        """Return all parameters as of the last step; DDP does not give a hook their names."""
        return {
            center_of(each): f"number {number} in DDP's buckets, of shape {list(each.shape)}"  # type: ignore[arg-type]
            for number, each in enumerate(self._bucket_of)  # in order of arrival
        }

    def has_seen(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether all these parameters were in a bucket, or in a loaded state."""
        return all(p in self._bucket_of or p in self._residuals for p in parameters)

    def bucket_exchange_of(
        self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> BucketExchange:
        """Return the exchange of a bucket, with its parameters' residuals."""
        # By identity: `_bucket_of` keeps the parameters alive, so ids are not reused.
        key = tuple(map(id, parameters))
        if key not in self._bucket_exchanges:
            for parameter in parameters:
                if parameter in self._bucket_of:
                    self._take_out(self._bucket_of[parameter][0])
            # Not a view of the buffer: DDP allocates new ones, and this would keep the old alive.
            whole = stand_in(buffer, buffer.numel())
            bucket_exchange = self._open_bucket_exchange(whole, parameters)
            for place, parameter in enumerate(parameters):
                self._bucket_of[parameter] = bucket_exchange, place
            self._bucket_exchanges[key] = bucket_exchange
        self._exclude_frozen(parameters, buffer)
        return self._bucket_exchanges[key]

    def _exclude_frozen(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Zero frozen parameters' gradients, and keep their residuals out of the bucket."""
        for parameter, gradient in zip(parameters, split(buffer, parameters), strict=True):
            if not parameter.requires_grad:
                # Any value that DDP has there must not be sent, nor join the residual.
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
            for parameter, (current, _) in self._bucket_of.items()
            if current is bucket_exchange
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
        # An owner error with no place in this bucket joins the residual, so that it is not lost.
        if OWNER_ERROR not in views:
            residuals = without_owner_errors(residuals)
        for kind, part in views.items():
            part.copy_(residuals[kind]) if kind in residuals else part.zero_()
        residual = _residual(self._bucket_of[parameter][0])
        residual.is_empty = False
        # With another bucket, or another number of ranks, the same entries have other owners.
        residual.may_be_misplaced |= OWNER_ERROR in residuals

    def _copy_of(self, parameter: torch.Tensor) -> ResidualState:
        return {kind: part.clone() for kind, part in self._views(parameter).items()}

    def _views(self, parameter: torch.Tensor) -> ResidualState:
        """Return views of a parameter's part of its bucket's residual, in memory order."""
        bucket_exchange, place = self._bucket_of[parameter]
        return _residual(bucket_exchange).parts(place)

    def residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each parameter with a residual, and a view of it in the parameter's shape."""
        for parameter, parts in self._residuals.items():
            if "residual" in parts:
                yield parameter, as_shaped(parts["residual"], parameter)  # type: ignore[misc]
        for parameter, (bucket_exchange, place) in self._bucket_of.items():
            residual = _residual(bucket_exchange)
            if parameter not in self._residuals and not residual.is_empty:
                yield parameter, as_shaped(residual.part("residual", place), parameter)  # type: ignore[misc]

    def residual_of(self, parameter: torch.Tensor, *, is_trained: bool) -> ResidualState:
        """Return copies of a parameter's residual, in its shape.

        For a trained parameter that has not been in a bucket, return an initial residual: torch's
        DCP only loads parts that a state already has.
        """
        own = self._residuals.get(parameter)
        if own is None and parameter in self._bucket_of:
            own = self._views(parameter)
        elif own is None and is_trained and parameter.numel() and not parameter.is_complex():
            whole = stand_in(parameter, parameter.numel())
            own = _residual(self._open_bucket_exchange(whole, [parameter])).parts(0)
        return {
            kind: (part if kind in (AGE, ROWS) else as_shaped(part, parameter)).clone(
                memory_format=torch.contiguous_format
            )
            for kind, part in (own or {}).items()
        }

    def put_residuals(self, residuals: dict[torch.Tensor, ResidualState]) -> None:
        """Replace all residuals, given in their parameters' shapes, from the next step on."""
        # Recreate the buckets: the next pass may have others, which take the residuals from here.
        self._bucket_exchanges, self._bucket_of, self._residuals = {}, {}, {}
        for parameter, parts in residuals.items():
            for kind, tensor in parts.items():
                if kind in (AGE, ROWS):
                    self._residuals.setdefault(parameter, {})[kind] = tensor.clone()
                    continue
                part = torch.empty(parameter.numel(), dtype=tensor.dtype, device=parameter.device)
                as_shaped(part, parameter).copy_(tensor)
                self._residuals.setdefault(parameter, {})[kind] = part


def _residual(bucket_exchange: BucketExchange) -> Residual:
    """Return a bucket's residual; every compression that hooks support has one."""
    residual = bucket_exchange.residual
    assert residual is not None
    return residual


class PassTransaction(RecordedStep):
    """Exchange the buckets of a pass; undo them all if a gradient or a sum is not finite.

    Unlike with a StepTransaction, returned gradients cannot be recalled. So the bucket that failed
    and all later ones are set to NaN: the optimizer's user sees that and skips the whole step. The
    residual is then bit for bit what it was before the pass.

    not_finite: the places of the ranks with non-finite gradients in the last bucket; the same on
        all ranks.
    preempted: the ranks that received SIGTERM.
    ran:     the buckets that ran, with or without an error, in that order.
    is_void: whether the pass counts on no rank.
    is_closed: whether it has ended.
    """

    bucket_exchanges: list[BucketExchange]

    def __init__(self) -> None:
        super().__init__()
        self.not_finite: list[int] = []
        self.preempted: set[int] = set()
        self.ran: list[BucketExchange] = []
        self.is_void = self.is_closed = False

    def add(self, bucket_exchange: BucketExchange) -> int:
        """Add a bucket, on the program's thread; return its number in the pass."""
        self.bucket_exchanges.append(bucket_exchange)
        return len(self.bucket_exchanges) - 1

    def run(self, number: int, transport: Transport, all_flags: Sequence[int]) -> bool:
        """Replace a bucket's gradients with the agreed sum, or NaN, on the engine's thread.

        Returns whether this rank's gradients were finite. If the pass was already void, nothing is
        exchanged; otherwise the exchange's select_seconds include those of applying.
        """
        begun = time.perf_counter()
        bucket_exchange = self.bucket_exchanges[number]
        # A module used twice in a pass is exchanged twice: `undo` must return to before the first
        # time.
        is_repeated = bucket_exchange in self.ran
        self.ran.append(bucket_exchange)
        places = enumerate(all_flags)
        self.preempted.update(transport.ranks[n] for n, flags in places if flags & PREEMPTED)
        self.not_finite = [n for n, flags in enumerate(all_flags) if flags & NOT_FINITE]
        self.is_void |= bool(self.not_finite)
        if not bucket_exchange.elements:  # on all ranks: its parameters are all empty
            return True
        # All ranks' flags and sums decide whether the pass is void: all ranks exchange, or none.
        if not self.is_void:
            if not is_repeated:
                bucket_exchange.snapshot()
            self._reduce(number, transport)
        if self.is_void:
            self.drop()
            with bucket_exchange.bucket.on_stream():
                bucket_exchange.bucket.poison()
        else:
            self.exchanged[number] = bucket_exchange.apply_at_once(self.exchanged[number])
        self.spans.append((begun, time.perf_counter()))
        return transport.rank not in self.not_finite

    def _reduce(self, number: int, transport: Transport) -> None:
        bucket_exchange = self.bucket_exchanges[number]
        self.exchanged[number] = bucket_exchange.reduce(transport)
        # The update and so this decision are the same on all ranks: all gather here, to name the
        # culprits; if no rank reports any, a sum of finite gradients is not finite.
        if not self.exchanged[number].finite:
            self.is_void = True
            gathered = transport.gather_object(not bucket_exchange.all_finite())
            self.not_finite = [place for place, is_nonfinite in enumerate(gathered) if is_nonfinite]

    def drop(self) -> None:
        """Make the pass void: restore the residual from before it."""
        self.is_void = True
        for bucket_exchange in self.ran:
            bucket_exchange.undo()

    def close(self) -> bool:
        """End the pass, and return whether it counted."""
        for bucket_exchange in self.ran:
            # Harmless in a void pass, which was undone.
            bucket_exchange.commit()
            bucket_exchange.release_gradients()
        self.is_closed = True
        return not self.is_void


def as_shaped(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return elements in memory order as a view in the parameter's shape."""
    # A parameter may be channels_last, or have gaps; its gradient in a bucket has no gaps.
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)


def stand_in(like: torch.Tensor, length: int) -> torch.nn.Parameter:
    """Return a parameter of this length, in the memory of one element; dtype, device as `like`."""
    return torch.nn.Parameter(like.detach().new_empty(1).expand(length))


def split(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return each parameter's part of a bucket, elements in memory order."""
    parts: Sequence[torch.Tensor] = buffer.split([p.numel() for p in parameters])
    return parts


class PendingBucket(NamedTuple):
    """A bucket that DDP passed to the hook, with the future of its agreed gradients."""

    bucket_exchange: BucketExchange
    number: int
    is_last: bool
    is_joined: bool  # this rank has joined: the gradients are zeros without samples
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class HookReplicas:
    """Compare the replicas of a hook's model, in a pass after the step: `begin`, then `end`.

    names_of: returns the names of the parameters as of the last step, in an order equal on all
        ranks.
    peers, progress: of the hook. progress counts passes since the hook was created, without those
        of a loaded state, because all ranks must compare in the same pass (`HookSteps`).
    check: counts how often replicas differed.
    """

    def __init__(
        self,
        peers: Peers,
        progress: Progress,
        names_of: Callable[[], dict[torch.Tensor, str]],
        check_every: int | None = None,
        on_divergence: Literal["error", "warn"] | None = None,
    ) -> None:
        require_check(check_every, on_divergence)
        self.peers, self.progress = peers, progress
        self._names_of = names_of
        self.check = ReplicaCheck(self, check_every, on_divergence)

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The parameters as of the last step."""
        return self._names_of()

    def begin(self, is_joined: bool = False) -> Operation | None:
        """Start the comparison, if it is due; call it at the last bucket of a pass.

        is_joined: this rank has joined: then no rank compares.
        """
        # In the pass after a step, because the hook only sees passes, not the steps after them.
        self.check.await_step(updates=self.progress.steps > 0)
        if (compare := self.check.begin()) is None:
            return None
        return self.peers.engine.submit(
            f"{self.peers.name}.replicas",
            [],
            lambda transport, all_flags: compare(transport) if all(all_flags) else None,
            flags=not is_joined,
        )

    def end(self, operation: Operation, failures: list[Exception]) -> None:
        """Warn of replicas that differ, or add HorovodInternalError, on every rank alike."""
        try:
            self.check.end(operation.wait(), {})
        except Exception as error:
            # Do not raise: this thread continues with the pass's other buckets.
            failures.append(error)


def refuse_another_model(bucket: GradBucket, bucket_exchanges: BucketExchanges) -> None:
    """Raise ValueError for new parameters after the first step, which has buckets in order."""
    if not bucket_exchanges.has_seen(bucket.parameters()) and bucket.index() != len(
        bucket_exchanges
    ):
        raise ValueError(
            "this GTopKState belongs to another model: use one GTopKState for each model (or leave "
            "out DDP's skip_all_reduce_unused_params=True and, if the model has parameters of "
            "several dtypes, static_graph=True: with them DDP leaves out buckets, or does not "
            "number its first ones)"
        )


def refuse_kinds(bucket: GradBucket) -> None:
    """Raise ValueError for complex parameters, and for the sparse gradient of an embedding."""
    refuse_complex(bucket.parameters())
    if bucket.buffer().is_sparse:
        shape = list(bucket.parameters()[0].shape)
        raise ValueError(
            f"the parameter of shape {shape} has sparse gradients, which the hook cannot exchange: "
            "make its embedding with sparse=False, or train with hvd.DistributedOptimizer in place "
            "of DistributedDataParallel"
        )


def write_flat_gradients(parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Write the update of parameters that no rank used, once DDP has ended the backward pass.

    With find_unused_parameters, or a static graph, DDP does not change the .grad of such a
    parameter. But its residual is sent in that step as in any other.
    """
    # Identity is not enough: DDP writes in place if .grad is a view of its bucket.
    old_gradients = [(p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]

    def write() -> None:
        parts = split(buffer, parameters)
        for parameter, part, (grad, version) in zip(parameters, parts, old_gradients, strict=True):
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                # DDP has written it.
                continue
            update = as_shaped(part, parameter)
            if grad is not None:
                # Changes nothing if it is a view of DDP's bucket.
                grad.copy_(update)
            # With a gradient of zeros the optimizer would decay a parameter that no rank used.
            elif update.any():
                parameter.grad = torch.empty_like(parameter).copy_(update)

    after_backward(write)


def after_backward(call: Callable[[], None]) -> None:
    """Call a function once this backward pass has ended; the pass raises the function's errors."""
    # DDP and FSDP queue theirs after the last bucket; a callback queued by a callback runs later.
    queue = Variable._execution_engine.queue_callback
    queue(partial(queue, call))


def process_set_of(group: ProcessGroup | None) -> ProcessSet:
    """Return the process set with a process group's ranks; raise ValueError if none has them."""
    here = world.current()
    # torch's `new_group` returns an object that is not a group on ranks outside the group.
    if not (group is None or isinstance(group, ProcessGroup)):
        raise TypeError(
            f"rank {here.rank}: process_group must be a ProcessGroup with this rank, got {group!r}"
        )
    ranks = (
        torch.distributed.get_process_group_ranks(group)
        if group is not None
        else list(range(torch.distributed.get_world_size()))
    )
    if len(ranks) == here.size:
        return global_process_set
    if (found := process_sets.find(ranks)) is not None:
        return found
    raise ValueError(
        f"the process group of ranks {ranks} is no process set of gtopk: on all ranks call "
        f"hvd.init(process_sets=[hvd.ProcessSet({ranks}), ...]) first"
    )


def refuse_another_group(parameters: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    """Raise ValueError if DDP averages these parameters over ranks other than the hook's."""
    # The usual case, without another group, is cheap: the search below takes a tenth of a second.
    groups = torch.distributed.distributed_c10d._world.pg_group_ranks.values()
    if all(set(group) == set(ranks) for group in groups):
        return
    found = [
        torch.distributed.get_process_group_ranks(ddp["process_group"])
        for ddp in ddps_of(parameters)
    ]
    if found and all(set(group) != set(ranks) for group in found):
        raise ValueError(
            f"rank {world.current().rank}: DistributedDataParallel averages this model over ranks "
            f"{found[0]}, and the state of its hook over ranks {list(ranks)}: use the same group "
            "for both, GTopKState(process_group=model.process_group)"
        )


def has_hook(ddp: Mapping[str, Any]) -> bool:
    """Return whether a DDP has a hook of gtopk, also one that a function of the script calls."""
    hooks = (each for hook, state in ddp["_comm_hooks"] for each in (hook, type(state)))
    return any(each.__module__.startswith("gtopk.") for each in hooks)


def in_other_ddp(parameters: Collection[torch.Tensor]) -> set[torch.Tensor]:
    """Return the parameters of each DDP without a hook of gtopk that has any of these."""
    others = [ddp for ddp in ddps_of(parameters) if not has_hook(ddp)] if parameters else []
    return {parameter for ddp in others for parameter in ddp["_module_parameters"]}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, including DDP, without the wrappers of torch.compile and Fabric.

    The wrappers may be in either order: Fabric may wrap before or after compiling.
    """
    while inner := {"_forward_module", "_orig_mod"} & model._modules.keys():
        model = model.get_submodule(inner.pop())
    return model


def named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters by name, without the parts of names that wrappers add.

    Raises TypeError for an object that is no model, such as a state in its place.
    """
    require_module(model)
    model = unwrapped(model)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}
