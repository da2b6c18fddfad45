"""Checks of steps: SkippedSteps counts skipped steps, ReplicaCheck compares the replicas.

All ranks skip a step if a gradient or a sum is not finite. ReplicaCheck checks at intervals that
the ranks' parameters are bit-identical, and can heal them:

    all ranks                    compare checksums of their parameters
    to heal, if some differ      compare checksums of these parameters with their optimizer state;
                                 the lowest rank of the majority sends its own to the others

The state is included because, with only the parameter repaired, a different momentum would make it
diverge again. A rank's residual is its own, and stays.
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

# GradScaler starts with a scale of 65,536 = 2^16 and halves it on each overflow: after 16 of them
# the scale is 1, and gradients that are finite without a scale no longer overflow.
MAX_SKIPPED_STEPS: Final = 20
EVERY: Final = 100  # steps, where check_every is None
# For ranks with a non-finite replica, replaced by that of the others: only parameters were.
BUFFERS_KEPT: Final = (
    "buffers (BatchNorm's means) are kept there: between epochs, broadcast another rank's"
)
_NOT_REPAIRED: Final = (
    "they stay different. Start with broadcast_parameters, and change parameters and learning "
    "rates alike on all ranks"
)


class Divergence(NamedTuple):
    """A parameter with bits that differ between ranks; ranks_by_checksum: ranks of each version."""

    name: str
    ranks_by_checksum: dict[int, list[int]]

    def describe(self) -> str:
        """Return a description of the parameter and its versions, for errors."""
        versions = "; ".join(
            f"{name_ranks(ranks)}: {bits:016x}" for bits, ranks in self.ranks_by_checksum.items()
        )
        return f"parameter '{self.name}' has the checksums {versions}"

    def majority(self) -> list[int] | None:
        """Return the ranks of the version that more than half of all ranks have; None if none."""
        # More than half, not just the most frequent: with two against two, either may be wrong.
        most = max(self.ranks_by_checksum.values(), key=len)
        return most if 2 * len(most) > sum(map(len, self.ranks_by_checksum.values())) else None


Comparison = Callable[[Transport], list[Divergence]]


def checksums(parameters: Iterable[torch.Tensor]) -> np.ndarray:
    """Return a checksum of each parameter's bits, uint64 [parameters]."""
    # Of its elements in order, whatever its memory layout.
    found = [checksum(as_bytes(each.detach().cpu()).numpy()) for each in parameters]
    return np.array(found, np.uint64)


def compare(transport: Transport, own: np.ndarray, names: Sequence[str]) -> list[Divergence]:
    """Return the parameters that differ, the same on every rank; a collective.

    own: this rank's `checksums`.
    """
    rows = [row.view(np.uint64) for row in transport.allgather(own.view(np.uint8))]
    found = []
    for place, name in enumerate(names):
        ranks_by_checksum: dict[int, list[int]] = {}
        for rank, row in zip(transport.ranks, rows, strict=True):
            ranks_by_checksum.setdefault(int(row[place]), []).append(rank)
        if len(ranks_by_checksum) > 1:
            found.append(Divergence(name, ranks_by_checksum))
    return found


def require_the_same(transport: Transport, own: np.ndarray, names: Sequence[str]) -> None:
    """Raise MismatchError, on every rank alike, naming the first parameter that differs."""
    if diverged := compare(transport, own, names):
        raise MismatchError(
            f"the replicas are no longer the same: {diverged[0].describe()}; begin with "
            "broadcast_parameters and broadcast_optimizer_state, and change parameters alike on "
            "all ranks"
        )


def pack(
    names: Mapping[torch.nn.Parameter, str],
    selected: Iterable[str],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> dict[str, bytes]:
    """Serialize the parameters of these names with their optimizer state, by name.

    Raises TypeError for a state with types that `runtime.object_codec` does not support.
    """
    selected = set(selected)
    return {
        name: encode([parameter.detach(), sorted(state.get(parameter, {}).items())])
        for parameter, name in names.items()
        if name in selected
    }


def spread_majority(
    transport: Transport, own: Mapping[str, bytes], problem: str = ""
) -> tuple[list[int], dict[str, bytes]]:
    """Send the majority's parameters to ranks that have others; a collective.

    Returns the repaired ranks, and bytes for this rank, by name.
    own: this rank's, from `pack`; all ranks must pack the same names.
    problem: why this rank cannot pack them; "" if it can.
    Raises MismatchError, on every rank alike, if no version has more than half of the ranks, or if
    any rank has a problem.
    """
    # Before the comparison, because a rank with a problem has packed nothing.
    problems = zip(transport.ranks, transport.gather_object(problem), strict=True)
    if reasons := "; ".join(f"{name_ranks([rank])}: {each}" for rank, each in problems if each):
        raise MismatchError(f"the replicas are no longer the same, and cannot be healed: {reasons}")
    sums = np.array([checksum(np.frombuffer(each, np.uint8)) for each in own.values()], np.uint64)
    diverged = [(each, each.majority()) for each in compare(transport, sums, list(own))]
    for each, most in diverged:
        if most is None:
            raise MismatchError(
                f"the replicas are no longer the same, and cannot be healed: {each.describe()}, "
                "and no version has more than half of the ranks; resume from a checkpoint"
            )
    repaired: dict[str, bytes] = {}
    repaired_ranks: set[int] = set()
    # In the order of `compare`, equal on all ranks, so that sends and receives match.
    for each, most in diverged:
        majority = [transport.ranks.index(rank) for rank in most or []]
        others = [place for place in range(transport.size) if place not in majority]
        repaired_ranks.update(transport.ranks[place] for place in others)
        if transport.rank == majority[0]:
            content = np.frombuffer(own[each.name], np.uint8)
            # Start all sends before waiting for the first.
            for sent in [transport.send(content, place) for place in others]:
                sent()
        elif transport.rank in others:
            repaired[each.name] = transport.receive(majority[0]).tobytes()
    return sorted(repaired_ranks), repaired


@torch.no_grad()
def install_parameters(
    names: Mapping[torch.nn.Parameter, str],
    repaired: Mapping[str, bytes],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> None:
    """Install parameters, and their optimizer state, from `spread_majority`."""
    for parameter, name in names.items():
        if name not in repaired:
            continue
        bits, items = decode(repaired[name])
        parameter.copy_(bits)
        own, received = state[parameter], dict(items)
        for key in own.keys() - received.keys():
            del own[key]
        for key, value in received.items():
            current = own.get(key)
            if not isinstance(value, torch.Tensor):
                own[key] = value
            elif isinstance(current, torch.Tensor) and _kind_of(current) == _kind_of(value):
                current.copy_(value)  # in place, because other objects may refer to it
            else:  # scalars stay on the host, as Adam's count of steps does
                own[key] = value.to(parameter.device) if value.dim() else value


def _kind_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def require_check(
    check_every: int | None, on_divergence: str | None, choices: Sequence[str] = ("error", "warn")
) -> None:
    """Raise ValueError or TypeError for invalid check options; choices: of on_divergence."""
    if check_every is not None:
        check_count("check_every", check_every)
    if on_divergence is not None:
        check_choice("on_divergence", on_divergence, choices)
    if on_divergence and check_every == 0:
        raise ValueError(
            f"on_divergence={on_divergence!r} needs a check: give check_every, say 100"
        )


class Replicated(Protocol):
    """An object with parameters that are the same on all ranks: see `Reducer`."""

    @property
    def names(self) -> Mapping[Any, str]: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def peers(self) -> Peers: ...


class ReplicaCheck:
    """Compare an optimizer's replicas: call `await_step`, then `after_step`, on all ranks alike.

    every: compare after the first step, also with a new parameter or a loaded state, and every
        `every` steps; 0: never. Steps with an update count, also those that other ranks take after
        this rank has joined. None: EVERY, and then on_divergence defaults to "warn".
    divergences: how many checks found that replicas differ without raising an error.
    """

    def __init__(
        self,
        replicated: Replicated,
        every: int | None,
        on_divergence: Literal["error", "warn", "heal"] | None,
    ) -> None:
        self._replicated = replicated
        self._every = EVERY if every is None else every
        self._on_divergence = on_divergence or ("warn" if every is None else "error")
        self._is_due = False
        self.divergences = 0

    def await_step(self, updates: bool, started: int = 0) -> None:
        """Decide whether to check after the step that was just exchanged.

        started: the steps before this rank, or another one, began or loaded a state.
        updates: whether it has an update. Only such steps count, because all ranks count them
        alike. The world's step count does not work: it is lower on a rank that joined or had a
        failed step.
        """
        steps = self._replicated.progress.steps
        # Also after the first step, where a forgotten broadcast or load shows.
        is_first = steps == started + 1
        is_time = self._every > 0 and (is_first or steps % self._every == 0)
        self._is_due = updates and is_time and self._replicated.peers.size > 1

    def after_step(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Check the replicas if due; heal parameters and their optimizer state if asked to.

        No check after a rank has joined: its replica is expected to differ.
        Raises HorovodInternalError, on every rank alike, if replicas differ and that is an error,
        or if they cannot be healed.
        """
        if (compare_ranks := self.begin()) is not None:
            diverged = self._replicated.peers.run_without_joined(
                "replicas", [], lambda t, joined: None if joined else compare_ranks(t)
            )
            self.end(diverged, state)

    def begin(self) -> Comparison | None:
        """Return the comparison of the current parameters, for all ranks to run together.

        Return None if no check is due; once due, it stays so until `end`. The comparison raises
        MismatchError, on every rank alike, if on_divergence is "error".
        """
        if not self._is_due:
            return None
        parameters, is_error = self._replicated.names, self._on_divergence == "error"
        # Now, in the caller's thread: parameters may have changed when the comparison runs.
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
        """Warn of, or heal, the differences that a comparison found; None: it was not run."""
        self._is_due = False
        if not diverged:
            return
        self.divergences += 1
        heals = self._on_divergence == "heal"
        result = self._repair(diverged, state) if heals else _NOT_REPAIRED
        others = f", and {len(diverged) - 1} more" if len(diverged) > 1 else ""
        here = world.current()
        _log.warning(
            "rank %d: the replicas are not the same at step %d: %s%s; %s",
            here.rank,
            here.step,
            diverged[0].describe(),
            others,
            result,
            extra=EVERYWHERE,
        )
        if (recorder := recorder_of(here)) is not None:
            recorder.note("parted", parameters=[each.name for each in diverged], healed=heals)

    def _repair(
        self, diverged: Sequence[Divergence], state: Mapping[torch.Tensor, dict[str, Any]]
    ) -> str:
        """Replace parameters that differ with the majority's; return a description."""
        parameters = self._replicated.names
        own: dict[str, bytes] = {}
        problem = ""
        try:
            own = pack(parameters, [each.name for each in diverged], state)
        except TypeError as error:  # perhaps only on some ranks, and the others would wait
            problem = str(error)
        ranks, repaired = self._replicated.peers.run(
            "replicas.heal", [], lambda transport, _: spread_majority(transport, own, problem)
        )
        install_parameters(parameters, repaired, state)
        # Verify: a rank that could not install the bits must not go on training.
        after, names = checksums(parameters), list(parameters.values())
        self._replicated.peers.run(
            "replicas.healed", [], lambda t, all_flags: require_the_same(t, after, names)
        )
        return f"healed: {name_ranks(ranks)} received the majority's values and optimizer state"


def name_culprits(culprits: Mapping[int, Sequence[str]]) -> str:
    """Return a description of ranks and at most three of each rank's parameters."""
    return "; ".join(f"rank {r}: {', '.join(map(repr, n[:3]))}" for r, n in culprits.items())


class SkipCounter:
    """Count steps skipped for a rank's non-finite values; raise if too many occur in a row.

    allowed: how many in a row are no error.
    count:   total steps, or total ranks with such values; the caller increments it.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._in_a_row = 0
        self.count = 0

    def end_row(self) -> None:
        """Reset the row: a step succeeded, or a state was loaded."""
        self._in_a_row = 0

    def lengthen(self, message: Callable[[int], str]) -> None:
        """Add a skipped step to the row.

        message: returns the error's message for a row of this length.
        Raises FloatingPointError if the row is longer than allowed.
        """
        self._in_a_row += 1
        if self._in_a_row > self.allowed:
            raise FloatingPointError(
                f"{message(self._in_a_row)}; max_skipped_steps={self.allowed} allows no more"
            )


class SkippedSteps(SkipCounter):
    """Count skipped steps; raise if there are too many in a row."""

    def note(self, rank: int, step: int, where: str) -> None:
        """Count a skipped step, and warn, on every rank, of the non-finite gradients.

        where: ranks and parameters that have them; "": only the sum is not finite.
        Raises FloatingPointError if more steps in a row were skipped than allowed.
        """
        cause = f"gradient is not finite on {where}"
        problem = f"the {cause}" if where else "the sum of finite gradients is not finite"
        why = f"a {cause}" if where else "a sum overflowed"
        warning = "rank %d: step %d is skipped on every rank, residuals untouched: %s"
        self.note_that(rank, step, warning, problem, why)

    def note_that(self, rank: int, step: int, warning: str, problem: str, why: str) -> None:
        """Count a skipped step as `note` does, with another message.

        warning: a format for rank, step and `problem`. why: the end of the error's message.
        """
        self.count += 1
        _log.warning(warning, rank, step, problem, extra=EVERYWHERE)
        self.lengthen(
            lambda n: (
                f"rank {rank}: {n} steps in a row were skipped at step {step}, the last because "
                f"{why}"
            )
        )
