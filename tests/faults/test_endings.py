"""A rank that ends, however and whenever, ends the job, and a restart recovers everything.

`make test-faults` runs all of it; the suite runs a part.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import LAUNCHERS, PROMISED_SECONDS, Ended, Job, plan, start

RANKS = 4
EVERY = 5

# What survivors report about the culprit besides its number, host and step; "": it varies.
REPORTED = {
    "killed": "",
    "segfault": "",
    "os._exit": "",
    "exit 3": "its program ended at step",
    "exit 0": "its program ended at step",
    "exception": "boom",
    "memory": "memory",
}
UNNOTICED = ("os._exit", "exit 0")  # by most launchers, if it happens before `init`
PHASES = ("start", "backward", "exchange", "checkpoint")
ANY_PHASE = (*PHASES, "any")  # "any": after a random time


def draw(
    dice: random.Random, rank: int | None = None, phase: str = "", way: str = ""
) -> dict[str, Any]:
    """Return a fault within the next steps; draw what is not given."""
    fault: dict[str, Any] = {"rank": dice.randrange(RANKS) if rank is None else rank}
    fault["phase"] = phase or dice.choice(ANY_PHASE)
    fault["way"] = "killed" if fault["phase"] == "any" else way or dice.choice(list(REPORTED))
    fault["step"] = dice.randrange(2 * EVERY)
    if fault["phase"] == "start":
        fault["step"] = 0
    elif fault["phase"] == "checkpoint":
        fault["step"] = dice.choice([EVERY, 2 * EVERY])
    return fault


def check_fault(job: Job, fault: dict[str, Any], dice: random.Random) -> float:
    """Wait for the fault, check how the job ends, and return how long the ranks lived on."""
    culprit, named = fault["rank"], REPORTED[fault["way"]]
    step: int | None = None
    if fault["phase"] == "any":
        job.begin()
        time.sleep(dice.uniform(0, 0.5))
        since = job.send(culprit, 9)
    elif fault["phase"] == "start":
        since = float(job.expect(r"fired at ([\d.]+)")[0][1])
    else:
        step = job.begin() + fault["step"]
        since = float(job.expect(r"fired at ([\d.]+)")[0][1])
    took = job.end(since)
    assert job.process.returncode != 0
    job.assert_nothing_is_left()
    if fault["phase"] != "start":
        job.assert_survivors_name(culprit, step, named)
    elif fault["way"] in UNNOTICED:
        # Open MPI's mpirun notices it, unless the others call `init` later.
        missed = rf"started on this host, rank {culprit} has ended|process rank {culprit} with PID"
        assert re.search(missed, job.text()), job.text()
    return took


def train(launcher: str, folder: Path, steps: int, **more: int) -> tuple[int, str]:
    """Train to the end; return its step, and the digest of the parameters there.

    steps: 0 for up to the next checkpoint.
    """
    argument = plan(folder, steps=steps, **more)
    every = more.get("every", EVERY)
    with start(launcher, RANKS, "faulty_training.py", argument) as job:
        # The time limit is per checkpoint, as the machine's speed is unknown.
        begin = job.begin()
        for step in range(begin + every, (steps or begin + every) + 1, every):
            job.expect(rf"saved step {step}$", times=RANKS)
        digests = job.expect(r"at step (\d+) digest (.*)", times=RANKS)
        ends = {match.groups() for match in digests}
        assert job.process.wait(60) == 0
        job.assert_nothing_is_left()
        trouble = r"gtopk: rank \d+ (of \d+ \(|ends)|stopped for|silent for|is lost"
        assert not re.search(trouble, job.text()), job.text()
    ((step, digest),) = ends
    return int(step), digest


def train_through(
    launcher: str,
    folder: Path,
    faults: int,
    seed: int,
    draw: Callable[[random.Random, int], dict[str, Any]],
) -> list[float]:
    """Train through faults to an end, and compare it with that of an undisturbed run.

    draw: returns the fault of a given number. Returns the seconds that each took to end the job.
    """
    dice = random.Random(seed)
    took: list[float] = []
    broken: list[str] = []  # failed checks
    disturbed, undisturbed = folder / "disturbed", folder / "undisturbed"
    for number in range(faults):
        fault = draw(dice, number)
        print(f"{launcher} {number}: {fault}", end=" ", flush=True)
        argument = plan(disturbed, fault, steps=10_000, every=EVERY, pause=0.02)
        with start(launcher, RANKS, "faulty_training.py", argument) as job:
            try:
                took.append(check_fault(job, fault, dice))
                print(f"ended after {took[-1]:.2f} s", flush=True)
            except AssertionError as error:
                broken.append(f"{fault}: {error}")
                print(f"broke a promise: {error}", flush=True)
    steps, digest = train(launcher, disturbed, steps=0)
    assert train(launcher, undisturbed, steps) == (steps, digest)
    print(f"{launcher}: {faults} faults, step {steps}, digest {digest[:16]}", flush=True)
    assert not broken, f"{len(broken)} of {faults}:\n" + "\n\n".join(broken)
    return took


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("seed", range(5))
def test_job_with_ten_faults_ends_bit_identical_to_undisturbed_job(launcher, seed, tmp_path):
    took = train_through(launcher, tmp_path, 10, seed, lambda dice, number: draw(dice))
    print(f"{launcher}: they ended the job in at most {max(took):.2f} s", flush=True)


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("times", "rank"), [(50, None), (20, 0)])
def test_job_with_many_kills_ends_bit_identical_to_undisturbed_job(launcher, times, rank, tmp_path):
    """Kill random ranks, and rank 0, equally often in each phase."""

    def kill(dice: random.Random, number: int) -> dict[str, Any]:
        return draw(dice, rank, ANY_PHASE[number % len(ANY_PHASE)], "killed")

    took = train_through(launcher, tmp_path, times, 4715, kill)
    whose = "ranks at random" if rank is None else f"rank {rank}"
    print(
        f"{launcher}: {len(took)} kills of {whose} ended the job in at most {max(took):.2f} s, "
        f"median {statistics.median(took):.2f} s",
        flush=True,
    )


@pytest.mark.faults  # the suite does it with two ranks, in tests/gtopk/runtime/world/test_guard.py
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_that_exits_before_init_is_named_by_the_others(launcher, tmp_path):
    fault = {"rank": 2, "phase": "start", "step": 0, "way": "exit 0"}
    with start(launcher, RANKS, "faulty_training.py", plan(tmp_path, fault)) as job:
        seconds = check_fault(job, fault, random.Random(0))
        print(f"{launcher}: ended after {seconds:.2f} s", flush=True)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_killed_launcher_leaves_no_rank(launcher, tmp_path):
    with start(launcher, RANKS, "faulty_training.py", plan(tmp_path, steps=10_000)) as job:
        job.begin()
        since = time.time()
        job.process.kill()
        job.end(since)
        # Only mpirun could remove Open MPI's own files.
        job.assert_nothing_is_left(but_files=launcher == "mpirun")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("late", [pytest.param(1, marks=pytest.mark.faults), None])
@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        *(pytest.param(other, marks=pytest.mark.faults) for other in ("mpirun", "own store")),
    ],
)
def test_launcher_killed_before_init_leaves_no_rank(launcher, late, tmp_path):
    """It is killed before rank 1, or any rank, has reached `init`; then they reach it."""
    variables = {"GTOPK_START_TIMEOUT": "120"}
    if launcher == "own store":
        launcher, variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "torchrun", "1"
    ranks = 2 if late is None else RANKS
    fault = {"rank": late, "phase": "start", "step": 0, "way": "waits"}
    with start(launcher, ranks, "faulty_training.py", plan(tmp_path, fault), **variables) as job:
        job.expect(r"rank \d+ is", times=ranks)
        job.expect("fired at", times=ranks if late is None else 1)
        if late is not None:
            time.sleep(1)  # the others are in init by then, or reach it
        since = time.time()
        job.process.kill()
        # MPICH's mpirun ends even the late rank.
        while late is not None and set(job.living()) - {late}:
            assert time.time() - since < PROMISED_SECONDS, f"{job.living()} live:\n{job.text()}"
            time.sleep(0.02)
        (tmp_path / "go").touch()
        job.end(time.time())
        job.assert_nothing_is_left(but_files=launcher == "mpirun")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("how", [2, 15])
def test_rank_ended_by_sigint_or_sigterm_ends_the_job(launcher, how, tmp_path):
    """It gets SIGINT, as from a keyboard, or SIGTERM, as from a scheduler, during an operation."""
    with start(launcher, RANKS, "faulty_training.py", plan(tmp_path, steps=10_000)) as job:
        job.begin()
        job.end(job.send(1, how))
        assert job.process.returncode != 0
        job.assert_nothing_is_left()
        # Under torchrun its closed connection is noticed before its own message arrives.
        word = "SIGTERM" if launcher == "mpirun" else ""
        job.assert_survivors_name(1, None, "KeyboardInterrupt" if how == 2 else word)
        # One per rank, torchrun's own, and in its summary that of the rank that ended first.
        assert job.text().count("Traceback") <= RANKS + 2 * (launcher == "torchrun")


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_killed_at_once_are_named_by_a_survivor(launcher, tmp_path):
    """Twenty times; at least one survivor names them: mpirun may end the other before it can."""
    dice = random.Random(4713)
    for _ in range(20):
        culprits = dice.sample(range(RANKS), 2)
        with start(launcher, RANKS, "faulty_training.py", plan(tmp_path, steps=10_000)) as job:
            job.begin()
            time.sleep(dice.uniform(0, 0.3))
            job.send(culprits[0], 9)
            took = job.end(job.send(culprits[1], 9))
            print(f"{launcher}: ranks {culprits}, ended after {took:.2f} s", flush=True)
            assert job.process.returncode != 0
            job.assert_nothing_is_left()
            survivors = set(range(RANKS)) - set(culprits)
            lines = [line for line in job.lines for s in survivors if f"gtopk: rank {s} " in line]
            named = [f"rank {culprit} is lost" in line for line in lines for culprit in culprits]
            assert any(named), job.text()


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.faults)])
def test_rank_killed_in_an_exchange_is_named_by_all_and_leaves_nothing(launcher, tmp_path):
    fault = {"rank": 2, "phase": "exchange", "step": 3, "way": "killed"}
    with start(launcher, 3, "faulty_training.py", plan(tmp_path, fault)) as job:
        check_fault(job, fault, random.Random(0))
        if launcher == "torchrun":  # torchrun's own report names the culprit as the root cause
            report = job.text().partition("FAILED")[2]
            assert re.search(r"Root Cause[^=]*rank +: 2 [^=]*exitcode +: -9", report), report
            assert re.search(r"rank [01] of 3 .* at step 3.* rank 2 is lost", report), report
        with pytest.raises(Ended):
            job.expect("digest", seconds=1)
