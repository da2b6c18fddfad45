"""Emulated hosts: rate limits, isolation, and cleanup after their program."""

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
    """Skip a test where hosts cannot be emulated, but not if the script fails otherwise."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    done = subprocess.run(command(1, "torchrun", "true"), capture_output=True, text=True)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


@pytest.fixture(autouse=True, scope="module")
def _require_hosts() -> None:
    require_hosts()


def interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def processes_with(mark: str) -> list[str]:
    """Return all processes whose environment holds a mark, also those that are no children."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:  # it has just ended
            continue
    return found


def test_each_emulated_rank_has_its_own_host() -> None:
    output = emulated(3, "torchrun", "sh", "-c", "echo $RANK of $WORLD_SIZE on $(hostname)").stdout
    assert sorted(output.splitlines()) == [f"{rank} of 3 on host{rank}" for rank in range(3)]


def test_emulated_links_are_rate_limited_in_both_directions() -> None:
    own = emulated(2, "torchrun", "tc", "qdisc", "show", "dev", "eth0").stdout
    assert own.count("rate 10Mbit") == 2


def test_emulated_host_routes_only_to_the_other_hosts() -> None:
    output = emulated(2, "torchrun", "ip", "route").stdout.splitlines()
    assert len(output) == 2
    assert all(route.startswith("10.0.0.0/24 dev eth0") for route in output)


@needs_taps
@pytest.mark.parametrize("options", ["", "--delay 1ms", "--loss 0.1"])
def test_tcp_waits_out_long_queues_on_links_without_loss(options: str) -> None:
    """TCP's timers wait longer than any queue, and it sends no tail-loss probes."""
    program = "ip route; cat /proc/sys/net/ipv4/tcp_early_retrans"
    output = emulated(2, "torchrun", "sh", "-c", program, options=options).stdout
    is_lossy = "loss" in options
    assert ("rto_min" in output) != is_lossy
    assert ("0" not in re.findall(r"^\d$", output, re.MULTILINE)) == is_lossy


def test_emulated_network_exits_with_the_programs_code() -> None:
    emulated(2, "torchrun", "sh", "-c", "exit $((3 * RANK))", code=3)


@needs_taps
def test_emulated_link_delays_and_loses_datagrams_as_requested() -> None:
    """Of 300 datagrams 0.9 * 0.9 return: 243, within five standard deviations of 6.8."""
    program = str(ROOT / "tests" / "programs" / "datagrams.py")
    options = "--delay 50ms --loss 0.1 --seed 3"
    output = emulated(
        2, "torchrun", sys.executable, program, "300", "0.002", options=options
    ).stdout
    found = json.loads(output)
    assert min(found["round_trips"]) >= 0.1
    assert 209 <= len(found["round_trips"]) <= 277


@pytest.mark.parametrize(
    "options", ["--delay 5", "--loss 1.5", "--loss", "--sites two", "--slow 1"]
)
def test_invalid_network_option_is_refused_with_usage(options: str) -> None:
    done = subprocess.run(
        command(2, "torchrun", "true", options=options), capture_output=True, text=True, check=False
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
def test_signal_leaves_no_process_and_no_interface_behind(
    how: signal.Signals, options: str
) -> None:
    before = interfaces()
    mark = uuid.uuid4().hex
    running = subprocess.Popen(
        command(2, "torchrun", "sh", "-c", "echo up; sleep 600", options=options),
        env=environment(GTOPK_TEST_MARK=mark),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    with running, running.stdout as output:
        assert output.readline() == "up\n"
        assert processes_with(mark)
        running.send_signal(how)
        assert running.wait(20) != 0
    deadline = time.monotonic() + 20
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark) == []
    assert interfaces() == before


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("launcher", "transport"),
    [("mpirun", "mpi"), ("torchrun", "torch.distributed")],
)
def test_bench_collectives_runs_on_emulated_hosts(
    tmp_path: Path, launcher: str, transport: str
) -> None:
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
