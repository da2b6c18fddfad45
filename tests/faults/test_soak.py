"""Many steps and many faults leave nothing behind but the trained parameters."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from typing import Any

import pytest

from tests.faults.jobs import LAUNCHERS, Job, plan, start
from tests.faults.test_endings import RANKS, REPORTED, check_fault, train
from tests.faults.test_frozen import ENVIRONMENT, assert_given_up

ROW, LAYERS = 12, 6
# How long to inject faults; `make soak SOAK_MINUTES=480` for a night.
MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
TRAINING = {"every": 20, "nan_every": 53}


def soak(mpirun, ranks: int, steps: int, timeout: float) -> list[dict]:
    job = mpirun(ranks, "soak.py", str(steps), timeout=timeout)
    assert job.returncode == 0, job.stderr
    # A busy machine slows ranks down now and then, which is reported.
    expected = re.compile(
        r"leaves 94 of 936 entries a step|SGD's momentum of 0\.9|"
        r"the others wait for it|has caught up"
    )
    messages = [line for line in job.stderr.splitlines() if "gtopk" in line]
    assert all(map(expected.search, messages)), job.stderr
    results = [line.removeprefix("soak ") for line in job.stdout.splitlines()]
    found = sorted(map(json.loads, results), key=lambda each: each["rank"])
    assert [each["rank"] for each in found] == list(range(ranks))
    for each in found:
        assert each["digest"] == found[0]["digest"]
        # Every step's sum of step + rank over the ranks, to the last integer.
        assert each["counted"] == ranks * steps * (steps - 1) // 2 + steps * sum(range(ranks))
        assert each["skipped"] == 0
        assert each["buckets"][-1] > LAYERS / 2
        assert each["descriptors"][-1] == each["descriptors"][0]
    assert len({each["selected"] for each in found}) == 1
    return found


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_twenty_thousand_steps_do_not_grow_memory(mpirun):
    for each in soak(mpirun, ranks=4, steps=20_000, timeout=7000):
        # The first tenth warms up: plans, caches, the allocator's arenas.
        warm, *later = each["resident"]
        growth = max(later) / warm - 1
        print(f"rank {each['rank']}: {warm / 1e6:.1f} MB, grew {100 * growth:.2f} %", flush=True)
        assert growth < 0.01, each["resident"]


def test_hundred_steps_count_right_and_leave_no_file_open(mpirun):
    soak(mpirun, ranks=2, steps=100, timeout=120)


def freeze_for_a_while(job: Job, dice: random.Random) -> None:
    """Stop a rank for at most half of the time after which it would be given up."""
    culprit = dice.randrange(RANKS)
    job.send(culprit, signal.SIGSTOP)
    time.sleep(dice.uniform(0.1, 2))
    job.send(culprit, signal.SIGCONT)


def end_by_fault_or_signal(job: Job, fault: dict[str, Any] | None, dice: random.Random) -> float:
    """Let the job fail, by its own fault or by a signal, and check what follows."""
    if fault is not None:
        return check_fault(job, fault, dice)
    job.begin()
    time.sleep(dice.uniform(0, 20))
    for _ in range(dice.randrange(3)):
        freeze_for_a_while(job, dice)
        time.sleep(dice.uniform(0, 3))
    culprit = dice.randrange(RANKS)
    if dice.random() < 0.5:
        return assert_given_up(job, culprit, job.send(culprit, signal.SIGSTOP))
    took = job.end(job.send(culprit, signal.SIGKILL))
    job.assert_nothing_is_left()
    job.assert_survivors_name(culprit, None)
    return took


@pytest.mark.soak
@pytest.mark.timeout(60 * (2 * MINUTES + 60))
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_hours_of_faults_and_restarts_change_no_bit_of_the_parameters(launcher, tmp_path):
    """Ranks are killed, crash or freeze, gradients are not finite; each time the job restarts."""
    dice = random.Random(4714)
    deadline = time.monotonic() + 60 * MINUTES
    endings: list[float] = []
    starts: list[float] = []
    while time.monotonic() < deadline:
        fault = None
        if dice.random() < 0.5:
            phase, way = dice.choice(["backward", "exchange"]), dice.choice(list(REPORTED))
            step = dice.randrange(200)
            fault = {"rank": dice.randrange(RANKS), "phase": phase, "way": way, "step": step}
        argument = plan(tmp_path / "faults", fault, steps=10**6, pause=0.05, **TRAINING)
        began = time.monotonic()
        with start(launcher, RANKS, "faulty_training.py", argument, **ENVIRONMENT) as job:
            job.begin()
            starts.append(time.monotonic() - began)
            endings.append(end_by_fault_or_signal(job, fault, dice))
    step, digest = train(launcher, tmp_path / "faults", steps=0, **TRAINING)
    assert train(launcher, tmp_path / "none", step, **TRAINING) == (step, digest)
    print(
        f"{launcher}: {len(endings)} faults that ended the job, in at most {max(endings):.1f} s; "
        f"restarts took {statistics.median(starts):.1f} s; {step} steps, the same bits",
        flush=True,
    )
