"""Tables show all measurements, including cases that gtopk loses."""

from __future__ import annotations

from gtopk.cli.bench.collectives import panels, table, times_reference
from gtopk.cli.bench.collectives.cases import Results


def test_table_lists_every_contender_of_every_case(results: Results) -> None:
    text = table(results)
    for rows in panels(results["records"]).values():
        for row in rows:
            assert row["contender"] in text
    assert "bench collectives --transport local" in text


def test_dense_is_listed_in_every_case_of_its_ranks_and_length(results: Results) -> None:
    for (ranks, *_), rows in panels(results["records"]).items():
        dense = [row for row in rows if row["contender"] == "dense-library"]
        assert [row["ranks"] for row in dense] == [ranks]


def test_ratios_are_relative_to_one_gtopk(results: Results) -> None:
    for rows in panels(results["records"]).values():
        (reference,) = [row for row in rows if row["reference"]]
        assert reference["algorithm"] == "gtopk"
        assert times_reference(reference, rows) == 1.0
        medians = [row["seconds"]["median"] for row in rows]
        assert medians == sorted(medians)
