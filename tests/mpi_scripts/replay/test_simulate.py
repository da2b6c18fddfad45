"""SimGrid agrees with the model, and adds the sharing of links that the model leaves out."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from collectives.cost import Link
from collectives.cost_model import (
    DEFAULT_RATES,
    EXACT,
    Candidate,
    CodingRate,
    Network,
    Rates,
    predict,
)
from gtopk.cli import main
from mpi_scripts.replay.simulate import Platform, SimulationError, find_python, simulate
from mpi_scripts.replay.traces import Reduction, profile_of, trace_of
from tests.started import under

LENGTH, SELECTED = 1_000_000, 1000
LINK = Link.of(1e8, 1e-4)
REDUCTIONS = {
    "dense": LENGTH,
    "topk-allgather": SELECTED,
    "gtopk-tree": SELECTED,
    "gtopk": SELECTED,
}


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return find_python()
    except SimulationError as error:
        pytest.skip(str(error))


def test_simulation_matches_model_when_no_link_is_shared(python: str) -> None:
    network = Network(8, LINK)
    for algorithm, selected in REDUCTIONS.items():
        trace = trace_of(Reduction(algorithm, 8, LENGTH, selected))
        modelled = predict(Candidate(algorithm, selected / LENGTH), LENGTH, network, DEFAULT_RATES)
        found = simulate(trace, Platform(network), python)
        assert found == pytest.approx(modelled.communicate_seconds, rel=0.01)


def test_acknowledgements_of_long_messages_cost_one_latency_each(python: str) -> None:
    """Also where long messages travel in pieces: only the last piece's acknowledgement counts."""
    for ranks, length in ((3, LENGTH), (4, LENGTH), (4, 5 * LENGTH)):
        network = Network(ranks, Link.of(1e9, 0.01))
        trace = trace_of(Reduction("dense", ranks, length, length))
        modelled = predict(Candidate("dense"), length, network, DEFAULT_RATES)
        found = simulate(trace, Platform(network), python)
        assert found == pytest.approx(modelled.communicate_seconds, rel=0.01)


def test_concurrent_messages_wait_for_one_latency(python: str) -> None:
    """Their bytes take turns, and their receivers wait for the latency: no sender does."""
    link = Link.of(1e9, 0.01)
    several = [[(1, 125_000)] * 11, [(0, -1)] * 11]
    assert simulate(several, Platform(Network(2, link)), python) == pytest.approx(0.011 + 0.01)
    flat = Network(8, link)
    two_sites = Network(8, Link.of(1e9, 0.02), 4, link)
    for algorithm, network, platform in (
        ("oktopk", flat, Platform(flat)),
        ("hierarchical", two_sites, Platform(flat, nodes_per_switch=4, sites=2, far=link)),
    ):
        trace = trace_of(Reduction(algorithm, 8, LENGTH, SELECTED, network.ranks_per_node))
        candidate = Candidate(algorithm, SELECTED / LENGTH)
        modelled = predict(candidate, LENGTH, network, DEFAULT_RATES).communicate_seconds
        assert simulate(trace, platform, python) == pytest.approx(modelled, rel=0.01)


def test_compute_seconds_between_messages_delay_the_replay(python: str) -> None:
    """Rank 1 is late by its work before it receives; the work of both at the end is added."""
    link = Link.of(1e9, 0.01)
    trace, platform = [[(1, 125_000)], [(0, -1)]], Platform(Network(2, link))
    computing = [[0.002, 0.5], [0.1, 0.003]]
    assert simulate(trace, platform, python, computing) == pytest.approx(0.002 + 0.001 + 0.5)
    computing[0][1] = 0.0
    assert simulate(trace, platform, python, computing) == pytest.approx(0.1 + 0.003)
    computing[1][0] = 0.0
    assert simulate(trace, platform, python, computing) == pytest.approx(0.013 + 0.003)
    with pytest.raises(ValueError, match="before each event of a rank, and after the last"):
        simulate(trace, platform, python, [[0.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    "trace",
    [
        [[(1, -1)], []],
        [[(1, 1000)], []],
        [[(1, 1000), (1, -1)], [(0, -1)]],
        [[(5, 1000)], []],
    ],
)
def test_trace_that_deadlocks_is_an_error(python: str, trace: list) -> None:
    """SimGrid itself ends without an error when all ranks wait."""
    with pytest.raises(SimulationError, match=r"ranks \[0\] wait for messages that no rank sends"):
        simulate(trace, Platform(Network(2, LINK)), python)


def test_platform_must_have_as_many_ranks_as_the_trace() -> None:
    with pytest.raises(ValueError, match="the trace has 2 ranks, and the platform 5"):
        simulate([[], []], Platform(Network(5, LINK)), sys.executable)


def test_message_of_any_size_takes_the_time_of_its_bytes(python: str) -> None:
    """Also a message of 8 bytes, as long as a checksum, and an empty one."""
    link = Link.of(8e6, 0.01)
    for trace, seconds in (([[(1, 0)], [(0, -1)]], 0.01), ([[(1, 8)], [(0, -1)]], 0.010008)):
        assert simulate(trace, Platform(Network(2, link)), python) == pytest.approx(seconds)
    at_once = Platform(Network(2, Link(0.25, 0.0)))
    assert simulate([[(1, 1 << 40)], [(0, -1)]], at_once, python) == pytest.approx(0.25, rel=0.01)


def test_failed_simulator_is_named_in_the_error() -> None:
    platform = Platform(Network(1, LINK))
    with pytest.raises(SimulationError, match="/nowhere/python cannot be run: No such file"):
        simulate([[]], platform, "/nowhere/python")
    with pytest.raises(SimulationError, match="exit code 0"):
        simulate([[]], platform, "/bin/true")


def test_burst_allowance_refills_while_ranks_compute(python: str) -> None:
    bucket = Platform(Network(2, Link(0.0, 8e-6, 1000.0)))  # 1 Mbit/s
    two = [[(1, 1000), (1, 1000)], [(0, -1), (0, -1)]]
    assert simulate(two, bucket, python) == pytest.approx(0.008)
    for pause, taken in ((0.004, 0.008), (0.02, 0.02)):
        computing = [[0.0, pause, 0.0], [0.0, 0.0, 0.0]]
        assert simulate(two, bucket, python, computing) == pytest.approx(taken)


@pytest.mark.parametrize("algorithm", ["topk-allgather", "gtopk", "oktopk", "hierarchical"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_profile_has_compute_seconds_for_every_trace_event(algorithm: str, ranks: int) -> None:
    reduction = Reduction(algorithm, ranks, LENGTH, SELECTED, ranks_per_node=2)
    trace, profile = trace_of(reduction), profile_of(reduction)
    assert [len(events) + 1 for events in trace] == [len(seconds) for seconds in profile]
    for seconds in profile:
        assert min(seconds) >= 0
        assert sum(seconds) > 0


def test_rank_receiving_two_messages_at_once_gets_each_at_half_speed(python: str) -> None:
    """Of 3 ranks the first receives from its guest and its partner, which does not wait.

    Its own list need not have reached its partner when it answers its guest.
    """
    network = Network(3, LINK)
    trace = trace_of(Reduction("gtopk", 3, LENGTH, SELECTED))
    found = simulate(trace, Platform(network), python)
    candidate = Candidate("gtopk", SELECTED / LENGTH)
    modelled = predict(candidate, LENGTH, network, DEFAULT_RATES).communicate_seconds
    list_seconds = (modelled - 3e-4) / 3
    assert found == pytest.approx(modelled + list_seconds - LINK.latency_seconds, rel=0.02)


def test_ranks_beyond_a_power_of_two_add_rounds_as_modelled(python: str) -> None:
    for ranks in (3, 6, 11):
        network, selected = Network(ranks, LINK), 4 * SELECTED
        found = simulate(
            trace_of(Reduction("gtopk", ranks, LENGTH, selected)), Platform(network), python
        )
        candidate = Candidate("gtopk", selected / LENGTH)
        modelled = predict(candidate, LENGTH, network, DEFAULT_RATES).communicate_seconds
        assert found == pytest.approx(modelled, rel=0.02)


def test_bytes_within_the_burst_pass_without_delay(python: str) -> None:
    """SimGrid counts whole bytes; a round waits only for the bytes beyond the burst."""
    at_once = Rates(0.0, 0.0, {EXACT: CodingRate(0.0, 0.0)})
    for algorithm in ("topk-allgather", "gtopk"):
        trace = trace_of(Reduction(algorithm, 8, LENGTH, SELECTED))
        for burst_bytes in (3_000.0, 12_000.0):
            network = Network(8, LINK._replace(burst_bytes=burst_bytes))
            candidate = Candidate(algorithm, SELECTED / LENGTH)
            modelled = predict(candidate, LENGTH, network, at_once).communicate_seconds
            found = simulate(trace, Platform(network), python)
            assert found == pytest.approx(modelled, rel=0.01)
            without = simulate(trace, Platform(Network(8, LINK)), python)
            assert without - found > 0.9 * burst_bytes * LINK.seconds_per_byte
    with pytest.raises(ValueError, match="one rank a node"):
        simulate(trace, Platform(network._replace(ranks_per_node=2)), python)


def test_oversubscribed_uplink_and_distant_site_slow_messages_by_their_rate(python: str) -> None:
    trace = [[(1, 100_000)], [(0, -1)]]
    seconds = {
        what: simulate(trace, platform, python)
        for what, platform in {
            "near": Platform(Network(2, LINK)),
            "narrow": Platform(Network(2, LINK), nodes_per_switch=1, oversubscription=4.0),
            "far": Platform(Network(2, LINK), 1, sites=2, far=Link.of(1e7, 0.01)),
        }.items()
    }
    wire = 100_000 * LINK.seconds_per_byte
    assert seconds["near"] == pytest.approx(wire + 1e-4, rel=0.01)
    assert seconds["narrow"] == pytest.approx(4 * wire + 1e-4, rel=0.01)
    assert seconds["far"] == pytest.approx(10 * wire + 1e-4 + 0.01, rel=0.01)


def test_every_rank_reaches_every_other_across_nodes_switches_and_sites(python: str) -> None:
    far = Link.of(1e7, 0.01)
    for per_node, sites in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2)):
        ranks = 12
        inside = Link.of(1e11, 1e-6)
        platform = Platform(Network(ranks, LINK, per_node, inside), 2, 1.0, sites, far)
        for sender in (0, 5, 11):
            trace: list[list[tuple[int, int]]] = [[(sender, -1)] for _ in range(ranks)]
            trace[sender] = [(peer, 1000) for peer in range(ranks) if peer != sender]
            seconds = simulate(trace, platform, python)
            assert seconds > (0.01 if sites > 1 else 1e-4)


def test_plan_reports_simulated_wire_seconds(
    python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--elements", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--no-measure"]
    assert main([*words, "--simulate", "--json", "-"]) == 0
    simulated = json.loads(capsys.readouterr().out)["simulated"]
    assert [each["algorithm"] for each in simulated["methods"]][:2] == ["dense", "gtopk-tree"]
    assert all(each["wire_seconds"] > 0 for each in simulated["methods"])
    assert main([*words, "--simulate", "--sites", "2"]) == 2
    assert "--nodes-per-switch" in capsys.readouterr().err


def test_plan_simulates_with_the_python_of_the_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stub without SimGrid: whatever it prints becomes the method's wire time."""
    simulator = tmp_path / "python"
    simulator.write_text(
        '#!/bin/sh\n[ "$1" = -c ] || { cat >/dev/null; echo \'{"seconds": 0.5}\'; }\n'
    )
    simulator.chmod(0o755)
    monkeypatch.setenv("GTOPK_SIMGRID_PYTHON", str(simulator))
    words = ["plan", "--elements", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--no-measure"]
    tree = ["--nodes-per-switch", "2", "--sites", "2", "--site-bandwidth", "100mbit"]
    assert main([*words, "--simulate", *tree]) == 0
    output = capsys.readouterr().out
    assert "2 nodes a switch, 2 sites with 100 Mbit/s and 10 ms between them." in output
    assert "500 ms" in output
    assert main([*words, "--simulate", *tree, "--json", "-"]) == 0
    methods = json.loads(capsys.readouterr().out)["simulated"]["methods"]
    assert {each["wire_seconds"] for each in methods} == {0.5}


@pytest.mark.parametrize("given", [["--site-bandwidth", "1gbit"], ["--site-latency", "9ms"]])
def test_plan_refuses_site_link_options_without_sites(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--elements", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--no-measure"]
    assert main([*words, "--simulate", *given]) == 2
    assert f"{given[0]} is between sites: add --sites 2" in capsys.readouterr().err


def test_missing_simgrid_is_an_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GTOPK_SIMGRID_PYTHON", sys.executable)
    monkeypatch.setattr("subprocess.run", lambda *a, **o: type("Done", (), {"returncode": 1})())
    with pytest.raises(SimulationError, match="apt-get install python3-simgrid"):
        find_python()


def test_folder_named_simgrid_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "simgrid").mkdir()  # for example a checkout of its sources
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SimulationError, match="apt-get install python3-simgrid"):
        under({"GTOPK_SIMGRID_PYTHON": sys.executable}, find_python)


def test_python_that_cannot_run_is_reported_without_simgrid(tmp_path: Path) -> None:
    (tmp_path / "python").touch()  # is not executable
    for place in (tmp_path / "python", tmp_path / "nothing"):
        with pytest.raises(SimulationError, match=f"which {re.escape(str(place))} does not have"):
            under({"GTOPK_SIMGRID_PYTHON": str(place)}, find_python)


def test_missing_python_is_skipped_for_the_next_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_all = tmp_path / "python3"
    has_all.write_text("#!/bin/sh\n")
    has_all.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert under({"PATH": str(tmp_path)}, find_python) in ("/usr/bin/python3", str(has_all))
