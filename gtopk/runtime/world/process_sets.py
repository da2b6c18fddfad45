"""Process sets: subsets of the ranks with independent operations of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from collectives.errors import MismatchError
from collectives.transports import Transport

from ... import settings
from ..coordinator import Engine
from ..coordinator.engine import SET_REMOVED
from . import world
from .joining import is_communicator, ranks_of
from .membership import Members

if TYPE_CHECKING:
    from mpi4py import MPI


class ProcessSet:
    """A subset of the ranks; every rank creates the object, and all register it together.

    ranks_or_comm: world ranks, or an mpi4py communicator. With communicators, ranks may pass
        different sets: each registers the one it is in.
    process_set_id: None until `init` or `add_process_set` registers the set.
    """

    process_set_id: int | None = None
    mpi_comm: MPI.Intracomm | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Intracomm) -> None:
        self._ranks: list[int] | None = None
        numbers: Any = ranks_or_comm
        if is_communicator(ranks_or_comm):
            self.mpi_comm = numbers
            return
        is_list = isinstance(numbers, Iterable) and not isinstance(numbers, str | bytes)
        numbers = list(numbers) if is_list else [None]
        if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers):
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks or an mpi4py "
                f"communicator, got {ranks_or_comm!r}"
            )
        self._ranks = sorted(map(int, numbers))
        if len(set(self._ranks)) < len(self._ranks):
            raise ValueError(f"the ranks of a ProcessSet must be distinct, got {self._ranks}")

    @property
    def ranks(self) -> list[int] | None:
        """The ranks, in order; those of a communicator are known once the set is registered."""
        # Works before init(), too: errors show a set by its ranks.
        members = self._find() if world.find() else None
        return list(members.ranks) if members else self._ranks

    def size(self) -> int | None:
        """Return the number of ranks in the set; None while it is not registered."""
        members = self._find()
        return None if members is None else len(members.ranks)

    def rank(self) -> int | None:
        """Return this rank's place in the set; None while it is not registered.

        Raises ValueError on a rank that is not in the set.
        """
        members = self._find()
        if members is None:
            return None
        return members.ranks.index(self._included(members))

    def included(self) -> bool | None:
        """Tell whether this rank is in the set; None while it is not registered."""
        members = self._find()
        return None if members is None else world.queried().rank in members.ranks

    @property
    def members(self) -> Members:
        """The set's ranks and engine; raises ValueError on a rank that is not in the set."""
        members = self.registered()
        self._included(members)
        return members

    def registered(self) -> Members:
        """The set's members, on any rank; raises ValueError while the set is not registered."""
        world.current()  # a forked process may ask about the set, but has no engine
        members = self._find()
        if members is None:
            raise ValueError(
                f"{self} is not registered: pass it to hvd.init(process_sets=...) or "
                "hvd.add_process_set, and again after another init()"
            )
        return members

    @property
    def engine(self) -> Engine:
        """The engine for the set's operations; raises ValueError like `members`."""
        engine = self.members.engine
        assert engine is not None
        return engine

    def _find(self) -> Members | None:
        if self.process_set_id is None:
            return None
        members = world.queried().sets.get(self.process_set_id)
        # The number may be another set's: after shutdown() and init(), numbering restarts.
        is_same = members and (self.process_set_id == 0 or list(members.ranks) == self._ranks)
        return members if is_same else None

    def _included(self, members: Members) -> int:
        rank = world.queried().rank
        if rank not in members.ranks:
            raise ValueError(
                f"rank {rank} is not in {self}: only its ranks {list(members.ranks)} may use it"
            )
        return rank

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def require_process_set(process_set: object) -> ProcessSet:
    """Return a process set; raise TypeError for anything else, such as a list of ranks."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            "process_set must be a ProcessSet, such as add_process_set returns, got "
            f"{process_set!r}"
        )
    return process_set


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def requested_sets(process_sets: object) -> list[ProcessSet]:
    """Return the sets in init's argument; "dynamic" allows sets to be added later.

    Raises ValueError for anything but a list of different process sets.
    """
    if process_sets is None:
        return []
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        # As if the user had set it: `add_process_set` reads it there.
        os.environ[settings.DYNAMIC_PROCESS_SETS.name] = "1"
        return []
    sets: list[Any] = list(process_sets) if isinstance(process_sets, Iterable) else [None]
    if isinstance(process_sets, str) or not all(isinstance(s, ProcessSet) for s in sets):
        raise ValueError(
            f"process_sets must be a list of ProcessSet, or 'dynamic', got {process_sets!r}"
        )
    listed = [process_set._ranks for process_set in sets if process_set.mpi_comm is None]
    duplicates = [ranks for number, ranks in enumerate(listed) if ranks in listed[:number]]
    if duplicates:
        raise ValueError(f"process_sets holds the set of ranks {duplicates[0]} more than once")
    return sets


# One name for adding and removing: ranks that do not do the same get an error that quotes both.
_CHANGE: Final = "process_sets"


def register(process_set: ProcessSet) -> None:
    """Give a process set operations of its own. A collective on the world.

    A set carried over by a recovery is reused.
    Raises ValueError if a set of these ranks exists or the ranks are invalid, and
    HorovodInternalError on every rank if the ranks disagree.
    """
    here = world.current()
    given = process_set._ranks if process_set.mpi_comm is None else None
    if given is not None and not (given and all(0 <= rank < here.size for rank in given)):
        raise ValueError(
            f"a process set must have at least one rank, all of 0..{here.size - 1}, got {given}"
        )

    def find_ranks(transport: Transport, all_flags: list[int]) -> list[int]:
        return given or _ranks_of_all(process_set.mpi_comm, transport)[transport.rank]

    signature = f"add {'an mpi4py communicator' if given is None else f'ranks {given}'}"
    ranks: list[int] = here.engine.submit(_CHANGE, [signature], find_ranks).wait()
    # Only once all ranks agree, but also if the set is refused: its number stays the same on all.
    here.sets_made += 1
    for number, members in here.sets.items():
        if list(members.ranks) == ranks:
            if number not in here.carried_sets:
                raise ValueError(f"process set {number} already has the ranks {ranks}")
            # A function under elastic.run adds its sets again after a recovery.
            here.carried_sets.discard(number)
            break
    else:
        number = here.sets_made
        here.open_set(number, ranks)
    process_set._ranks = ranks
    process_set.process_set_id = number


def find(ranks: list[int]) -> ProcessSet | None:
    """Return the process set of these ranks; None if none is registered."""
    for number, members in world.current().sets.items():
        if list(members.ranks) == ranks:
            found = ProcessSet(ranks)
            found.process_set_id = number
            return found
    return None


def find_or_register(ranks: list[int]) -> ProcessSet:
    """Return the process set of these ranks; register it if needed. A collective."""
    return find(ranks) or add(ranks)


def _ranks_of_all(comm: Any, transport: Transport) -> list[list[int]]:
    """Return the ranks of every rank's communicator; raise MismatchError if they overlap."""
    sets = transport.gather_object(ranks_of(comm, transport))
    for rank, ranks in enumerate(sets):
        for other in ranks:
            if sets[other] != ranks:
                raise MismatchError(
                    f"the ranks disagree about a process set: rank {rank}'s communicator has the "
                    f"ranks {ranks}, rank {other}'s {sets[other]}; all ranks of a communicator "
                    "must pass the same one"
                )
    return sets


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set after `init`, and return it. A collective on the world.

    Raises ValueError if sets are not dynamic, or a set of these ranks exists.
    """
    _must_be_dynamic()
    return add(process_set)


def add(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, as `register` does, and return it."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    register(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; tell whether it existed. A collective on the world.

    Operations that its members have submitted run first. The set of all ranks cannot be removed.
    Raises ValueError if sets are not dynamic.
    """
    require_process_set(process_set)
    here = world.current()
    number = process_set.process_set_id
    if not number or process_set._find() is None:  # 0 is all ranks
        return False
    _must_be_dynamic()
    # All ranks agree first, including those outside the set: afterwards none of them has it.
    signature = [f"remove set {number} of ranks {process_set.ranks}"]
    here.engine.submit(_CHANGE, signature, lambda transport, all_flags: None).wait()
    process_set.process_set_id = None
    here.close_set(number, SET_REMOVED)
    return True


def _must_be_dynamic() -> None:
    # First: before init() the error should be that there is no world.
    world.current()
    if not settings.DYNAMIC_PROCESS_SETS.read():
        raise ValueError(
            f"process sets are added and removed only with {settings.DYNAMIC_PROCESS_SETS.name}=1 "
            "in the environment or hvd.init(process_sets='dynamic'); others are passed to hvd.init"
        )
