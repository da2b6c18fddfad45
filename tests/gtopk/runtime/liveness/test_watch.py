"""From beats to decisions: who watches whom, which ranks get a warning, and which are lost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gtopk.runtime.liveness.watch import Beat, Peer, State, Watch

TIMEOUT, WARNING, PAUSE = 4.0, 2.0, 0.5


def peers(size: int) -> list[Peer]:
    return [Peer(rank, f"host{rank}", 100 + rank, "127.0.0.1", 1000 + rank) for rank in range(size)]


class Job:
    """The companions of a few ranks on a simulated clock; all beats arrive."""

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        self.now = 50.0
        self.watches = [Watch(r, peers(size), timeout, WARNING, self.now) for r in range(size)]
        self.states = dict.fromkeys(range(size), State.ALIVE)
        self.sequence = 0
        self.cut: set[int] = set()  # no beats from or to these arrive
        self.frozen: set[int] = set()  # with their companions

    def send(self, sender: int, about: int, state: State, text: str = "") -> None:
        self.sequence += 1
        for rank, watch in enumerate(self.watches):
            if rank != sender and not {sender, rank} & self.cut and rank not in self.frozen:
                watch.receive(Beat(sender, about, state, self.sequence, 0.0, text), self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / PAUSE)):
            self.now += PAUSE
            for rank, state in self.states.items():
                if rank not in self.frozen:
                    self.send(rank, rank, state)
            for rank, watch in enumerate(self.watches):
                if rank not in self.frozen:
                    watch.check_timeouts(self.now, self.states[rank] is State.STOPPED)

    def lost(self) -> list[set[int]]:
        return [set(watch.lost) for watch in self.watches]

    def messages(self) -> list[str]:
        return [text for watch in self.watches for text in watch.messages]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 17])
def test_targets_of_a_rank_watch_it_and_news_reaches_every_rank(size):
    watches = [Watch(rank, peers(size), TIMEOUT, WARNING, 0.0) for rank in range(size)]
    for watch in watches:
        assert watch.rank not in watch.targets
        assert all(watch.rank in watches[other].watches for other in watch.targets)
    reached, last = {0}, set()
    while reached != last:
        last = set(reached)
        reached |= {other for rank in last for other in watches[rank].targets}
    assert reached == set(range(size))


def test_ranks_that_send_beats_are_never_lost_nor_warned_of():
    job = Job(5)
    job.run(100)
    assert job.lost() == [set()] * 5
    assert job.messages() == []


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_stopped_rank_alone_is_warned_of_and_then_lost(size):
    job = Job(size)
    job.run(3)
    job.states[1] = State.STOPPED
    job.run(WARNING + 2 * PAUSE)
    assert job.lost() == [set()] * size
    assert job.messages()
    assert all(
        text.startswith("rank 1 (host host1, pid 101): stopped for") for text in job.messages()
    )
    job.run(TIMEOUT - WARNING)
    watchers = {rank for rank, watch in enumerate(job.watches) if 1 in watch.watches}
    assert [rank for rank, lost in enumerate(job.lost()) if lost == {1}] == sorted(watchers)
    assert all("stopped for" in job.watches[rank].lost[1] for rank in watchers)
    job.run(10 * TIMEOUT)
    assert set().union(*job.lost()) == {1}


def test_stopped_rank_that_continues_in_time_is_not_lost():
    job = Job(3)
    job.states[1] = State.STOPPED
    job.run(TIMEOUT - PAUSE)
    job.states[1] = State.ALIVE
    job.run(10 * TIMEOUT)
    assert job.lost() == [set()] * 3
    assert "rank 1 (host host1, pid 101) responds again" in job.messages()


def test_job_that_is_stopped_as_a_whole_loses_no_rank():
    """When a rank continues, it finds the others stopped or silent."""
    for companions_stop in (False, True):
        job = Job(4)
        job.run(3)
        if companions_stop:
            job.now += 10 * TIMEOUT
        else:
            job.states = dict.fromkeys(job.states, State.STOPPED)
            job.run(10 * TIMEOUT)
            for rank in range(4):  # they continue one by one
                job.states[rank] = State.ALIVE
                job.watches[rank].check_timeouts(job.now, False)
        job.run(10 * TIMEOUT)
        assert job.lost() == [set()] * 4
        assert job.messages() == []


def test_unreachable_rank_is_lost_and_reports_that_it_receives_no_beats():
    job = Job(4)
    job.run(3)
    job.cut = {2}
    job.run(TIMEOUT + 2 * PAUSE)
    assert 2 in job.watches[3].lost
    assert 2 in job.watches[0].lost
    assert "silent for" in job.watches[3].lost[2]
    assert "receives no heartbeats at all" not in job.watches[3].lost[2]
    assert job.watches[2].lost
    assert all(
        "or that of rank 2 (host host2, pid 102), which receives no heartbeats at all, is down"
        in why
        for why in job.watches[2].lost.values()
    )


def test_rank_frozen_with_its_companion_is_lost_and_reports_no_other():
    job = Job(3)
    job.run(3)
    job.frozen = {2}
    job.run(TIMEOUT + 2 * PAUSE)
    assert [set(job.watches[rank].lost) for rank in (0, 1)] == [{2}, {2}]
    job.frozen = set()
    job.run(PAUSE)
    assert job.lost()[2] == set()


def test_reported_loss_is_accepted_and_the_lost_rank_knows_its_reporter():
    job = Job(3)
    job.send(0, 2, State.LOST, "stopped for 5 s")
    assert job.watches[1].lost == {2: "stopped for 5 s"}
    by = "declared lost by rank 0 (host host0, pid 100): stopped for 5 s"
    assert job.watches[2].lost == {2: by}


def test_rank_that_ended_is_lost_at_once_and_one_that_left_is_not():
    job = Job(3)
    job.run(1)
    job.send(1, 1, State.ENDED, "failed at step 5: RuntimeError: boom")
    job.send(2, 2, State.LEFT)
    job.frozen = {1, 2}
    job.run(10 * TIMEOUT)
    assert job.watches[0].lost == {1: "failed at step 5: RuntimeError: boom"}


def test_rank_that_left_is_not_lost_whatever_later_beats_say():
    job = Job(3)
    job.send(1, 1, State.LEFT)
    job.send(2, 1, State.LOST, "silent for 5 s")
    job.send(1, 1, State.ENDED, "ended without an error message")
    assert job.lost() == [set(), {1}, set()]


def test_rank_that_never_sent_a_beat_is_warned_of_once_and_not_lost():
    job = Job(3)
    job.cut = {1}
    job.run(20 * TIMEOUT)
    assert job.lost() == [set()] * 3
    assert len(job.watches[0].messages) == 1
    assert "receives no heartbeats from rank 1 (host host1, pid 101)" in job.watches[0].messages[0]
    assert "GTOPK_INTERFACE" in job.watches[0].messages[0]


def receive_all(watch: Watch, beats: Iterable[Beat]) -> None:
    for beat in beats:
        watch.receive(beat, 50.0)


def test_repeated_and_invalid_beats_change_nothing():
    watch = Watch(0, peers(3), TIMEOUT, WARNING, 50.0)
    alive = Beat(1, 1, State.ALIVE, 7)
    receive_all(watch, [alive, alive._replace(state=State.ENDED), Beat(1, 1, State.ENDED, 6)])
    strangers = [Beat(9, 9, State.ENDED, 8), Beat(3, 1, State.LOST, 8), Beat(9, 1, State.LOST, 8)]
    receive_all(watch, [*strangers, Beat(1, 3, State.LOST, 8), Beat(1, 9, State.LOST, 8)])
    watch.receive(Beat(0, 1, State.LOST, 9), 50.0)  # its own
    assert watch.lost == {}


def test_lost_before_finds_the_first_lost_rank_in_any_order_of_beats():
    watch = Watch(0, peers(4), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ENDED, 1, 0.2, "killed, too"), 51.0)
    watch.receive(Beat(3, 2, State.LOST, 1, 0.5, "killed"), 51.1)
    watch.receive(Beat(2, 0, State.LOST, 1, 9.0, "itself"), 51.2)
    watch.receive(Beat(2, 2, State.ENDED, 2, 0.0, "again"), 51.3)
    assert watch.lost_before(52.0) == 2
    assert watch.lost_before(50.7) == 2
    assert watch.lost_before(50.6) is None


def check_for(watch: Watch, begin: float, seconds: float) -> float:
    for number in range(round(seconds / PAUSE)):
        watch.check_timeouts(begin + (number + 1) * PAUSE, False)
    return begin + seconds


@pytest.mark.parametrize(
    ("state", "reason"), [(State.ALIVE, "silent for 4.5 s: "), (State.STOPPED, "stopped for 4.5 s")]
)
def test_timeouts_restart_after_a_long_pause_between_checks(state, reason):
    watch = Watch(0, peers(3), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, state, 1), 50.0)
    watch.check_timeouts(50.0, False)
    late = 50.0 + 3 * TIMEOUT
    watch.check_timeouts(late, False)
    late = check_for(watch, late, TIMEOUT)
    assert watch.lost == {}
    check_for(watch, late, PAUSE)
    assert watch.lost.keys() == {1}
    assert watch.lost[1].startswith(reason)


@pytest.mark.parametrize("last", [State.LEFT, State.ENDED])
def test_silence_of_a_rank_that_left_or_ended_gives_no_warning(last):
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    watch.receive(Beat(1, 1, last, 2), 50.0)
    check_for(watch, 50.0, 3 * TIMEOUT)
    assert watch.messages == []


def test_one_of_two_ranks_blames_only_the_other_and_warns_once():
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    check_for(watch, check_for(watch, 50.0, TIMEOUT), PAUSE)
    assert len(watch.messages) == 1
    assert watch.lost == {1: "silent for 4.5 s: its host or its network is down"}


@pytest.mark.parametrize(("warning", "half"), [(1.0, 1.0), (3.0, 2.0)])
def test_warning_comes_after_half_the_timeout_at_the_latest(warning, half):
    watch = Watch(0, peers(2), TIMEOUT, warning, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    late = check_for(watch, 50.0, half)
    assert watch.messages == []
    check_for(watch, late, PAUSE)
    assert len(watch.messages) == 1


@pytest.mark.parametrize(("pause", "is_lost"), [(1.0, True), (1.5, False)])
def test_timeouts_restart_after_a_quarter_of_one_without_a_check(pause, is_lost):
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    for number in range(10):
        watch.check_timeouts(50.0 + number * pause, False)
    assert bool(watch.lost) == is_lost


def test_stopped_rank_is_lost_although_its_companion_reports_a_loss():
    watch = Watch(0, peers(3), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.STOPPED, 1), 50.0)
    watch.receive(Beat(1, 2, State.LOST, 2, 0.0, "killed"), 51.0)
    check_for(watch, 50.0, TIMEOUT + PAUSE)
    assert watch.lost == {2: "killed", 1: "stopped for 4.5 s (SIGSTOP?)"}


@pytest.mark.parametrize(("received_at", "blames_itself"), [(52.0, True), (52.5, False)])
def test_rank_that_received_a_beat_lately_does_not_blame_its_own_network(
    received_at, blames_itself
):
    watch = Watch(0, peers(3), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    check_for(watch, 50.0, TIMEOUT)
    watch.receive(Beat(2, 2, State.ALIVE, 1), received_at)
    watch.check_timeouts(54.5, False)
    assert ("which receives no heartbeats at all" in watch.lost[1]) == blames_itself


def test_missing_first_beat_is_warned_of_after_the_warning_time():
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    watch.check_timeouts(50.0 + TIMEOUT, False)  # was suspended: a beat may wait in the socket
    assert watch.messages == []
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    late = check_for(watch, 50.0, WARNING)
    assert watch.messages == []
    check_for(watch, late, PAUSE)
    assert len(watch.messages) == 1


@pytest.mark.parametrize(
    ("host", "sent_at", "lost_at"),
    [
        ("host0", 50.5, 50.25),  # this host's clock; the beat waited for this companion
        ("host0", 46.5, 46.25),
        ("host0", 46.0, 50.75),  # more than a companion is late, so another clock
        ("host0", 51.5, 50.75),
        ("host1", 49.5, 50.75),
    ],
)
@pytest.mark.parametrize("state", [State.ENDED, State.LOST])
def test_time_of_a_loss_comes_from_the_beat_only_on_the_same_host(host, sent_at, lost_at, state):
    own, other = peers(2)
    watch = Watch(0, [own, other._replace(host=host)], TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, state, round(sent_at * 1e9), 0.25, "killed"), 51.0)
    assert watch.lost_at == {1: lost_at}
