"""What a rank says when it leaves, and what is known of one that says nothing."""

from __future__ import annotations

from collectives.transports import local_world
from collectives.transports.departure import DepartureNotice


def test_a_departure_notice_travels_with_its_cause():
    died = DepartureNotice({}, "its connection is lost", lost=True)
    said = DepartureNotice({0: 3, 1025: 7}, "it missed rank 1", (1, died))
    assert DepartureNotice.decode(said.encode()) == said


def test_who_died_is_told_from_who_left_also_by_a_peers_word():
    one, two, three, four = local_world(4)
    assert one.lost() == []
    three.announce_departure("its program ended")
    assert one.lost() == []
    two._left[1] = DepartureNotice(
        {}, "it missed rank 3", (3, DepartureNotice({}, "lost", lost=True))
    )
    assert one.lost() == [3]
    one._left[2] = DepartureNotice({}, "lost", lost=True)
    assert four.lost() == [2, 3]
