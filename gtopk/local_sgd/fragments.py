"""Fragments: parts of the model with rounds that end in turn, each with its own exchange.

    fragment 0   x x|x x x x x x x x|x x x    x: a step; |: the end of a round of this fragment
    fragment 1   x x x x|x x x x x x x x|x
    fragment 2   x x x x x x|x x x x x x x
    fragment 3   x x x x x x x x|x x x x x    here rounds of 8 steps; the first ones are shorter

Streaming DiLoCo's partial synchronization (Douillard et al. 2025, arXiv 2501.18512): each parameter
is exchanged as often as with one fragment, but the longest exchange is that of one part.
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

# Largest size of a fragment of whole layers, relative to one that may split layers.
_UNEVEN: Final = 1.1


def check_rounds(
    inner_steps: int | None,
    overlap_steps: int,
    fragments: int,
    residual_decay: float,
    compression: Any,
) -> None:
    """Raise ValueError or TypeError for options of `LocalSGD` that do not fit together."""
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
    # A single fragment needs no turns, so it works without inner_steps.
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

    Layers are dealt from the largest to the smallest, each to the fragment with the fewest values.
    So the equal blocks of a transformer go round in order of depth (the paper's strided fragments),
    and the other layers balance the sizes. A layer is all parameters with the same name up to the
    first number, such as `blocks.3.`, or else of the same module. Parameters are dealt one by one
    if whole layers make a fragment more than a tenth larger, or leave one empty.
    Raises ValueError for more fragments than parameters with values.
    """
    parameters = list(names)
    sizes = [parameter.numel() for parameter in parameters]
    layers = [
        [place for place, _ in group]
        for _, group in groupby(enumerate(names.values()), lambda pair: _layer(pair[1]))
    ]
    by_layer = _assign(layers, sizes, fragments)
    by_parameter = _assign([[place] for place in range(len(sizes))], sizes, fragments)
    both = by_layer, by_parameter
    totals = [[sum(sizes[place] for place in part) for part in parts] for parts in both]
    is_even = min(totals[0]) > 0 and max(totals[0]) <= _UNEVEN * max(totals[1])
    dealt = by_layer if is_even or fragments == 1 else by_parameter
    if fragments > 1 and min(totals[1]) == 0:
        raise ValueError(
            f"fragments must be at most the number of parameters with values, "
            f"{sum(map(bool, sizes))}, got {fragments}"
        )
    # By their first parameters, so that the turns follow the depth of the model.
    return sorted(dealt)


def _assign(
    items: Sequence[Sequence[int]], sizes: Sequence[int], fragments: int
) -> list[list[int]]:
    """Deal items in order of size, each to the fragment with the fewest values so far."""
    totals = [0] * fragments
    dealt: list[list[int]] = [[] for _ in range(fragments)]
    weights = [sum(sizes[place] for place in item) for item in items]
    # The sort is stable: layers of equal size stay in order of depth.
    for number in sorted(range(len(items)), key=lambda number: -weights[number]):
        fragment = totals.index(min(totals))
        totals[fragment] += weights[number]
        dealt[fragment] += items[number]
    return [sorted(each) for each in dealt]


def _layer(name: str) -> str:
    parts = name.split(".")
    depth = next((end for end, part in enumerate(parts, 1) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:depth])


@contextmanager
def center_in_place(
    parameters: Iterable[torch.nn.Parameter],
    center: Sequence[torch.Tensor],
    outer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
) -> Iterator[None]:
    """Let the outer optimizer step the center, with these options, while the replica stays.

    Swaps `data`, unseen by autograd: a running backward pass may need the replica.
    """
    own, groups = list(parameters), outer.param_groups
    replica = [parameter.data for parameter in own]
    old = [{name: group[name] for name in new} for group, new in zip(groups, options, strict=True)]
    try:
        for parameter, tensor in zip(own, center, strict=True):
            parameter.data = tensor
        for group, new in zip(groups, options, strict=True):
            group.update(new)
        with ExitStack() as versions:
            # An in-place step increments the parameters' versions, which a running backward pass
            # would refuse.
            for parameter in own:
                versions.enter_context(preserve(parameter))
            yield
    finally:
        for parameter, tensor in zip(own, replica, strict=True):
            parameter.data = tensor
        for group, new in zip(groups, old, strict=True):
            group.update(new)


class Fragment:
    """A part of the parameters, this rank's place in its round, and its exchange.

    places:     of the parameters, among all that are exchanged.
    others:     the parameters of other fragments.
    center:     z, while a round is open.
    previous:   the round before, until its exchange has moved the replica.
    steps_made: by this rank, in this round; wasted: the part of them made by a lost replica.
    early:      by how many steps this round is shorter than others; below 0: longer.
    """

    def __init__(
        self,
        all_parameters: Sequence[torch.nn.Parameter],
        places: Sequence[int],
        exchange: OuterExchange,
    ) -> None:
        self.places = list(places)
        self.parameters = [all_parameters[place] for place in places]
        self.others = [p for place, p in enumerate(all_parameters) if place not in set(places)]
        self.exchange = exchange
        self.center: list[torch.Tensor] = []
        self.previous: Round | None = None
        self.steps_made = self.wasted = self.early = 0

    @torch.no_grad()
    def receive(self, outer: torch.optim.Optimizer, rank: int) -> None:
        """Wait for the exchange of the previous round, and take the outer step.

        With overlap the replica does not move yet: a rank may receive earlier than others.
        """
        previous = self.previous
        # A checkpoint may have received it already; then only the replica must still move.
        if previous is None or previous.has_ended:
            return
        with previous.waiting():
            try:
                with preserve_gradients(self.others), self.exchange.ended() as outcome:
                    for parameter in self.others:
                        parameter.grad = None  # so that the outer optimizer skips it
                    if not previous.sent:
                        # The rank has waited, so nothing needs the replica: the outer optimizer
                        # steps in its place.
                        torch._foreach_copy_([*self.parameters], self.center)
                        if outcome.moves:
                            outer.step()
                    elif outcome.moves:
                        own, options = self.parameters, previous.options
                        with center_in_place(own, self.center, outer, options):
                            outer.step()
            except HorovodInternalError as error:
                previous.error = error  # so that all ranks raise it in the same step
            except BaseException:
                self.merge_failed_round(previous)
                raise
            else:
                previous.outcome, previous.is_lost = outcome, rank in outcome.lost

    def merge_failed_round(self, previous: Round) -> None:
        """Add the steps of a round with a failed exchange to this one."""
        # Its changes were never summed: they are still in the replica, and the next exchange sends
        # them.
        self.previous = None
        self.steps_made += previous.steps
        self.wasted += previous.steps - previous.counted
        self.early += previous.early

    def move_to_center(self, previous: Round) -> None:
        """Move the replica to the center, and keep the steps that it has made since."""
        # A rank that has waited has made no steps since: its parameters are the center now.
        if not previous.sent:
            self.center = []
        elif previous.is_lost or not self.steps_made:
            torch._foreach_copy_([*self.parameters], self.center)
        else:
            for p, z, sent in zip(self.parameters, self.center, previous.sent, strict=True):
                # Exact for unchanged values: a frozen parameter must not seem to move.
                p.copy_(torch.where(p == sent, z, p + (z - sent)))
        if previous.is_lost:
            self.wasted = self.steps_made

    @torch.no_grad()
    def reset_to_center(self, outer: torch.optim.Optimizer, rank: int) -> None:
        """Reset to the center: another fragment's exchange found this rank's replica lost.

        Changes sent before count; the steps since do not.
        """
        self.receive(outer, rank)
        if not self.center:
            return
        torch._foreach_copy_([*self.parameters], self.center)
        self.wasted = self.steps_made
        if self.previous is not None and self.previous.error is not None:
            # Its changes are lost with the replica: the next sum contains none of its steps.
            self.previous.counted = 0
        elif self.previous is not None:
            # `move_to_center` then adds only the center's own move, and keeps later steps.
            self.previous.sent = [z.clone() for z in self.center]
            self.previous.is_lost = False

    def state(self) -> dict[str, Any]:
        """Return this rank's place in its round; call `receive` first."""
        previous = self.previous
        has_failed = previous is not None and previous.error is not None
        state = {
            "places": self.places,
            "steps_made": self.steps_made,
            "wasted": self.wasted,
            "early": self.early,
            "center": [tensor.clone() for tensor in self.center],
            "sent": [],
            "is_lost": False,
        }
        # A loader of this state cannot raise the error, so it starts as after `merge_failed_round`.
        if previous is not None and has_failed:
            state["steps_made"] = self.steps_made + previous.steps
            state["wasted"] = self.wasted + previous.steps - previous.counted
            state["early"] = self.early + previous.early
        elif previous is not None:
            state["sent"] = [tensor.clone() for tensor in previous.sent]
            state["is_lost"] = previous.is_lost
        return state

    @property
    def is_uncounted(self) -> bool:
        """Tell whether an exchange has ended that is not counted in the outer steps yet."""
        outcome = self.previous.outcome if self.previous is not None else None
        return outcome is not None and not outcome.empty

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self.steps_made, self.wasted = state["steps_made"], state.get("wasted", 0)
        self.early = state.get("early", 0)
        self.center, self.previous = self._in_layout(state["center"]), None
        if sent := self._in_layout(state.get("sent", ())):
            self.previous = Round(sent=sent, is_lost=state["is_lost"], is_loaded=True)

    def _in_layout(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies in the parameters' memory layout; an empty list for an empty one."""
        pairs = zip(self.parameters, tensors, strict=True) if tensors else ()
        return [torch.empty_like(p).copy_(tensor) for p, tensor in pairs]


class Fragments:
    """All fragments, in the order of their turns; the owner of their residuals."""

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
        parameters, self._name = list(names), self._name_in(here)
        elements = sum(parameter.numel() for parameter in parameters)
        self._fragments = [
            Fragment(
                parameters,
                places,
                OuterExchange(
                    {parameters[place]: names[parameters[place]] for place in places},
                    f"{self._name}.{number}",
                    compression,
                    process_set,
                    here,
                    residual_decay,
                    # bytes_per_step is divided in proportion to elements.
                    sum(parameters[place].numel() for place in places) / elements,
                ),
            )
            for number, places in enumerate(assign_parameters(names, fragments))
        ]
        # For names that no parameter has; kept to be saved again.
        self._unmatched: dict[str, ResidualState] = {}
        self._spaced_for: int | None = None  # the inner_steps that the rounds are spaced for
        self.turn = 0  # of the next exchange

    def enter(self, here: World) -> None:
        """Enter the next world; call each exchange's `agree` before it."""
        self._name = self._name_in(here)
        for number, each in enumerate(self):
            each.exchange.enter(here, f"{self._name}.{number}")

    def _name_in(self, here: World) -> str:
        # From all parameters: ranks with other fragments get the same name, so the mismatch shows.
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
        """Return the number of fragments, and the fragment of each parameter."""
        placed = {place: number for number, each in enumerate(self) for place in each.places}
        return [
            f"fragments={len(self)}",
            *(f"parameter {place} in fragment {placed[place]}" for place in sorted(placed)),
        ]

    def start_rounds(self, inner_steps: int | None) -> None:
        """Begin a round of each fragment, spaced so that they end in turn; drop open rounds."""
        for fragment in self:
            fragment.load({"steps_made": 0, "center": ()})
        self._spaced_for = None
        self.space(inner_steps)

    def space(self, inner_steps: int | None) -> None:
        """Space the open rounds so that they end in turn, if they are spaced for other inner_steps.

        All ranks call it in the same step: the order in which rounds would have ended is kept.
        """
        steps, count = inner_steps or 0, len(self)
        if count > 1 and inner_steps != self._spaced_for:
            # The fragment furthest in its round first, as it would have ended first anyway.
            in_order = sorted(self, key=lambda each: -(each.steps_made + each.early))
            for number, fragment in enumerate(in_order, 1):
                steps_left = -(-steps * number // count)
                fragment.early = steps - steps_left - fragment.steps_made
        self._spaced_for = inner_steps

    def state(self, outer_steps: int) -> dict[str, Any]:
        """Return this rank's place in all rounds; call `receive` of each first.

        outer_steps: the number counted so far; the state also counts exchanges that have ended
        since.
        """
        # The first one's keys are at the top level, as in states from before fragments existed.
        first, *others = (fragment.state() for fragment in self)
        outer_steps += sum(fragment.is_uncounted for fragment in self)
        spaced = {"outer_steps": outer_steps, "inner_steps": self._spaced_for}
        return {**spaced, **first, "other_fragments": others}

    def matches(self, state: Mapping[str, Any]) -> bool:
        """Tell whether a state has the same fragments."""
        return [places for places, _ in self._rounds(state)] == [each.places for each in self]

    def load(self, state: Mapping[str, Any]) -> int:
        """Resume from a state with the same fragments; return the number of its outer steps."""
        for fragment, (_, own) in zip(self, self._rounds(state), strict=True):
            fragment.load(own)
        self._spaced_for = state.get("inner_steps", self._spaced_for)
        outer_steps: int = state["outer_steps"]
        return outer_steps

    def restore_centers(self, state: Mapping[str, Any]) -> bool:
        """Set the model to the centers of a state with any fragments; tell whether it has any."""
        parameters = list(self._names)
        rounds = [(places, own["center"]) for places, own in self._rounds(state) if own["center"]]
        for places, center in rounds:
            torch._foreach_copy_([parameters[place] for place in places], list(center))
        return bool(rounds)

    def _rounds(self, state: Mapping[str, Any]) -> list[tuple[list[int], Mapping[str, Any]]]:
        all_places = range(len(self._names))  # for states from before fragments existed
        states = [state, *state.get("other_fragments", ())]
        return [([*own.get("places", all_places)], own) for own in states]

    def begin(
        self,
        fragment: Fragment,
        signature: Sequence[str],
        outer: torch.optim.Optimizer | None,
        preempted: bool,
    ) -> None:
        """End a fragment's round, and start to exchange this rank's changes in it.

        outer: steps the center later, with its current options; None: the rank waits.
        The exchange is named by its turn: if ranks exchange different fragments, all see the
        mismatch, and none waits.
        """
        name, count = f"{self._name}.outer", len(self)
        # After a failure with fewer inner_steps turns are out of order: a name may still be in use.
        pending_turns = {each.previous.turn for each in self if each.previous is not None}
        turns = (turn % count for turn in range(self.turn, self.turn + count))
        turn = next(turn for turn in turns if turn not in pending_turns)
        if count > 1:
            name = f"{name}.{turn}"
            signature = [*signature, f"fragment {self._fragments.index(fragment)} of {count}"]
        counted = fragment.steps_made - fragment.wasted
        previous = Round(fragment.steps_made, counted, fragment.early, turn)
        # Since the last end of any round, so that no step is in two reports. No sum contains a lost
        # replica's steps, so no report does.
        previous.covered = min(counted, *(each.steps_made for each in self))
        with previous.waiting():
            fragment.exchange.begin(name, fragment.center, signature, counted, preempted)
            if outer is not None:
                # A copy, to separate the changes made during the exchange from those sent.
                previous.sent = [p.detach().clone() for p in fragment.parameters]
                previous.options = options_by_group(outer)
        fragment.previous = previous
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

    def parameter_names(self) -> Collection[str]:
        return {name for each in self for name in each.exchange.parameter_names()}

    def export_state(self) -> tuple[dict[str, ResidualState], list[dict[str, Any]]]:
        """Return the residual of each parameter, and the buckets' records."""
        found, records = zip(*(each.exchange.export_state() for each in self), strict=True)
        own = {name: parts for residuals in found for name, parts in residuals.items()}
        ordered = {name: own[name] for name in self._names.values() if name in own}
        return {**self._unmatched, **ordered}, [*records]

    def import_state(
        self, residuals: Mapping[str, ResidualState], records: list[dict[str, Any]], steps: int
    ) -> None:
        """Replace the residuals, and resume from the records; call `agree` before an exchange."""
        for each in self:
            each.exchange.import_state(residuals, records, steps)
        self._unmatched = unmatched(
            residuals,
            self.parameter_names(),
            self.ranks[self.rank],
            "LocalSGD trains no parameter of that name; give it the names that the checkpoint "
            "was saved with (named_parameters)",
        )
