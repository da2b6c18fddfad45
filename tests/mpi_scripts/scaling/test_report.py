"""Tables and picture show measured and published figures side by side."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpi_scripts.scaling.measure import Results, read
from mpi_scripts.scaling.report import markdown, picture, table


def test_scaling_table_has_efficiencies_ratios_and_published_figures(runs: list[Results]) -> None:
    text = table(runs[0])
    assert "emulated compute" in text
    assert "all sharing 2 cores" in text
    assert "stand for ones 10 times as large" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("gtopk-tree"))
    # 130.6 of 1317.3 samples a second, where S-SGD had 92.6
    assert row.replace("\N{NO-BREAK SPACE}", " ").split("-")[-1].split()[2:] == [
        *("50.0", "%", "9.9", "%"),
        *("5.00", "1.41", "25%"),
        *("1", "MB"),
    ]


def test_scaling_markdown_has_an_ordered_column_per_rank_count(runs: list[Results]) -> None:
    text = markdown(runs)
    assert "| | P = 4 | P = 8 |" in text
    assert "| | P = 4 | P = 8 | P = 16 | P = 32 |" in text  # the published ones
    assert "8.00x ssgd" in text


def test_report_has_no_published_figures_for_real_compute(runs: list[Results]) -> None:
    run = {**runs[0], "emulated_compute": False}
    run["records"] = [{**record, "published": None} for record in run["records"]]
    assert "Published" not in markdown([run])
    assert 'class="published" d="M200.0' in picture([run])  # only the legend's
    assert picture([run]).count('class="published"') == 1


def test_scaling_picture_is_svg_with_bars_proportional_to_efficiency(runs: list[Results]) -> None:
    drawn = picture(runs)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    namespace = "{http://www.w3.org/2000/svg}"
    bars = [
        float(bar.get("width"))
        for bar in ElementTree.fromstring(drawn).iter(f"{namespace}rect")
        if bar.get("class") == "bar"
    ][2:]
    assert len(bars) == 2 * 4  # without the contender `alone`
    assert bars[3] == pytest.approx(8 * bars[0], rel=0.01)
    assert drawn.count('class="published"') == 1 + 2 * 2  # ssgd and the tree


def test_results_of_another_benchmark_or_schema_are_refused(
    tmp_path: Path, runs: list[Results]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(runs))
    assert read(file) == runs
    for wrong, message in (
        ({"benchmark": "wire"}, "must be written by"),
        ({"benchmark": "scaling", "schema": 0}, "must have schema"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            read(file)
