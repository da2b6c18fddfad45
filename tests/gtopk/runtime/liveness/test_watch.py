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

    def say(self, sender: int, about: int, state: State, text: str = "") -> None:
        self.sequence += 1
        for rank, watch in enumerate(self.watches):
            if rank != sender and not {sender, rank} & self.cut and rank not in self.frozen:
                watch.receive(Beat(sender, about, state, self.sequence, 0.0, text), self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / PAUSE)):
            self.now += PAUSE
            for rank, state in self.states.items():
                if rank not in self.frozen:
                    self.say(rank, rank, state)
            for rank, watch in enumerate(self.watches):
                if rank not in self.frozen:
                    watch.check_timeouts(self.now, self.states[rank] is State.STOPPED)

    def lost(self) -> list[set[int]]:
        return [set(watch.lost) for watch in self.watches]

    def messages(self) -> list[str]:
        return [text for watch in self.watches for text in watch.messages]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 17])
def test_every_rank_is_watched_by_those_it_tells_and_word_reaches_everyone(size):
    watches = [Watch(rank, peers(size), TIMEOUT, WARNING, 0.0) for rank in range(size)]
    for watch in watches:
        assert watch.rank not in watch.targets
        assert all(watch.rank in watches[other].watches for other in watch.targets)
    reached, last = {0}, set()
    while reached != last:
        last = set(reached)
        reached |= {other for rank in last for other in watches[rank].targets}
    assert reached == set(range(size))


def test_ranks_that_beat_are_never_lost_nor_warned_of():
    job = Job(5)
    job.run(100)
    assert job.lost() == [set()] * 5
    assert job.messages() == []


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_stopped_rank_is_warned_of_and_then_lost_and_no_other_is(size):
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


def test_a_rank_that_goes_on_in_time_is_not_lost():
    job = Job(3)
    job.states[1] = State.STOPPED
    job.run(TIMEOUT - PAUSE)
    job.states[1] = State.ALIVE
    job.run(10 * TIMEOUT)
    assert job.lost() == [set()] * 3
    assert "rank 1 (host host1, pid 101) responds again" in job.messages()


def test_a_job_that_is_stopped_as_a_whole_loses_nobody():
    """When a rank continues, it finds the others stopped or silent."""
    for companions_too in (False, True):
        job = Job(4)
        job.run(3)
        if companions_too:
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


def test_a_rank_that_cannot_be_reached_is_lost_and_knows_that_it_hears_nobody():
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


def test_who_froze_with_its_companion_is_lost_and_accuses_nobody_when_it_wakes():
    job = Job(3)
    job.run(3)
    job.frozen = {2}
    job.run(TIMEOUT + 2 * PAUSE)
    assert [set(job.watches[rank].lost) for rank in (0, 1)] == [{2}, {2}]
    job.frozen = set()
    job.run(PAUSE)
    assert job.lost()[2] == set()


def test_word_of_a_loss_is_believed_and_the_one_given_up_knows_by_whom():
    job = Job(3)
    job.say(0, 2, State.LOST, "stopped for 5 s")
    assert job.watches[1].lost == {2: "stopped for 5 s"}
    by = "declared lost by rank 0 (host host0, pid 100): stopped for 5 s"
    assert job.watches[2].lost == {2: by}


def test_a_rank_that_ended_is_lost_at_once_and_one_that_left_never_is():
    job = Job(3)
    job.run(1)
    job.say(1, 1, State.ENDED, "failed at step 5: RuntimeError: boom")
    job.say(2, 2, State.LEFT)
    job.frozen = {1, 2}
    job.run(10 * TIMEOUT)
    assert job.watches[0].lost == {1: "failed at step 5: RuntimeError: boom"}


def test_who_left_is_not_lost_whatever_others_say_later():
    job = Job(3)
    job.say(1, 1, State.LEFT)
    job.say(2, 1, State.LOST, "silent for 5 s")
    job.say(1, 1, State.ENDED, "ended without an error message")
    assert job.lost() == [set(), {1}, set()]


def test_who_was_never_heard_is_told_of_once_and_not_watched():
    job = Job(3)
    job.cut = {1}
    job.run(20 * TIMEOUT)
    assert job.lost() == [set()] * 3
    assert len(job.watches[0].messages) == 1
    assert "receives no heartbeats from rank 1 (host host1, pid 101)" in job.watches[0].messages[0]
    assert "GTOPK_INTERFACE" in job.watches[0].messages[0]


def hear_all(watch: Watch, beats: Iterable[Beat]) -> None:
    for beat in beats:
        watch.receive(beat, 50.0)


def test_copies_and_nonsense_change_nothing():
    watch = Watch(0, peers(3), TIMEOUT, WARNING, 50.0)
    left = Beat(1, 1, State.ALIVE, 7)
    hear_all(watch, [left, left._replace(state=State.ENDED), Beat(1, 1, State.ENDED, 6)])
    strangers = [Beat(9, 9, State.ENDED, 8), Beat(3, 1, State.LOST, 8), Beat(9, 1, State.LOST, 8)]
    hear_all(watch, [*strangers, Beat(1, 3, State.LOST, 8), Beat(1, 9, State.LOST, 8)])
    watch.receive(Beat(0, 1, State.LOST, 9), 50.0)  # its own
    assert watch.lost == {}


def test_who_was_lost_first_is_known_whatever_came_first():
    watch = Watch(0, peers(4), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ENDED, 1, 0.2, "killed, too"), 51.0)
    watch.receive(Beat(3, 2, State.LOST, 1, 0.5, "killed"), 51.1)
    watch.receive(Beat(2, 0, State.LOST, 1, 9.0, "itself"), 51.2)
    watch.receive(Beat(2, 2, State.ENDED, 2, 0.0, "again"), 51.3)
    assert watch.lost_before(52.0) == 2
    assert watch.lost_before(50.7) == 2
    assert watch.lost_before(50.6) is None


def look_on(watch: Watch, begin: float, seconds: float) -> float:
    for number in range(round(seconds / PAUSE)):
        watch.check_timeouts(begin + (number + 1) * PAUSE, False)
    return begin + seconds


@pytest.mark.parametrize(
    ("state", "befell"), [(State.ALIVE, "silent for 4.5 s: "), (State.STOPPED, "stopped for 4.5 s")]
)
def test_a_companion_that_was_kept_from_looking_counts_anew_and_what_it_never_heard_not_at_all(
    state, befell
):
    watch = Watch(0, peers(3), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, state, 1), 50.0)
    watch.check_timeouts(50.0, False)
    late = 50.0 + 3 * TIMEOUT
    watch.check_timeouts(late, False)
    late = look_on(watch, late, TIMEOUT)
    assert watch.lost == {}
    look_on(watch, late, PAUSE)
    assert watch.lost.keys() == {1}
    assert watch.lost[1].startswith(befell)


@pytest.mark.parametrize("last", [State.LEFT, State.ENDED])
def test_nobody_is_warned_of_the_silence_of_who_left_or_is_lost(last):
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    watch.receive(Beat(1, 1, last, 2), 50.0)
    look_on(watch, 50.0, 3 * TIMEOUT)
    assert watch.messages == []


def test_of_two_ranks_none_blames_its_own_network_and_warns_once():
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    look_on(watch, look_on(watch, 50.0, TIMEOUT), PAUSE)
    assert len(watch.messages) == 1
    assert watch.lost == {1: "silent for 4.5 s: its host or its network is down"}


@pytest.mark.parametrize(("warning", "half"), [(1.0, 1.0), (3.0, 2.0)])
def test_a_warning_comes_after_half_the_timeout_at_the_latest(warning, half):
    watch = Watch(0, peers(2), TIMEOUT, warning, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    late = look_on(watch, 50.0, half)
    assert watch.messages == []
    look_on(watch, late, PAUSE)
    assert len(watch.messages) == 1


@pytest.mark.parametrize(("pause", "is_lost"), [(1.0, True), (1.5, False)])
def test_timeouts_begin_anew_where_a_quarter_of_one_passed_between_looks(pause, is_lost):
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    for number in range(10):
        watch.check_timeouts(50.0 + number * pause, False)
    assert bool(watch.lost) == is_lost


def test_a_stopped_rank_whose_companion_reports_a_loss_is_stopped_all_the_same():
    watch = Watch(0, peers(3), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.STOPPED, 1), 50.0)
    watch.receive(Beat(1, 2, State.LOST, 2, 0.0, "killed"), 51.0)
    look_on(watch, 50.0, TIMEOUT + PAUSE)
    assert watch.lost == {2: "killed", 1: "stopped for 4.5 s (SIGSTOP?)"}


@pytest.mark.parametrize(("heard", "blames_itself"), [(52.0, True), (52.5, False)])
def test_who_heard_another_rank_since_the_time_to_warn_does_not_blame_itself(heard, blames_itself):
    watch = Watch(0, peers(3), TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, State.ALIVE, 1), 50.0)
    look_on(watch, 50.0, TIMEOUT)
    watch.receive(Beat(2, 2, State.ALIVE, 1), heard)
    watch.check_timeouts(54.5, False)
    assert ("which receives no heartbeats at all" in watch.lost[1]) == blames_itself


def test_who_is_not_heard_is_told_of_once_the_time_to_warn_has_passed():
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    watch.check_timeouts(50.0 + TIMEOUT, False)  # was suspended: a beat may wait in the socket
    assert watch.messages == []
    watch = Watch(0, peers(2), TIMEOUT, WARNING, 50.0)
    late = look_on(watch, 50.0, WARNING)
    assert watch.messages == []
    look_on(watch, late, PAUSE)
    assert len(watch.messages) == 1


@pytest.mark.parametrize(
    ("host", "said", "lost_at"),
    [
        ("host0", 50.5, 50.25),  # this host's clock; the beat waited for this companion
        ("host0", 46.5, 46.25),
        ("host0", 46.0, 50.75),  # more than a companion is late, so another clock
        ("host0", 51.5, 50.75),
        ("host1", 49.5, 50.75),
    ],
)
@pytest.mark.parametrize("state", [State.ENDED, State.LOST])
def test_when_a_rank_was_lost_is_told_by_the_clock_of_its_host(host, said, lost_at, state):
    own, other = peers(2)
    watch = Watch(0, [own, other._replace(host=host)], TIMEOUT, WARNING, 50.0)
    watch.receive(Beat(1, 1, state, round(said * 1e9), 0.25, "killed"), 51.0)
    assert watch.lost_at == {1: lost_at}
