"""Memory: computes a batch that does not fit in parts, and bounds the rank's batch size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_log = logging.getLogger("gtopk")


class Memory:
    """The most samples this rank can compute on at once.

    most: None until the memory has run out once.
    """

    def __init__(self, rank: int) -> None:
        self.most: int | None = None
        self._rank = rank

    def backward(
        self, loss_of: Callable[[Any], torch.Tensor], batch: Any, size: int, summed: bool
    ) -> torch.Tensor:
        """Compute a batch's loss, add its gradients to all leaves it depends on, return the loss.

        loss_of: maps a batch, or a part of it, to its loss: a mean over samples, or a sum.
        The gradients reach the parameters all at once, when they are complete: an attempt that
        runs out of memory leaves nothing behind, and every hook of a parameter is called once.
        Raises RuntimeError where the loss depends on nothing that is trained.
        """
        while True:
            try:
                loss, gradients = self._in_parts(loss_of, batch, size, summed)
                break
            except RuntimeError as error:  # torch.cuda.OutOfMemoryError is one
                if size == 1 or self.most == 1 or not ran_out(error):
                    raise
                # A batch may be smaller than the bound: then it is the batch that did not fit.
                before = min(self.most or size, size)
            # Outside the handler: the traceback refers to the memory that is to be freed.
            self.most = -(-before // 2)
            _log.warning(
                "rank %d: a batch of %d samples does not fit into memory; from now on at most %d "
                "are computed at once",
                self._rank,
                before,
                self.most,
            )
        if not gradients:
            raise RuntimeError(
                "the loss must require a gradient, and depends on no parameter that is trained: "
                "all may be frozen, or the loss detached"
            )
        torch.autograd.backward(list(gradients), list(gradients.values()))
        return loss

    def _in_parts(
        self, loss_of: Callable[[Any], torch.Tensor], batch: Any, size: int, summed: bool
    ) -> tuple[torch.Tensor, MutableMapping[torch.Tensor, torch.Tensor]]:
        """Return the loss of the whole batch and its gradients."""
        # The bound of an earlier batch holds here, too: another try would run out once more.
        most = size if self.most is None else min(size, self.most)
        loss = torch.zeros((), device="cpu")
        gradients = WeakTensorKeyDictionary()  # drops leaves that a part has made for itself
        for first in range(0, size, most):
            last = min(first + most, size)
            part = batch if last - first == size else slice_of(batch, size, first, last)
            # A mean of the whole is the parts' means, weighted by their samples.
            share = 1.0 if summed else (last - first) / size
            of_part = loss_of(part) * share
            loss = loss.to(of_part.device) + of_part.detach()
            leaves = leaves_of(of_part)
            if not leaves:
                continue
            with without_hooks(leaves):
                found = torch.autograd.grad(of_part, leaves, allow_unused=True)
            for leaf, new in zip(leaves, found, strict=True):
                if new is not None:
                    # Not in place: two leaves may share a gradient's memory.
                    gradients[leaf] = gradients[leaf] + new if leaf in gradients else new
        return loss, gradients


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return all leaves to which `backward` would add gradients, of whichever optimizer."""
    found = []
    # A list, not recursion: a graph may be deeper than Python's stack.
    left: list[Any] = [loss.grad_fn] if loss.grad_fn else []
    seen = set(left)
    while left:
        for node, _ in left.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            left.append(node)
            if node.name().endswith("AccumulateGrad"):
                found.append(node.variable)
    return found


@contextmanager
def without_hooks(leaves: Collection[torch.Tensor]) -> Iterator[None]:
    """Switch off the leaves' own hooks meanwhile: they expect whole gradients."""
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks]
    for leaf, _ in hooks:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, own in hooks:
            leaf._backward_hooks = own


def ran_out(error: BaseException) -> bool:
    """Tell whether an error means that memory has run out, on a GPU or on the host."""
    # The host's allocator raises a plain RuntimeError, known by its text alone.
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
        # A list of tensors is one of columns, even where it is as long as the batch.
        if len(batch) == size and not any(isinstance(value, torch.Tensor) for value in batch):
            return batch[first:last]
        return type(batch)(slice_of(value, size, first, last) for value in batch)
    if batch is None or isinstance(batch, (int, float, str, bool)):
        return batch
    raise TypeError(
        f"a batch that holds a {type(batch).__name__} cannot be divided to fit into memory; pass "
        "a smaller max_batch to adapt"
    )
