"""The report's page is self-contained, agrees with its records, and is safe."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from gtopk.cli.demo.page import page
from gtopk.cli.demo.verdicts import Record
from gtopk.units import bytes_text

VOID = {"meta", "link"}


class Reader(HTMLParser):
    """Collect a page's words, attributes and unclosed elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data.replace("\N{NO-BREAK SPACE}", " ")


def cells(html: str, label: str) -> list[str]:
    """Return the table's cells of one method."""
    found = re.search(rf'<th scope="row">{re.escape(label)}</th>(.*?)</tr>', html)
    assert found is not None
    return [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in re.findall(">([^<]+)<", found[1])]


def test_page_loads_nothing_from_outside(records: list[Record]) -> None:
    html = page(records)
    reader = Reader(html)
    fetched = [value for name, value in reader.attributes if name in {"src", "href", "srcset"}]
    assert fetched == ["data:,"]
    assert "script" not in reader.tags
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    assert "default-src 'none'" in html


def test_page_elements_are_closed_and_ids_unique(records: list[Record]) -> None:
    reader = Reader(page(records))
    assert reader.open == []
    ids = [value for name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_table_holds_the_numbers_of_the_records(records: list[Record]) -> None:
    html = page(records)
    for record in records:
        accuracy, epochs, density, sent, share, seconds, identical = cells(html, record["label"])
        assert accuracy == f"{100 * record['accuracy']:.1f} ± 1.0 %"
        assert epochs == "3"
        assert float(density) == record["density"]
        dagger = "" if record["bytes_counted"] else " †"
        assert sent == bytes_text(record["bytes_per_step"]).replace("\xa0", " ") + dagger
        fewer = records[0]["bytes_per_step"] / record["bytes_per_step"]
        assert float(share.removeprefix("1/")) == pytest.approx(fewer, rel=5e-3)
        assert float(seconds) == record["seconds"]
        assert identical == "yes"


def test_computed_bytes_are_marked_as_not_counted(records: list[Record]) -> None:
    assert "† is not counted but a formula" in page(records)
    records[0]["bytes_counted"] = True
    assert "†" not in page(records)


def test_opening_says_what_was_run(records: list[Record]) -> None:
    words = Reader(page(records)).words
    assert "4 MPI ranks on one machine" in words
    assert "scikit-learn's 8x8 handwritten digits" in words
    assert "3 epochs each, from 3 seeds" in words
    for fact in records[0]["machine"].values():
        assert str(fact) in words


def test_slower_method_is_called_a_loss(records: list[Record]) -> None:
    html = page(records)
    assert "12 s, dense 8 s: slower, a loss" in Reader(html).words
    assert html.count('<td data-column="Seconds per run" class=loss>') == 3


def test_table_has_epochs_to_nearly_dense_accuracy(records: list[Record]) -> None:
    records[0]["accuracy_by_epoch"] = [[0.5, 0.94, 0.95]] * 3
    records[1]["accuracy_by_epoch"] = [[0.5, 0.6, 0.93]] * 3
    html = page(records)
    assert "Epochs to 94 %" in html
    assert [cells(html, record["label"])[1] for record in records] == ["2", "&gt; 3", "3", "3"]


def test_less_accurate_method_is_called_a_loss(records: list[Record]) -> None:
    records[2]["accuracy"] -= 0.05
    records[2]["accuracy_by_seed"] = [0.90, 0.91, 0.89]
    words = Reader(page(records)).words
    assert "lies 5.0 points below dense (± 1.0, paired over 3 seeds): a loss" in words
    assert "Behind a difference, ± is its standard error" in words


def test_diverged_replicas_are_shown(records: list[Record]) -> None:
    records[1]["final_replicas_identical"] = False
    assert cells(page(records), "top-k allgather")[-1] == "no"


def test_parts_of_a_step_are_explained_by_what_they_measure(records: list[Record]) -> None:
    words = Reader(page(records)).words
    for part in (
        "Compute is forward, backward and the optimizer's own step.",
        "Select + copy is gradients in and out of the bucket",
        "Communicate is agree, encode, exchange, merge, decode, and waiting for others.",
    ):
        assert part in words
    assert words.count("select + copy") == 5  # the legend, and a bar of each method


@pytest.mark.parametrize("field", ["label", "model"])
def test_markup_in_a_record_stays_text(records: list[Record], field: str) -> None:
    attack = "<script>alert('1')</script>\"&"
    harmless = len(Reader(page(records)).tags)
    for record in records:
        record[field] = attack  # type: ignore[literal-required]
    reader = Reader(page(records))
    assert "script" not in reader.tags
    assert len(reader.tags) <= harmless  # an element keeps "top-k" in a label on one line
    assert attack in reader.words


def test_page_of_one_seed_and_one_epoch_has_no_spread(records: list[Record]) -> None:
    for record in records:
        record["seeds"] = record["epochs"] = 1
        record["accuracy_by_seed"] = [0.95]
        record["accuracy_by_epoch"] = [[0.95]]
    html = page(records)
    assert "±" not in "".join(cells(html, "dense allreduce"))
    assert "best seed" not in html


def test_page_of_one_rank_has_no_plot_over_bytes(records: list[Record]) -> None:
    for record in records:
        record["ranks"], record["bytes_per_step"] = 1, 0.0
    assert page(records).count("<figure>") == 2


def test_first_figure_is_loss_over_seconds_here_and_over_the_link(
    linked: list[Record],
) -> None:
    html = page(linked)
    reader = Reader(html)
    assert reader.open == []
    assert html.index("Training loss over seconds") < html.index('<dl class="tiles">')
    assert html.index("This machine as it is") < html.index("An emulated link of 100 Mbit/s")
    assert "of 0.1 after 12 s, dense after 8 s: 1.50 times later, a loss." in reader.words
    assert "of 0.1 after 6 s, dense after 24 s: 4 times sooner." in reader.words
    assert "Time of a run, emulated 100 Mbit/s" in reader.words
    assert "0.25 times" in reader.words


def test_page_without_a_link_has_no_loss_over_seconds(records: list[Record]) -> None:
    assert "Training loss over seconds" not in page(records)
    assert "emulated" not in page(records)
