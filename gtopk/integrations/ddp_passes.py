"""DDP's backward pass: its buckets and parameters for a hook, and the work that it leaves to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._C._distributed_c10d import GradBucket, ProcessGroup
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from ..exchange.residual_state import plain_name
from ..runtime.world import world
from ..runtime.world.process_sets import ProcessSet, global_process_set
from .bucket_exchanges import as_shaped, split


def refuse_sparse(bucket: GradBucket) -> None:
    """Raise ValueError for the sparse gradient of an embedding, for which DDP has a bucket."""
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
    before = [(p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]

    def write() -> None:
        parts = split(buffer, parameters)
        for parameter, part, (grad, version) in zip(parameters, parts, before, strict=True):
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                continue  # DDP has written it
            update = as_shaped(part, parameter)
            if grad is not None:
                grad.copy_(update)  # changes nothing where it is a view of DDP's bucket
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
