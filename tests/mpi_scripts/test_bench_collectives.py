"""The published baselines compute the sums that they promise, and count their bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Network
from collectives.transports import Transport
from collectives.vector import SparseVector
from gtopk.cli.bench.collectives import main
from gtopk.cli.bench.collectives.cases import picks
from gtopk.cli.bench.collectives.contenders import BASELINES, Place
from gtopk.cli.bench.collectives.library import open_library
from mpi_scripts import bench_collectives as baselines
from mpi_scripts.bench_collectives import Collectives

LENGTH, K = 2_000, 100


def selections_of(size: int) -> list[SparseVector]:
    return [picks("clustered", LENGTH, K, rank, seed=3) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_plain_allgather_returns_the_sum_of_all_selections(threads, size: int) -> None:
    def program(transport: Transport) -> SparseVector:
        library = Collectives(open_library(transport, range(size)), transport.rank)
        return baselines.plain_allgather(selections_of(size)[transport.rank], K, size, library)

    expected = np.sum([vector.to_dense() for vector in selections_of(size)], axis=0, dtype=float)
    for update in threads(size, program):
        assert update.to_dense() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("binomial", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_published_tree_keeps_k_largest_of_each_merge(threads, size: int, binomial: bool) -> None:
    def program(transport: Transport) -> SparseVector:
        library = Collectives(open_library(transport, range(size)), transport.rank)

        def broadcast(message: np.ndarray) -> None:
            if binomial:
                baselines.binomial_broadcast(message, transport.rank, size, library)
            else:
                library.broadcast(message, 0)

        return baselines.published_tree(
            selections_of(size)[transport.rank], K, transport.rank, size, library, broadcast
        )

    def tree(ranks: list[np.ndarray]) -> np.ndarray:
        if len(ranks) == 1:
            return ranks[0]
        half = 1 << ((len(ranks) - 1).bit_length() - 1)
        total = tree(ranks[:half]) + tree(ranks[half:])
        kept = np.argsort(-np.abs(total), kind="stable")[:K]
        return np.where(np.isin(np.arange(LENGTH), kept), total, 0)

    expected = tree([vector.to_dense() for vector in selections_of(size)])
    updates = threads(size, program)
    for update in updates:
        assert update.to_dense() == pytest.approx(expected, abs=1e-5)


def test_published_tree_encodes_an_entry_in_16_bytes() -> None:
    vector = selections_of(1)[0]
    message = baselines.in_sixteen_bytes(vector, K + 1)
    assert message.nbytes == 16 * (K + 1)
    again = baselines.of_sixteen_bytes(message.view(np.float64).reshape(2, -1), vector)
    for part, other in zip(again, vector, strict=True):
        np.testing.assert_array_equal(part, other)


def test_library_collectives_count_the_fewest_bytes_possible(threads) -> None:
    size = 4

    def program(transport: Transport) -> list[int]:
        transport_of_library = open_library(transport, range(size))
        library = Collectives(transport_of_library, transport.rank)
        sent = []
        for operation in (
            lambda: library.allgather(np.zeros(50, np.uint8)),
            lambda: library.broadcast(np.zeros(50, np.uint8), 0),
        ):
            operation()
            sent.append(transport_of_library.traffic.read_and_reset().sent_bytes)
        return sent

    *passing_on, last = threads(size, program)
    assert passing_on == [[150, 50]] * 3
    assert last == [150, 0]


def test_baseline_models_follow_message_bytes() -> None:
    k, network = 1_000, Network(8, Link.of(1e8, 1e-4))
    place = Place(1_000_000, k, network, DEFAULT_RATES)
    alpha, beta, _ = network.between
    wire = {
        contender.name: contender.modelled(place)[0]
        for contenders in baselines.PUBLISHED.values()
        for contender in contenders
    }
    assert wire.pop("plain-allgather") == pytest.approx(3 * alpha + 7 * 8 * k * beta)
    assert len(wire) == 2
    for seconds in wire.values():
        assert seconds == pytest.approx(9 * alpha + 6 * (alpha + 16 * k * beta))


def test_published_baselines_run_beside_gtopk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, contenders in baselines.PUBLISHED.items():
        monkeypatch.setitem(BASELINES, name, contenders)
    words = "--transport local --ranks 3 --lengths 1000 --rounds 1 --algorithms gtopk --baselines"
    assert main([*words.split(), "plain-allgather", "published-tree"], baselines.CALL) == 0
    output = capsys.readouterr().out
    assert f"`{baselines.CALL} {words}" in output
    for name in ("plain-allgather", "published-tree library-", "published-tree binomial-"):
        assert name in output


@pytest.mark.matrix
@pytest.mark.parametrize("launch", ["mpirun", "torchrun"])
def test_published_baselines_run_on_mpi_and_gloo(request, launch: str, tmp_path: Path) -> None:
    path = tmp_path / "collectives.json"
    words = [
        "--ranks",
        "2",
        "3",
        "--lengths",
        "1000",
        "--rounds",
        "1",
        "--algorithms",
        "gtopk",
        "--json",
    ]
    job = request.getfixturevalue(launch)(3, "bench_collectives_script.py", *words, str(path))
    assert job.returncode == 0, job.stdout + job.stderr
    results = json.loads(path.read_text())
    assert ("gloo" if launch == "torchrun" else "MPI") in results["run"]["library"]
    updated = {}
    for record in results["records"]:
        updated.setdefault((record["ranks"], record["contender"]), record["updated"])
    assert len(updated) == 2 * 5
    # Of picks that hardly overlap the allgather keeps all, the tree k of them.
    assert updated[3, "plain-allgather"] > updated[3, "published-tree binomial-broadcast"] == 1
