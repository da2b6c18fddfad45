"""Wrapping: derive an optimizer's class from the user's own, sharing its groups and state.

So `isinstance` works as for the user's class, and so do schedulers, even existing ones.

Readings: properties for scripts, some under Horovod's private names. StepPolicy: the interface
through which the modes of `hvd.adapt` drive the optimizer. The modes hand out batches, and some of
them step in place of the optimizer. StepPolicy has everything that they need besides public
methods, so that the optimizer's internals may change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

import torch

from ...exchange.buckets.parameters import require_optimizer
from ...exchange.exchange import Progress
from ...runtime.world.membership import World
from ...runtime.world.process_sets import ProcessSet
from ..options import Options
from ..reducer import Reducer
from ..samples import Samples
from ..step_checks import ReplicaCheck, SkippedSteps
from .tree import lay_out_as_parameters


class Wrapping(torch.optim.Optimizer):
    """A mixin: `wrap` derives a class from (this, the user's optimizer class).

    So super().step() is the user's step. Groups and state are looked up in the wrapped optimizer:
    so both stay the same, even after either, or an optimizer inside, loads a state.
    """

    _wrapped: torch.optim.Optimizer

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's groups."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._wrapped.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self._wrapped.state

    @state.setter
    def state(self, state: Any) -> None:
        self._wrapped.state = state

    @property
    def diverging_parameters(self) -> Collection[torch.nn.Parameter]:
        """Return the parameters that may now differ between ranks; the others are the same."""
        return ()

    def outer_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return additional optimizers that all ranks step alike, such as LocalSGD's outer one."""
        return []

    def shared_layout(self) -> list[str]:
        """Return descriptions of what must be equal on all ranks for them to share their state."""
        return []

    def shared_state(self) -> Any:
        """Return what else all ranks share, beyond groups and `state`; None: nothing.

        The types must be supported by `runtime.object_codec`: another rank may load the result.
        """
        return None

    def load_shared_state(self, common: Any) -> None:
        """Load the shared state that another rank's `shared_state` returned."""

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state, in the memory layout of this rank's parameters."""
        super().load_state_dict(state_dict, *args, **kwargs)
        lay_out_as_parameters(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and state, as torch does when it has loaded them."""
        self._wrapped.__setstate__(state)

    def _patch_step_function(self) -> None:
        """Patch only the wrapped step, so that torch calls its hooks once, after the exchange."""
        self._wrapped._patch_step_function()
        self._zero_grad_profile_name = self._wrapped._zero_grad_profile_name

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the copy would reduce its gradients a second time."""
        raise TypeError(
            "a distributed optimizer can be neither copied nor pickled: it belongs to the ranks of "
            "a running job. Keep its state_dict(), or copy the plain optimizer and wrap the copy"
        )

    def _step_wrapped(self) -> None:
        """Step as the wrapped optimizer does, with the current gradients."""
        super().step()
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before

    def _take_agreed_step(self, step: Callable[[Any], None]) -> None:
        """Call `step` instead of the wrapped optimizer's step, between the optimizer's hooks."""
        # Use torch's wrapper, so that the optimizer's hooks and a profiler see a step.
        self.profile_hook_step(step)(self)
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapping]) -> Any:
    """Wrap an optimizer in a class derived from (kind, the optimizer's own class).

    Raises ValueError for LBFGS, and for an optimizer that is already wrapped; TypeError for an
    object that is not an optimizer.
    """
    require_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure many times a step; use another optimizer")
    if isinstance(optimizer, Wrapping):
        raise ValueError("the optimizer is distributed already; wrap the plain one")
    own = type(optimizer)

    @wraps(own.zero_grad)  # libraries check whether its signature has set_to_none
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        super(derived, self).zero_grad(*args, **kwargs)

    derived: Any = type(own.__name__, (kind, own), {"zero_grad": zero_grad})
    # Bypass the class's __init__, because its arguments are unknown here.
    wrapped = object.__new__(derived)
    wrapped.__dict__.update(vars(optimizer))
    wrapped._wrapped = optimizer
    # An earlier scheduler has set its own `step` on the instance: remove it, so that the derived
    # class's is found.
    for shadowed in ("step", "param_groups", "state"):
        wrapped.__dict__.pop(shadowed, None)
    return wrapped


class Readings(Wrapping):
    """Read-only properties of a distributed optimizer: a mixin without side effects (`wrap`)."""

    _options: Options
    _reducer: Reducer
    _replicas: ReplicaCheck
    _skipped: SkippedSteps

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce together."""
        return self._options.process_set

    @property
    def op(self) -> int:
        """Average or Sum."""
        return self._options.op

    @property
    def gradient_predivide_factor(self) -> float:
        """The factor that divides gradients before the sum, and multiplies them after it."""
        return self._options.gradient_predivide_factor

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are exchanged as dense ones."""
        return self._options.sparse_as_dense

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes accumulated before a step."""
        return self._reducer.hooks.limit

    @property
    def straggler_scores(self) -> list[float | None] | None:
        """The speed of each rank's computation in the last report; the fastest is 1; None before.

        Computed from recent steps: the smallest of all ranks' median seconds over the rank's own.
        """
        return self._reducer.stragglers.scores

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped on all ranks because a gradient or a sum was not finite."""
        return self._skipped.count

    @property
    def divergences(self) -> int:
        """The number of checks that found differing replicas without raising an error."""
        return self._replicas.divergences

    @property
    def step_policy(self) -> StepPolicy:
        """The interface through which the modes of `hvd.adapt` drive this optimizer."""
        return StepPolicy(self)

    @property
    def _compression(self) -> Any:
        return self._options.compression

    @property
    def _handles(self) -> dict[torch.nn.Parameter, Any]:
        return self._reducer.in_flight()

    @property
    def _requires_update(self) -> set[torch.nn.Parameter]:
        return set(self._reducer.trained())

    @property
    def _allreduce_delay(self) -> dict[torch.nn.Parameter, int]:
        return {p: self._reducer.hooks.passes_left(p) for p in self._reducer.trained()}


class StepListener:
    """Called on an optimizer's steps. The methods of this class do nothing; override them."""

    def enter(self, here: World) -> None:
        """Called before the first step in another world."""

    def end_step(self) -> None:
        """Called when a step has been taken, or skipped on all ranks."""

    def drop(self) -> None:
        """Called when gradients are cleared; no step will use the synchronized ones."""


class StepPolicy:
    """An optimizer's internals, for a mode; `optimizer.step_policy` creates a new one each time.

    names:    of the optimizer's parameters, equal on all ranks.
    options:  the arguments of DistributedOptimizer, with its compression.
    name:     prefix of the names of the optimizer's exchanges; equal on all ranks.
    progress: of these exchanges; a mode that steps in place of the optimizer counts there, too.
    replicas: the check whether replicas differ.
    skipped:  counts skipped steps.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.names: Mapping[torch.nn.Parameter, str] = optimizer._parameter_names
        self.options: Options = optimizer._options
        self.name: str = optimizer._reducer.peers.name
        self.progress: Progress = optimizer._reducer.progress
        self.replicas: ReplicaCheck = optimizer._replicas
        self.skipped: SkippedSteps = optimizer._skipped

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that require a gradient now."""
        return [parameter for parameter in self.names if parameter.requires_grad]

    def samples(self) -> Samples:
        """Return the sample count of the current gradients, as last set."""
        samples: Samples = self._optimizer._reducer.samples
        return samples

    def set_weightless(self, is_weightless: bool) -> None:
        """Set whether the current batch is a placeholder, so that its gradients have weight 0."""
        self._optimizer._is_weightless = is_weightless

    def listener(self) -> StepListener:
        """Return the listener that is called on steps."""
        listener: StepListener = self._optimizer._listener
        return listener

    def listen(self, listener: StepListener) -> None:
        """Set the listener that is called on steps, replacing the previous one."""
        self._optimizer._listener = listener

    def clip(self) -> None:
        """Clip the gradients, which are an agreed update, to global_clip_norm."""
        self._optimizer._clip(None)

    def log_compression(self) -> None:
        """Warn, once and on rank 0, if the compression may cost accuracy in this mode."""
        self._optimizer._log_compression(by_mode=True)

    def stop_exchanging(self, mode: str) -> None:
        """Stop the optimizer's exchanges: from now on `mode` steps in its place."""
        self._optimizer._reducer.stop_exchanging(mode)

    def mode(self) -> str:
        """Return the mode that steps in place of the optimizer; "" if it steps itself."""
        mode: str = self._optimizer._reducer.stepping_mode
        return mode

    def note_step(self) -> None:
        """Let learning-rate schedulers know that a step was taken."""
        # torch's schedulers read this mark, to warn if they are called before the optimizer.
        self._optimizer._opt_called = self._optimizer._wrapped._opt_called = True
