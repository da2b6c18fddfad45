"""Subsets and channels: creating them, and missing ranks in them."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import MessageError, PeerError, PeerTimeoutError, Transport
from collectives.transports import LocalTransport, local_world
from tests.collectives.transports.kinds import MESSAGE, every_kind


@pytest.mark.parametrize("ranks", [[0, 0, 1], [0, 3], [-1, 0]])
def test_subset_with_duplicate_or_unknown_ranks_is_refused(ranks: list[int]) -> None:
    world = local_world(3)
    with pytest.raises(ValueError, match=rf"distinct ranks of 0..2, got \{ranks} on rank 0"):
        world[0].subset(ranks)


def test_subset_made_by_a_rank_outside_it_is_refused() -> None:
    world = local_world(3)
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 1\]"):
        world[2].subset([0, 1])


@pytest.mark.parametrize("number", [-1, 1024])
def test_channel_number_out_of_bounds_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=rf"channel must lie in 0..1023, got {number}"):
        local_world(1)[0].channel(number)


def test_streams_with_colliding_tags_are_refused(monkeypatch) -> None:
    # Tags so few that the hash leaves one for all subsets.
    monkeypatch.setattr(LocalTransport, "tag_limit", 1026)
    (transport,) = local_world(1)
    subset = transport.subset([0])
    with pytest.raises(ValueError, match=r"\(\(0,\), 3\) and \(\(0,\),\) would share the tag 1025"):
        subset.channel(3)
    assert transport.channel(3).tag != transport.channel(4).tag


def test_view_counts_its_operations_and_those_of_its_parent() -> None:
    (transport,) = local_world(1)
    channel = transport.channel(3)
    for number in range(1, 6):
        with transport.operation("of the parent"):
            assert (transport.begun, channel.begun, channel.subset([0]).begun) == (number,) * 3
    with channel.operation("of its own"):
        assert (transport.begun, channel.begun, channel.subset([0]).begun) == (5, 1, 1)
    with transport.operation("of the parent"), channel.operation("of its own"):
        assert (transport.begun, channel.begun, channel.subset([0]).begun) == (6, 2, 2)


def test_errors_of_a_view_name_world_ranks() -> None:
    world = local_world(5, timeout_seconds=0.1)
    view = world[2].subset([4, 2]).channel(1)
    with pytest.raises(
        PeerTimeoutError, match=r"rank 2 has waited [\d.]+ s for rank 4 in an exchange"
    ):
        view.receive(0)
    world[4].subset([4, 2]).channel(1).send(MESSAGE, 1)
    with pytest.raises(MessageError, match="the message from rank 4 is malformed"):
        view.allgather(MESSAGE)
    world[4].subset([4, 2]).channel(1).send(MESSAGE, 1)
    with pytest.raises(MessageError, match=r"from rank 4 .* 10 bytes, but rank 2's has 3"):
        view.allgather_into(np.zeros(6, np.uint8), [0, 3, 6])
    world[4].announce_departure("enough")
    with pytest.raises(PeerError, match=r"rank 4 left \(enough\) while rank 2 waited for it in an"):
        view.receive(0)


@every_kind
def test_members_name_a_rank_that_left_in_an_operation_of_a_view(in_world, kind: str) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 3:
            transport.leave("it is no member")
            return
        channel = transport.subset([0, 1, 2]).channel(0)
        with channel.operation("bucket 0"):
            channel.barrier()
        if transport.rank == 2:
            transport.leave("its data ran out")
            return
        text = r"rank 2 left \(its data ran out\) while rank \d waited for it in bucket 1"
        with pytest.raises(PeerError, match=text) as caught, channel.operation("bucket 1"):
            channel.receive(1 - channel.rank)
        transport.leave(str(caught.value))

    in_world(kind, 4, program, 30)


def test_rank_that_completed_a_views_operation_is_not_missed_in_it() -> None:
    world = local_world(3, timeout_seconds=0.1)
    views = [transport.channel(1) for transport in world]
    with views[2].operation("bucket 0"):
        pass
    world[2].announce_departure("done")
    with (
        pytest.raises(PeerTimeoutError, match="rank 1 in bucket 0"),
        views[0].operation("bucket 0"),
    ):
        views[0].receive(1)


def test_view_raises_for_a_rank_missed_in_its_parents_operation() -> None:
    world = local_world(3, timeout_seconds=30)
    world[2].announce_departure("enough")
    view = world[0].channel(1).subset([0, 1])
    text = r"rank 2 left \(enough\) while rank 0 waited for it in step 1"
    with pytest.raises(PeerError, match=text), world[0].operation("step 1"):
        view.receive(1)


def test_rank_waiting_in_a_view_names_the_first_departed_rank() -> None:
    world = local_world(3, timeout_seconds=30)
    with world[0].operation("step 0"), world[1].operation("step 0"):
        world[2].announce_departure("enough")
        world[1].announce_departure("rank 2 is gone")
        del world[0]._left[2]  # heard of only through its consequence
        text = r"^rank 2 left \(enough\) while rank 0 waited for it in step 0$"
        with pytest.raises(PeerError, match=text):
            world[0].channel(1).receive(1)
