"""The expected time of an exchange is the model's, for the requested options."""

from __future__ import annotations

import torch

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Calibration, Network
from gtopk.compression import Compression
from gtopk.exchange.bucket_exchange import open_bucket_exchange
from gtopk.exchange.exchange import Progress
from gtopk.planning.advice import expected, expected_seconds

HERE = Calibration(Network(8, Link.of(1e9, 50e-6)), DEFAULT_RATES, "made up")
LENGTH = 25_557_032


def test_expectation_covers_dense_and_gtopk_but_not_auto() -> None:
    assert expected(Compression.auto(density=0.01), LENGTH, HERE) is None
    dense = expected(Compression.none, LENGTH, HERE)
    gtopk = expected(Compression.gtopk(density=0.001), LENGTH, HERE)
    assert dense is not None
    assert gtopk is not None
    assert gtopk.seconds < dense.seconds
    copies = DEFAULT_RATES.copy_seconds * LENGTH
    assert dense.seconds == dense.communicate_seconds + copies > dense.communicate_seconds
    passes = DEFAULT_RATES.select_seconds * LENGTH
    picks = DEFAULT_RATES.pick_seconds * gtopk.candidate.selected(LENGTH)
    assert gtopk.select_seconds == passes + picks > passes > 0


def test_hierarchical_expectation_uses_the_given_node_size() -> None:
    of_four = Calibration(HERE.network._replace(ranks_per_node=4), DEFAULT_RATES, "made up")
    by_number = expected(Compression.hierarchical(0.01, node_size=4), LENGTH, HERE)
    assert by_number == expected(Compression.hierarchical(0.01), LENGTH, of_four)
    assert by_number == expected(Compression.hierarchical(0.01, node_size=4), LENGTH, of_four)
    assert by_number != expected(Compression.hierarchical(0.01), LENGTH, HERE)


def test_unmodelled_hierarchies_have_no_expectation() -> None:
    of_four = Calibration(HERE.network._replace(ranks_per_node=4), DEFAULT_RATES, "made up")
    for options in ({"node_size": 2}, {"node_size": 8}, {"across": "oktopk"}, {"inside": "dense"}):
        assert expected(Compression.hierarchical(0.01, **options), LENGTH, of_four) is None


def test_draining_the_residual_changes_no_expectation() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    bucket_exchange = open_bucket_exchange(
        "lane", [parameter], ["parameter"], Compression.none, Progress()
    )
    seconds = expected_seconds([bucket_exchange], HERE)
    assert seconds is not None
    bucket_exchange.start_draining()
    assert expected_seconds([bucket_exchange], HERE) == seconds
