"""Compression.auto measures, agrees, switches without loss, and stays within its budget."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from collectives import run_ranks
from collectives.cost import Link
from collectives.cost_model import (
    DEFAULT_RATES,
    Calibration,
    Candidate,
    CodingRate,
    Format,
    Network,
    cache,
)
from collectives.transports import LocalTransport, local_world
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.exchange import automatic, calibration, exchange
from gtopk.exchange.algorithm_selector import FIRST_WINDOW, AlgorithmSelector
from gtopk.optim import hooks
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Sum
from gtopk.runtime.world import world
from tests.gtopk import posing
from tests.gtopk.held import held

FREE = Link(1e-7, 1e-11)  # almost free
# Fewer bytes take more seconds to code.
CODED = DEFAULT_RATES._replace(
    coding={
        Format(indices): CodingRate(seconds, seconds)
        for indices, seconds in (("raw", 1e-9), ("blocks", 1e-8), ("packed", 1e-7))
    }
)


@pytest.fixture
def calibrated(monkeypatch):
    """Return a function that sets every transport's calibration to a link."""

    def set_link(link: Link, latency_of_selection: float = DEFAULT_RATES.select_seconds) -> None:
        rates = DEFAULT_RATES._replace(select_seconds=latency_of_selection)
        monkeypatch.setattr(
            automatic,
            "calibration_of",
            lambda transport, home: Calibration(Network(transport.size, link), rates, "made up"),
        )

    return set_link


def parameters(size: int = 400, seed: int = 0) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64))


def gradient_of(rank: int, step: int, size: int = 400) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def optimizer_of(parameter: torch.nn.Parameter, compression: Any, **options: Any) -> Any:
    return DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), compression=compression, op=Sum, **options
    )


class Slow:
    """A transport with slow sends."""

    def __init__(self, transport: LocalTransport, seconds_per_byte: float) -> None:
        send = transport.send

        def slow_send(message: np.ndarray, to: int) -> Any:
            time.sleep(message.size * seconds_per_byte)
            return send(message, to)

        transport.send = slow_send


def test_links_slower_than_calibrated_switch_to_compression(calibrated, threads):
    """Links are reported as free, but take 10 us per byte: dense takes 64 ms, sparse a few ms."""
    calibrated(FREE)

    def program(transport: LocalTransport) -> list[str]:
        Slow(transport, 1e-5)
        parameter = parameters(1600)
        ran = []
        with world.entered(transport):
            optimizer = optimizer_of(parameter, Compression.auto(density=0.005))
            for step in range(2 * FIRST_WINDOW + 4):
                parameter.grad = gradient_of(transport.rank, step, 1600)
                optimizer.step()
                ran.append(optimizer.last_step.algorithm)
        return ran

    by_rank = threads(2, program)
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][: 2 * FIRST_WINDOW + 2] == ["dense"] * (2 * FIRST_WINDOW + 2)
    assert by_rank[0][-1] != "dense"


CANDIDATES = [
    Candidate("gtopk", 0.05),
    Candidate("dense"),
    Candidate("topk-allgather", 0.02),
    Candidate("dense"),
    Candidate("gtopk", 0.01),
]


class SwitchingSelector(AlgorithmSelector):
    """A selector that changes its choice after every step."""

    def begin(self, backward_seconds: float) -> Candidate:
        self.window = 1
        self.calls = 0
        return CANDIDATES[0]

    def reconsider(self, measured: Any, backward_seconds: float) -> Candidate:
        self.calls += 1
        # Two steps of each: one that switches, and one after it.
        return CANDIDATES[self.calls // 2 % len(CANDIDATES)]


@pytest.fixture
def switching(monkeypatch, calibrated):
    calibrated(FREE)
    monkeypatch.setattr(automatic, "AlgorithmSelector", SwitchingSelector)
    monkeypatch.setattr(automatic, "SETTLING_STEPS", 0)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradient_mass_is_conserved_when_the_algorithm_switches(switching, threads, size, momentum):
    def program(transport: LocalTransport) -> Any:
        parameter = parameters()
        steps = []
        with world.entered(transport):
            optimizer = optimizer_of(parameter, Compression.auto(momentum_correction=momentum))
            for step in range(25):
                gradient = gradient_of(transport.rank, step)
                parameter.grad = gradient.clone()
                before = held(optimizer)
                added = gradient.numpy().copy()
                if momentum:
                    added += momentum * held(optimizer, "velocity")
                optimizer.step()
                update = parameter.grad.numpy().copy()
                steps.append(
                    (optimizer.last_step.algorithm, before, added, update, held(optimizer))
                )
        return steps

    ran = set()
    for ranks in zip(*threads(size, program), strict=True):
        algorithms, before, added, updates, after = zip(*ranks, strict=True)
        ran |= set(algorithms)
        assert len(set(algorithms)) == 1
        assert all((update == updates[0]).all() for update in updates)
        np.testing.assert_allclose(
            updates[0] + np.sum(after, 0), np.sum(before, 0) + np.sum(added, 0), rtol=0, atol=1e-12
        )
        if algorithms[0] == "dense":  # each step sends some of it
            for rank in range(size):
                was, own = np.linalg.norm(before[rank]), np.linalg.norm(added[rank]) / 2
                assert np.linalg.norm(after[rank]) == pytest.approx(max(0.0, was - own), abs=1e-9)
    assert ran == {"dense", "gtopk", "topk-allgather"}


def test_dense_steps_with_momentum_correction_equal_sgd_momentum(calibrated, threads):
    calibrated(FREE)

    def program(transport: LocalTransport, compression: Any, momentum: float) -> torch.Tensor:
        parameter = parameters()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=0.1, momentum=momentum),
                compression=compression,
                op=Sum,
            )
            for step in range(6):
                parameter.grad = gradient_of(transport.rank, step)
                optimizer.step()
        return parameter.detach()

    auto = Compression.auto(momentum_correction=0.9)
    corrected, *_ = threads(3, lambda t: program(t, auto, 0.0))
    plain, *_ = threads(3, lambda t: program(t, Compression.none, 0.9))
    torch.testing.assert_close(corrected, plain, rtol=1e-12, atol=1e-12)


def test_overflowing_dense_sum_leaves_the_residual_unchanged(switching, threads):
    def program(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(40))
        with world.entered(transport):
            optimizer = optimizer_of(parameter, Compression.auto())
            for _ in range(2):  # gtopk, which leaves a residual
                parameter.grad = torch.arange(40, dtype=torch.float32)
                optimizer.step()
            left = held(optimizer)
            assert left.any()
            parameter.grad = torch.full((40,), 3e38)
            optimizer.step()  # dense
            assert optimizer.last_step.skipped
            assert optimizer.last_step.algorithm == "dense"
            np.testing.assert_array_equal(held(optimizer), left)

    threads(2, program)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("budget_bytes", [2_000, 6_000, 100_000])
def test_no_rank_sends_more_than_bytes_per_step(calibrated, threads, size, budget_bytes):
    calibrated(Link.of(1e6, 1e-3))

    def program(transport: LocalTransport) -> list[int]:
        parameter = parameters(2000)
        sent = []
        with world.entered(transport):
            optimizer = optimizer_of(parameter, Compression.auto(bytes_per_step=budget_bytes))
            for step in range(5):
                parameter.grad = gradient_of(transport.rank, step, 2000)
                optimizer.step()
                sent.append(optimizer.last_step.sent_bytes)
        return sent[2:]  # in the first two, ranks also agree on what to run

    for sent in threads(size, program):
        assert max(sent) <= budget_bytes


def test_buckets_share_the_byte_budget_and_overlap_backward(calibrated, threads):
    calibrated(Link.of(1e6, 1e-3))
    budget_bytes = 12_000

    def program(transport: LocalTransport) -> tuple[int, int, int]:
        layers = [parameters(1000, seed) for seed in range(4)]
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(layers, lr=0.1),
                compression=Compression.auto(bytes_per_step=budget_bytes, values="exact"),
                bucket_bytes=8000,
            )
            for _ in range(5):
                optimizer.zero_grad()
                x = torch.ones(1000, dtype=torch.float64)
                for layer in layers:
                    x = torch.tanh(x * layer)
                x.sum().backward()
                in_flight = len(optimizer._handles)
                optimizer.step()
            step = optimizer.last_step
            densities = {
                bucket_exchange.exchange.selector.chosen.candidate
                for bucket_exchange in optimizer._reducer.planned.bucket_exchanges
            }
            assert len(densities) == 1, "alike in all buckets of a size"
        return step.sent_bytes, step.buckets, in_flight

    for sent_bytes, buckets, in_flight in threads(2, program):
        assert budget_bytes / 4 < sent_bytes <= budget_bytes
        assert (buckets, in_flight) == (4, 3)  # the last one cannot be hidden


@pytest.mark.parametrize("overlap", [True, False])
def test_room_behind_backward_is_measured_only_with_overlap(calibrated, threads, overlap):
    calibrated(FREE)
    sizes = [400, 100, 300, 200]  # backward begins with the last one

    def program(transport: LocalTransport) -> list[tuple[float, float]]:
        layers = [parameters(size) for size in sizes]
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(layers, lr=0.1),
                compression=Compression.auto(),
                bucket_bytes=1,
                overlap=overlap,
            )
            for _ in range(5):
                optimizer.zero_grad()
                total = torch.zeros(1, dtype=torch.float64)
                for layer in layers:
                    total = torch.tanh(total + layer.sum())
                total.backward()
                optimizer.step()
            exchanges = [
                bucket_exchange.exchange
                for bucket_exchange in optimizer._reducer.planned.bucket_exchanges
            ]
            return [(each.room_share, each._window[-1][4]) for each in exchanges]

    for rank in threads(2, program):
        shares, rooms = zip(*rank, strict=True)
        assert shares == (200 / 600, 300 / 400, 1.0, 1.0)
        assert [room > 0 for room in rooms] == [overlap] * 3 + [False]


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("buckets", [{"bucket_bytes": 1}, {"groups": 1}])
def test_hide_behind_backward_warns_if_nothing_can_be_hidden(
    calibrated, threads, caplog, changed, buckets
):
    calibrated(FREE)

    def program(transport: LocalTransport) -> None:
        layers = [parameters(seed=seed) for seed in range(3)]
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(layers, lr=0.1),
                compression=Compression.auto(hide_behind_backward=True),
                **buckets,
            )
            for _ in range(3):
                optimizer.zero_grad()
                sum((layer * layer).sum() for layer in layers).backward()
                if changed:
                    layers[-1].grad.mul_(0.5)
                optimizer.step()

    threads(2, program)
    warned = [r.getMessage() for r in caplog.records if "hides nothing" in r.getMessage()]
    if "groups" in buckets:
        assert len(warned) == 2
        assert all("one bucket" in text and "smaller bucket_bytes=" in text for text in warned)
    else:
        assert len(warned) == 2 * changed
        assert all("changed" in text and "give density=" in text for text in warned)


def test_unreachable_byte_budget_raises_on_every_rank(calibrated, threads):
    calibrated(FREE)

    def program(transport: LocalTransport) -> str:
        parameter = parameters()
        with world.entered(transport):
            optimizer = optimizer_of(parameter, Compression.auto(bytes_per_step=10))
            parameter.grad = gradient_of(transport.rank, 0)
            with pytest.raises((ValueError, HorovodInternalError)) as error:
                optimizer.step()
        return str(error.value)

    for text in threads(2, program):
        assert "bytes_per_step must be at least" in text


def test_step_report_has_predicted_and_measured_seconds(calibrated, threads):
    calibrated(Link.of(1e9, 1e-3))

    def program(transport: LocalTransport) -> Any:
        parameter = parameters()
        with world.entered(transport):
            optimizer = optimizer_of(parameter, Compression.auto(density=0.01))
            parameter.grad = gradient_of(transport.rank, 0)
            optimizer.step()
            return optimizer.last_step

    for report in threads(2, program):
        assert report.predicted_seconds >= 1e-3  # a message's latency
        assert report.exchange_seconds > 0


def test_unequal_density_raises_on_every_rank_and_names_both(calibrated, threads):
    calibrated(FREE)

    def program(transport: LocalTransport) -> str:
        parameter = parameters()
        with world.entered(transport):
            density = 0.01 if transport.rank else 0.02
            optimizer = optimizer_of(parameter, Compression.auto(density=density))
            parameter.grad = gradient_of(transport.rank, 0)
            with pytest.raises(HorovodInternalError) as error:
                optimizer.step()
        return str(error.value)

    for text in threads(2, program):
        assert "density=0.01" in text
        assert "density=0.02" in text


@pytest.mark.parametrize(("link", "indices"), [(Link.of(1e6, 0), "packed"), (FREE, "raw")])
def test_wire_auto_follows_the_cost_model(monkeypatch, threads, link, indices):
    monkeypatch.setattr(
        exchange,
        "calibration_of",
        lambda transport, home: Calibration(Network(transport.size, link), CODED, "made up"),
    )

    def program(transport: LocalTransport) -> Any:
        parameter = parameters()
        with world.entered(transport):
            optimizer = optimizer_of(parameter, Compression.gtopk(0.1, wire="auto"))
            parameter.grad = gradient_of(transport.rank, 0)
            optimizer.step()
            return optimizer._reducer.planned.bucket_exchanges[0].exchange.format

    assert threads(2, program) == [Format(indices)] * 2


def test_single_rank_runs_dense_without_calibration(monkeypatch):
    monkeypatch.setattr(automatic, "calibration_of", None)  # would fail if called
    parameter = parameters()
    (transport,) = local_world(1)
    with world.entered(transport):
        optimizer = optimizer_of(parameter, Compression.auto())
        for step in range(3):
            parameter.grad = gradient_of(0, step)
            optimizer.step()
            assert optimizer.last_step.algorithm == "dense"


def test_transport_is_calibrated_once_and_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("GTOPK_CALIBRATION", str(tmp_path / "kept.json"))

    def program(transport: LocalTransport) -> Any:
        first = calibration.calibration_of(transport)
        return first, calibration.calibration_of(transport) is first

    (first, same), (second, also_same) = run_ranks(local_world(2, 30), program)
    assert first == second
    assert same
    assert also_same
    record = json.loads((tmp_path / "kept.json").read_text())
    assert "gtopk" in record["facts"]
    assert cache.load(tmp_path / "kept.json", record["facts"], 2).rates == first.rates


def test_calibration_takes_the_slower_rates_of_host_and_gpu_ranks(monkeypatch, kernels):
    """The rates of fake GPU memory are measured with its own kernels."""
    launched = posing.pose(monkeypatch, kernels)
    monkeypatch.setattr(calibration, "_ELEMENTS", 1 << 12)
    select, pick, copy = calibration.measure_on(torch.device("cpu"))
    assert select > 0
    assert copy > 0
    assert pick == 0.0
    assert {name.partition("<")[0] for name in launched()} >= {"mark", "expand", "clear_at"}
    monkeypatch.setattr(calibration, "measure_on", lambda home: [7.0, 0.0, 1e-12])

    def program(transport: LocalTransport) -> Any:
        home = torch.device("cuda" if transport.rank else "cpu")
        return calibration._slowest_rates(DEFAULT_RATES, transport, home)

    one, other = run_ranks(local_world(2, 30), program)
    assert one == other
    assert one.select_seconds == 7.0
    assert one.pick_seconds == DEFAULT_RATES.pick_seconds
    assert one.copy_seconds == DEFAULT_RATES.copy_seconds


class Clock(threading.local):
    """A clock per rank that the test advances."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_backward_is_timed_from_first_to_last_gradient(threads, monkeypatch):
    """This is the time that can hide an exchange."""
    clock = Clock()
    monkeypatch.setattr(hooks, "time", clock)

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            clock.now += 8.0
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            clock.now += 2.0
            return gradient

    def program(transport: LocalTransport) -> float:
        first, last = (torch.nn.Parameter(torch.ones(3)) for _ in "ab")
        with world.entered(transport):
            optimizer = DistributedOptimizer(torch.optim.SGD([first, last], lr=0.1))
            for _ in range(2):
                optimizer.zero_grad()
                loss = Passing.apply(Passing.apply(first * 2) * last).sum()
                clock.now += 1.0
                loss.backward()
                clock.now += 4.0
                optimizer.step()
            return optimizer._reducer.progress.backward_seconds

    assert threads(2, program) == [2.0, 2.0]
