"""Hooks: which gradients the backward pass has completed, noted while it goes on.

Torch appends each parameter to a list when its gradient has come. Python code costs a few
microseconds a call, so it runs only for some parameters, and counts what is in the list by then:

    buckets   a b c d | e f g | h i       in the order in which gradients are complete
    counts    ^     ^       ^     ^       the first tells when backward began, the others which
                                          buckets are complete
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
    """Counts the backward passes of each parameter, and tells when a bucket is complete.

    limit: how many passes add up to a gradient; one more is an error: in the pass itself, or where
           no gradient that counts follows, in the `check` before a step.
    began: when the first gradient was complete, by time.perf_counter: in a step's last pass; 0:
           nobody has counted yet.
    is_aside: whether gradients are ignored until `forget`, as another optimizer steps with them.
    Parameters outlive this, which holds on weakly to whom it tells. All is looked up by `id`: a
    tensor's hash is a call of Python code.
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
        # Function and weak reference apart: a WeakMethod runs Python code at each call.
        method = cast(MethodType | None, on_complete)
        self._notify: Any = None if method is None else method.__func__
        self._listener = None if method is None else weakref.ref(method.__self__)
        self._accumulated: list[torch.nn.Parameter] = []  # since `forget`
        self._counted = 0  # how many of _accumulated
        self._passes: Counter[int] = Counter()
        self._order: list[torch.nn.Parameter] = []
        self._seen: list[torch.nn.Parameter] = []  # in the step before
        self._complete: set[int] = set()
        self._watched: list[torch.nn.Parameter] = []
        self._members: list[frozenset[int]] = []  # of the watched buckets
        self._incomplete: list[int] = []  # places of those that are not complete yet
        self._recording: list[RemovableHandle] = []
        self._counting: list[RemovableHandle] = []
        # Not at the program's end, when the parameters go as well.
        weakref.finalize(self, _remove, self._recording, self._counting).atexit = False
        # Autograd has a thread for the host and one for each GPU: hooks may run side by side.
        self._lock = threading.Lock()
        # Who had a pass too many, and how many; None once it is told.
        self._excess: tuple[str, int] | None = None
        self.set_limit(limit)

    def set_limit(self, passes: int) -> None:
        """Set the limit; raise ValueError where it is below 1."""
        check_count("backward_passes_per_step", passes, 1)
        self._count()  # by the limit that they were made under
        self.limit = passes

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Count these parameters' gradients from now on; each once, also if it is given again."""
        known = set(map(id, self._watched))
        asked = {id(p): p for p in parameters if p.requires_grad}
        news = [parameter for key, parameter in asked.items() if key not in known]
        self._watched += news
        # The list's own method: torch calls it without any Python code.
        append = self._accumulated.append
        self._recording += [p.register_post_accumulate_grad_hook(append) for p in news]
        # Without buckets any gradient may be the first, or the last.
        if not self._members:
            self._count_at(news)

    def watch_buckets(self, buckets: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Call on_complete for each of these buckets once it is complete; call `watch` before.

        buckets: the parameters of each, in the order in which their gradients are complete. In a
            pass of another order, a bucket is told of later: at the next gradient that counts. An
            empty list: count at every gradient.
        """
        self._members = [frozenset(map(id, parameters)) for parameters in buckets]
        self._incomplete = [*range(len(buckets))]
        _remove(self._counting)
        known = set(map(id, self._watched))
        trained = [[p for p in each if p.requires_grad and id(p) in known] for each in buckets]
        # At those that had a gradient last time: others tell nothing of when backward was there.
        seen = set(map(id, self._seen))
        filled = [[p for p in each if id(p) in seen] or each for each in trained if each]
        ends = [filled[0][0], *(each[-1] for each in filled)] if filled else []
        self._count_at({id(p): p for p in ends}.values() if buckets else self._watched)

    @property
    def order(self) -> list[torch.nn.Parameter]:
        """Return the parameters in the order in which their gradients were complete."""
        self._count()
        return self._order

    @property
    def seconds(self) -> float:
        """Return the seconds from `began` to the last gradient of that pass that counts."""
        return self._ended - self.began

    @property
    def has_counted(self) -> bool:
        """Tell whether a watched parameter had a gradient since `forget`."""
        return bool(self._accumulated)

    def passes_left(self, parameter: torch.nn.Parameter) -> int:
        """Return how many backward passes a parameter's gradient still lacks."""
        self._count()
        return self.limit - self._passes[id(parameter)]

    def forget(self) -> None:
        """Count anew: what was computed belongs to no step any more."""
        self._count()
        self._accumulated.clear()
        self._counted = 0
        self._passes.clear()
        # A step without gradients says nothing of the next one's.
        self._seen, self._order = self._order or self._seen, []
        self.began = self._ended = 0.0
        self._complete.clear()
        self._excess = None
        self._incomplete = [*range(len(self._members))]
        self.is_aside = False

    def set_aside(self) -> None:
        """Ignore gradients until `forget`: neither is a pass too many, nor a bucket complete."""
        self.forget()
        self.is_aside = True

    def _count_at(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        known = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            if (hooks := known()) is not None:
                hooks._reach()

        self._counting += [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _reach(self) -> None:
        """Count, and tell the listener which buckets are complete by now."""
        with self._lock:
            now = time.perf_counter()
            self.check()
            if self._order:
                self.began, self._ended = self.began or now, now
            if self._listener is None or (listener := self._listener()) is None:
                return
            told = [place for place in self._incomplete if self._members[place] <= self._complete]
            # Off the list before the call, which may raise: a bucket is told of once.
            for place in told:
                self._incomplete.remove(place)
                self._notify(listener, place)

    def check(self) -> None:
        """Count; raise AssertionError, once, where there was a pass too many.

        Who catches it may step with what was accumulated, as in Horovod.
        """
        self._count()
        if self._excess is not None:
            (name, passes), self._excess = self._excess, None
            raise AssertionError(
                f"the gradient of '{name}' was computed {passes} times before a call to step(); "
                "increase backward_passes_per_step to accumulate gradients locally, or drop them "
                "by optimizer.zero_grad(): that of a model or another optimizer is not noticed; "
                "an optimizer that is not used any more must be deleted, with its scheduler"
            )

    def _count(self) -> None:
        """Count the gradients that came since the last count."""
        news = self._accumulated[self._counted :]
        if not news:
            return
        if self.is_aside:
            self._accumulated.clear()  # nobody else does so until `forget`
            return
        self._counted += len(news)
        ids = [*map(id, news)]
        passes = self._passes
        passes.update(ids)
        # At the limit, not from there on: a gradient is complete once.
        complete = {i: p for i, p in zip(ids, news, strict=True) if passes[i] == self.limit}
        self._order += complete.values()
        self._complete |= complete.keys()
        for parameter, each in zip(news, ids, strict=True):
            if passes[each] > self.limit and not self._excess:
                self._excess = self._names[parameter], passes[each]


def _remove(*hooks: list[RemovableHandle]) -> None:
    for each in hooks:
        for handle in each:
            handle.remove()
        each.clear()
