"""Hooks: track which gradients the backward pass has completed, while it runs.

torch appends each parameter to a list when its gradient has been accumulated. Python code costs a
few microseconds per call, so it runs only for some parameters, and counts the list's entries then:

    buckets   a b c d | e f g | h i       in the order in which gradients are complete
    counts    ^     ^       ^     ^       the first gives the time when backward began, the others
                                          show which buckets are complete
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from ..errors import check_count


class BackwardHooks:
    """Count the backward passes of each parameter, and notify a listener of complete buckets.

    limit: how many passes add up to a gradient; one more is an error: in the pass itself or, if no
           counted gradient follows, in the `check` before a step.
    began: when the first gradient of a step's last pass was complete, by time.perf_counter; 0 if
           nothing has been counted yet.
    is_aside: whether gradients are ignored until `forget`, because another optimizer uses them.
    Parameters outlive this object, which refers to its listener weakly. Lookups use `id`: hashing a
    tensor calls Python code.
    """

    def __init__(
        self,
        names: Mapping[torch.nn.Parameter, str],
        limit: int = 1,
        on_complete: Callable[[int], None] | None = None,
    ) -> None:
        """on_complete: a method, called with the place of each watched bucket that is complete."""
        self.began = self._ended = 0.0
        self.is_aside = False
        self._names = names
        # Store function and weak reference separately: a WeakMethod runs Python code on each call.
        method = cast(MethodType | None, on_complete)
        self._notify: Any = None if method is None else method.__func__
        self._listener = None if method is None else weakref.ref(method.__self__)
        self._accumulated: list[torch.nn.Parameter] = []  # since `forget`
        self._counted = 0  # how many of _accumulated are counted
        self._passes: Counter[int] = Counter()
        self._order: list[torch.nn.Parameter] = []
        self._last_order: list[torch.nn.Parameter] = []  # order of the step before
        self._complete: set[int] = set()
        self._watched: list[torch.nn.Parameter] = []
        self._members: list[frozenset[int]] = []  # of the watched buckets
        self._incomplete: list[int] = []  # places of buckets that are not complete yet
        self._recording: list[RemovableHandle] = []
        self._counting: list[RemovableHandle] = []
        # Not at exit, when the parameters are deleted as well.
        weakref.finalize(self, _remove, self._recording, self._counting).atexit = False
        # Autograd has one thread for the host and one per GPU, so hooks may run concurrently.
        self._lock = threading.Lock()
        # The parameter with a pass too many, and its passes; None once reported.
        self._excess: tuple[str, int] | None = None
        self.set_limit(limit)

    def set_limit(self, passes: int) -> None:
        """Set the limit; raise ValueError if it is below 1."""
        check_count("backward_passes_per_step", passes, 1)
        self._count()  # count earlier passes under the old limit
        self.limit = passes

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Count these parameters' gradients from now on; each once, even if passed again."""
        watched = set(map(id, self._watched))
        requested = {id(p): p for p in parameters if p.requires_grad}
        new = [parameter for key, parameter in requested.items() if key not in watched]
        self._watched += new
        # The list's own method, so that torch calls it without running Python code.
        append = self._accumulated.append
        self._recording += [p.register_post_accumulate_grad_hook(append) for p in new]
        # Without buckets any gradient may be the first or the last.
        if not self._members:
            self._count_after(new)

    def watch_buckets(self, buckets: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Call on_complete for each of these buckets once it is complete; call `watch` before.

        buckets: the parameters of each, in the order in which their gradients are complete. If a
            pass has another order, a bucket is reported later: at the next counted gradient. An
            empty list: count at every gradient.
        """
        self._members = [frozenset(map(id, parameters)) for parameters in buckets]
        self._incomplete = [*range(len(buckets))]
        _remove(self._counting)
        watched = set(map(id, self._watched))
        trained = [[p for p in each if p.requires_grad and id(p) in watched] for each in buckets]
        # Use parameters that had a gradient last time: others do not show backward's progress.
        last = set(map(id, self._last_order))
        filled = [[p for p in each if id(p) in last] or each for each in trained if each]
        ends = [filled[0][0], *(each[-1] for each in filled)] if filled else []
        self._count_after({id(p): p for p in ends}.values() if buckets else self._watched)

    @property
    def order(self) -> list[torch.nn.Parameter]:
        """Return the parameters in the order in which their gradients became complete."""
        self._count()
        return self._order

    @property
    def seconds(self) -> float:
        """Return the seconds from `began` to the last counted gradient of that pass."""
        return self._ended - self.began

    @property
    def has_counted(self) -> bool:
        """Return whether a watched parameter had a gradient since `forget`."""
        return bool(self._accumulated)

    def passes_left(self, parameter: torch.nn.Parameter) -> int:
        """Return how many more backward passes a parameter's gradient needs."""
        self._count()
        return self.limit - self._passes[id(parameter)]

    def forget(self) -> None:
        """Restart counting: earlier passes no longer belong to any step."""
        self._count()
        self._accumulated.clear()
        self._counted = 0
        self._passes.clear()
        # A step without gradients says nothing about the next one's.
        self._last_order, self._order = self._order or self._last_order, []
        self.began = self._ended = 0.0
        self._complete.clear()
        self._excess = None
        self._incomplete = [*range(len(self._members))]
        self.is_aside = False

    def set_aside(self) -> None:
        """Ignore gradients until `forget`: no pass is one too many, and no bucket is complete."""
        self.forget()
        self.is_aside = True

    def _count_after(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self_ref = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            if (hooks := self_ref()) is not None:
                hooks._count_and_notify()

        self._counting += [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _count_and_notify(self) -> None:
        """Count, and notify the listener of the buckets that are now complete."""
        with self._lock:
            now = time.perf_counter()
            self.check()
            if self._order:
                self.began, self._ended = self.began or now, now
            if self._listener is None or (listener := self._listener()) is None:
                return
            completed = [
                place for place in self._incomplete if self._members[place] <= self._complete
            ]
            # Remove it before the call, which may raise: each bucket is reported once.
            for place in completed:
                self._incomplete.remove(place)
                self._notify(listener, place)

    def check(self) -> None:
        """Count; raise AssertionError, once, if there was a pass too many.

        A caller that catches it may step with the accumulated gradients, as in Horovod.
        """
        self._count()
        if self._excess is not None:
            (name, passes), self._excess = self._excess, None
            raise AssertionError(
                f"the gradient of '{name}' was computed {passes} times before a call to step(); "
                "increase backward_passes_per_step to accumulate gradients locally, or clear them "
                "with this optimizer's zero_grad(), not with that of the model or of another "
                "optimizer; delete an optimizer that is no longer used, and its scheduler"
            )

    def _count(self) -> None:
        """Count the gradients that were accumulated since the last count."""
        new = self._accumulated[self._counted :]
        if not new:
            return
        if self.is_aside:
            self._accumulated.clear()  # nothing else clears it until `forget`
            return
        self._counted += len(new)
        ids = [*map(id, new)]
        passes = self._passes
        passes.update(ids)
        # Exactly at the limit, so that a gradient becomes complete once.
        complete = {i: p for i, p in zip(ids, new, strict=True) if passes[i] == self.limit}
        self._order += complete.values()
        self._complete |= complete.keys()
        for parameter, each in zip(new, ids, strict=True):
            if passes[each] > self.limit and not self._excess:
                self._excess = self._names[parameter], passes[each]


def _remove(*hooks: list[RemovableHandle]) -> None:
    for each in hooks:
        for handle in each:
            handle.remove()
        each.clear()
