"""Contenders: every algorithm in the requested formats, with the model's prediction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives import ALGORITHMS
from collectives.cost import Link, dense_bytes
from collectives.cost_model import DEFAULT_RATES, Candidate, CodingRate, Format, Network, predict
from collectives.transports import Transport, local_world, run_ranks
from collectives.vector import SparseVector
from collectives.wire.format import INDEX_CODES
from gtopk.cli.bench.collectives.contenders import (
    BASELINES,
    Place,
    Task,
    formats_of,
    own,
    own_contenders,
    parse,
    reference_of,
    to_measure,
)
from gtopk.cli.bench.collectives.library import open_library
from gtopk.cli.bench.collectives.run import modelled_network

SLOW = Network(8, Link.of(1e8, 1e-4))
FORMATS = [Format(indices, values) for values in ("exact", "bf16") for indices in INDEX_CODES]
RATES = DEFAULT_RATES._replace(coding={format: CodingRate(2e-9, 2e-9) for format in FORMATS})
LENGTH, K = 1_000_000, 1_000
HERE = Place(LENGTH, K, SLOW, RATES)


def test_every_algorithm_has_one_contender_per_format() -> None:
    found = own_contenders(list(ALGORITHMS), ["exact", "raw+bf16"], HERE)
    assert {contender.algorithm for contender in found} == set(ALGORITHMS)
    assert len(found) == 1 + 2 * (len(ALGORITHMS) - 1)  # dense has no format
    assert len({contender.name for contender in found}) == len(found)


def test_value_code_selects_the_format_modelled_fastest() -> None:
    (found,) = own_contenders(["gtopk"], ["bf16"], HERE)
    seconds = {
        format: predict(Candidate("gtopk", K / LENGTH, format), LENGTH, SLOW, RATES)
        for format in formats_of("bf16")
    }
    assert found.format == min(seconds, key=lambda format: seconds[format].exchange_seconds)
    assert found.format == Format("packed", "bf16")  # fewest bytes, for a slow link
    free = Network(8, Link(1e-6, 0.0))
    slow_packing = RATES._replace(
        coding={f: CodingRate(1e-9 * (1 + 9 * (f.indices != "raw")), 1e-9) for f in FORMATS}
    )
    (found,) = own_contenders(["gtopk"], ["bf16"], Place(LENGTH, K, free, slow_packing))
    assert found.format == Format("raw", "bf16")


def test_dense_model_uses_the_measured_network() -> None:
    plan: Any = SimpleNamespace(bandwidth=1e9, latency=None, shared_cores=None)
    measured = SLOW._replace(native_bytes=1 << 24, ranks_per_core=1.5)
    network, _ = modelled_network(plan, measured)
    assert network == measured._replace(between=Link.of(1e9, 1e-4))


@pytest.mark.parametrize(("cores", "ranks_per_core"), [(2, 4.0), (8, 1.0), (100, 1.0)])
def test_given_cores_override_detected_cores(cores, ranks_per_core) -> None:
    plan: Any = SimpleNamespace(bandwidth=None, latency=None, shared_cores=cores)
    network, _ = modelled_network(plan, SLOW._replace(ranks_per_core=1.5))
    assert network.ranks_per_core == ranks_per_core


def test_reference_is_the_gtopk_contender_modelled_fastest() -> None:
    found = own_contenders(["gtopk:growth=2.0", "gtopk", "topk-allgather"], ["exact", "bf16"], HERE)
    assert reference_of(found, HERE) == "gtopk packed+bf16"
    assert reference_of(found[-2:], HERE) is None


@pytest.mark.parametrize("algorithm", ["topk-allgather", "gtopk-tree", "gtopk"])
def test_contender_model_equals_that_of_the_plan(algorithm: str) -> None:
    format = Format("blocks", "bf16")
    found = own(algorithm, {}, format).modelled(HERE)
    expected = predict(Candidate(algorithm, K / LENGTH, format), LENGTH, SLOW, RATES)
    code_seconds = expected.code_seconds + expected.merge_seconds
    assert found == (expected.communicate_seconds, code_seconds, expected.rounds)


def test_shards_have_one_contender_for_all_formats() -> None:
    requested = ["shards:period=8,bits=2", "gtopk"]
    found = own_contenders(requested, ["exact", "raw+bf16"], HERE)
    assert [each.algorithm for each in found] == ["shards", "gtopk", "gtopk"]
    assert found[0].name == "shards period=8 bits=2"
    rates = RATES._replace(coding={**RATES.coding, Format("raw", "int2"): CodingRate(1e-9, 1e-9)})
    expected = predict(Candidate("shards", 1 / 8, Format("whole", "int2")), LENGTH, SLOW, rates)
    code_seconds = expected.code_seconds + expected.merge_seconds
    modelled = found[0].modelled(HERE._replace(rates=rates))
    assert modelled == (expected.communicate_seconds, code_seconds, expected.rounds)
    assert Format("raw", "int2") in to_measure(requested, ["exact"])


def test_oktopk_boundaries_are_ready_before_every_run() -> None:
    """Regression: the first of three runs drew them, so the median was that of a slower run."""

    def program(transport: Transport) -> list[int]:
        (contender,) = own_contenders(["oktopk"], ["exact"], Place(100, 10, SLOW, RATES))
        picks = SparseVector(np.arange(10, dtype=np.int32), np.ones(10, np.float32), 100)
        library = open_library(transport, range(transport.size))
        sent = []
        for _ in range(3):
            run_once = contender.prepare(Task(picks, 10, transport, library))
            transport.traffic.read_and_reset()
            run_once()
            sent.append(transport.traffic.read_and_reset().sent_messages)
        return sent

    assert run_ranks(local_world(2), program) == [[3] * 3] * 2  # a part, and two allgathers


def test_library_dense_is_modelled_by_its_bytes() -> None:
    (contender,) = BASELINES["dense-library"]
    dense = predict(Candidate("dense"), LENGTH, SLOW, RATES).communicate_seconds
    assert contender.modelled(HERE)[0] == dense
    assert dense >= dense_bytes(LENGTH, 8) * SLOW.between.seconds_per_byte


def test_algorithm_options_are_parsed() -> None:
    assert parse("gtopk") == ("gtopk", {})
    assert parse("hierarchical:across=gtopk,growth=2.0") == (
        "hierarchical",
        {"across": "gtopk", "growth": 2.0},
    )
    with pytest.raises(ValueError, match="name=value"):
        parse("gtopk:growth")
    with pytest.raises(ValueError, match="'gtpok'"):
        parse("gtpok")
    with pytest.raises(ValueError, match="zipped"):
        formats_of("zipped+exact")
