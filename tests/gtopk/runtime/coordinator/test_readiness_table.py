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


def said(table: ReadinessTable, names: str, *, rank: int = 0, flags: int = 0) -> Announcement:
    """Return a rank's announcement when these names become ready, with unchanged signatures."""
    return table.announcement_of([Request(name, PLAIN, flags) for name in names], rank)


def done(table: ReadinessTable, *announcements: Announcement) -> list[str]:
    return [ready.name for ready in table.enter(announcements).ready]


def test_a_name_has_a_slot_from_the_first_time_it_was_done():
    table = ReadinessTable(range(2), capacity=10)
    assert done(table, fresh("a", "b"), fresh("b")) == ["b"]
    assert [said(table, name).ready for name in "ab"] == [0, 0b1]
    assert done(table, Announcement(ready=1), fresh("a")) == ["a"]
    assert [said(table, name).ready for name in "ab"] == [0b10, 0b1]
    assert done(table, Announcement(), Announcement(ready=0b11)) == ["b"]
    assert done(table, Announcement(ready=0b10), Announcement()) == ["a"]


def test_a_rank_that_ran_out_of_batches_is_told_of_with_a_way_out():
    for reason, has_way_out in (("its program ended at step 8", True), ("failed at step 8", False)):
        table = ReadinessTable(range(2), capacity=2)
        table.enter([fresh("a"), Announcement()])
        ((name, error),) = table.enter([Announcement(), Announcement(leaves=reason)]).refused
        assert name == "a"
        assert f"rank 1 left ({reason}) before a" in str(error)
        assert ("give all ranks equally many batches" in str(error)) == has_way_out
        assert ("hvd.join()" in str(error)) == has_way_out


def test_who_alone_saves_a_checkpoint_is_told_that_all_have_to():
    table = ReadinessTable(range(2), capacity=2)
    table.enter([fresh("allgather.checkpoint.problem.label"), Announcement()])
    ended = Announcement(leaves="its program ended at step 8")
    ((_, error),) = table.enter([Announcement(), ended]).refused
    assert "every rank must call save_checkpoint and load_latest" in str(error)
    assert "batches" not in str(error)


def test_the_name_that_was_used_least_recently_makes_way():
    table = ReadinessTable(range(2), capacity=2)
    for name in "ab":
        done(table, fresh(name), fresh(name))
    assert done(table, Announcement(ready=1), Announcement(ready=1)) == ["a"]
    assert done(table, fresh("c"), fresh("c")) == ["c"]
    assert [said(table, name).ready for name in "abc"] == [0b1, 0, 0b10]
    assert table.slots == 2


def test_a_name_that_some_rank_is_ready_for_keeps_its_slot():
    table = ReadinessTable(range(2), capacity=1)
    done(table, fresh("a"), fresh("a"))
    assert done(table, Announcement(ready=1), fresh("b")) == []
    assert done(table, fresh("b"), Announcement()) == ["b"]
    assert [said(table, name).ready for name in "ab"] == [0b1, 0]
    assert done(table, Announcement(), Announcement(ready=1)) == ["a"]


def test_a_slot_that_changes_hands_is_used_again():
    table = ReadinessTable(range(2), capacity=2)
    other = OperationSpec(("y",), None, ())
    for _ in range(5):
        for spec in (PLAIN, other):
            said = fresh("a", spec=spec)
            assert done(table, said, said) == ["a"]
    assert table.slots == 1


def test_what_was_said_before_is_said_alike_until_a_slot_or_a_vote_is_another():
    table = ReadinessTable(range(2), capacity=3)
    done(table, fresh(*"abc"), fresh(*"abc"))
    for _ in range(2):
        assert said(table, "ba") == Announcement(ready=0b11)
    assert said(table, "ca", flags=7) == Announcement(ready=0b101, changed_flags={0: 7, 2: 7})
    done(table, said(table, "ca", flags=7), said(table, "ca", rank=1))
    # Without changed flags, rank 0's last flags of "a", 7, would count instead of its 0.
    assert said(table, "ba") == Announcement(ready=0b11, changed_flags={0: 0})
    assert said(table, "ba", rank=1) == Announcement(ready=0b11)
    done(table, fresh("b", spec=OperationSpec(("y",), None, ())), Announcement())
    assert said(table, "ba", rank=1) == Announcement(0b1, (Request("b", PLAIN, 0),))


def test_who_waits_and_who_is_waited_for():
    table = ReadinessTable([4, 5, 6], capacity=10)
    table.enter([fresh("a"), Announcement(), fresh("a", "b")])
    assert [table.waits(rank) for rank in range(3)] == [True, False, True]
    assert [table.is_waited_for(rank) for rank in range(3)] == [True, True, False]
    assert (table.missing("a"), table.missing("b")) == ([5], [4, 5])
    table.enter([Announcement(), Announcement(joins=True), Announcement()])
    assert table.missing("b") == [4]
    assert [table.waits(rank) for rank in range(3)] == [False, True, True]  # "a" was refused
    assert [table.is_waited_for(rank) for rank in range(3)] == [True, False, False]


def test_what_is_said_and_run_again_is_the_same_objects():
    """A step with many names then costs one comparison per cycle."""
    table = ReadinessTable(range(2), capacity=3)
    done(table, fresh(*"ab"), fresh(*"ab"))
    one, other = said(table, "a"), said(table, "b")
    assert said(table, "a") is one
    assert said(table, "b") is other
    ready = table.enter([one, one]).ready
    assert [each.name for each in ready] == ["a"]
    assert table.enter([one, one]).ready is ready
    assert done(table, other, other) == ["b"]


def test_ranks_that_wait_for_each_other_are_told_once_nobody_has_news():
    table = ReadinessTable(range(2), capacity=3)
    table.enter([fresh("a"), fresh("b")])
    stuck = [Announcement(stuck="a"), Announcement(stuck="b")]
    assert table.enter([stuck[0]._replace(fresh=fresh("c").fresh), stuck[1]]).refused == []
    assert [name for name, _ in table.enter(stuck).refused] == ["a", "b"]


def test_after_a_deadlock_slots_become_vacant_in_the_same_order_in_every_process():
    # In a set's order, which differs between processes, ranks would number slots differently.
    size = 8
    table = ReadinessTable(range(size), capacity=size)
    names = "abcdefgh"
    assert done(table, *[fresh(*names)] * size) == [*names]
    table.enter([said(table, name, rank=rank) for rank, name in enumerate(names)])
    refused = table.enter([Announcement(stuck=name) for name in names]).refused
    assert [name for name, _ in refused] == [*names]
    later = "ijklmnop"
    assert done(table, *[fresh(*later)] * size) == [*later]
    assert [said(table, name).ready for name in reversed(later)] == [1 << n for n in range(size)]


OTHER = OperationSpec(("y",), None, ())
Refused = dict[str, type[Exception]]
REDUCED = OperationSpec(("z",), b"how", ())  # a rank that has joined takes part in it


class Plainly:
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
        self, said: list[list[Request]], more: list[Announcement]
    ) -> tuple[dict[str, tuple[OperationSpec, list[int]]], Refused, int | None, str | None]:
        everyone = set(range(len(self.ranks)))
        for rank, names in enumerate(said):
            for name, spec, flags in names:
                self.waiting.setdefault(name, {})[rank] = spec, flags
        joining = [rank for rank in everyone if more[rank].joins]
        self.joined |= set(joining)
        self.leaving |= {r: more[r].leaves or "" for r in everyone if more[r].leaves is not None}
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
        names = [name for one in more for name in one.expired if name in self.waiting]
        expired = f"{names[0]} expired" if names else None
        for rank in self.leaving:
            refused |= self.drop([n for n, h in self.waiting.items() if rank not in h], PeerError)
        if not any(said) and not any(one.has_changes for one in more):
            stuck = [more[rank].stuck for rank in everyone - self.joined - self.leaving.keys()]
            names = [name for name in set(stuck) if name in self.waiting]
            if names and len(names) == len(set(stuck)):
                refused |= self.drop(names, MismatchError)
                self.events["a tangle"] += 1
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


def drawn(
    draw: random.Random, plainly: Plainly, size: int
) -> tuple[list[list[Request]], list[Announcement]]:
    """Return the ranks' announcements in a cycle: few names, and often the same on all ranks."""
    more = [Announcement() for _ in range(size)]
    if draw.random() < 0.5:
        names = [n for n in "abcde" if draw.random() < 0.4]
        names = [n for n in names if all(plainly.may_be_ready(r, n) for r in range(size))]
        flags, spec = draw.choice((0, 0, 0, 1)), draw.choice((PLAIN, PLAIN, PLAIN, REDUCED))
        return [[Request(n, spec, flags) for n in names] for _ in range(size)], more
    spec = draw.choice((PLAIN, REDUCED, REDUCED))
    said = [
        [
            Request(n, OTHER if draw.random() < 0.05 else spec, draw.choice((0, 0, 1, 2)))
            for n in draw.sample("abcde", 5)
            if draw.random() < draw.choice((0.0, 0.3)) and plainly.may_be_ready(rank, n)
        ]
        for rank in range(size)
    ]
    for rank in range(size):
        one = more[rank]
        if rank not in plainly.joined and rank not in plainly.leaving:
            one = one._replace(joins=draw.random() < 0.1)
            one = one._replace(leaves=f"left {rank}" if draw.random() < 0.02 else None)
            stuck = [*plainly.waiting, *plainly.waiting, draw.choice("abcde"), None]
            one = one._replace(stuck=draw.choice(stuck) if draw.random() < 0.7 else None)
        if draw.random() < 0.05:
            one = one._replace(expired={(name := draw.choice("abcde")): f"{name} expired"})
        more[rank] = one
    return said, more


def test_the_table_is_what_follows_plainly_from_what_was_said_on_every_rank_alike():
    """For any announcements in any order, and any number of slots."""
    events: Counter[str] = Counter()
    for seed in range(150):
        draw = random.Random(seed)
        ranks = range(4, 4 + draw.choice((2, 3, 3, 4)))
        size, capacity = len(ranks), draw.choice((1, 2, 3, 9))
        tables = [ReadinessTable(ranks, capacity) for _ in ranks]
        plainly = Plainly(ranks)
        for _ in range(25):
            said, more = drawn(draw, plainly, size)
            announcements = []
            for rank, (table, names, one) in enumerate(zip(tables, said, more, strict=True)):
                ready, fresh, flags, *_ = table.announcement_of(names, rank)
                one = one._replace(ready=ready, fresh=fresh, changed_flags=flags)
                assert sorted(table.names_in(one)) == sorted(name for name, *_ in names)
                announcements.append(one)
            outcomes = [table.enter(announcements) for table in tables]
            assert all(repr(outcome) == repr(outcomes[0]) for outcome in outcomes)
            expected = plainly.enter(said, more)
            ready, refused, joined, left, expired, news = outcomes[0]
            assert (
                {name: (spec, all_flags) for name, spec, all_flags in ready},
                {name: type(error) for name, error in refused},
                joined,
                expired,
            ) == expected, (seed, announcements)
            assert len(ready) + len(refused) == len(expected[0]) + len(expected[1])
            assert news == any(one.has_changes for one in announcements)
            assert left == plainly.gone()
            for rank in range(size):
                assert tables[rank].waits(rank) == plainly.waits(rank)
                assert tables[0].is_waited_for(rank) == plainly.is_waited_for(rank)
            assert sorted(tables[0].joined_ranks()) == sorted(ranks[r] for r in plainly.joined)
            assert tables[0].slots <= capacity
            if left is not None:
                plainly.events["left"] += 1
                break
        events += plainly.events
    assert all(events[what] > 20 for what in ("ready", "refused", "a tangle", "left")), events
    assert all(events[what] > 20 for what in ("expired", "all joined")), events
