"""The table follows from what is said, and from nothing else: all ranks have the same."""

from __future__ import annotations

from gtopk.runtime.coordinator.operation import Announcement, Intention, ReadyName
from gtopk.runtime.coordinator.readiness_table import ReadinessTable

PLAIN = Intention(("x",), None, ())


def fresh(*names: str, intention: Intention = PLAIN) -> Announcement:
    return Announcement(fresh=tuple(ReadyName(name, intention, 0) for name in names))


def said(table: ReadinessTable, names: str, *, rank: int = 0, flags: int = 0) -> Announcement:
    """What a rank says when these become ready there, each as it always was."""
    return table.announcement_of([ReadyName(name, PLAIN, flags) for name in names], rank)


def done(table: ReadinessTable, *announcements: Announcement) -> list[str]:
    return [ready.name for ready in table.take(announcements).ready]


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
        table.take([fresh("a"), Announcement()])
        ((name, error),) = table.take([Announcement(), Announcement(leaves=reason)]).refused
        assert name == "a"
        assert f"rank 1 left ({reason}) and was waited for in a" in str(error)
        assert ("give all ranks as many batches" in str(error)) == has_way_out
        assert ("hvd.join()" in str(error)) == has_way_out


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
    other = Intention(("y",), None, ())
    for _ in range(5):
        for intention in (PLAIN, other):
            said = fresh("a", intention=intention)
            assert done(table, said, said) == ["a"]
    assert table.slots == 1


def test_what_was_said_before_is_said_alike_until_a_slot_or_a_vote_is_another():
    table = ReadinessTable(range(2), capacity=3)
    done(table, fresh(*"abc"), fresh(*"abc"))
    for _ in range(2):
        assert said(table, "ba") == Announcement(ready=0b11)
    assert said(table, "ca", flags=7) == Announcement(ready=0b101, all_flags={0: 7, 2: 7})
    done(table, said(table, "ca", flags=7), said(table, "ca", rank=1))
    # What rank 0 says of a is what it said last: 7. Left out, its 0 would be taken for that.
    assert said(table, "ba") == Announcement(ready=0b11, all_flags={0: 0})
    assert said(table, "ba", rank=1) == Announcement(ready=0b11)
    done(table, fresh("b", intention=Intention(("y",), None, ())), Announcement())
    assert said(table, "ba", rank=1) == Announcement(0b1, (ReadyName("b", PLAIN, 0),))


def test_who_waits_and_who_is_waited_for():
    table = ReadinessTable([4, 5, 6], capacity=10)
    table.take([fresh("a"), Announcement(), fresh("a", "b")])
    assert [table.waits(rank) for rank in range(3)] == [True, False, True]
    assert [table.is_waited_for(rank) for rank in range(3)] == [True, True, False]
    assert (table.missing("a"), table.missing("b")) == ([5], [4, 5])
    table.take([Announcement(), Announcement(joins=True), Announcement()])
    assert table.missing("b") == [4]
    assert [table.waits(rank) for rank in range(3)] == [False, True, True]  # "a" was refused
    assert [table.is_waited_for(rank) for rank in range(3)] == [True, False, False]


def test_what_is_said_and_run_again_is_the_same_objects():
    """A step of many names then costs a comparison a cycle."""
    table = ReadinessTable(range(2), capacity=3)
    done(table, fresh(*"ab"), fresh(*"ab"))
    one, other = said(table, "a"), said(table, "b")
    assert said(table, "a") is one
    assert said(table, "b") is other
    ready = table.take([one, one]).ready
    assert [each.name for each in ready] == ["a"]
    assert table.take([one, one]).ready is ready
    assert done(table, other, other) == ["b"]


def test_ranks_that_wait_for_each_other_are_told_once_nobody_has_news():
    table = ReadinessTable(range(2), capacity=3)
    table.take([fresh("a"), fresh("b")])
    stuck = [Announcement(stuck="a"), Announcement(stuck="b")]
    assert table.take([stuck[0]._replace(fresh=fresh("c").fresh), stuck[1]]).refused == []
    assert [name for name, _ in table.take(stuck).refused] == ["a", "b"]
