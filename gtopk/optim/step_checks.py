"""Checks of steps: SkippedSteps counts those that are skipped, ReplicaCheck compares the replicas.

A step is skipped, on all ranks, because a gradient or a sum was not finite. ReplicaCheck checks at
intervals that the ranks' parameters are the same bits; heals them:

    all ranks                      compare checksums of their parameters
    where some differ, to heal     compare checksums of these with the optimizer's state of them;
                                   the lowest rank of the majority sends its own to the others

The state goes along: if only the parameter was repaired, a momentum that differs would make it
differ again. A rank's residual is its own, and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.kernels import checksum
from collectives.transports import Transport

from ..errors import check_choice, check_count
from ..exchange.buckets.arrays import as_bytes
from ..exchange.exchange import Progress
from ..runtime.coordinator.agreement import name_ranks
from ..runtime.logs import EVERYWHERE
from ..runtime.object_codec import decode, encode
from ..runtime.world import world
from ..telemetry.run_record import recorder_of
from .peers import Peers

_log = logging.getLogger("gtopk")

# GradScaler begins at a scale of 65,536 = 2^16 and halves it at each step that overflows: after 16
# of them the scale is 1, and gradients that are finite without a scale do not overflow any more.
MAX_SKIPPED_STEPS: Final = 20
EVERY: Final = 100  # steps, where check_every is None
# For ranks whose replica was not finite and became the others': only parameters were replaced.
BUFFERS_STAY: Final = (
    "buffers (BatchNorm's means) stay as they are there: between epochs, broadcast another rank's"
)
_STAY: Final = (
    "on_divergence='warn': they stay so. Begin with broadcast_parameters, and change parameters "
    "alike on all ranks"
)


class Divergence(NamedTuple):
    """A parameter whose bits differ between ranks; sides: by checksum, the ranks that have it."""

    name: str
    ranks_by_checksum: dict[int, list[int]]

    def describe(self) -> str:
        """Return the parameter and its sides in words, for errors."""
        sides = "; ".join(
            f"{name_ranks(ranks)}: {bits:016x}" for bits, ranks in self.ranks_by_checksum.items()
        )
        return f"parameter '{self.name}' has the checksums {sides}"

    def majority(self) -> list[int] | None:
        """Return the ranks of the side that has more than half of all ranks; None: none has."""
        # More than half of all, not the largest side: of two and two, either may be wrong.
        most = max(self.ranks_by_checksum.values(), key=len)
        return most if 2 * len(most) > sum(map(len, self.ranks_by_checksum.values())) else None


Look = Callable[[Transport], list[Divergence]]


def checksums(parameters: Iterable[torch.Tensor]) -> np.ndarray:
    """Return a checksum of each parameter's bits, uint64 [parameters]."""
    # Of its memory in the order of its elements.
    found = [checksum(as_bytes(each.detach().cpu()).numpy()) for each in parameters]
    return np.array(found, np.uint64)


def compare(transport: Transport, own: np.ndarray, names: Sequence[str]) -> list[Divergence]:
    """Return the parameters that differ, the same on every rank; all ranks call it together.

    own: this rank's `checksums`.
    """
    rows = [row.view(np.uint64) for row in transport.allgather(own.view(np.uint8))]
    found = []
    for place, name in enumerate(names):
        sides: dict[int, list[int]] = {}
        for rank, row in zip(transport.ranks, rows, strict=True):
            sides.setdefault(int(row[place]), []).append(rank)
        if len(sides) > 1:
            found.append(Divergence(name, sides))
    return found


def require_the_same(transport: Transport, own: np.ndarray, names: Sequence[str]) -> None:
    """Raise MismatchError, on every rank alike, that names the first parameter that differs."""
    if diverged := compare(transport, own, names):
        raise MismatchError(
            f"the replicas are no longer the same: {diverged[0].describe()}; begin with "
            "broadcast_parameters and broadcast_optimizer_state, and change parameters alike on "
            "all ranks"
        )


def pack(
    names: Mapping[torch.nn.Parameter, str],
    wanted: Iterable[str],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> dict[str, bytes]:
    """Return parameters of these names with the optimizer's state of them, as bytes, by name.

    Raises TypeError for a state of types that `runtime.object_codec` does not know.
    """
    wanted = set(wanted)
    return {
        name: encode([parameter.detach(), sorted(state.get(parameter, {}).items())])
        for parameter, name in names.items()
        if name in wanted
    }


def spread_majority(
    transport: Transport, own: Mapping[str, bytes], problem: str = ""
) -> tuple[list[int], dict[str, bytes]]:
    """Send the majority's parameters to ranks that have others; all ranks call it together.

    Returns the ranks that were repaired, and bytes for this rank, by name.
    own: this rank's, from `pack`; all ranks pack the same names.
    problem: why this rank cannot pack them; "": it can.
    Raises MismatchError, on every rank alike, where no side has more than half of the ranks, or one
    of them has a problem.
    """
    # Before anything is compared: a rank with a problem has packed nothing.
    problems = zip(transport.ranks, transport.gather_object(problem), strict=True)
    if said := "; ".join(f"{name_ranks([rank])}: {each}" for rank, each in problems if each):
        raise MismatchError(f"the replicas are no longer the same, and cannot be healed: {said}")
    sums = np.array([checksum(np.frombuffer(each, np.uint8)) for each in own.values()], np.uint64)
    diverged = [(each, each.majority()) for each in compare(transport, sums, list(own))]
    for each, most in diverged:
        if most is None:
            raise MismatchError(
                f"the replicas are no longer the same, and cannot be healed: {each.describe()}, "
                "and no side has more than half of the ranks; go on from a checkpoint"
            )
    repaired: dict[str, bytes] = {}
    sick: set[int] = set()
    # In one order on all ranks, as `compare` returns it: sends and receives match by it.
    for each, most in diverged:
        healthy = [transport.ranks.index(rank) for rank in most or []]
        others = [place for place in range(transport.size) if place not in healthy]
        sick.update(transport.ranks[place] for place in others)
        if transport.rank == healthy[0]:
            content = np.frombuffer(own[each.name], np.uint8)
            # All are begun before the first is waited for.
            for sent in [transport.send(content, place) for place in others]:
                sent()
        elif transport.rank in others:
            repaired[each.name] = transport.receive(healthy[0]).tobytes()
    return sorted(sick), repaired


@torch.no_grad()
def install_parameters(
    names: Mapping[torch.nn.Parameter, str],
    repaired: Mapping[str, bytes],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> None:
    """Take over parameters, and the optimizer's state of them, from `spread_majority`."""
    for parameter, name in names.items():
        if name not in repaired:
            continue
        bits, items = decode(repaired[name])
        parameter.copy_(bits)
        own, theirs = state[parameter], dict(items)
        for key in own.keys() - theirs.keys():
            del own[key]
        for key, value in theirs.items():
            here = own.get(key)
            if not isinstance(value, torch.Tensor):
                own[key] = value
            elif isinstance(here, torch.Tensor) and _kind_of(here) == _kind_of(value):
                here.copy_(value)  # in place: other objects may refer to it
            else:  # scalars stay on the host, as Adam's count of steps does
                own[key] = value.to(parameter.device) if value.dim() else value


def _kind_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def require_check(
    check_every: int | None, on_divergence: str | None, ways: Sequence[str] = ("error", "warn")
) -> None:
    """Raise ValueError or TypeError for options that make no check; ways: of on_divergence."""
    if check_every is not None:
        check_count("check_every", check_every)
    if on_divergence is not None:
        check_choice("on_divergence", on_divergence, ways)
    if on_divergence and check_every == 0:
        raise ValueError(
            f"on_divergence={on_divergence!r} needs a check: give check_every, say 100"
        )


class Replicated(Protocol):
    """An object whose parameters are the same on all ranks: see `Reducer`."""

    @property
    def names(self) -> Mapping[Any, str]: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def peers(self) -> Peers: ...


class ReplicaCheck:
    """Compares an optimizer's replicas: call `await_step`, then `after_step`, on all ranks alike.

    every: compare after the first step and every so many; 0: never. Steps with an update count,
        also those that others take while this rank has joined. None: EVERY, and then on_divergence
        is "warn" unless it is given.
    divergences: how many checks found that replicas differ, and did not end in an error.
    """

    def __init__(
        self,
        of: Replicated,
        every: int | None,
        on_divergence: Literal["error", "warn", "heal"] | None,
    ) -> None:
        self._of = of
        self._every = EVERY if every is None else every
        self._on_divergence = on_divergence or ("warn" if every is None else "error")
        self._is_due = False
        self.divergences = 0

    def await_step(self, updates: bool) -> None:
        """Decide whether to check after the step that was just exchanged.

        updates: whether it has an update. Only such steps count, as all ranks count them alike; the
        world's own count does not: a rank that has joined, or where a step failed, has taken fewer.
        """
        steps = self._of.progress.steps
        # After the first, too: that is where a forgotten broadcast shows.
        is_time = self._every > 0 and (steps == 1 or steps % self._every == 0)
        self._is_due = updates and is_time and self._of.peers.size > 1

    def after_step(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Check the replicas where it is time; heal parameters and their optimizer state if asked.

        No check while a rank has joined: its replica differs, as it should.
        Raises HorovodInternalError, on every rank alike, where replicas differ and that is an
        error, or they cannot be healed.
        """
        if (compare_ranks := self.begin()) is not None:
            diverged = self._of.peers.run_without_joined(
                "replicas", [], lambda t, joined: None if joined else compare_ranks(t)
            )
            self.end(diverged, state)

    def begin(self) -> Look | None:
        """Return the comparison of the parameters as they are, for all ranks to run together.

        None: it is not time; once it is, it stays so until `end`. The comparison raises
        MismatchError, on every rank alike, where on_divergence is "error".
        """
        if not self._is_due:
            return None
        parameters, is_error = self._of.names, self._on_divergence == "error"
        # Now, in the caller's thread: parameters may have moved on when the comparison is run.
        own, names = checksums(parameters), list(parameters.values())

        def compare_ranks(transport: Transport) -> list[Divergence]:
            if is_error:
                require_the_same(transport, own, names)
                return []
            return compare(transport, own, names)

        return compare_ranks

    def end(
        self, diverged: Sequence[Divergence] | None, state: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Warn of, or heal, the parameters that a comparison has found; None: it was not run."""
        self._is_due = False
        if not diverged:
            return
        self.divergences += 1
        heals = self._on_divergence == "heal"
        became = self._repair(diverged, state) if heals else _STAY
        more = f", and {len(diverged) - 1} more parted" if len(diverged) > 1 else ""
        here = world.current()
        _log.warning(
            "rank %d: the replicas are not the same at step %d: %s%s; %s",
            here.rank,
            here.step,
            diverged[0].describe(),
            more,
            became,
            extra=EVERYWHERE,
        )
        if (recorder := recorder_of(here)) is not None:
            recorder.note("parted", parameters=[each.name for each in diverged], healed=heals)

    def _repair(
        self, diverged: Sequence[Divergence], state: Mapping[torch.Tensor, dict[str, Any]]
    ) -> str:
        """Replace parameters that differ by the majority's; return in words what was done."""
        parameters = self._of.names
        own: dict[str, bytes] = {}
        problem = ""
        try:
            own = pack(parameters, [each.name for each in diverged], state)
        except TypeError as error:  # on some ranks perhaps: the others would wait
            problem = str(error)
        ranks, repaired = self._of.peers.run(
            "replicas.heal", [], lambda transport, _: spread_majority(transport, own, problem)
        )
        install_parameters(parameters, repaired, state)
        # To be sure: whoever could not take the bits over must not train on.
        again, names = checksums(parameters), list(parameters.values())
        self._of.peers.run(
            "replicas.healed", [], lambda t, all_flags: require_the_same(t, again, names)
        )
        has = "has" if len(ranks) == 1 else "have"
        return f"healed: {name_ranks(ranks)} {has} what most ranks have, the optimizer's state too"


def name_culprits(culprits: Mapping[int, Sequence[str]]) -> str:
    """Return ranks and parameters of theirs in words: three of each, as there may be hundreds."""
    return "; ".join(f"rank {r}: {', '.join(map(repr, n[:3]))}" for r, n in culprits.items())


class SkipCounter:
    """Counts steps that non-finite numbers of a rank spoilt; raises where too many are in a row.

    allowed: how many in a row are no error.
    count:   of the steps, or of the ranks whose numbers they were; the caller counts.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._in_a_row = 0
        self.count = 0

    def end_row(self) -> None:
        """Begin a new row: a step was good, or a state was loaded."""
        self._in_a_row = 0

    def lengthen(self, said: Callable[[int], str]) -> None:
        """Add a spoilt step to the row.

        said: makes the error's message of the row's length.
        Raises FloatingPointError with it where the row is longer than allowed.
        """
        self._in_a_row += 1
        if self._in_a_row > self.allowed:
            raise FloatingPointError(
                f"{said(self._in_a_row)}; max_skipped_steps={self.allowed} allows as many"
            )


class SkippedSteps(SkipCounter):
    """Counts skipped steps; raises when too many follow each other."""

    def note(self, rank: int, step: int, where: str) -> None:
        """Count a skipped step, and warn, on every rank, of the gradients that are not finite.

        where: ranks and parameters that have them; "": only the sum is not finite.
        Raises FloatingPointError where more steps in a row were skipped than allowed.
        """
        unlike = f"gradient is not finite on {where}"
        seen = f"the {unlike}" if where else "the sum of finite gradients is not finite"
        why = f"a {unlike}" if where else "a sum overflowed"
        warning = "rank %d: step %d is skipped on every rank, residuals untouched: %s"
        self.note_that(rank, step, warning, seen, why)

    def note_that(self, rank: int, step: int, warning: str, seen: str, why: str) -> None:
        """Count a skipped step as `note` does, with other words.

        warning: a format for rank, step and `seen`. why: ends the error's message.
        """
        self.count += 1
        _log.warning(warning, rank, step, seen, extra=EVERYWHERE)
        self.lengthen(
            lambda n: (
                f"rank {rank}: {n} steps in a row were skipped at step {step}, the last because "
                f"{why}"
            )
        )
