"""CurrentBatch: the batch of an optimizer's next step, its weight and its learning rate factor.

hand-over   this rank's gradients are weighted by the batch's samples; the factor is set
step        the learning rates are multiplied by the factor, and restored after the step
over        all ranks have equal weights again, and the factor is 1

LearningRate: sets the factor from the size of the batch.
Memory: computes a batch that does not fit in parts, and bounds the rank's batch size.

Only the rate changes, never the residual: the rest of an old gradient is applied at today's rate.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..optim.samples import Samples
from ..optim.wrapped.wrapping import StepListener
from ..runtime.world.membership import World
from .noise_scale import Noise
from .throughput import weak_hook

_log = logging.getLogger("gtopk")


class CurrentBatch(StepListener):
    """The batch of an optimizer's next step; all loaders of an optimizer share one CurrentBatch.

    The batch handed out last counts. If each loader multiplied the rates by itself, one would
    restore rates that another had multiplied.

    factor: multiplies the next step's rates; 1 again after the step if no batch is current.
    The optimizer holds this object, which in turn holds only a weak reference to the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer_ref = weakref.ref(optimizer)
        self._adam = optimizer.step_policy.options.adam
        self.factor = 1.0
        self._rates: list[Any] | None = None  # to restore after the step
        self._batch: object = None
        self._world: World | None = None  # the world in which the batch was handed out
        self._step_before: object = None  # the last step's report when the batch was handed out
        self._left_samples: Samples | None = None  # of a batch if the loop was left before its step
        optimizer.register_step_pre_hook(weak_hook(self._multiply))
        optimizer.register_step_post_hook(weak_hook(self._restore_after_step))

    @property
    def _optimizer(self) -> Any:
        return self._optimizer_ref()

    @property
    def factor(self) -> float:
        """Return the factor of the next step's rates."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._factor = factor
        if self._adam is not None:  # it computes Adam's steps before the optimizer applies them
            self._adam.factor = factor

    @classmethod
    def of(cls, optimizer: Any) -> CurrentBatch:
        """Return the optimizer's CurrentBatch; create it if there is none."""
        current = optimizer.step_policy.listener()
        if not isinstance(current, cls):
            current = cls(optimizer)
            optimizer.step_policy.listen(current)
        return current

    def make_current(self, batch: object, samples: int, loss_reduction: Any, here: World) -> None:
        """Make the batch current, with this number of samples on this rank; 0: no weight."""
        self._restore_rates()  # a failed step has not called its post hook
        self._batch, self._left_samples, self._world = batch, None, here
        # Each step, even a skipped one, makes its own report: another object means another step.
        self._step_before = self._optimizer.last_step
        self._optimizer.step_policy.set_weightless(samples == 0)
        self._optimizer.set_num_samples(samples, loss_reduction)

    def finish(self, batch: object) -> None:
        """Finish a batch if it is the current one."""
        if batch is not self._batch:
            return
        left_samples, self._batch, self._left_samples = self._left_samples, None, None
        self.factor = 1.0
        self._optimizer.step_policy.set_weightless(False)
        # If they differ, the script has set another number for a step of its own.
        if left_samples is None or left_samples is self._optimizer.step_policy.samples():
            self._optimizer.set_num_samples(None)

    def leave(self, batch: object) -> None:
        """Finish a batch after its loop was left and its step taken.

        Sample counts that the script sets from now on belong to its own steps. Does nothing if the
        optimizer has been collected.
        """
        if batch is not self._batch or self._optimizer is None:
            return
        if self._optimizer.last_step is not self._step_before:
            self.finish(batch)
        else:
            self._optimizer.step_policy.set_weightless(False)
            self._left_samples = self._optimizer.step_policy.samples()

    def enter(self, here: World) -> None:
        """Finish a batch that was left in an earlier world: its step failed or never came."""
        if self._left_samples is not None and self._world is not here:
            self.finish(self._batch)

    def end_step(self) -> None:
        """Finish a batch if its loop was left before this step."""
        if self._left_samples is not None:
            self.finish(self._batch)
        elif self._batch is None:
            self.factor = 1.0

    def drop(self) -> None:
        """Finish a batch if its loop was left and a GradScaler skipped its gradients."""
        if self._left_samples is not None and self._optimizer.last_step is not self._step_before:
            self.finish(self._batch)

    def _multiply(self, optimizer: Any, *step: Any) -> None:
        # The plain optimizer and its other wrappers share these hooks. A step that calls its base
        # class's step gets here twice.
        if optimizer is not self._optimizer or self.factor == 1.0 or self._rates is not None:
            return
        self._rates = []
        for group in optimizer.param_groups:
            rate, multiplied = group["lr"], group["lr"] * self.factor
            self._rates.append((group, rate, multiplied))
            group["lr"] = multiplied

    def _restore_after_step(self, optimizer: Any, *step: Any) -> None:
        if optimizer is self._optimizer:
            self._restore_rates()

    def _restore_rates(self) -> None:
        """Undo the multiplication, except for rates that a schedule or a state has set since."""
        for group, rate, multiplied in self._rates or ():
            # By identity: a schedule may have set an equal number, which must stay.
            if group["lr"] is multiplied:
                group["lr"] = rate
        self._rates = None


Factor = Callable[[float, Noise | None, float], float]


def adascale(s: float, noise: Noise | None, reference: float) -> float:
    """Return AdaScale's gain (V + M) / (V/s + M), between 1 and s; 1 if both are 0 or unknown.

    V is the variance of the reference batch's gradient, M the square of its mean. Johnson et al.
    2020, arXiv 2007.05105, section 3.
    """
    if noise is None or noise.variance == noise.square == 0.0:
        return 1.0
    variance, square = noise.variance / reference, noise.square
    return (variance + square) / (variance / s + square)


FACTORS: Final[Mapping[str, Factor]] = {
    "none": lambda s, noise, reference: 1.0,
    "linear": lambda s, noise, reference: s,
    "sqrt": lambda s, noise, reference: math.sqrt(s),
    "adascale": adascale,
}


class LearningRate:
    """Scales an optimizer's learning rates with its batches' samples; call `scale` for each batch.

    reference: the samples of a step for which the rates were chosen.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaling: str, reference: float) -> None:
        self._factor = FACTORS[scaling]
        self._reference = reference
        self._current_batch = CurrentBatch.of(optimizer)

    def scale(self, samples: int, noise: Noise | None) -> None:
        """Set the factor for a batch with this many samples over all ranks."""
        self._current_batch.factor = self._factor(samples / self._reference, noise, self._reference)


class Memory:
    """Computes batches that may not fit into memory, with `backward`.

    max_samples: samples to compute at once; None until the memory has run out once.
    """

    def __init__(self, rank: int) -> None:
        self.max_samples: int | None = None
        self._rank = rank

    def backward(
        self, loss_of: Callable[[Any], torch.Tensor], batch: Any, size: int, summed: bool
    ) -> torch.Tensor:
        """Compute a batch's loss, add its gradients to all leaves it depends on, return the loss.

        loss_of: maps a batch, or a part of it, to its loss: a mean over samples, or a sum.
        All gradients reach the parameters at the end: an attempt that runs out of memory leaves
        nothing behind, and every hook of a parameter is called once. Raises RuntimeError if the
        loss depends on no trained parameter.
        """
        while True:
            try:
                loss, gradients = self._in_parts(loss_of, batch, size, summed)
                break
            except RuntimeError as error:  # torch.cuda.OutOfMemoryError is one
                if size == 1 or self.max_samples == 1 or not is_out_of_memory(error):
                    raise
                # The batch may be smaller than the bound; then the batch is what did not fit.
                before = min(self.max_samples or size, size)
            # Outside the handler: its traceback holds the memory that must be freed.
            self.max_samples = -(-before // 2)
            _log.warning(
                "rank %d: a batch of %d samples does not fit into memory; from now on at most %d "
                "are computed at once",
                self._rank,
                before,
                self.max_samples,
            )
        if not gradients:
            raise RuntimeError(
                "the loss must depend on a trained parameter, and depends on none: all parameters "
                "may be frozen, or the loss detached"
            )
        torch.autograd.backward(list(gradients), list(gradients.values()))
        return loss

    def _in_parts(
        self, loss_of: Callable[[Any], torch.Tensor], batch: Any, size: int, summed: bool
    ) -> tuple[torch.Tensor, MutableMapping[torch.Tensor, torch.Tensor]]:
        """Return the loss of the whole batch and its gradients."""
        # An earlier batch's bound applies here too: more would run out of memory again.
        part_size = size if self.max_samples is None else min(size, self.max_samples)
        loss = torch.zeros((), device="cpu")
        gradients = WeakTensorKeyDictionary()  # drops leaves that only one part uses
        for first in range(0, size, part_size):
            last = min(first + part_size, size)
            part = batch if last - first == size else slice_of(batch, size, first, last)
            # The whole mean is the mean of the parts, weighted by their samples.
            share = 1.0 if summed else (last - first) / size
            of_part = loss_of(part) * share
            loss = loss.to(of_part.device) + of_part.detach()
            leaves = leaves_of(of_part)
            if not leaves:
                continue
            with without_hooks(leaves):
                new_gradients = torch.autograd.grad(of_part, leaves, allow_unused=True)
            for leaf, new in zip(leaves, new_gradients, strict=True):
                if new is not None:
                    # Not in place: two leaves may share the memory of a gradient.
                    gradients[leaf] = gradients[leaf] + new if leaf in gradients else new
        return loss, gradients


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return all leaves to which `backward` would add gradients, of any optimizer."""
    found = []
    # A list, not recursion: a graph may be deeper than Python's stack.
    stack: list[Any] = [loss.grad_fn] if loss.grad_fn else []
    seen = set(stack)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            stack.append(node)
            if node.name().endswith("AccumulateGrad"):
                found.append(node.variable)
    return found


@contextmanager
def without_hooks(leaves: Collection[torch.Tensor]) -> Iterator[None]:
    """Disable the leaves' own hooks in this context: they expect whole gradients."""
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks]
    for leaf, _ in hooks:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, own in hooks:
            leaf._backward_hooks = own


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that a GPU or the host is out of memory."""
    # The host's allocator raises a plain RuntimeError that only its text identifies.
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


def slice_of(batch: Any, size: int, first: int, last: int) -> Any:
    """Return samples first..last-1 of a batch: slices of its tensors and lists of `size`, nested.

    Raises TypeError for a value that cannot be divided.
    """
    if isinstance(batch, torch.Tensor):
        return batch[first:last] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        return {key: slice_of(value, size, first, last) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(slice_of(value, size, first, last) for value in batch))
    if isinstance(batch, (list, tuple)):
        # A list of tensors holds columns, even if it is as long as the batch.
        if len(batch) == size and not any(isinstance(value, torch.Tensor) for value in batch):
            return batch[first:last]
        return type(batch)(slice_of(value, size, first, last) for value in batch)
    if batch is None or isinstance(batch, (int, float, str, bool)):
        return batch
    raise TypeError(
        f"a batch that holds a {type(batch).__name__} cannot be divided to fit into memory; pass "
        "a smaller max_batch to adapt"
    )
