"""The advice line at a run's start is parsed, and compared with the run's measurement."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.cost import BreakEven
from gtopk.planning.comparison import break_even_text
from mpi_scripts import bench_advice
from mpi_scripts.bench_advice import NO_DELAY, Measurement, edges, number_after, parse_edge, table
from tests.mpi_scripts.test_emulated_network import require_hosts

LINE = (
    "estimated exchange per step, 500,000 values, 2 ranks, nothing hidden behind backward: "
    "dense 1,000 ms, gTop-k 24.5 ms (density 0.05, 78 kB a rank, 1/25 of the bytes): "
    "saves up to 900 ms; gTop-k pays below about\N{NO-BREAK SPACE}48 Mbit/s "
    "(25 to 70 Mbit/s if a time is 20 % off); links 95.4 Mbit/s, 127 µs, measured in 2 s (here)"
)
SCRIPT = Path(bench_advice.__file__)


def held(
    dense: float,
    sparse: float,
    hosts: int = 2,
    rate: str = "10mbit",
    line: str = LINE,
    delay: str = NO_DELAY,
) -> Measurement:
    return Measurement(rate, delay, hosts, 500_000, 25_000, line, dense, sparse)


def test_number_is_read_from_the_advice_line() -> None:
    assert number_after(": dense", LINE) == 1.0
    assert number_after("saves up to", LINE) == 0.9
    with pytest.raises(ValueError, match="must have a number after 'loses'"):
        number_after("loses", LINE)


@pytest.mark.parametrize(
    ("edge", "words"),
    [
        (BreakEven(480e3, 250e3, 630e3), "below about 480 kbit/s (250 to 630 kbit/s if a time is"),
        (BreakEven(480e6, 400e6, 1.2e9), "below about 480 Mbit/s (400 Mbit/s to 1.2 Gbit/s if a"),
        (BreakEven(480e6, 390e6, 1.2e9), "below a bandwidth of 390 Mbit/s to 1.2 Gbit/s: a time"),
        (BreakEven(48e6, 12e6, 63e6), "below a bandwidth of 12 to 63 Mbit/s: a time may be"),
        (BreakEven(48e6, 0.0, 2e9), "below 2 Gbit/s at most, perhaps at no bandwidth: a time may"),
        (BreakEven(None, 0.0, 210e6), "below 210 Mbit/s at most, perhaps at no bandwidth: a time"),
        (BreakEven(48e6, 25e6, math.inf), "below 25 Mbit/s at least, perhaps at every bandwidth:"),
        (BreakEven(math.inf, 25e6, math.inf), "below 25 Mbit/s at least, perhaps at every"),
        (BreakEven(None, 0.0, math.inf), "at no bandwidth or at every one: the two times are too"),
        (BreakEven(None, 0.0, 0.0), "at no bandwidth"),
        (BreakEven(math.inf, math.inf, math.inf), "at every bandwidth"),
    ],
)
def test_break_even_text_is_parsed_back(edge: BreakEven, words: str) -> None:
    written = break_even_text(edge)
    assert written.replace("\N{NO-BREAK SPACE}", " ").startswith(words)
    is_told = edge.is_a_number or edge.lowest == edge.highest
    about = (edge.bits_per_second or 0.0) if is_told else None
    for name in ("gTop-k", "at this latency Ok-Topk"):
        line = f"a verdict; {name} pays {written}; links 1 Gbit/s, 50 µs, measured (here)"
        assert parse_edge(line) == (about, edge.lowest, edge.highest)


def test_unknown_break_even_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the line must say where compression pays"):
        parse_edge(LINE.replace("25 to 70 Mbit/s if a time is", "25 and 70 Mbit/s, were a time"))


def test_break_even_is_a_number_only_if_six_per_cent_move_it_under_a_fifth() -> None:
    """The bounds differ by a factor of three where 1 % of a time is 3 % of the bandwidth."""
    slope = math.log(3) / (2 * math.log(1.2))
    for steep, is_a_number in ((0.99 * slope, True), (1.01 * slope, False)):
        edge = BreakEven(100e6, 100e6 / 1.2**steep, 100e6 * 1.2**steep)
        assert edge.is_a_number is is_a_number
    assert 1.06**slope < 1.2 < 1.07**slope


def test_measured_break_even_is_where_dense_and_sparse_take_the_same() -> None:
    """Dense takes 1 s and 20 Mbit, gTop-k 1.5 s and 5 Mbit: both as long at 30 Mbit/s."""
    rates = [10, 20, 40, 80]
    loses = LINE.replace("saves up to 900 ms", "dense is faster here")
    group = [
        held(1 + 20 / rate, 1.5 + 5 / rate, rate=f"{rate}mbit", line=LINE if rate < 30 else loses)
        for rate in reversed(rates)
    ]
    others = [held(5.0, 1.0, hosts=4, rate=f"{rate}mbit") for rate in rates]  # always faster
    longer = [
        held(1 + 20 / rate, 1.36 + 2 / rate, rate=f"{rate}mbit", delay="10ms") for rate in rates
    ]
    ((found, who), (far, them)) = edges([*group, *others, *longer])
    assert (found, far) == (pytest.approx(30e6), pytest.approx(50e6))
    assert len(who) == len(them) == 4
    assert [each.network for each in them] == [f"{rate}mbit, 10ms" for rate in rates]
    about, within = who[0].edge(found)
    assert about.predicted == 48e6
    assert within.predicted == within.measured == found
    _, beyond = who[0].edge(80e6)
    assert beyond.predicted == 70e6
    rows = table(group)
    assert rows[3].startswith("| what compression saves | 2 |")
    assert rows[4].startswith("| below which bandwidth it pays | 4 | 60 % | 0 | +60 % (")
    assert rows[5].startswith("| between which bandwidths that is | 4 | 0 % | 4 | +0 % (")


def test_advice_errors_are_relative_to_the_measurement() -> None:
    rows = table([held(1.0, 0.1), held(1.25, 0.05, 4), held(2.0, 0.2, 8)])
    assert rows[2] == "| dense's time | 3 | 20 % | 2 | -50 % (10mbit, 8 ranks) |"
    assert rows[3] == "| what compression saves | 3 | 25 % | 1 | -50 % (10mbit, 8 ranks) |"


@pytest.mark.matrix
def test_bench_advice_compares_an_emulated_network_with_its_line(tmp_path: Path) -> None:
    require_hosts()
    small = ["--rates", "80mbit", "--hosts", "2", "--densities", "0.05", "0.5", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, *small],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "advice.json").read_text())
    assert [each["entries"] for each in found] == [25_000, 250_000]
    for each in found:
        assert "; links " in each["line"]
        _, lowest, highest = parse_edge(each["line"])
        assert lowest < highest or lowest in (0, math.inf)  # at no bandwidth, or at every
    assert found[0]["dense_seconds"] > found[0]["sparse_seconds"] > 0
    assert done.stdout.splitlines()[2].startswith("| dense's time | 2 |")
