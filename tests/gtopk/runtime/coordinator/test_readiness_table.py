"""The readiness table depends only on announcements, so all ranks have the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from collectives.errors import MismatchError, PeerError
from gtopk.runtime.coordinator.operation import Announcement, OperationSpec, Request
from gtopk.runtime.coordinator.readiness_table import ReadinessTable

PLAIN = OperationSpec(("x",), None, ())


def fresh(*names: str, spec: OperationSpec = PLAIN) -> Announcement:
    return Announcement(fresh=tuple(Request(name, spec, 0) for name in names))


def announcement(
    table: ReadinessTable, names: str, *, rank: int = 0, flags: int = 0
) -> Announcement:
    """Return a rank's announcement when these names become ready, with unchanged signatures."""
    return table.announcement_of([Request(name, PLAIN, flags) for name in names], rank)


def ready_names(table: ReadinessTable, *announcements: Announcement) -> list[str]:
    return [ready.name for ready in table.enter(announcements).ready]


def test_name_has_a_slot_once_it_was_ready_on_all_ranks():
    table = ReadinessTable(range(2), capacity=10)
    assert ready_names(table, fresh("a", "b"), fresh("b")) == ["b"]
    assert [announcement(table, name).ready for name in "ab"] == [0, 0b1]
    assert ready_names(table, Announcement(ready=1), fresh("a")) == ["a"]
    assert [announcement(table, name).ready for name in "ab"] == [0b10, 0b1]
    assert ready_names(table, Announcement(), Announcement(ready=0b11)) == ["b"]
    assert ready_names(table, Announcement(ready=0b10), Announcement()) == ["a"]


def test_error_advises_equal_batches_only_if_the_rank_that_left_ended():
    for reason, has_advice in (("its program ended at step 8", True), ("failed at step 8", False)):
        table = ReadinessTable(range(2), capacity=2)
        table.enter([fresh("a"), Announcement()])
        ((name, error),) = table.enter([Announcement(), Announcement(leaves=reason)]).refused
        assert name == "a"
        assert f"rank 1 left ({reason}) before a" in str(error)
        assert ("give all ranks equally many batches" in str(error)) == has_advice
        assert ("hvd.join()" in str(error)) == has_advice


def test_error_of_lone_checkpoint_says_that_every_rank_must_save():
    table = ReadinessTable(range(2), capacity=2)
    table.enter([fresh("allgather.checkpoint.problem.label"), Announcement()])
    ended = Announcement(leaves="its program ended at step 8")
    ((_, error),) = table.enter([Announcement(), ended]).refused
    assert "every rank must call save_checkpoint and load_latest" in str(error)
    assert "batches" not in str(error)


def test_full_table_evicts_the_least_recently_used_name():
    table = ReadinessTable(range(2), capacity=2)
    for name in "ab":
        ready_names(table, fresh(name), fresh(name))
    assert ready_names(table, Announcement(ready=1), Announcement(ready=1)) == ["a"]
    assert ready_names(table, fresh("c"), fresh("c")) == ["c"]
    assert [announcement(table, name).ready for name in "abc"] == [0b1, 0, 0b10]
    assert table.slots == 2


def test_name_that_is_ready_on_some_rank_keeps_its_slot():
    table = ReadinessTable(range(2), capacity=1)
    ready_names(table, fresh("a"), fresh("a"))
    assert ready_names(table, Announcement(ready=1), fresh("b")) == []
    assert ready_names(table, fresh("b"), Announcement()) == ["b"]
    assert [announcement(table, name).ready for name in "ab"] == [0b1, 0]
    assert ready_names(table, Announcement(), Announcement(ready=1)) == ["a"]


def test_slot_is_reused_when_a_name_changes_its_signature():
    table = ReadinessTable(range(2), capacity=2)
    other = OperationSpec(("y",), None, ())
    for _ in range(5):
        for spec in (PLAIN, other):
            announcement = fresh("a", spec=spec)
            assert ready_names(table, announcement, announcement) == ["a"]
    assert table.slots == 1


def test_announcement_holds_only_slots_until_a_slot_or_flags_change():
    table = ReadinessTable(range(2), capacity=3)
    ready_names(table, fresh(*"abc"), fresh(*"abc"))
    for _ in range(2):
        assert announcement(table, "ba") == Announcement(ready=0b11)
    assert announcement(table, "ca", flags=7) == Announcement(
        ready=0b101, changed_flags={0: 7, 2: 7}
    )
    ready_names(table, announcement(table, "ca", flags=7), announcement(table, "ca", rank=1))
    # Without changed flags, rank 0's last flags of "a", 7, would count instead of its 0.
    assert announcement(table, "ba") == Announcement(ready=0b11, changed_flags={0: 0})
    assert announcement(table, "ba", rank=1) == Announcement(ready=0b11)
    ready_names(table, fresh("b", spec=OperationSpec(("y",), None, ())), Announcement())
    assert announcement(table, "ba", rank=1) == Announcement(0b1, (Request("b", PLAIN, 0),))


def test_table_knows_which_ranks_wait_and_which_are_waited_for():
    table = ReadinessTable([4, 5, 6], capacity=10)
    table.enter([fresh("a"), Announcement(), fresh("a", "b")])
    assert [table.waits(rank) for rank in range(3)] == [True, False, True]
    assert [table.is_waited_for(rank) for rank in range(3)] == [True, True, False]
    assert (table.missing("a"), table.missing("b")) == ([5], [4, 5])
    table.enter([Announcement(), Announcement(joins=True), Announcement()])
    assert table.missing("b") == [4]
    assert [table.waits(rank) for rank in range(3)] == [False, True, True]  # "a" was refused
    assert [table.is_waited_for(rank) for rank in range(3)] == [True, False, False]


def test_repeated_announcements_and_results_are_the_same_objects():
    """A step with many names then costs one comparison per cycle."""
    table = ReadinessTable(range(2), capacity=3)
    ready_names(table, fresh(*"ab"), fresh(*"ab"))
    one, other = announcement(table, "a"), announcement(table, "b")
    assert announcement(table, "a") is one
    assert announcement(table, "b") is other
    ready = table.enter([one, one]).ready
    assert [each.name for each in ready] == ["a"]
    assert table.enter([one, one]).ready is ready
    assert ready_names(table, other, other) == ["b"]


def test_deadlock_is_refused_once_no_rank_announces_anything_new():
    table = ReadinessTable(range(2), capacity=3)
    table.enter([fresh("a"), fresh("b")])
    stuck = [Announcement(stuck="a"), Announcement(stuck="b")]
    assert table.enter([stuck[0]._replace(fresh=fresh("c").fresh), stuck[1]]).refused == []
    assert [name for name, _ in table.enter(stuck).refused] == ["a", "b"]


def test_slots_become_vacant_in_the_same_order_on_all_ranks_after_deadlock():
    # In a set's order, which differs between processes, ranks would number slots differently.
    size = 8
    table = ReadinessTable(range(size), capacity=size)
    names = "abcdefgh"
    assert ready_names(table, *[fresh(*names)] * size) == [*names]
    table.enter([announcement(table, name, rank=rank) for rank, name in enumerate(names)])
    refused = table.enter([Announcement(stuck=name) for name in names]).refused
    assert [name for name, _ in refused] == [*names]
    later = "ijklmnop"
    assert ready_names(table, *[fresh(*later)] * size) == [*later]
    assert [announcement(table, name).ready for name in reversed(later)] == [
        1 << n for n in range(size)
    ]


OTHER = OperationSpec(("y",), None, ())
Refused = dict[str, type[Exception]]
REDUCED = OperationSpec(("z",), b"how", ())  # a rank that has joined takes part in it


class ReferenceTable:
    """A reference without slots, bits and caches: {name: {rank: (spec, flags)}}."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = [*ranks]
        self.waiting: dict[str, dict[int, tuple[OperationSpec, int]]] = {}
        self.joined: set[int] = set()
        self.leaving: dict[int, str] = {}
        self.events: Counter[str] = Counter()

    def may_be_ready(self, rank: int, name: str) -> bool:
        here = self.waiting.get(name, {})
        return rank not in here and rank not in self.joined and rank not in self.leaving

    def enter(
        self, requests: list[list[Request]], extras: list[Announcement]
    ) -> tuple[dict[str, tuple[OperationSpec, list[int]]], Refused, int | None, str | None]:
        everyone = set(range(len(self.ranks)))
        for rank, names in enumerate(requests):
            for name, spec, flags in names:
                self.waiting.setdefault(name, {})[rank] = spec, flags
        joining = [rank for rank in everyone if extras[rank].joins]
        self.joined |= set(joining)
        self.leaving |= {
            r: extras[r].leaves or "" for r in everyone if extras[r].leaves is not None
        }
        ready: dict[str, tuple[OperationSpec, list[int]]] = {}
        refused: Refused = {}
        for name, here in [*self.waiting.items()]:
            if not everyone - self.joined <= here.keys():
                continue
            del self.waiting[name]
            lacking, specs = everyone - here.keys(), {one for one, _ in here.values()}
            if len(specs) > 1 or (lacking and specs != {REDUCED}):
                refused[name] = MismatchError
                continue
            flags = [here[rank][1] if rank in here else 0 for rank in everyone]
            ready[name] = specs.pop(), flags
        names = [name for one in extras for name in one.expired if name in self.waiting]
        expired = f"{names[0]} expired" if names else None
        for rank in self.leaving:
            refused |= self.drop([n for n, h in self.waiting.items() if rank not in h], PeerError)
        if not any(requests) and not any(one.has_changes for one in extras):
            stuck = [extras[rank].stuck for rank in everyone - self.joined - self.leaving.keys()]
            names = [name for name in set(stuck) if name in self.waiting]
            if names and len(names) == len(set(stuck)):
                refused |= self.drop(names, MismatchError)
                self.events["deadlock"] += 1
        joined = None
        if self.joined == everyone:
            joined = self.ranks[max(joining)]
            self.joined.clear()
        events = {"ready": ready, "refused": refused, "expired": expired, "all joined": joining}
        self.events.update(what for what, found in events.items() if found)
        return ready, refused, joined, expired

    def drop(self, names: list[str], error: type[Exception]) -> Refused:
        for name in names:
            del self.waiting[name]
        return dict.fromkeys(names, error)

    def waits(self, rank: int) -> bool:
        return rank in self.joined or any(rank in here for here in self.waiting.values())

    def is_waited_for(self, rank: int) -> bool:
        return rank not in self.joined and any(rank not in h for h in self.waiting.values())

    def gone(self) -> tuple[int, str] | None:
        gone = [r for r in self.leaving if not any(r in here for here in self.waiting.values())]
        return (self.ranks[gone[0]], self.leaving[gone[0]]) if gone else None


def random_announcements(
    draw: random.Random, reference: ReferenceTable, size: int
) -> tuple[list[list[Request]], list[Announcement]]:
    """Return the ranks' announcements in a cycle: few names, and often the same on all ranks."""
    extras = [Announcement() for _ in range(size)]
    if draw.random() < 0.5:
        names = [n for n in "abcde" if draw.random() < 0.4]
        names = [n for n in names if all(reference.may_be_ready(r, n) for r in range(size))]
        flags, spec = draw.choice((0, 0, 0, 1)), draw.choice((PLAIN, PLAIN, PLAIN, REDUCED))
        return [[Request(n, spec, flags) for n in names] for _ in range(size)], extras
    spec = draw.choice((PLAIN, REDUCED, REDUCED))
    requests = [
        [
            Request(n, OTHER if draw.random() < 0.05 else spec, draw.choice((0, 0, 1, 2)))
            for n in draw.sample("abcde", 5)
            if draw.random() < draw.choice((0.0, 0.3)) and reference.may_be_ready(rank, n)
        ]
        for rank in range(size)
    ]
    for rank in range(size):
        one = extras[rank]
        if rank not in reference.joined and rank not in reference.leaving:
            one = one._replace(joins=draw.random() < 0.1)
            one = one._replace(leaves=f"left {rank}" if draw.random() < 0.02 else None)
            stuck = [*reference.waiting, *reference.waiting, draw.choice("abcde"), None]
            one = one._replace(stuck=draw.choice(stuck) if draw.random() < 0.7 else None)
        if draw.random() < 0.05:
            one = one._replace(expired={(name := draw.choice("abcde")): f"{name} expired"})
        extras[rank] = one
    return requests, extras


def test_table_equals_the_reference_on_every_rank():
    """For any announcements in any order, and any number of slots."""
    events: Counter[str] = Counter()
    for seed in range(150):
        draw = random.Random(seed)
        ranks = range(4, 4 + draw.choice((2, 3, 3, 4)))
        size, capacity = len(ranks), draw.choice((1, 2, 3, 9))
        tables = [ReadinessTable(ranks, capacity) for _ in ranks]
        reference = ReferenceTable(ranks)
        for _ in range(25):
            requests, extras = random_announcements(draw, reference, size)
            announcements = []
            for rank, (table, names, one) in enumerate(zip(tables, requests, extras, strict=True)):
                ready, fresh, flags, *_ = table.announcement_of(names, rank)
                one = one._replace(ready=ready, fresh=fresh, changed_flags=flags)
                assert sorted(table.names_in(one)) == sorted(name for name, *_ in names)
                announcements.append(one)
            outcomes = [table.enter(announcements) for table in tables]
            assert all(repr(outcome) == repr(outcomes[0]) for outcome in outcomes)
            expected = reference.enter(requests, extras)
            ready, refused, joined, left, expired, news = outcomes[0]
            assert (
                {name: (spec, all_flags) for name, spec, all_flags in ready},
                {name: type(error) for name, error in refused},
                joined,
                expired,
            ) == expected, (seed, announcements)
            assert len(ready) + len(refused) == len(expected[0]) + len(expected[1])
            assert news == any(one.has_changes for one in announcements)
            assert left == reference.gone()
            for rank in range(size):
                assert tables[rank].waits(rank) == reference.waits(rank)
                assert tables[0].is_waited_for(rank) == reference.is_waited_for(rank)
            assert sorted(tables[0].joined_ranks()) == sorted(ranks[r] for r in reference.joined)
            assert tables[0].slots <= capacity
            if left is not None:
                reference.events["left"] += 1
                break
        events += reference.events
    assert all(events[what] > 20 for what in ("ready", "refused", "deadlock", "left")), events
    assert all(events[what] > 20 for what in ("expired", "all joined")), events
