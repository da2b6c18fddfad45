"""The link of a host is cut, among hosts that this machine emulates (needs root)."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.jobs import LAUNCHERS, PROGRAMS, PROMISED_SECONDS, Job, plan, running
from tests.mpi_scripts.test_emulated_network import SCRIPT, environment, needs_taps, require_hosts

HOSTS = 3
TIMEOUT = 4.0


@pytest.fixture(autouse=True, scope="module")
def _require_hosts() -> None:
    require_hosts()


@contextmanager
def train(
    launcher: str, argument: str, hosts: int = HOSTS, rate: str = "100mbit", options: str = ""
) -> Iterator[Job]:
    program = [sys.executable, str(PROGRAMS / "faulty_training.py"), argument]
    with running(
        [str(SCRIPT), *options.split(), str(hosts), rate, launcher, *program],
        hosts,
        PATH=environment()["PATH"],
        GTOPK_HEARTBEAT_TIMEOUT=str(TIMEOUT),
        HOROVOD_STALL_CHECK_TIME_SECONDS="1",
    ) as job:
        yield job


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_unreachable_host_is_named_and_its_rank_ends_by_itself(launcher, tmp_path):
    """mpirun would wait for its daemon on that host, so the test ends it."""
    fault = {"rank": 1, "phase": "backward", "step": 7, "way": "cut"}
    with train(launcher, plan(tmp_path, fault, steps=10_000, every=10_000)) as job:
        job.expect(r"rank \d goes on", times=HOSTS)
        job.expect(r"gtopk: rank 1 \(host host1, pid \d+\): silent for .* the job ends when")
        since = time.monotonic()
        for rank in (0, 2):
            named = rf"gtopk: rank {rank} (of 3 \(|ends).*rank 1 is lost \(silent for .*host1"
            (found,) = job.expect(named)
            assert re.search(r"at step [678]\D.*gradients", found.string), found.string
        while job.rank_processes():
            assert time.monotonic() < since + TIMEOUT + 6, job.text()
            time.sleep(0.05)
        print(f"{launcher}: ended {time.monotonic() - since:.1f} s after the warning", flush=True)
        if launcher == "torchrun":
            assert job.process.wait(30) != 0
            # The isolated rank cannot tell whether its own link is cut or everybody else's.
            job.expect(r"gtopk: rank 1 of 3 \(.*receives no heartbeats at all")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_both_halves_of_a_split_network_end_the_job(launcher, tmp_path):
    """Two hosts on each side: the last checkpoint is the one that all four wrote.

    Output of the half without mpirun never reaches it.
    """
    fault = {"rank": None, "phase": "backward", "step": 12, "way": "halved"}
    reporting = 4 if launcher == "torchrun" else 2
    with train(launcher, plan(tmp_path, fault, steps=10_000, every=10), hosts=4) as job:
        job.expect(r"rank \d goes on", times=4)
        fired = float(job.expect("fired at (.*)", times=reporting)[0][1])
        while job.rank_processes():
            assert time.time() < fired + TIMEOUT + PROMISED_SECONDS, job.text()
            time.sleep(0.05)
        print(f"{launcher}: both ended after {time.time() - fired:.1f} s", flush=True)
        for rank in range(reporting):
            other = "[23]" if rank < 2 else "[01]"
            job.expect(
                rf"gtopk: rank {rank} (of 4 \(|ends).*rank {other} (is lost|left)", seconds=5
            )
        assert "digest" not in job.text()
    with train(launcher, plan(tmp_path, steps=11, every=10_000), hosts=4) as job:
        assert {m[1] for m in job.expect(r"goes on from (\d+)", times=4)} == {"10"}
        assert job.process.wait(60) == 0


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_brief_outage_or_slow_link_changes_no_bit(launcher, tmp_path):
    """The same holds for a slow link, and for one that loses packets."""
    digests = []
    faults = [
        (None, "100mbit"),
        (None, "1mbit"),
        ({"rank": 1, "phase": "backward", "step": 7, "way": "cut for a while"}, "100mbit"),
        ({"rank": None, "phase": "backward", "step": 7, "way": "halved for a while"}, "100mbit"),
        ({"rank": 2, "phase": "backward", "step": 7, "way": "lossy"}, "100mbit"),
    ]
    for fault, rate in faults:
        with train(launcher, plan(tmp_path, fault, steps=40, every=10_000), rate=rate) as job:
            digests += [{m[1] for m in job.expect("digest (.*)", seconds=200, times=HOSTS)}]
            assert job.process.wait(60) == 0
    assert digests[1:] == [digests[0]] * (len(faults) - 1)
    assert len(digests[0]) == 1


@needs_taps
@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_delay_and_lost_frames_change_no_bit_and_give_up_no_rank(launcher, tmp_path):
    """Delays are one way, losses per frame; the last but one has both."""
    networks = ["", "--delay 200ms", "--loss 0.01", "--delay 20ms --loss 0.01", "--loss 0.05"]
    digests = []
    for options in networks:
        begun = time.monotonic()
        with train(launcher, plan(tmp_path, steps=15, every=10_000), options=options) as job:
            digests += [{m[1] for m in job.expect("digest (.*)", seconds=300, times=HOSTS)}]
            took = time.monotonic() - begun
            assert job.process.wait(60) == 0
        assert not re.search(r"is lost|left \(|declared lost", job.text()), job.text()
        warned = len(re.findall("silent for", job.text()))
        print(f"{launcher} {options}: {took:.1f} s, {warned} warnings of silence", flush=True)
    assert digests == [digests[0]] * len(networks)
    assert len(digests[0]) == 1


@needs_taps
@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("delay_ms", [0, 10, 50])
def test_doctor_measures_the_emulated_delay(delay_ms):
    """The machine's own time comes on top: a millisecond if it is not busy."""
    options = f"--delay {delay_ms}ms --sites 2".split()
    doctor = [sys.executable, "-m", "gtopk", "doctor"]
    done = subprocess.run(
        [SCRIPT, *options, "2", "100mbit", "mpirun", *doctor],
        env=environment(GTOPK_CALIBRATION="fresh"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.search(r"between hosts (\S+) Gbit/s and (\S+) us", done.stdout)
    assert found, done.stdout + done.stderr
    print(f"expected {delay_ms} ms: {found[0]}", flush=True)
    assert delay_ms <= float(found[2]) / 1000 <= delay_ms + 20
