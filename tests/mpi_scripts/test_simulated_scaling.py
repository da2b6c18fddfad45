"""Trees of hosts are simulated at every rate, and drawn."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from gtopk.replay.simulate import SimulationError, find_python
from mpi_scripts.simulated_scaling import main


def test_ten_times_the_bandwidth_is_about_a_tenth_of_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        find_python()
    except SimulationError as error:
        pytest.skip(str(error))
    plot = tmp_path / "scaling.svg"
    asked = ["--methods", "gtopk", "--ranks", "2", "4", "--rates", "1mbit", "10mbit"]
    assert main([*asked, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    slow, fast = printed.splitlines()[2:]
    assert slow == "| 1mbit | gtopk | 1.64 s | 3.27 s |"
    assert fast == "| 10mbit | gtopk | 164 ms | 327 ms |"
    lines = ElementTree.parse(plot).findall(".//*[@class='line']")
    assert len(lines) == 2  # a panel each

    far = ["--sites", "2", "--nodes-per-switch", "2", "--far", "100kbit", "--far-latency", "1s"]
    assert main([*asked[:2], "--ranks", "4", "--rates", "10mbit", *far]) == 0
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
    assert "takes sites for nodes" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # switches of 2, 2 and 2: sites of 2 and 4
        main(["--methods", "hierarchical", "--ranks", "8", "6", *far])
    assert "--ranks must be multiples of 4" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*asked[:2], "--ranks", "4", "--sites", "3"])
    assert "sites must lie in 1..1" in capsys.readouterr().err
