"""Fragments: parts of the model whose rounds end in turn, each with an exchange of its own.

    fragment 0   x x|x x x x x x x x|x x x    x: a step; |: the end of a round of this fragment
    fragment 1   x x x x|x x x x x x x x|x
    fragment 2   x x x x x x|x x x x x x x
    fragment 3   x x x x x x x x|x x x x x    here of 8 steps, the first ones shorter

Streaming DiLoCo's partial synchronization (Douillard et al. 2025, arXiv 2501.18512): each parameter
is exchanged as often as with one fragment, and the longest exchange is that of one part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, ClassVar, Final

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve

from ..compression import ErrorFeedback
from ..errors import HorovodInternalError, check_count, check_number
from ..exchange.residual_state import ResidualState, unmatched
from ..optim.wrapped.checkpoint import CHANGES
from ..runtime.world.membership import World
from ..runtime.world.process_sets import ProcessSet
from .outer_exchange import OuterExchange, Round, options_by_group, preserve_gradients

# A fragment of whole layers may have so many times the values of one that cuts layers up.
_UNEVEN: Final = 1.1


def check_rounds(
    inner_steps: int | None,
    overlap_steps: int,
    fragments: int,
    residual_decay: float,
    compression: Any,
) -> None:
    """Raise ValueError or TypeError for options of `LocalSGD` that no rounds can have."""
    if inner_steps is not None:
        check_count("inner_steps", inner_steps)
        if inner_steps == 0:
            raise ValueError("inner_steps must be at least 1, or None, got 0")
    check_count("overlap_steps", overlap_steps)
    if overlap_steps > (inner_steps or 0):
        raise ValueError(
            f"overlap_steps must be at most inner_steps={inner_steps}, got {overlap_steps}: "
            "an exchange must have ended before the next begins"
            + (", and without inner_steps outer_step() waits for it" if inner_steps is None else "")
        )
    check_count("fragments", fragments)
    # One fragment needs no turns, so that it may go without inner_steps.
    if fragments < 1 or fragments > max(1, inner_steps or 0):
        raise ValueError(
            f"fragments must lie in 1..inner_steps={inner_steps}, got {fragments}: "
            + (
                "each is exchanged in a step of its own"
                if inner_steps is not None
                else "without inner_steps outer_step() exchanges all at once"
            )
        )
    check_number("residual_decay", residual_decay)
    if not 0 <= residual_decay <= 1:
        raise ValueError(f"residual_decay must lie in 0..1, got {residual_decay}")
    if residual_decay != 1 and not isinstance(compression, ErrorFeedback):
        raise ValueError(
            f"residual_decay={residual_decay} needs a compression that keeps a residual, such as "
            f"Compression.gtopk, not {compression!r}"
        )


def assign_parameters(names: Mapping[torch.nn.Parameter, str], fragments: int) -> list[list[int]]:
    """Return the places of each fragment's parameters among all, in order.

    Layers are dealt from the largest to the smallest, each to the fragment that has the fewest
    values: so the blocks of a transformer, which are alike, go round in order of depth (the paper's
    strided fragments), and the rest levels them. A layer is what has one name up to its first
    number, as `blocks.3.`, or else one module. Where fragments would be more than a tenth larger
    for it, or one would be empty, parameters are dealt one by one.
    Raises ValueError for more fragments than parameters with values.
    """
    parameters = list(names)
    sizes = [parameter.numel() for parameter in parameters]
    layers = [
        [place for place, _ in group]
        for _, group in groupby(enumerate(names.values()), lambda pair: _layer(pair[1]))
    ]
    whole = _assign(layers, sizes, fragments)
    cut = _assign([[place] for place in range(len(sizes))], sizes, fragments)
    totals = [[sum(sizes[place] for place in each) for each in way] for way in (whole, cut)]
    is_even = min(totals[0]) > 0 and max(totals[0]) <= _UNEVEN * max(totals[1])
    dealt = whole if is_even or fragments == 1 else cut
    if fragments > 1 and min(totals[1]) == 0:
        raise ValueError(
            f"fragments must be at most the number of parameters with values, "
            f"{sum(map(bool, sizes))}, got {fragments}"
        )
    # By their first parameters: the turns then follow the depth of the model.
    return sorted(dealt)


def _assign(
    items: Sequence[Sequence[int]], sizes: Sequence[int], fragments: int
) -> list[list[int]]:
    """Return places: each item's go to the fragment that has the fewest values by then."""
    totals = [0] * fragments
    dealt: list[list[int]] = [[] for _ in range(fragments)]
    weights = [sum(sizes[place] for place in item) for item in items]
    # The sort is stable: layers of one size stay in the order of their depth.
    for number in sorted(range(len(items)), key=lambda number: -weights[number]):
        fragment = totals.index(min(totals))
        totals[fragment] += weights[number]
        dealt[fragment] += items[number]
    return [sorted(each) for each in dealt]


def _layer(name: str) -> str:
    parts = name.split(".")
    ends = next((end for end, part in enumerate(parts, 1) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:ends])


@contextmanager
def center_in_place(
    parameters: Iterable[torch.nn.Parameter],
    center: Sequence[torch.Tensor],
    outer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
) -> Iterator[None]:
    """Let the outer optimizer step the center, by these options, while the replica stays.

    By `data`, and unseen by autograd: a backward pass under way may need the replica.
    """
    known, groups = list(parameters), outer.param_groups
    replica = [parameter.data for parameter in known]
    now = [{name: group[name] for name in of} for group, of in zip(groups, options, strict=True)]
    try:
        for parameter, tensor in zip(known, center, strict=True):
            parameter.data = tensor
        for group, of in zip(groups, options, strict=True):
            group.update(of)
        with ExitStack() as versions:
            # A step in place counts up the parameters' versions, and a backward pass under way
            # would refuse them.
            for parameter in known:
                versions.enter_context(preserve(parameter))
            yield
    finally:
        for parameter, tensor in zip(known, replica, strict=True):
            parameter.data = tensor
        for group, of in zip(groups, now, strict=True):
            group.update(of)


class Fragment:
    """A part of the parameters, the place of this rank in its round, and its exchange.

    places:     of the parameters, among all that are exchanged.
    others:     the parameters of other fragments.
    center:     z, while a round goes on.
    before:     the round before, while its exchange goes on.
    steps_made: by this rank, in this round; wasted: those of them by a replica that was lost.
    early:      by how many steps this round is shorter than others; below 0: longer.
    """

    def __init__(
        self,
        every: Sequence[torch.nn.Parameter],
        places: Sequence[int],
        exchange: OuterExchange,
    ) -> None:
        self.places = list(places)
        self.parameters = [every[place] for place in places]
        self.others = [p for place, p in enumerate(every) if place not in set(places)]
        self.exchange = exchange
        self.center: list[torch.Tensor] = []
        self.before: Round | None = None
        self.steps_made = self.wasted = self.early = 0

    @torch.no_grad()
    def receive(self, outer: torch.optim.Optimizer, rank: int) -> None:
        """Wait for the exchange of the previous round, and make the outer step.

        With overlap the replica does not move yet: a rank may receive earlier than others.
        """
        before = self.before
        # A checkpoint may have received it already; then only the replica is still to move.
        if before is None or before.has_ended:
            return
        with before.waiting():
            try:
                with preserve_gradients(self.others), self.exchange.ended() as outcome:
                    for parameter in self.others:
                        parameter.grad = None  # so that the outer optimizer passes over it
                    if not before.sent:
                        # The rank has waited, so nothing needs the replica: the outer optimizer
                        # steps in its place.
                        torch._foreach_copy_([*self.parameters], self.center)
                        if outcome.moves:
                            outer.step()
                    elif outcome.moves:
                        own, options = self.parameters, before.options
                        with center_in_place(own, self.center, outer, options):
                            outer.step()
            except HorovodInternalError as error:
                before.error = error  # for all ranks to raise it in the same step
            except BaseException:
                self.give_back(before)
                raise
            else:
                before.outcome, before.is_lost = outcome, rank in outcome.lost

    def give_back(self, before: Round) -> None:
        """Count the steps of a round whose exchange has failed to this one."""
        # Its changes were never summed: they are still in the replica, and the next exchange sends
        # them.
        self.before = None
        self.steps_made += before.steps
        self.wasted += before.steps - before.made
        self.early += before.early

    def show_center(self, before: Round) -> None:
        """Let the replica be the center, and the steps that it has made since."""
        # Whoever waits has made no steps since: the parameters are the center now.
        if not before.sent:
            self.center = []
        elif before.is_lost or not self.steps_made:
            torch._foreach_copy_([*self.parameters], self.center)
        else:
            for p, z, sent in zip(self.parameters, self.center, before.sent, strict=True):
                # To the bit, where nothing was changed: what is frozen is not to seem to move.
                p.copy_(torch.where(p == sent, z, p + (z - sent)))
        if before.is_lost:
            self.wasted = self.steps_made

    @torch.no_grad()
    def go_back(self, outer: torch.optim.Optimizer, rank: int) -> None:
        """Be the center again: this rank's replica was lost, as another fragment's exchange found.

        What was sent before counts; the steps since do not.
        """
        self.receive(outer, rank)
        if not self.center:
            return
        torch._foreach_copy_([*self.parameters], self.center)
        self.wasted = self.steps_made
        if self.before is not None and self.before.error is not None:
            # Its changes go with the replica: none of its steps is in the next sum.
            self.before.made = 0
        elif self.before is not None:
            # `show_center` then moves the replica by nothing but the center's own move until then,
            # and keeps the steps since.
            self.before.sent = [z.clone() for z in self.center]
            self.before.is_lost = False

    def state(self) -> dict[str, Any]:
        """Return where this rank is in its round; call `receive` first."""
        before = self.before
        has_failed = before is not None and before.error is not None
        state = {
            "places": self.places,
            "steps_made": self.steps_made,
            "wasted": self.wasted,
            "early": self.early,
            "center": [tensor.clone() for tensor in self.center],
            "sent": [],
            "is_lost": False,
        }
        # A loader of this state cannot raise the error any more: it begins as after `give_back`.
        if before is not None and has_failed:
            state["steps_made"] = self.steps_made + before.steps
            state["wasted"] = self.wasted + before.steps - before.made
            state["early"] = self.early + before.early
        elif before is not None:
            state["sent"] = [tensor.clone() for tensor in before.sent]
            state["is_lost"] = before.is_lost
        return state

    @property
    def is_uncounted(self) -> bool:
        """Tell whether the exchange that has ended is not among the outer steps yet."""
        outcome = self.before.outcome if self.before is not None else None
        return outcome is not None and not outcome.empty

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.steps_made, self.wasted = state["steps_made"], state.get("wasted", 0)
        self.early = state.get("early", 0)
        self.center, self.before = self._in_layout(state["center"]), None
        if sent := self._in_layout(state.get("sent", ())):
            self.before = Round(sent=sent, is_lost=state["is_lost"], is_loaded=True)

    def _in_layout(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies in the parameters' memory layout; of an empty list an empty one."""
        pairs = zip(self.parameters, tensors, strict=True) if tensors else ()
        return [torch.empty_like(p).copy_(tensor) for p, tensor in pairs]


class Fragments:
    """All fragments, in the order in which they take turns; the owner of their residuals."""

    residual_of: ClassVar[str] = CHANGES

    def __init__(
        self,
        names: Mapping[torch.nn.Parameter, str],
        fragments: int,
        compression: Any,
        process_set: ProcessSet,
        here: World,
        residual_decay: float,
    ) -> None:
        self._names, self._process_set = names, process_set
        every, self._name = list(names), self._name_in(here)
        elements = sum(parameter.numel() for parameter in every)
        self._fragments = [
            Fragment(
                every,
                places,
                OuterExchange(
                    {every[place]: names[every[place]] for place in places},
                    f"{self._name}.{number}",
                    compression,
                    process_set,
                    here,
                    residual_decay,
                    # Its share of bytes_per_step is that of its elements.
                    sum(every[place].numel() for place in places) / elements,
                ),
            )
            for number, places in enumerate(assign_parameters(names, fragments))
        ]
        # Of names that no parameter has; saved again.
        self._unmatched: dict[str, ResidualState] = {}
        self._spaced_for: int | None = None  # inner_steps by which the rounds end in turn
        self.turn = 0  # of the next exchange

    def enter(self, here: World) -> None:
        """Enter the next world; `meet` of each before its exchange."""
        self._name = self._name_in(here)
        for number, each in enumerate(self):
            each.exchange.enter(here, f"{self._name}.{number}")

    def _name_in(self, here: World) -> str:
        # Of all parameters: it is the same on ranks with other fragments, which so hear of them.
        ranks = self._process_set.members.ranks
        return f"local_sgd.{here.name_optimizer(self._names.values(), ranks)}"

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._fragments)

    def __len__(self) -> int:
        return len(self._fragments)

    @property
    def first(self) -> OuterExchange:
        """Return the first fragment's exchange; all fragments have the same ranks."""
        return self._fragments[0].exchange

    def layout(self) -> list[str]:
        """Return how many there are, and which parameter is in which."""
        placed = {place: number for number, each in enumerate(self) for place in each.places}
        return [
            f"fragments={len(self)}",
            *(f"parameter {place} in fragment {placed[place]}" for place in sorted(placed)),
        ]

    def begin_anew(self, inner_steps: int | None) -> None:
        """Begin a round of each, so long that they end in turn; what goes on is forgotten."""
        for fragment in self:
            fragment.load({"steps_made": 0, "center": ()})
        self._spaced_for = None
        self.space(inner_steps)

    def space(self, inner_steps: int | None) -> None:
        """Let the rounds that go on end in turn, where they were spaced for other inner_steps.

        All ranks call it in the same step: the order in which rounds would have ended is kept.
        """
        steps, count = inner_steps or 0, len(self)
        if count > 1 and inner_steps != self._spaced_for:
            # The one that is furthest in its round first, as it would have been anyway.
            in_order = sorted(self, key=lambda each: -(each.steps_made + each.early))
            for number, fragment in enumerate(in_order, 1):
                steps_left = -(-steps * number // count)
                fragment.early = steps - steps_left - fragment.steps_made
        self._spaced_for = inner_steps

    def state(self, outer_steps: int) -> dict[str, Any]:
        """Return where this rank is in all rounds; call `receive` of each first.

        outer_steps: how many have been counted; the state counts those that have ended since.
        """
        # The first one's keys lie at the top: so states had them before there were fragments.
        first, *others = (fragment.state() for fragment in self)
        outer_steps += sum(fragment.is_uncounted for fragment in self)
        spaced = {"outer_steps": outer_steps, "inner_steps": self._spaced_for}
        return {**spaced, **first, "other_fragments": others}

    def matches(self, state: Mapping[str, Any]) -> bool:
        """Tell whether a state is of the same fragments."""
        return [places for places, _ in self._rounds(state)] == [each.places for each in self]

    def load(self, state: Mapping[str, Any]) -> int:
        """Go on from a state of the same fragments; return how many outer steps it counts."""
        for fragment, (_, own) in zip(self, self._rounds(state), strict=True):
            fragment.load(own)
        self._spaced_for = state.get("inner_steps", self._spaced_for)
        outer_steps: int = state["outer_steps"]
        return outer_steps

    def restore_centers(self, state: Mapping[str, Any]) -> bool:
        """Let the model be the centers of a state of any fragments; tell whether there are any."""
        every = list(self._names)
        rounds = [(places, own["center"]) for places, own in self._rounds(state) if own["center"]]
        for places, center in rounds:
            torch._foreach_copy_([every[place] for place in places], list(center))
        return bool(rounds)

    def _rounds(self, state: Mapping[str, Any]) -> list[tuple[list[int], Mapping[str, Any]]]:
        every = range(len(self._names))  # before there were fragments
        states = [state, *state.get("other_fragments", ())]
        return [([*own.get("places", every)], own) for own in states]

    def begin(
        self,
        fragment: Fragment,
        signature: Sequence[str],
        outer: torch.optim.Optimizer | None,
        preempted: bool,
    ) -> None:
        """End a fragment's round, and begin to exchange what this rank has changed in it.

        outer: to step the center by its options of now, later; None: the rank waits.
        The exchange is named by its turn: where ranks do not exchange the same fragment, all hear
        of it, and none waits.
        """
        name, count = f"{self._name}.outer", len(self)
        # With fewer inner_steps since a failure turns are not in order: a name may still be in use.
        under_way = {each.before.turn for each in self if each.before is not None}
        turns = (turn % count for turn in range(self.turn, self.turn + count))
        turn = next(turn for turn in turns if turn not in under_way)
        if count > 1:
            name = f"{name}.{turn}"
            signature = [*signature, f"fragment {self._fragments.index(fragment)} of {count}"]
        made = fragment.steps_made - fragment.wasted
        before = Round(fragment.steps_made, made, fragment.early, turn)
        # Since the latest end of any round, so that no step is in two reports. A lost replica's
        # steps are in no sum, and so in no report.
        before.covered = min(made, *(each.steps_made for each in self))
        with before.waiting():
            fragment.exchange.begin(name, fragment.center, signature, made, preempted)
            if outer is not None:
                # What the rank changes during the exchange is told from what was sent by this copy.
                before.sent = [p.detach().clone() for p in fragment.parameters]
                before.options = options_by_group(outer)
        fragment.before = before
        fragment.steps_made = fragment.wasted = fragment.early = 0
        self.turn = turn + 1

    @property
    def ranks(self) -> Sequence[int]:
        return self.first.peers.ranks

    @property
    def rank(self) -> int:
        return self.first.peers.rank

    @property
    def steps(self) -> int:
        """Return how many exchanges of the first fragment have moved the model."""
        return self.first.steps

    def known_names(self) -> Collection[str]:
        return {name for each in self for name in each.exchange.known_names()}

    def export_state(self) -> tuple[dict[str, ResidualState], list[dict[str, Any]]]:
        """Return the residual of each parameter, and the buckets' records."""
        found, records = zip(*(each.exchange.export_state() for each in self), strict=True)
        own = {name: parts for residuals in found for name, parts in residuals.items()}
        ordered = {name: own[name] for name in self._names.values() if name in own}
        return {**self._unmatched, **ordered}, [*records]

    def import_state(
        self, residuals: Mapping[str, ResidualState], records: list[dict[str, Any]], steps: int
    ) -> None:
        """Replace the residuals, and go on from the records; `meet` before an exchange."""
        for each in self:
            each.exchange.import_state(residuals, records, steps)
        self._unmatched = unmatched(
            residuals,
            self.known_names(),
            self.ranks[self.rank],
            "LocalSGD trains no parameter of that name; give it the names that the checkpoint "
            "was saved with (named_parameters)",
        )
