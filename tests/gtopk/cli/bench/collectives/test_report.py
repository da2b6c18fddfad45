"""Tables tell what was measured, losing cases included."""

from __future__ import annotations

import re
from pathlib import Path

from gtopk.cli.bench.collectives import main, markdown, panels, table, times_reference
from gtopk.cli.bench.collectives.cases import Results


def test_the_table_has_every_contender_of_every_case(results: Results) -> None:
    text = table(results)
    for rows in panels(results["records"]).values():
        for row in rows:
            assert row["contender"] in text
    assert "bench collectives --transport local" in text


def test_dense_stands_in_every_case_of_its_ranks_and_length(results: Results) -> None:
    for (ranks, *_), rows in panels(results["records"]).items():
        dense = [row for row in rows if row["contender"] == "dense-library"]
        assert [row["ranks"] for row in dense] == [ranks]


def test_ratios_are_told_against_one_gtopk(results: Results) -> None:
    for rows in panels(results["records"]).values():
        (reference,) = [row for row in rows if row["reference"]]
        assert reference["algorithm"] == "gtopk"
        assert times_reference(reference, rows) == 1.0
        medians = [row["seconds"]["median"] for row in rows]
        assert medians == sorted(medians)


def test_markdown_is_made_from_the_file(json_file: Path, results: Results, capsys) -> None:
    assert main(["--markdown", str(json_file)]) == 0
    printed = capsys.readouterr().out
    assert printed == markdown([results]) + "\n"
    rows = [line for line in printed.splitlines() if line.startswith("| ") and "P = " not in line]
    assert len(rows) == 2 * len({record["label"] for record in results["records"]})
    assert all(re.fullmatch(r"\|.*\|.*\|.*\|", row) for row in rows)
