"""DDP's backward pass: its buckets and parameters for a hook, and the work that it leaves to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket, ProcessGroup
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from ..exchange.bucket_exchange import BucketExchange
from ..exchange.buckets.parameters import refuse_complex
from ..exchange.exchange import Progress
from ..exchange.residual_state import plain_name
from ..optim.double_reduction import groups_of_ddp
from ..optim.peers import Peers
from ..optim.replica_check import ReplicaCheck, require_check
from ..optim.wrapped.local_residual import center_of
from ..runtime.coordinator import Operation
from ..runtime.world import world
from ..runtime.world.process_sets import ProcessSet, global_process_set
from .bucket_exchanges import BucketExchanges, as_shaped, split


class PendingBucket(NamedTuple):
    """A bucket that DDP has handed over, with the future of its agreed gradients."""

    bucket_exchange: BucketExchange
    number: int
    is_last: bool
    is_joined: bool  # this rank has joined: the gradients are zeros of no sample
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class HookReplicas:
    """Compares the replicas of a hook's model, in a pass after the step: `begin`, then `end`.

    peers, progress: of the hook; progress counts passes since the hook was made, and not those of a
        state that was loaded, as all ranks must compare in the same pass.
    check: says how often replicas differed.
    """

    def __init__(
        self,
        peers: Peers,
        bucket_exchanges: BucketExchanges,
        check_every: int | None,
        on_divergence: Literal["error", "warn"] | None,
    ) -> None:
        require_check(check_every, on_divergence)
        self.peers, self.progress = peers, Progress()
        self._bucket_exchanges = bucket_exchanges
        self.check = ReplicaCheck(self, check_every, on_divergence)

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The parameters as they were after the last step: DDP does not tell a hook their names."""
        return {
            center_of(each): f"number {number} in DDP's buckets, of shape {list(each.shape)}"  # type: ignore[arg-type]
            for number, each in enumerate(self._bucket_exchanges.in_order())
        }

    def begin(self, is_joined: bool) -> Operation | None:
        """Begin to compare, if it is time; call it at the last bucket of a pass.

        is_joined: this rank has joined: no rank compares then.
        """
        # In the pass after a step: the hook hears of passes, and not of the step that follows one.
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
            # Not raised here: this thread goes on with the pass's other buckets.
            failures.append(error)


def refuse_another_model(bucket: GradBucket, known: BucketExchanges) -> None:
    """Raise ValueError for new parameters after the first step, which has buckets in order."""
    if not known.knows(bucket.parameters()) and bucket.index() != len(known):
        raise ValueError(
            "this GTopKState has the parameters of another model: use one GTopKState for each "
            "model (or, of one model whose parameters have several dtypes, static_graph=True, "
            "with which DDP does not number its first buckets: leave it out)"
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
    # Identity alone does not tell: DDP writes in place where .grad is a view of its bucket.
    before = [(p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]

    def write() -> None:
        parts = split(buffer, parameters)
        for parameter, part, (grad, version) in zip(parameters, parts, before, strict=True):
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                # DDP has written it.
                continue
            update = as_shaped(part, parameter)
            if grad is not None:
                # Changes nothing where it is a view of DDP's bucket.
                grad.copy_(update)
            # A gradient of zeros would let the optimizer decay a parameter that no rank used.
            elif update.any():
                parameter.grad = torch.empty_like(parameter).copy_(update)

    after_ddp(write)


def after_ddp(call: Callable[[], None]) -> None:
    """Call a function once DDP has ended the current backward pass, which raises its errors."""
    # DDP's own callback is queued after its last bucket; one queued by a callback comes after it.
    queue = Variable._execution_engine.queue_callback
    queue(partial(queue, call))


def process_set_of(group: ProcessGroup | None) -> ProcessSet:
    """Return the process set with a process group's ranks; raise ValueError where there is none."""
    here = world.current()
    ranks = (
        torch.distributed.get_process_group_ranks(group)
        if group is not None
        else list(range(torch.distributed.get_world_size()))
    )
    if len(ranks) == here.size:
        return global_process_set
    for number, members in here.sets.items():
        if list(members.ranks) == ranks:
            found = ProcessSet(ranks)
            found.process_set_id = number
            return found
    raise ValueError(
        f"the process group of ranks {ranks} is no process set of gtopk: on all ranks call "
        f"hvd.init(process_sets=[hvd.ProcessSet({ranks}), ...]) first"
    )


def refuse_another_group(parameters: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    """Raise ValueError where DDP averages these parameters over others than the hook's `ranks`."""
    # The usual case, without another group, is cheap: the search below takes a tenth of a second.
    known = torch.distributed.distributed_c10d._world.pg_group_ranks.values()
    if all(set(group) == set(ranks) for group in known):
        return
    found = [*map(torch.distributed.get_process_group_ranks, groups_of_ddp(parameters))]
    if found and all(set(group) != set(ranks) for group in found):
        raise ValueError(
            f"rank {world.current().rank}: DistributedDataParallel averages this model over ranks "
            f"{found[0]}, and the state of its hook over ranks {list(ranks)}: give both one group, "
            "GTopKState(process_group=model.process_group)"
        )


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, with DDP around it, out of the wrappers of torch.compile and Fabric.

    The two may be in either order: Fabric compiles before it wraps, or after.
    """
    while inner := {"_forward_module", "_orig_mod"} & model._modules.keys():
        model = model.get_submodule(inner.pop())
    return model


def named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters by name, without the parts of names that wrappers add."""
    model = unwrapped(model)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}
