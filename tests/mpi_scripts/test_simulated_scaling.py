"""The simulation of host trees: its table, its picture, and the options that it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpi_scripts import simulated_scaling
from mpi_scripts.replay.simulate import SimulationError, find_python
from mpi_scripts.simulated_scaling import main, picture, table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "must be a whole number, at least 1"),
        (["--oversubscription", "nan"], r"must lie in [1, inf)"),
        (["--far", "5parsec"], "must be a rate such as"),
        (["--rates", "5parsec"], "must be a rate such as"),
        (["--plot", "/dev/null/scaling.svg"], "cannot be written"),
    ],
)
def test_invalid_option_is_refused_with_its_requirement(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(simulated_scaling, "find_python", lambda: sys.executable)
    with pytest.raises(SystemExit, match="2"):
        main(["--methods", "gtopk", "--ranks", "2", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--ranks", "64", "2", "--sites", "2"], ["--ranks", "64", "--rates", "1gbit", "x"]],
)
def test_impossible_platform_is_refused_before_any_simulation(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late refusal would lose hours of simulation."""
    monkeypatch.setattr(simulated_scaling, "find_python", lambda: sys.executable)
    monkeypatch.setattr(simulated_scaling, "trace_of", lambda reduction: 1 / 0)
    with pytest.raises(SystemExit, match="2"):
        main(["--methods", "gtopk", *arguments])


def test_missing_simgrid_is_an_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.setenv("GTOPK_SIMGRID_PYTHON", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        main(["--methods", "gtopk", "--ranks", "2"])
    assert "apt-get install python3-simgrid" in capsys.readouterr().err


def test_zero_seconds_are_printed_as_zero_and_cannot_be_drawn() -> None:
    nothing = {"1gbit": {"gtopk": {1: 0.0, 2: None}}}
    assert table(nothing, [1, 2])[-1] == "| 1gbit | gtopk | 0\N{NO-BREAK SPACE}µs | refused |"
    with pytest.raises(ValueError, match="nothing to draw"):
        picture(nothing, [1, 2])


def test_simulated_seconds_follow_bandwidth_and_distant_sites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        find_python()
    except SimulationError as error:
        pytest.skip(str(error))
    plot = tmp_path / "scaling.svg"
    arguments = ["--methods", "gtopk", "--ranks", "2", "4", "--rates", "1mbit", "10mbit"]
    assert main([*arguments, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    slow, fast = printed.splitlines()[2:]
    assert slow == "| 1mbit | gtopk | 1.64 s | 3.27 s |"
    assert fast == "| 10mbit | gtopk | 164 ms | 327 ms |"
    lines = ElementTree.parse(plot).findall(".//*[@class='line']")
    assert len(lines) == 2  # one panel for each rate

    far = ["--sites", "2", "--nodes-per-switch", "2", "--far", "100kbit", "--far-latency", "1s"]
    assert main([*arguments[:2], "--ranks", "4", "--rates", "10mbit", *far]) == 0
    # The second round crosses, two ranks of a site at once: 20 times 164 ms, and a second.
    assert "| 10mbit | gtopk | 33.9 s |" in capsys.readouterr().out.replace(
        "\N{NO-BREAK SPACE}", " "
    )
    # A site is a node, whose two ranks send half a list each: 16.4 s, a second, and 83 ms within
    # the site before and after.
    assert main(["--methods", "hierarchical", "--ranks", "4", "--rates", "10mbit", *far]) == 0
    assert "| 10mbit | hierarchical | 17.5 s |" in capsys.readouterr().out.replace(
        "\N{NO-BREAK SPACE}", " "
    )
    with pytest.raises(SystemExit, match="2"):
        main(["--methods", "hierarchical", "--ranks", "4"])
    assert "uses sites as nodes" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # switches of 2, 2 and 2: sites of 2 and 4
        main(["--methods", "hierarchical", "--ranks", "8", "6", *far])
    assert "--ranks must be multiples of 4" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*arguments[:2], "--ranks", "4", "--sites", "3"])
    assert "sites must lie in 1..1" in capsys.readouterr().err
