"""World: a rank's part of the job: its transport, its engine, its place on its host, its records.

Which transport carries messages of tensors on GPUs:

    every rank sees a GPU             NCCL, if at the first tensor on a GPU each rank turns out to
                                      have one of its own and NCCL works (`device_choice`)
    some do, or GTOPK_TRANSPORT=...   the ranks' own transport, through the hosts' memory
    none does                         there are no such messages

Rank 0 logs the choice once, with its reason.

GTOPK_LINK paces the messages between ranks of one host as a slow network would; with
GTOPK_CHECK_MESSAGES every message has a checksum. Operations that are unfinished on all ranks are
finished before they leave.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from collectives.cost import Link
from collectives.transports import Transport
from collectives.transports.device_choice import GpuRoute, RouteChoice
from collectives.transports.nccl import NcclTransport
from collectives.transports.transport import CHANNELS

from ... import __version__, settings
from ...errors import HorovodInternalError
from ..coordinator import Engine
from ..coordinator.agreement import describe_mismatch, name_ranks
from ..coordinator.clocks import Offset, agree_on_now, clock_offset
from ..logs import EVERYWHERE


@dataclass
class Members:
    """All ranks, or those of a process set, as one rank sees them.

    ranks:   their ranks in the world, in order.
    engine:  runs their operations; None where this rank is none of them.
    unnamed: counts their operations without a name.
    """

    ranks: Sequence[int]
    engine: Engine | None
    unnamed: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_log = logging.getLogger("gtopk")


def emulate_on(transport: Transport, environ: Mapping[str, str] = os.environ) -> None:
    """Pace the messages of a transport as GTOPK_LINK asks for; every rank calls it.

    Raises ValueError, on every rank, for a text that is no link, for texts that differ, for ranks
    on several hosts, and for NCCL, whose messages cannot be paced.
    """
    emulate_as_said(transport, transport.gather_object(settings.LINK.text(environ)), environ)


def emulate_as_said(
    transport: Transport, texts: Sequence[str], environ: Mapping[str, str] = os.environ
) -> None:
    """Pace messages as `emulate_on` does; texts: every rank's GTOPK_LINK."""
    # As texts, and before any is read: all ranks raise the same, or none does.
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"{settings.LINK.name} must be the same on all ranks, got {texts[0]!r} on rank 0 "
                f"and {text!r} on rank {rank}"
            )
    asked = settings.LINK.read(environ)
    if asked is None or transport.size == 1:
        return
    if transport.name == "nccl":
        raise ValueError(
            f"{settings.LINK.name} cannot have NCCL's messages paced: unset it, or let the GPUs' "
            "messages go through the hosts (GTOPK_TRANSPORT=staged)"
        )
    try:
        transport.emulate(Link.of(*asked))
    except ValueError as error:
        raise ValueError(f"{settings.LINK.name}={texts[0]}: {error}") from None
    if transport.rank == 0:
        _log.info(
            "%s, for each rank: messages of gtopk wait as they would there, and every time that "
            "follows is emulated. A process group of torch.distributed is not paced",
            transport.link_text,
            extra=EVERYWHERE,
        )


def visible_gpus() -> int:
    """Return how many GPUs torch can use here, without opening one."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def over_gpus(
    transport: Transport, gpus_of_ranks: Sequence[int], environ: Mapping[str, str] = os.environ
) -> Transport:
    """Return the transport for tensors on hosts and on GPUs; sends nothing.

    gpus_of_ranks: how many GPUs each rank sees, the same on all ranks.
    """
    if transport.size == 1 or not any(gpus_of_ranks):
        return transport
    choice = configured_choice(transport, gpus_of_ranks, environ)
    if choice is not None:
        _log_choice(transport, choice)
        return transport
    # It may choose again, for vectors that lie elsewhere: each choice is logged once.
    log_once = functools.cache(functools.partial(_log_choice, transport))
    return NcclTransport(
        transport, timeout_seconds=transport.timeout_seconds, automatic=True, on_choice=log_once
    )


def configured_choice(
    transport: Transport, gpus_of_ranks: Sequence[int], environ: Mapping[str, str] = os.environ
) -> RouteChoice | None:
    """Return how GPUs' messages are carried; None: that is chosen at the first of them."""
    if isinstance(transport, NcclTransport):
        return transport.choice
    if settings.LINK.text(environ):
        return RouteChoice(GpuRoute.STAGED, f"those over NCCL are not paced ({settings.LINK.name})")
    if wanted := settings.TRANSPORT.read(environ):
        return RouteChoice(GpuRoute.STAGED, f"GTOPK_TRANSPORT={wanted} asks for that")
    if lacking := [rank for rank, count in enumerate(gpus_of_ranks) if not count]:
        sees = "see" if lacking[1:] else "sees"
        return RouteChoice(GpuRoute.STAGED, f"{name_ranks(lacking)} {sees} none")
    return None


def choose_gpu_route(transport: Transport, environ: Mapping[str, str] = os.environ) -> str:
    """Choose, by a trial of all ranks together, how GPUs' messages are carried; return its text.

    Each rank takes the GPU of its local rank. Returns "" where no rank has a GPU.
    """
    gpus_of_ranks = transport.gather_object(visible_gpus())
    if transport.size == 1 or not any(gpus_of_ranks):
        return ""
    choice = configured_choice(transport, gpus_of_ranks, environ)
    if choice is None:
        place = transport.neighbours().index(transport.rank)
        nccl = NcclTransport(transport, timeout_seconds=transport.timeout_seconds, automatic=True)
        # A launcher may let each rank see a single GPU, its own.
        nccl.connect(0 if gpus_of_ranks[transport.rank] == 1 else place)
        choice = nccl.choice
        nccl.disconnect("it was tried")
    assert choice is not None
    return describe(choice, transport.name)


def _log_choice(transport: Transport, choice: RouteChoice) -> None:
    if transport.rank == 0:
        _log.info("%s", describe(choice, transport.name), extra=EVERYWHERE)


def describe(choice: RouteChoice, name: str) -> str:
    """Return the log's line about a choice; name: that of the transport between hosts."""
    if choice.route is GpuRoute.STAGED:
        return f"messages of GPUs go through host memory, over {name}: {choice.reason}"
    return f"messages of GPUs go over NCCL: {choice.reason}"


class Unfinished(Protocol):
    """Work that all ranks have under way, such as a checkpoint being saved."""

    def is_ready(self) -> bool:
        """Tell whether this rank's part is done, so that `begin` would not wait."""

    def begin(self, engine: Engine) -> Callable[[], None]:
        """Submit the operations that finish it; return a function that ends it.

        That function is called once this rank has left, and raises the error of the work.
        """


def checks_messages_on(transport: Transport, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether GTOPK_CHECK_MESSAGES is on; raise ValueError where invalid, or over NCCL."""
    is_wanted = settings.CHECK_MESSAGES.read(environ)
    if is_wanted and transport.name == "nccl":
        raise ValueError(
            f"{settings.CHECK_MESSAGES.name}=1 cannot have NCCL's messages checked: unset it, or "
            "let the GPUs' messages go through the hosts (GTOPK_TRANSPORT=staged)"
        )
    return is_wanted


FAILED_SECONDS: Final = 2.0  # for the others to leave, too, where init() has failed


class WorldObserver:
    """Receives the events of a world, in this order; each is called on the rank's own thread.

    A class that derives defines those that it needs.
    """

    def join(self, world: World, before: World | None) -> bool:
        """Begin to observe; tell whether it needs the ranks' clocks compared.

        before: the world that the same ranks have left for this one.
        """
        return False

    def start(self, world: World) -> None:
        """The world is set up: its clock is known."""

    def open_set(self, world: World, number: int) -> None:
        """A process set was added."""

    def resume(self, world: World) -> None:
        """The world goes on from a step of an earlier run."""

    def leave(self, world: World) -> None:
        """Every operation is over."""

    def pause(self, world: World) -> None:
        """The run goes on in another world."""

    def end(self, world: World, how: str, in_order: bool) -> None:
        """The rank ends; how: a text for the record. Further calls change nothing."""


_observers: Final[list[WorldObserver]] = []


def register(observer: WorldObserver) -> None:
    """Add an observer of every world that is made from now on."""
    _observers.append(observer)


class World:
    """A rank's view of all ranks.

    step:       how many optimizer steps this rank has finished; errors name it.
    resumed:    whether it continues an earlier run.
    clock:      how far this rank's clock is ahead of rank 0's; known where something is recorded.
    began_unix_seconds: when it began, by rank 0's clock, the same on every rank; known where clock
                is.
    advice:     how the job can be continued when it ends early; errors end with it.
    advised:    whether the log has said how much compression saves.
    termination_requested: whether this rank had SIGTERM.
    preempted:  the ranks that had it, as all ranks know after the same step. See `preemption`.
    optimizers: how many distributed optimizers it has made, by the name of a parameter.
    sets:       the process sets by their number; 0 is all ranks. A new world numbers them, and
                their operations without a name, from the start: ranks that left the last one at
                different operations agree again.
    sets_made:  how many further sets were made, including those that were refused or removed.
    is_homogeneous: whether all nodes have equally many ranks.
    unfinished: work that all ranks have under way, to be finished before they leave.
    failures:   the errors of that work; known once this rank has left.
    introductions: of every rank's `Heartbeat`, in rank order; None where a rank has none.
    """

    def __init__(
        self,
        transport: Transport,
        before: World | None = None,
        signature: Sequence[str] = (),
        introduction: object = None,
    ) -> None:
        """Meet the other ranks; raise HorovodInternalError, on all alike, where they disagree.

        before: the world that the same ranks have left for this one.
        signature: texts that must be equal on all ranks. introduction: this rank's heartbeat's.
        """
        self.rank, self.size = transport.rank, transport.size
        # Called with both where step or advice changes.
        self.on_change: Callable[[int, str], None] = lambda step, advice: None
        self._step = 0
        self._advice = ""
        self.resumed = False
        self.advised = False
        self.termination_requested = False
        self.preempted: list[int] = []
        self.optimizers: Counter[str] = Counter()
        # Those of now: an observer follows a world from its beginning, or not at all.
        self._observers = tuple(_observers)
        node = transport.neighbours()
        self.local_rank, self.local_size = node.index(self.rank), len(node)
        checks_messages = checks_messages_on(transport)
        needs_clock = [each.join(self, before) for each in self._observers]
        # Ranks of different versions may differ in anything: they are refused first.
        facts = {
            "signature": [
                f"gtopk {__version__}",
                f"{settings.CHECK_MESSAGES.name}={checks_messages:d}",
                *signature,
            ],
            "place": [node[0], self.local_rank],
            "gpus": visible_gpus(),
            "link": settings.LINK.text(),
            "needs clock": any(needs_clock),
            "introduction": introduction,
        }
        # All in one message: a start takes as long as its round trips.
        with transport.operation("init"):
            said = transport.gather_object(facts)
        signatures = {rank: ("init", *each["signature"]) for rank, each in enumerate(said)}
        if len(set(signatures.values())) > 1:
            raise HorovodInternalError(describe_mismatch(signatures))
        self.introductions = [each["introduction"] for each in said]
        places = [each["place"] for each in said]
        self.is_homogeneous = len(set(Counter(first for first, _ in places).values())) == 1
        # The nodes that have a process with this local rank, in order of their first rank.
        nodes = sorted(first for first, local_rank in places if local_rank == self.local_rank)
        self.cross_rank, self.cross_size = nodes.index(node[0]), len(nodes)
        transport = self.transport = over_gpus(transport, [each["gpus"] for each in said])
        if checks_messages_on(transport):  # equal on all ranks, as was compared
            transport.check_messages()
        emulate_as_said(transport, [each["link"] for each in said])
        self.clock, self.began_unix_seconds = Offset(), 0.0
        if any(each["needs clock"] for each in said):
            with transport.operation("init"):
                self.clock = clock_offset(transport)
                self.began_unix_seconds = agree_on_now(transport)
        self.unfinished: list[Unfinished] = []
        self.failures: list[Exception] = []
        self._endings: list[Callable[[], None]] = []
        self.engine = Engine(transport)
        self.engine.finishes_later = self._finishes_later
        self.engine.where = self.where
        self.sets = {0: Members(range(self.size), self.engine)}
        self.sets_made = 0
        self.carried: set[int] = set()  # sets of the world before that were not added again yet

    def where(self) -> str:
        """Return the text of errors about this rank's step."""
        return f"at step {self.step}"

    def name_optimizer(self, names: Iterable[str], ranks: Sequence[int] | None = None) -> str:
        """Return a name for an optimizer of parameters with these names.

        Optimizers with the same names are numbered in the order in which they are made. Those of
        some ranks (None: of all) are counted apart, as other ranks may not have them.
        """
        # The least, which is the same in whatever order a rank has its parameter groups.
        first = min(names)
        if ranks is not None and len(ranks) < self.size:
            first += f".of.{'.'.join(map(str, ranks))}"
        self.optimizers[first] += 1
        number = self.optimizers[first]
        return first if number == 1 else f"{first}.{number}"

    def open_set(self, number: int, ranks: Sequence[int]) -> None:
        """Give some of the ranks operations of their own; every rank calls it, nothing is sent."""
        engine = None
        if self.rank in ranks:
            # A channel of its own makes the set independent of the ranks' other messages.
            engine = Engine(self.transport.subset(ranks).channel(number % CHANNELS))
            engine.where = self.where
            engine.stalls.joined = self.engine.joined
        self.sets[number] = Members(tuple(ranks), engine)
        for each in self._observers:
            each.open_set(self, number)

    def reopen_sets(self, sets: Mapping[int, Members], made: int) -> None:
        """Open the sets of the world before, under the same numbers; every rank calls it.

        made: how many were made there. A set that not every rank has, because adding or removing it
        failed, is forgotten.
        """

        def compare(transport: Transport, all_flags: Sequence[int]) -> tuple[int, list[int]]:
            said = transport.gather_object([made, *sets])
            numbers = set(sets).intersection(*(numbers for _, *numbers in said))
            # The highest count, so that the next set has the same unused number on all ranks.
            return max(made for made, *_ in said), sorted(numbers - {0})

        self.sets_made, numbers = self.engine.submit("process sets", [], compare).wait()
        for number in numbers:
            self.open_set(number, sets[number].ranks)
        self.carried = set(numbers)

    def close_set(self, number: int, reason: str) -> None:
        """Run the operations that the set's members have submitted, and forget the set."""
        engine = self.sets.pop(number).engine
        if engine is not None:
            engine.close(reason)

    def close(self, reason: str, in_order: bool = True) -> None:
        """Leave the world, and tell the observers how."""
        self.leave(reason)
        if self.failures:
            reason, in_order = f"{reason}; unfinished then: {self.failures[0]}", False
        self.note_end(reason, in_order)
        self.pause()

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        """Leave the world; returns when every rank has left, or the job ends anyway.

        Unfinished work is finished first; its errors go to `failures`.
        leave_timeout_seconds: the longest wait for the others. Returns the ranks that stay.
        """
        self._begin_to_finish()
        # Sets first: their channels lie on the world's transport, which is left last.
        for number in [number for number in self.sets if number]:
            self.close_set(number, reason)
        staying = self.engine.close(reason, leave_timeout_seconds)
        for each in self._observers:
            each.leave(self)
        for end in self._endings:
            try:
                end()
            except Exception as error:  # of any kind: raised once the rank has left
                self.failures.append(error)
        return staying

    def _begin_to_finish(self) -> None:
        unfinished, self.unfinished = self.unfinished, []
        self._endings += [each.begin(self.engine) for each in unfinished]

    def _finishes_later(self) -> bool:
        # The engine's thread asks: to wait here would stop the operations that are waited for.
        if not all(each.is_ready() for each in self.unfinished):
            return True
        self._begin_to_finish()
        return False

    @property
    def step(self) -> int:
        """Return how many optimizer steps this rank has made."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.on_change(self._step, self._advice)

    @property
    def advice(self) -> str:
        """Return how the job can be continued when it ends early."""
        return self._advice

    @advice.setter
    def advice(self, advice: str) -> None:
        self._advice = advice
        self.on_change(self._step, self._advice)

    def resume(self, step: int) -> None:
        """Continue from this step of an earlier run."""
        self.step, self.resumed = step, True
        for each in self._observers:
            each.resume(self)

    def note_preempted(self, ranks: Sequence[int]) -> None:
        """Note the ranks that are preempted; all ranks do so in the same step."""
        self.preempted = sorted({*self.preempted, *ranks})

    def note_end(self, how: str, in_order: bool) -> None:
        """Tell the observers how this rank ends, before it does."""
        for each in self._observers:
            each.end(self, how, in_order)

    def observe(self) -> None:
        """Tell the observers that the world is set up."""
        for each in self._observers:
            each.start(self)

    def pause(self) -> None:
        """Let the observers write their data: the run ends, or goes on in another world."""
        for each in self._observers:
            each.pause(self)
