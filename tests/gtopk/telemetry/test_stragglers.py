"""A rank that computes longer than the others is reported by name, soon and once."""

from __future__ import annotations

import math
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gtopk
from collectives.transports import LocalTransport
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.coordinator import Engine
from gtopk.runtime.world import world
from gtopk.telemetry import stragglers
from gtopk.telemetry.reading import read_run
from gtopk.telemetry.stragglers import SLOW, Stragglers, StragglerState

PROMISED_STEPS = 22
RANKS = 3


@pytest.fixture(autouse=True)
def cores(monkeypatch) -> None:
    """Give each rank a core, whatever this machine has."""
    names = list(map(str, range(RANKS)))
    monkeypatch.setattr(stragglers, "own_cores", lambda: (names, float(RANKS), "a container"))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20))
def test_score_is_time_of_the_fastest_rank_over_own_time(seconds):
    scores = StragglerState(seconds, [], [], set()).scores()
    assert max(scores) == 1
    assert all(0 < score <= 1 for score in scores)
    assert StragglerState([1.0, 4.0], [], [], set()).scores() == [1.0, SLOW]
    assert StragglerState([0.0, 4.0, 0.0], [], [], set()).scores() == [None, 1.0, None]
    assert StragglerState([0.0], [], [], set()).scores() == [None]


def steps(
    transport: LocalTransport, slow_from: int, slow_until: int, times: float, seconds: float
) -> list[Any]:
    """Return the scores after each of 60 steps; rank 1 is slow in some."""
    found = []
    with world.entered(transport) as here:
        watch = Stragglers(here, here.engine, "test")
        for step in range(1, 61):
            slow = transport.rank == 1 and slow_from <= step < slow_until
            watch.note(step, seconds * (times if slow else 1))
            # A step ends with an exchange of all ranks.
            here.engine.submit("a step", [], lambda transport, all_flags: None).wait()
            here.step += 1
            found.append(watch.scores)
    return found


@pytest.mark.parametrize("slow_from", range(1, 7))
def test_straggler_is_reported_within_22_steps_of_its_slowdown(threads, caplog, slow_from):
    found = threads(RANKS, lambda t: steps(t, slow_from, slow_from + 21, times=5, seconds=0.01))
    for scores in found:  # the same on every rank
        assert scores[slow_from + PROMISED_STEPS - 2] == pytest.approx([1, 0.2, 1])
        assert scores[-1] == [1, 1, 1]
    slowed, caught_up = (record.getMessage() for record in caplog.records)
    host = re.escape(socket.gethostname())
    assert re.match(
        rf"rank 1 \(host {host}\) computes 50 ms per step, the fastest rank 10 ms "
        r"\(5 times slower, at step ",
        slowed,
    )
    assert int(re.search(r"at step (\d+)", slowed)[1]) < slow_from + PROMISED_STEPS
    assert "hvd.adapt" in slowed
    assert re.match(rf"rank 1 \(host {host}\) has caught up: it computes 10 ms ", caught_up)


@pytest.mark.parametrize(
    ("why", "until", "times", "seconds"),
    [
        ("two steps that are long, as those that save", 12, 50, 0.1),
        ("ten steps on a core that others use, too", 20, 50, 0.1),
        ("three times as long", 61, 3, 0.1),
        ("four times next to nothing", 61, 5, 0.001),
    ],
)
def test_short_or_small_slowdowns_are_not_reported(threads, caplog, why, until, times, seconds):
    threads(RANKS, lambda t: steps(t, 10, until, times, seconds))
    assert not caplog.records, why


def test_stragglers_are_not_reported_if_ranks_outnumber_cores(threads, caplog, monkeypatch):
    monkeypatch.setattr(stragglers, "own_cores", lambda: (["0", "1"], math.inf, ""))
    threads(RANKS, lambda t: steps(t, 10, 50, times=5, seconds=0.1))
    assert not caplog.records


def test_intermittent_straggler_is_reported_at_most_once_a_minute(threads, caplog, monkeypatch):
    """Slow for 24 of every 36 steps of a second each: 360 seconds, slow 10 times."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(stragglers, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def program(transport: LocalTransport) -> None:
        with world.entered(transport) as here:
            watch = Stragglers(here, here.engine, "test")
            for step in range(1, 361):
                slow = transport.rank == 1 and step % 36 < 24
                watch.note(step, 0.1 if slow else 0.02)
                here.engine.submit("a step", [], lambda transport, all_flags: None).wait()
                if transport.rank == 0:
                    clock.now += 1.0

    threads(RANKS, program)
    messages = [record.getMessage() for record in caplog.records]
    slowed = [text for text in messages if "the others wait for it" in text]
    assert len(slowed) == 5
    assert len(messages) == 2 * len(slowed)


def test_optimizer_reports_stragglers_without_adapt(threads, caplog, tmp_path: Path, monkeypatch):
    """The clock of a rank that computes five times as long advances five times as far."""
    times = {rank: 5 if rank == 2 else 1 for rank in range(RANKS)}

    def program(transport: LocalTransport) -> Any:
        model = torch.nn.Linear(4, 2)
        with world.entered(transport):
            gtopk.record(str(tmp_path))
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
            )
            noted, note = [], optimizer._reducer.stragglers.note

            def note_modelled(steps: int, seconds: float | None) -> None:
                noted.append(seconds)
                note(steps, None if seconds is None else 0.02 * times[transport.rank])

            monkeypatch.setattr(optimizer._reducer.stragglers, "note", note_modelled)
            for _ in range(PROMISED_STEPS):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            assert noted[0] is None
            assert all(each > 0 for each in noted[1:])
            return optimizer.straggler_scores

    assert threads(RANKS, program) == [pytest.approx([1, 1, 0.2])] * RANKS
    (warning,) = [r.getMessage() for r in caplog.records if "wait for it" in r.getMessage()]
    assert warning.startswith("rank 2 (host ")
    scores = [rank.scores[-1].content["score"] for rank in read_run(tmp_path).ranks]
    assert scores == pytest.approx([1, 1, 0.2])


def test_single_rank_exchanges_no_straggler_scores(threads):
    def program(transport: LocalTransport) -> None:
        with world.entered(transport) as here:
            engine: Engine = here.engine
            before = engine.cycles
            watch = Stragglers(here, engine, "test")
            for step in range(20):
                watch.note(step, 1.0)
            assert watch.scores is None
            assert engine.cycles == before

    threads(1, program)
