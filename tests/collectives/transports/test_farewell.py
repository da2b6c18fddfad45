"""What a rank says when it leaves, and what is known of one that says nothing."""

from __future__ import annotations

from collectives.transports import local_world
from collectives.transports.farewell import Farewell


def test_a_farewell_travels_with_its_cause():
    died = Farewell({}, "its connection is lost", lost=True)
    said = Farewell({0: 3, 1025: 7}, "it missed rank 1", (1, died))
    assert Farewell.decode(said.encode()) == said


def test_who_died_is_told_from_who_left_also_by_a_peers_word():
    one, two, three, four = local_world(4)
    assert one.lost() == []
    three.resign("its program ended")
    assert one.lost() == []
    two._left[1] = Farewell({}, "it missed rank 3", (3, Farewell({}, "lost", lost=True)))
    assert one.lost() == [3]
    one._left[2] = Farewell({}, "lost", lost=True)
    assert four.lost() == [2, 3]
