"""AdamW's steps after the exchange: apply weight decay, and subtract the agreed steps.

The moments were applied before the exchange (`exchange.adamw`). This is for torch's own Adam and
AdamW; a derived class with its own `step` counts as another optimizer.

`ramp` warms up the learning rate: compressed AdamW is most fragile in the first half of a training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.weak import TensorWeakRef

from ...compression import ErrorFeedback, Hierarchical, check_density
from ...errors import check_choice, check_count
from ...exchange.adamw import SHARED, SHARED_ROWS, AdamGroups, is_decoupled, refuse_amsgrad
from ...exchange.buckets.parameters import parameters_of, require_optimizer
from ...reduce_ops import Adasum
from .local_residual import on_this_rank, take_center, versions_of


def groups_to_step_before(
    optimizer: torch.optim.Optimizer, compression: object
) -> AdamGroups | None:
    """Return an optimizer's groups if its steps can be computed before the exchange, else None.

    compression: must have a residual, of each rank's own gradients, and no momentum of its own.
    Raises ValueError for amsgrad=True.
    """
    if not isinstance(compression, ErrorFeedback) or compression.corrects:
        return None
    # A node's sum and its residual belong to no single rank.
    if isinstance(compression, Hierarchical) and compression.inside == "dense":
        return None
    own = (torch.optim.Adam, torch.optim.AdamW)
    # Unwrap torch's decorators: a class with its own `step` may do more.
    stepping = inspect.unwrap(type(optimizer).step)
    if not isinstance(optimizer, own) or stepping not in [inspect.unwrap(e.step) for e in own]:
        return None
    for group in optimizer.param_groups:
        refuse_amsgrad(group)
    return AdamGroups(optimizer)


@torch.no_grad()
def apply_agreed_steps(optimizer: Any, agreed: AgreedSteps | None) -> None:
    """Decay the parameters, and subtract the agreed steps, which replace the gradients.

    agreed: the steps as recorded, to detect changes; None: do not check.
    Afterwards the parameters are the center, including those with unsent steps applied.
    Raises RuntimeError for a sparse gradient, as Adam does, and ValueError for changed steps.
    """
    if agreed is not None:
        agreed.require_unchanged()
    for group in optimizer.param_groups:
        # Adam (not AdamW) adds the decay to gradients, so the steps already include it.
        keep = 1.0
        if is_decoupled(group, optimizer):
            keep -= float(group["lr"]) * float(group["weight_decay"])
        for parameter in group["params"]:
            center = take_center(parameter)
            update = parameter.grad
            if update is None:
                if center is not None:
                    on_this_rank(parameter).copy_(center)
                continue
            if update.is_sparse:
                raise RuntimeError(
                    "Adam does not support sparse gradients: use sparse=False in the embedding"
                )
            local = on_this_rank(parameter)
            # Decay first, in the parameter's own memory, which may still be c - a: one pass
            # overwrites it with the decayed center.
            torch.mul(local if center is None else center, keep, out=local)
            local.sub_(on_this_rank(update))


def keep_precision(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Restore the shared second moments in the dtype in which they were saved.

    torch has cast them to the parameters' dtype.
    state_dict: the one that the optimizer has just loaded.
    """
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, parameter in zip(saved, parameters_of(optimizer), strict=True):
        for name in (SHARED, SHARED_ROWS):
            tensor = state_dict["state"].get(number, {}).get(name)
            if tensor is not None:
                optimizer.state[parameter][name] = tensor.detach().clone()


def require_plain(states: Iterable[Any], rank: int) -> None:
    """Raise ValueError for states of steps computed before the exchange: Adam cannot use those.

    states: all states of an optimizer, including those of no parameter, such as a count.
    """
    of_parameters = (state for state in states if isinstance(state, Mapping))
    if any(SHARED in state and "exp_avg" not in state for state in of_parameters):
        raise ValueError(
            f"rank {rank}: the optimizer's state was saved with adam_steps='before', where each "
            "rank has moments of its own, but here Adam itself steps, as with adam_steps='after' "
            "and in all modes of adapt but 'balanced': resume with adam_steps='before', or load "
            "the model alone, with a new optimizer"
        )


class AgreedSteps:
    """The agreed steps that replace gradients: detects whether a script has changed them.

    A GradScaler may change them: torch does not count unscaling as a change of a tensor.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._versions = {  # with weak references to the gradients, so that `zero_grad` frees them
            parameter: (TensorWeakRef(parameter.grad), versions_of(parameter.grad))
            for parameter in parameters
            if parameter.grad is not None
        }

    def is_changed(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's step has been changed in place since it was recorded."""
        gradient, versions = self._versions.get(parameter, (lambda: None, (0, 0)))
        current = gradient()
        return current is not None and versions_of(current) != versions

    def is_in(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's gradient is still its agreed step."""
        gradient, _ = self._versions.get(parameter, (lambda: None, (0, 0)))
        return parameter.grad is not None and parameter.grad is gradient()

    def require_unchanged(self) -> None:
        """Raise ValueError if a step has been changed in place since it was recorded."""
        if any(map(self.is_changed, self._versions)):
            raise ValueError(
                "gradients were changed between synchronize() and step(), when they hold the "
                "agreed steps of AdamW, not gradients: use global_clip_norm=, which clips the mean "
                "gradient before the moments; adam_steps='after' steps with agreed gradients"
            )


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, unwrapping Accelerate's or Lightning's wrapper."""
    require_optimizer(optimizer)
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def options_of_adam(
    optimizer: torch.optim.Optimizer | None,
    compression: object,
    adam_steps: str,
    local_residual: bool | None,
    op: int,
) -> dict[str, Any]:
    """Return the `Options` fields for Adam; raise ValueError for incompatible options."""
    if optimizer is not None:
        require_optimizer(optimizer)
    check_choice("adam_steps", adam_steps, ("before", "after"))
    before = adam_steps == "before" and op != Adasum
    adam = None
    if before and optimizer is not None:
        adam = groups_to_step_before(optimizer, compression)
    if local_residual and adam is None:
        raise ValueError(
            "local_residual=True is for Adam and AdamW with steps computed before the exchange: "
            "the residual of other optimizers holds gradients, not steps"
        )
    return {"adam": adam, "local_residual": adam is not None and local_residual is not False}


def ramp(
    optimizer: torch.optim.Optimizer,
    steps: int,
    schedule: Callable[[int], float] | None = None,
    *,
    start: float = 0.5,
    until: float = 0.5,
) -> LambdaLR:
    """Return a scheduler that starts at a fraction of the learning rate and raises it linearly.

    The factor of step t is min(1, start + (1 - start) * t / (until * steps)), times schedule(t).

    optimizer: distributed or plain; the ramp ends at its current learning rate. After another
        scheduler, as with all of torch's, it ends at the original one: a group's "initial_lr".
        For another rate in a second phase set both group["lr"] and group["initial_lr"].
    steps: of the whole training. schedule: a factor by step, such as a cosine; None: always 1.
    start: the factor of the first step, above 0 to 1. until: the fraction of the training, above 0
        to 1, at which the ramp ends.
    Raises ValueError for a number out of range; TypeError if schedule is a scheduler, or optimizer
    is not an optimizer.
    """
    require_optimizer(optimizer)
    check_count("steps", steps, 1)
    check_density("start", start)
    check_density("until", until)
    if schedule is not None and not callable(schedule):
        raise TypeError(
            "schedule must be a function that returns a factor for a step, got "
            f"{type(schedule).__name__}: write a scheduler's rule as one, for instance "
            "lambda t: 0.5 + 0.5 * math.cos(math.pi * t / steps) for a cosine"
        )

    def factor(step: int) -> float:
        rising = min(1.0, start + (1.0 - start) * step / (until * steps))
        return rising if schedule is None else rising * schedule(step)

    return LambdaLR(optimizer, factor)
