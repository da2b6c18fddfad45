"""Emulated hosts: shaped, apart from each other, and gone with their program."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from mpi_scripts.predictions import read
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "mpi_scripts" / "emulated_network.sh"
TAPS = Path("/dev/net/tun")
CANNOT = 77  # the script's exit code where there is no root, no iproute2 or no namespaces


needs_taps = pytest.mark.skipif(not TAPS.exists(), reason="no TAP devices")


def command(hosts: int, launcher: str, *program: str, options: str = "") -> list[str]:
    return [str(SCRIPT), *options.split(), str(hosts), "10mbit", launcher, *program]


def environment(**more: str) -> dict[str, str]:
    # mpirun lies beside the interpreter, which need not be on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PYTHONPATH": STARTED_PATH, "PATH": path, **more}


def emulated(
    hosts: int, launcher: str, *program: str, code: int = 0, options: str = ""
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(hosts, launcher, *program, options=options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def require_hosts() -> None:
    """Skip a test where hosts cannot be emulated; that the script fails is no reason to."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    done = subprocess.run(command(1, "torchrun", "true"), capture_output=True, text=True)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


@pytest.fixture(autouse=True, scope="module")
def _possible() -> None:
    require_hosts()


def interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def processes_with(mark: str) -> list[str]:
    """Return the processes whose environment holds a mark, this one's children or not."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:  # it has just ended
            continue
    return found


def test_each_rank_has_a_host_of_its_own() -> None:
    said = emulated(3, "torchrun", "sh", "-c", "echo $RANK of $WORLD_SIZE on $(hostname)").stdout
    assert sorted(said.splitlines()) == [f"{rank} of 3 on host{rank}" for rank in range(3)]


def test_both_directions_of_every_link_are_shaped() -> None:
    own = emulated(2, "torchrun", "tc", "qdisc", "show", "dev", "eth0").stdout
    assert own.count("rate 10Mbit") == 2


def test_a_host_reaches_the_others_and_nothing_else() -> None:
    said = emulated(2, "torchrun", "ip", "route").stdout.splitlines()
    assert len(said) == 2
    assert all(route.startswith("10.0.0.0/24 dev eth0") for route in said)


@needs_taps
@pytest.mark.parametrize("options", ["", "--delay 1ms", "--loss 0.1"])
def test_queues_that_lose_nothing_do_not_look_like_loss_to_tcp(options: str) -> None:
    """Its timers wait longer than any queue, and it does not ask after the tail of a message."""
    program = "ip route; cat /proc/sys/net/ipv4/tcp_early_retrans"
    said = emulated(2, "torchrun", "sh", "-c", program, options=options).stdout
    is_lossy = "loss" in options
    assert ("rto_min" in said) != is_lossy
    assert ("0" not in re.findall(r"^\d$", said, re.MULTILINE)) == is_lossy


def test_the_exit_code_is_the_programs() -> None:
    emulated(2, "torchrun", "sh", "-c", "exit $((3 * RANK))", code=3)


@needs_taps
def test_a_way_takes_as_long_and_loses_as_much_as_was_asked_for() -> None:
    """Of 300 datagrams 0.9 times 0.9 come back: 243, and five standard deviations of 6.8."""
    program = str(ROOT / "tests" / "programs" / "datagrams.py")
    options = "--delay 50ms --loss 0.1 --seed 3"
    said = emulated(2, "torchrun", sys.executable, program, "300", "0.002", options=options).stdout
    found = json.loads(said)
    assert min(found["round_trips"]) >= 0.1
    assert 209 <= len(found["round_trips"]) <= 277


@pytest.mark.parametrize("asked", ["--delay 5", "--loss 1.5", "--loss", "--sites two", "--slow 1"])
def test_an_option_that_is_none_is_refused(asked: str) -> None:
    done = subprocess.run(
        command(2, "torchrun", "true", options=asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--delay 100ms" in done.stderr


@pytest.mark.parametrize(
    ("how", "options"),
    [
        (signal.SIGTERM, ""),
        (signal.SIGINT, ""),
        (signal.SIGKILL, ""),
        pytest.param(signal.SIGKILL, "--delay 5ms", marks=needs_taps),
    ],
)
def test_nothing_is_left_behind_however_it_ends(how: signal.Signals, options: str) -> None:
    before = interfaces()
    mark = uuid.uuid4().hex
    running = subprocess.Popen(
        command(2, "torchrun", "sh", "-c", "echo up; sleep 600", options=options),
        env=environment(GTOPK_TEST_MARK=mark),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    with running, running.stdout as said:
        assert said.readline() == "up\n"
        assert processes_with(mark)
        running.send_signal(how)
        assert running.wait(20) != 0
    deadline = time.monotonic() + 20
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark) == []
    assert interfaces() == before


@pytest.mark.parametrize(
    ("launcher", "transport"), [("mpirun", "mpi"), ("torchrun", "torch.distributed")]
)
def test_the_benchmark_runs_on_it(tmp_path: Path, launcher: str, transport: str) -> None:
    path = tmp_path / "bench.json"
    words = "--lengths 20000 --densities 0.01 --rounds 1 --interface eth0"
    program = str(ROOT / "tests" / "programs" / "bench_collectives.py")
    emulated(3, launcher, sys.executable, program, *words.split(), "--json", str(path))
    found = read(path)
    assert found["run"]["transport"] == transport
    assert found["run"]["hosts"] == 3
    for record in found["records"]:
        assert record["interface_bytes"] is not None
        if record["counted"]:
            assert record["interface_bytes"]["max"] >= record["sent_bytes"]["max"]
