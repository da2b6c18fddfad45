"""The line at the start of a run agrees with `gtopk plan`."""

from __future__ import annotations

import re

import pytest

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Calibration, Network
from gtopk.compression import Compression
from gtopk.planning import advice

LENGTH = 25_557_032


def details(*arguments: object, **options: object) -> str:
    return advice.advice(*arguments, **options).explain()


def at(bits_per_second: float, ranks: int = 8) -> Calibration:
    return Calibration(Network(ranks, Link.of(bits_per_second, 50e-6)), DEFAULT_RATES, "made up")


@pytest.mark.parametrize(
    ("compression", "bits_per_second", "words"),
    [
        (Compression.gtopk(density=0.001), 1e8, ": saves up to"),
        (Compression.none, 1e8, ": would save up to"),
        (Compression.auto(density=0.001), 1e8, ": would save up to"),
        (Compression.gtopk(density=0.001), 1e12, "dense is faster here"),
        (Compression.none, 1e12, "leave it dense"),
    ],
)
def test_advice_says_whether_compression_pays(
    compression: object, bits_per_second: float, words: str
) -> None:
    text = details(compression, [LENGTH], at(bits_per_second))
    assert words in text
    assert " pays below about" in text
    start = (
        "estimated exchange per step, 25,557,032 values, 8 ranks, nothing hidden behind backward: "
    )
    assert text.startswith(start)
    assert re.search(r"; links \S+\s[MGT]bit/s, 50\sµs, made up$", text)
    assert "\n" not in text


@pytest.mark.parametrize("options", [{"across": "oktopk"}, {"inside": "dense"}])
def test_advice_says_if_hierarchy_is_not_modelled(options: dict[str, str]) -> None:
    text = details(Compression.hierarchical(0.001, **options), [LENGTH], at(1e8))
    assert "the model does not cover hierarchical as it runs here" in text
    assert "save" not in text


def test_break_even_bandwidth_rises_with_a_slower_dense_allreduce() -> None:
    """If the library's allreduce is half as fast as possible, compression pays on faster links."""
    network = at(1e9).network
    slow = network._replace(allreduce=network.between.scaled(2.0))
    edges = []
    for each in (network, slow):
        text = details(Compression.none, [LENGTH], Calibration(each, DEFAULT_RATES, "x"))
        edges.append(
            float(text.split("below about\N{NO-BREAK SPACE}")[1].split("\N{NO-BREAK SPACE}")[0])
        )
    assert edges[1] > edges[0]


def test_more_bytes_in_fewer_rounds_pay_above_the_break_even() -> None:
    """For 200,000 values, 32 lists of 10,000 are more bytes than dense, in half the rounds."""
    compression = Compression.topk(density=0.05)
    for bits_per_second, verdict in ((1e9, "saves up to"), (1e6, "dense is faster")):
        network = Network(32, Link.of(bits_per_second, 2e-3))
        text = details(compression, [200_000], Calibration(network, DEFAULT_RATES, "x"))
        assert verdict in text
        assert "top-k allgather pays above a bandwidth of 1.1\N{NO-BREAK SPACE}Mbit/s to" in text


def test_break_even_is_that_of_the_running_algorithm() -> None:
    """It is not that of Ok-Topk, which is faster."""
    gtopk = Compression.gtopk(density=0.2)

    def line(bits_per_second: float) -> str:
        return details(gtopk, [LENGTH], at(bits_per_second))

    text = line(1e8)
    assert re.search(r", Ok-Topk \S+\sm?s \(density 0\.2, ", text)
    number, unit = text.split("; gTop-k pays below about\N{NO-BREAK SPACE}")[1].split()[:2]
    edge = float(number) * {"Mbit/s": 1e6, "Gbit/s": 1e9}[unit]
    assert ": saves up to" in line(edge / 3)
    assert "dense is faster here" in line(edge * 3)
    assert "; Ok-Topk pays below about" in details(None, [LENGTH], at(1e8))


@pytest.mark.parametrize("compression", [Compression.gtopk(density=0.001), Compression.none])
def test_advice_on_one_host_uses_its_own_links(compression: object) -> None:
    inside = Link.of(2e10, 5e-6)
    lines = [
        details(compression, [LENGTH], Calibration(network, DEFAULT_RATES, "x"))
        for network in (Network(4, Link.of(1e6, 1.0), 4, inside), Network(4, inside, 4))
    ]
    assert "; links 20\N{NO-BREAK SPACE}Gbit/s, " in lines[0]
    assert lines[0] == lines[1]


def test_saved_time_excludes_the_agreement_that_dense_needs_as_well() -> None:
    """Dense and gTop-k both agree once per bucket."""
    agreement_seconds = 2.0
    quick = at(1e8)
    slow = Calibration(
        quick.network._replace(agreement_seconds=agreement_seconds), DEFAULT_RATES, "x"
    )
    gtopk, number = Compression.gtopk(density=0.001), r"([\d.]+)\N{NO-BREAK SPACE}s"

    def numbers(calibration: Calibration) -> list[float]:
        text = details(gtopk, [LENGTH], calibration)
        return [
            float(re.search(f"{words} {number}", text)[1]) for words in (": dense", "saves up to")
        ]

    (dense, saved), (dense_slow, saved_slow) = numbers(quick), numbers(slow)
    assert dense_slow == pytest.approx(dense + agreement_seconds, abs=0.01)
    assert saved_slow == pytest.approx(saved, abs=0.01)


def test_faster_options_are_named_beside_those_that_run() -> None:
    """The saved time is dense's minus that of the running algorithm."""
    number = r"([\d.]+)\N{NO-BREAK SPACE}ms"
    pattern = rf": dense {number}, gTop-k {number} \((.*?), [\d.]+\skB .*? as it runs {number}"
    for options, faster_option in (({}, "wire=packed"), ({"wire": "packed", "growth": 8.0}, "")):
        gtopk = Compression.gtopk(0.01, **options)
        text = details(gtopk, [500_000], at(1e8, ranks=4))
        found = re.search(rf"{pattern}: saves up to {number}", text)
        assert found is not None, text
        assert found[3] == ", ".join(filter(None, ["density 0.01", faster_option]))
        dense, quickest, runs, saved = (float(found[group]) for group in (1, 2, 4, 5))
        assert quickest < runs
        assert saved == pytest.approx(dense - runs, rel=0.01)
    packed = details(Compression.gtopk(0.01, wire="packed"), [500_000], at(1e8, ranks=4))
    assert "as it runs" not in packed


def test_buckets_are_modelled_one_after_the_other() -> None:
    """Each of many buckets has its own latency, so compression pays only at lower bandwidth."""
    ones, tens = (
        details(Compression.gtopk(0.001), [1_000_000 // count] * count, at(1e8))
        for count in (1, 10)
    )

    def number(text: str, words: str) -> float:
        return float(text.split(words)[1].split("\N{NO-BREAK SPACE}")[0])

    dense = ": dense "
    assert number(tens, dense) > number(ones, dense)
    below = "gTop-k pays below about\N{NO-BREAK SPACE}"
    assert number(tens, below) < number(ones, below)


@pytest.mark.parametrize("is_compressed", [True, False])
def test_dense_and_compressed_times_use_their_own_buckets(is_compressed: bool) -> None:
    """On a link with high latency, many buckets cost many latencies."""
    far = Calibration(Network(8, Link.of(1e9, 20e-3)), DEFAULT_RATES, "made up")

    def seconds(buckets: int, other_buckets: int) -> tuple[str, str]:
        text = details(
            Compression.gtopk(0.001) if is_compressed else None,
            [10**6 // buckets] * buckets,
            far,
            other_buckets=other_buckets,
        )
        found = re.search(r": dense (\S+\s\S+), \D+ (\d\S*\s\S+) \(", text)
        assert found is not None, text
        return found[1], found[2]

    (dense_in_one, sparse_in_one), (dense_in_five, sparse_in_five) = seconds(1, 1), seconds(5, 5)
    assert dense_in_one != dense_in_five
    assert sparse_in_one != sparse_in_five
    both = (dense_in_five, sparse_in_one) if is_compressed else (dense_in_one, sparse_in_five)
    assert seconds(1, 5) == both


@pytest.mark.parametrize(
    ("compression", "bits_per_second", "expected"),
    [
        (Compression.gtopk(0.001), 1e8, r"gTop-k at density 0\.001 saves up to .* of dense's "),
        (Compression.none, 1e8, r"Ok-Topk at density \S+ would save up to .* of dense's "),
        (Compression.gtopk(0.001), 1e12, "dense is faster here: dense takes "),
        (Compression.none, 1e12, "leave it dense: dense takes "),
        (
            Compression.hierarchical(0.001, inside="dense"),
            1e8,
            "dense takes .* does not cover hierarchical as it runs here$",
        ),
    ],
)
def test_logged_advice_is_one_short_sentence_with_the_transport(
    compression: object, bits_per_second: float, expected: str
) -> None:
    found = advice.advice(compression, [LENGTH], at(bits_per_second), over="Open MPI v5.0.11")
    assert re.match(f"8 ranks over Open MPI v5.0.11: {expected}", found.sentence), found.sentence
    assert len(found.sentence) <= 160


def test_advice_per_outer_step_uses_the_article_an() -> None:
    for compression, bits_per_second in ((Compression.gtopk(0.001), 1e8), (None, 1e12)):
        found = advice.advice(compression, [LENGTH], at(bits_per_second), per="outer step")
        assert re.search(r"\d\S*\s\S+ an outer step \(estimate\)", found.sentence)


def test_advice_describes_shards_by_their_period() -> None:
    found = advice.advice(Compression.shards(4, 3), [LENGTH], at(1e8))
    assert "shards at period 4 saves up to" in found.sentence
    assert "density" not in found.sentence
