"""Replicas of a model that fully_shard shards exchange their shards' gradients by gTop-k (HSDP).

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    state = gtopk.fsdp.replicate(model, mesh["replicate"], density=0.001)

    ranks        0    1  |  2    3         0 and 1 share a replica, 2 and 3 another
    dense        0 <> 1  |  2 <> 3         FSDP's reduce-scatter, over what is fast
    gTop-k       0 <> 2, 1 <> 3            each shard among its replicas, over what is slow

The residual is sharded as the gradients are. A module's shard is exchanged when FSDP has it, before
backward goes on; what the replicas of one shard do is independent of the others. Needs torch 2.7 or
newer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    _set_hook = FSDPModule.set_all_reduce_hook  # of torch 2.7; the class itself is of 2.6
except (ImportError, AttributeError) as missing:
    raise ImportError(f"gtopk.fsdp needs torch 2.7 or newer, got {torch.__version__}") from missing

from collectives.transports import Transport

from . import world
from .agreement import gather_words
from .compression import GTopK
from .exchange import Progress
from .grad_scaler import loss_scale
from .hook_steps import HookSteps
from .lanes import Lane, open_lane
from .one_step import NOT_FINITE, OneStep
from .process_sets import ProcessSet, find_or_register
from .telemetry import StepReport

__all__ = ["ReplicaState", "replicate"]

_FORMAT: Final = 1


def replicate(
    model: torch.nn.Module,
    replicas: DeviceMesh,
    density: float = 0.001,
    *,
    scaler: Any = None,
    **options: Any,
) -> ReplicaState:
    """Let the replicas of a sharded model exchange its gradients by gTop-k; all ranks call it.

    model: fully_shard was applied to it, or to modules in it, on a mesh of one dimension.
    replicas: the mesh, of one dimension, of the ranks that hold the same shard as this one.
    density: of every sharded module's gradients; `options` are the others of Compression.gtopk.
        With momentum_correction the optimizer's own momentum must be 0.
    scaler: the GradScaler that scales the loss, to keep what is held back as it is when its scale
        changes.
    Joins the ranks (`hvd.init`) where nobody has. Raises ValueError for options out of range, and
    for a model or a mesh that is none of these.
    """
    compression = GTopK(density, **options)
    if compression.dense or compression.dense_vectors or compression.dense_under:
        raise ValueError(
            "a module's shard travels as one: dense parameters are not possible; leave out dense, "
            "dense_vectors and dense_under"
        )
    sharded = {name: each for name, each in model.named_modules() if isinstance(each, FSDPModule)}
    if not sharded:
        raise ValueError("no module of the model is sharded: call fully_shard before replicate")
    if replicas.ndim != 1:
        raise ValueError(
            f"replicas must be a mesh of one dimension, as mesh['replicate'], got {replicas}"
        )
    if not world.is_initialized():
        world.init()
    if torch.distributed.get_rank() != world.current().rank:
        raise ValueError(
            f"rank {torch.distributed.get_rank()} of torch.distributed is rank "
            f"{world.current().rank} of gtopk: start the ranks with one launcher"
        )
    state = ReplicaState(_process_set_of(replicas), compression, scaler)
    for name, module in sharded.items():
        _set_hook(module, partial(state.exchange, name))
    return state


def _process_set_of(replicas: DeviceMesh) -> ProcessSet:
    """Return the process set of this rank's replicas; all ranks make those of all."""
    mine = sorted(torch.distributed.get_process_group_ranks(replicas.get_group()))
    said = [" ".join(map(str, mine))]

    def gather(transport: Transport, votes: list[int]) -> list[list[str]]:
        return gather_words(transport, said)

    here = world.current()
    everyones = here.engine.submit("fsdp.replicas", [], gather).wait()
    sets = {ranks: [int(word) for word in ranks.split()] for (ranks,) in everyones}
    found = {ranks: find_or_register(sets[ranks]) for ranks in sorted(sets)}
    return found[said[0]]


class ReplicaState:
    """What replicas keep from step to step: of each sharded module, what was not sent yet.

    process_set: the ranks that hold the same shard.
    skipped_steps: in how many steps a gradient was not finite on some replica, or a sum beyond
        float32. From the module on where that shows, gradients become NaN on all of them:
        GradScaler skips such a step; without one, look at `skipped_steps` before optimizer.step().
        So do with several optimizers and a GradScaler, which skips only those that have a NaN: all
        or none may step. What is held back is then as before the step. What a sum has beyond
        float16, of gradients in it, is held back, and the step counts.
    """

    def __init__(self, process_set: ProcessSet, compression: GTopK, scaler: Any) -> None:
        self.compression = compression
        self.scaler = scaler
        self.progress = Progress()
        self.process_set = process_set
        self._skipped_before = 0
        self._name = world.current().name_optimizer(["fsdp"])
        self._lanes: dict[str, Lane] = {}
        self._held: dict[str, dict[str, torch.Tensor]] = {}  # of modules without a lane yet
        self._step = OneStep()
        self._steps = HookSteps(world.current(), process_set.engine, self._name)
        self._seen: set[str] = set()  # modules of the step under way

    def exchange(self, module: str, gradients: torch.Tensor) -> None:
        """Replace the mean over a replica's ranks, [shard's length], by that of all replicas."""
        if module in self._seen:
            self._close_step()
        self._seen.add(module)
        lane = self._lane_of(module, gradients)
        scale = loss_scale(self.scaler)
        lane.parameters[0].grad = gradients
        lane.take(1.0 / (self.process_set.size() or 1) / scale, scale)
        number = self._steps.hand_over(lane)

        def work(transport: Transport, votes: list[int]) -> None:
            began = time.perf_counter()
            self._steps.ran(number, began, self._step.run(lane, transport, votes))

        operation = self.process_set.engine.submit(
            f"{self._name}.{module}",
            [f"{gradients.dtype} {list(gradients.shape)}", lane.facts],
            work,
            vote=0 if lane.all_finite() else NOT_FINITE,
        )
        self._steps.submitted(number, operation)
        operation.wait()
        self._steps.arrived()

    @property
    def last_step(self) -> StepReport | None:
        """What the last step cost that another has followed; None before."""
        return self._steps.last

    @property
    def straggler_scores(self) -> list[float | None] | None:
        """How fast each replica of this shard computes beside the fastest; None: not told yet."""
        return self._steps.stragglers.scores

    @property
    def skipped_steps(self) -> int:
        """Return how many steps were skipped, the last one included."""
        return self._skipped_before + self._step.is_void

    def _close_step(self) -> None:
        if not self._seen:
            return
        counted = self._step.close()
        self._steps.close(counted, overlapped=False)
        self.progress.steps += counted
        self._skipped_before += not counted
        self._seen.clear()

    def _lane_of(self, module: str, gradients: torch.Tensor) -> Lane:
        if module not in self._lanes:
            whole = torch.nn.Parameter(gradients.detach().clone())
            lane = open_lane(module, [whole], [module], self.compression, self.progress)
            self._put_in(lane, self._held.pop(module, {}))
            self._lanes[module] = lane
        return self._lanes[module]

    def _put_in(self, lane: Lane, held: Mapping[str, torch.Tensor]) -> None:
        residual = lane.exchange.residual
        assert residual is not None
        for what, tensor in residual.after_last_step().items():
            if what not in held:
                tensor.zero_()
                continue
            if held[what].shape != tensor.shape:
                raise ValueError(
                    f"the {what} of the shard of '{lane.name}' has the shape "
                    f"{list(held[what].shape)}, but here it is {list(tensor.shape)}: the number "
                    "of shards must be what it was"
                )
            tensor.copy_(held[what])
        residual.holds_nothing = not held

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank holds back; save it on every rank."""
        self._close_step()
        held = {
            name: {what: tensor.clone() for what, tensor in residual.after_last_step().items()}
            for name, lane in self._lanes.items()
            if (residual := lane.exchange.residual) is not None
        }
        return {"format": _FORMAT, "steps": self.progress.steps, "held": {**self._held, **held}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold back this from the next step on; between steps only.

        Raises ValueError for a state of another format, and of shards of other lengths.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"the state must be of format {_FORMAT}, got {state.get('format')!r}; load it with "
                "the version of gtopk that saved it"
            )
        self._close_step()
        self._held = dict(state["held"])
        for name, lane in self._lanes.items():
            self._put_in(lane, self._held.pop(name, {}))
        self.progress.steps = int(state["steps"])
