"""World: a rank's part of the job: its transport, engine, place on its host, and records.

The transport for messages of GPU tensors:

    every rank sees a GPU             NCCL, if at the first GPU tensor each rank turns out to have
                                      its own GPU and NCCL works (`device_choice`)
    some do, or GTOPK_TRANSPORT=...   the ranks' own transport, through host memory
    none does                         there are no such messages

Rank 0 logs the choice once, with its reason.

GTOPK_LINK paces messages between ranks on one host like a slow network; GTOPK_CHECK_MESSAGES adds
a checksum to every message. Work that is unfinished on all ranks is completed before they leave.
"""

from __future__ import annotations

import functools
import itertools
import logging
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

    ranks:   their world ranks, in order.
    engine:  runs their operations; None if this rank is not one of them.
    unnamed: counts their operations without a name.
    """

    ranks: Sequence[int]
    engine: Engine | None
    unnamed: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_log = logging.getLogger("gtopk")


def emulate_on(transport: Transport) -> None:
    """Pace a transport's messages as GTOPK_LINK says. A collective.

    Raises ValueError on every rank for an invalid or differing GTOPK_LINK, for ranks on several
    hosts, and for NCCL, whose messages cannot be paced.
    """
    emulate_given(transport, transport.gather_object(settings.LINK.text()))


def emulate_given(transport: Transport, texts: Sequence[str]) -> None:
    """Pace messages like `emulate_on`; texts: every rank's GTOPK_LINK."""
    # Compare the texts before parsing any: all ranks raise the same error, or none does.
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"{settings.LINK.name} must be the same on all ranks, got {texts[0]!r} on rank 0 "
                f"and {text!r} on rank {rank}"
            )
    link = settings.LINK.read()
    if link is None or transport.size == 1:
        return
    if transport.name == "nccl":
        raise ValueError(
            f"{settings.LINK.name} cannot pace NCCL's messages: unset it, or send GPU messages "
            "through host memory (GTOPK_TRANSPORT=staged)"
        )
    try:
        transport.emulate(Link.of(*link))
    except ValueError as error:
        raise ValueError(f"{settings.LINK.name}={texts[0]}: {error}") from None
    if transport.rank == 0:
        _log.info(
            "%s, for each rank: gtopk's messages are delayed accordingly, and all times from now "
            "on are emulated. Process groups of torch.distributed are not paced",
            transport.link_text,
            extra=EVERYWHERE,
        )


def visible_gpus() -> int:
    """Return the number of GPUs here, without opening one."""
    # Not `is_available`: it starts CUDA, after which forked processes cannot use it, nor does
    # setting CUDA_VISIBLE_DEVICES have an effect.
    return torch.cuda.device_count()


def over_gpus(transport: Transport, gpus_of_ranks: Sequence[int]) -> Transport:
    """Return the transport for tensors on hosts and GPUs; sends nothing.

    gpus_of_ranks: how many GPUs each rank sees, the same on all ranks.
    """
    if transport.size == 1 or not any(gpus_of_ranks):
        return transport
    choice = configured_choice(transport, gpus_of_ranks)
    if choice is not None:
        _log_choice(transport, choice)
        return transport
    # It may choose again for vectors on other devices: log each choice once.
    log_once = functools.cache(functools.partial(_log_choice, transport))
    return NcclTransport(
        transport, timeout_seconds=transport.timeout_seconds, automatic=True, on_choice=log_once
    )


def configured_choice(transport: Transport, gpus_of_ranks: Sequence[int]) -> RouteChoice | None:
    """Return the route for GPU messages; None: choose at the first such message."""
    if isinstance(transport, NcclTransport):
        return transport.choice
    if settings.LINK.text():
        return RouteChoice(GpuRoute.STAGED, f"NCCL messages cannot be paced ({settings.LINK.name})")
    if requested := settings.TRANSPORT.read():
        return RouteChoice(GpuRoute.STAGED, f"selected by GTOPK_TRANSPORT={requested}")
    if without_gpu := [rank for rank, count in enumerate(gpus_of_ranks) if not count]:
        sees = "see" if without_gpu[1:] else "sees"
        return RouteChoice(GpuRoute.STAGED, f"{name_ranks(without_gpu)} {sees} none")
    return None


def choose_gpu_route(transport: Transport) -> str:
    """Choose the route for GPU messages in a trial of all ranks; return the log text.

    Each rank uses the GPU of its local rank. Returns "" if no rank has a GPU.
    """
    gpus_of_ranks = transport.gather_object(visible_gpus())
    if transport.size == 1 or not any(gpus_of_ranks):
        return ""
    choice = configured_choice(transport, gpus_of_ranks)
    if choice is None:
        place = transport.neighbours().index(transport.rank)
        nccl = NcclTransport(transport, timeout_seconds=transport.timeout_seconds, automatic=True)
        # A launcher may show each rank only its own GPU.
        nccl.connect(0 if gpus_of_ranks[transport.rank] == 1 else place)
        choice = nccl.choice
        nccl.disconnect("the trial is over")
    assert choice is not None
    return describe(choice, transport.name)


def _log_choice(transport: Transport, choice: RouteChoice) -> None:
    if transport.rank == 0:
        _log.info("%s", describe(choice, transport.name), extra=EVERYWHERE)


def describe(choice: RouteChoice, name: str) -> str:
    """Return the log line about a choice; name: the transport between hosts."""
    if choice.route is GpuRoute.STAGED:
        return f"GPU messages go through host memory, over {name}: {choice.reason}"
    return f"GPU messages go over NCCL: {choice.reason}"


class Unfinished(Protocol):
    """Work in progress on all ranks, such as saving a checkpoint."""

    def is_ready(self) -> bool:
        """Tell whether this rank's part is done, so that `begin` does not wait."""

    def begin(self, engine: Engine) -> Callable[[], None]:
        """Submit the operations that finish the work; return a function that ends it.

        That function is called once this rank has left, and raises the work's error.
        """


def checks_messages_on(transport: Transport) -> bool:
    """Tell whether GTOPK_CHECK_MESSAGES is on; raise ValueError if invalid, or with NCCL."""
    is_enabled = settings.CHECK_MESSAGES.read()
    if is_enabled and transport.name == "nccl":
        raise ValueError(
            f"{settings.CHECK_MESSAGES.name}=1 cannot check NCCL's messages: unset it, or send GPU "
            "messages through host memory (GTOPK_TRANSPORT=staged)"
        )
    return is_enabled


FAILED_SECONDS: Final = 2.0  # for the others to leave after a failed init()


class WorldObserver:
    """Receives a world's events, in this order, each on the rank's own thread.

    Override only the methods that you need.
    """

    def join(self, world: World, previous: World | None) -> bool:
        """Begin to observe; tell whether the ranks' clocks must be compared.

        previous: the world that the same ranks have left for this one.
        """
        return False

    def start(self, world: World) -> None:
        """The world is set up, and its clock is known."""

    def open_set(self, world: World, number: int) -> None:
        """A process set was added."""

    def resume(self, world: World) -> None:
        """The world continues from a step of an earlier run."""

    def leave(self, world: World) -> None:
        """Every operation is over."""

    def pause(self, world: World) -> None:
        """The run continues in another world."""

    def end(self, world: World, how: str, in_order: bool) -> None:
        """The rank ends; how: a text for the record. Further calls change nothing."""


_observers: Final[list[WorldObserver]] = []


def register(observer: WorldObserver) -> None:
    """Add an observer to every world created from now on."""
    _observers.append(observer)


class World:
    """A rank's view of all ranks.

    step:       number of optimizer steps this rank has finished; errors name it.
    resumed:    whether it continues an earlier run.
    clock:      this rank's clock offset from rank 0; known if something is recorded.
    began_unix_seconds: its start, by rank 0's clock, the same on every rank; known if clock is.
    advice:     how to continue the job if it ends early; added to errors.
    advised:    whether the log has said how much compression saves.
    termination_requested: whether this rank received SIGTERM.
    preempted:  the ranks that received it; all ranks learn of it after the same step. See
                `preemption`.
    optimizers: how many distributed optimizers it has made, by the name of a parameter.
    sets:       the process sets by number; 0 is all ranks. A new world numbers its sets and its
                unnamed operations from the start, so that ranks that left the last world at
                different operations agree again.
    sets_made:  how many further sets were made, including refused and removed ones.
    is_homogeneous: whether all nodes have the same number of ranks.
    unfinished: work in progress on all ranks, to be finished before they leave.
    failures:   the errors of that work; known once this rank has left.
    is_leaving: whether this rank leaves, or has left; an operation that a thread begins then fails.
    introductions: every rank's `Heartbeat` introduction, in rank order; None if a rank has none.
    """

    def __init__(
        self,
        transport: Transport,
        previous: World | None = None,
        signature: Sequence[str] = (),
        introduction: object = None,
    ) -> None:
        """Meet the other ranks; raise HorovodInternalError, on all ranks, if they disagree.

        previous: the world that the same ranks have left for this one.
        signature: texts that must be equal on all ranks. introduction: that of this rank's
            heartbeat.
        """
        self.rank, self.size = transport.rank, transport.size
        # Called with both when step or advice changes.
        self.on_change: Callable[[int, str], None] = lambda step, advice: None
        self._step = 0
        self._advice = ""
        self.resumed = False
        self.advised = False
        self.termination_requested = False
        self.preempted: list[int] = []
        self.optimizers: Counter[str] = Counter()
        # Fixed now: an observer follows a world from its beginning, or not at all.
        self._observers = tuple(_observers)
        node = transport.neighbours()
        self.local_rank, self.local_size = node.index(self.rank), len(node)
        checks_messages = checks_messages_on(transport)
        needs_clock = [each.join(self, previous) for each in self._observers]
        # Check versions first: ranks of different versions may differ in anything.
        own_info = {
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
        # All in one message, as round trips dominate the start time.
        with transport.operation("init"):
            infos = transport.gather_object(own_info)
        signatures = {rank: ("init", *each["signature"]) for rank, each in enumerate(infos)}
        if len(set(signatures.values())) > 1:
            raise HorovodInternalError(describe_mismatch(signatures))
        self.introductions = [each["introduction"] for each in infos]
        places = [each["place"] for each in infos]
        self.is_homogeneous = len(set(Counter(first for first, _ in places).values())) == 1
        # The nodes with a process of this local rank, in order of their first rank.
        nodes = sorted(first for first, local_rank in places if local_rank == self.local_rank)
        self.cross_rank, self.cross_size = nodes.index(node[0]), len(nodes)
        transport = self.transport = over_gpus(transport, [each["gpus"] for each in infos])
        if checks_messages_on(transport):  # equal on all ranks: compared above
            transport.check_messages()
        emulate_given(transport, [each["link"] for each in infos])
        self.clock, self.began_unix_seconds = Offset(), 0.0
        if any(each["needs clock"] for each in infos):
            with transport.operation("init"):
                self.clock = clock_offset(transport)
                self.began_unix_seconds = agree_on_now(transport)
        self.unfinished: list[Unfinished] = []
        self.failures: list[Exception] = []
        self.is_leaving = False
        self._finishers: list[Callable[[], None]] = []
        self.engine = Engine(transport)
        self.engine.finishes_later = self._finishes_later
        self.engine.where = self.where
        self.sets = {0: Members(range(self.size), self.engine)}
        self.sets_made = 0
        self.carried_sets: set[int] = set()  # sets of the previous world, not added again yet

    def where(self) -> str:
        """Return the text about this rank's step, for errors."""
        return f"at step {self.step}"

    def name_optimizer(self, names: Iterable[str], ranks: Sequence[int] | None = None) -> str:
        """Return a name for an optimizer of parameters with these names.

        Optimizers with the same names are numbered in order of creation. Those of a subset of ranks
        (None: all ranks) have their own counter, as other ranks may not have them.
        """
        # The smallest name does not depend on the order of a rank's parameter groups.
        first = min(names)
        if ranks is not None and len(ranks) < self.size:
            first += f".of.{'.'.join(map(str, ranks))}"
        self.optimizers[first] += 1
        number = self.optimizers[first]
        return first if number == 1 else f"{first}.{number}"

    def open_set(self, number: int, ranks: Sequence[int]) -> None:
        """Give a subset of ranks its own operations; every rank calls it, nothing is sent."""
        engine = None
        if self.rank in ranks:
            # Its own channel makes the set independent of the ranks' other messages.
            engine = Engine(self.transport.subset(ranks).channel(number % CHANNELS))
            engine.where = self.where
            engine.stalls.joined = self.engine.joined
        self.sets[number] = Members(tuple(ranks), engine)
        for each in self._observers:
            each.open_set(self, number)

    def reopen_sets(self, sets: Mapping[int, Members], made: int) -> None:
        """Open the previous world's sets again under the same numbers. A collective.

        made: how many were made there. Forget a set that some ranks lack because adding or removing
        it failed.
        """

        def compare(transport: Transport, all_flags: Sequence[int]) -> tuple[int, list[int]]:
            gathered = transport.gather_object([made, *sets])
            numbers = set(sets).intersection(*(numbers for _, *numbers in gathered))
            # Take the highest count, so that the next set gets the same unused number everywhere.
            return max(made for made, *_ in gathered), sorted(numbers - {0})

        self.sets_made, numbers = self.engine.submit("process sets", [], compare).wait()
        for number in numbers:
            self.open_set(number, sets[number].ranks)
        self.carried_sets = set(numbers)

    def close_set(self, number: int, reason: str) -> None:
        """Run the operations that the set's members have submitted, then forget the set."""
        engine = self.sets.pop(number).engine
        if engine is not None:
            engine.close(reason)

    def close(self, reason: str, in_order: bool = True) -> None:
        """Leave the world, and tell the observers how."""
        self.leave(reason)
        if self.failures:
            reason, in_order = f"{reason}; unfinished work failed: {self.failures[0]}", False
        self.note_end(reason, in_order)
        self.pause()

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        """Leave the world; return when every rank has left, or the job ends anyway.

        First finishes unfinished work; its errors go to `failures`.
        leave_timeout_seconds: the longest wait for the others. Returns the ranks that stay.
        """
        self.is_leaving = True
        self._begin_to_finish()
        # Close sets first: their channels use the world's transport, which is left last.
        for number in [number for number in self.sets if number]:
            self.close_set(number, reason)
        remaining = self.engine.close(reason, leave_timeout_seconds)
        for each in self._observers:
            each.leave(self)
        for end in self._finishers:
            try:
                end()
            except Exception as error:  # any error is raised once the rank has left
                self.failures.append(error)
        return remaining

    def _begin_to_finish(self) -> None:
        unfinished, self.unfinished = self.unfinished, []
        self._finishers += [each.begin(self.engine) for each in unfinished]

    def _finishes_later(self) -> bool:
        # Called on the engine's thread: waiting here would block the operations awaited.
        if not all(each.is_ready() for each in self.unfinished):
            return True
        self._begin_to_finish()
        return False

    @property
    def step(self) -> int:
        """The number of optimizer steps this rank has finished."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.on_change(self._step, self._advice)

    @property
    def advice(self) -> str:
        """How to continue the job if it ends early."""
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
        """Note which ranks are preempted; all ranks do so in the same step."""
        self.preempted = sorted({*self.preempted, *ranks})

    def note_end(self, how: str, in_order: bool) -> None:
        """Tell the observers how this rank will end."""
        for each in self._observers:
            each.end(self, how, in_order)

    def observe(self) -> None:
        """Tell the observers that the world is set up."""
        for each in self._observers:
            each.start(self)

    def pause(self) -> None:
        """Let the observers write their data: the run ends, or continues in another world."""
        for each in self._observers:
            each.pause(self)
