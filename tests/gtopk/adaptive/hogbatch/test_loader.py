"""The workers of a node train one model, on ranks that are threads of this process."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from collectives import PeerError
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.hogbatch_workers import (
    BATCH,
    adam,
    adapted,
    classes,
    data,
    flat,
    flattened,
    loss_of,
    momentum,
    record,
    sgd,
    take_alone,
    train,
)
from tests.gtopk.adaptive.modelled_ranks import FEATURES, network, on_ranks


@pytest.mark.parametrize("make", [sgd, momentum, adam])
@pytest.mark.parametrize("mode", ["hogbatch", "adaptive-hogbatch"])
def test_lock_step_equals_single_process_training(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer], mode: str
) -> None:
    """Classes differ and sizes change; every update reaches the model, and nothing else."""
    size, steps = 3, []

    def program(here: World) -> Any:
        loader, model, optimizer = adapted(
            mode,
            make,
            device_class=classes(here),
            sizes={"slow": (3, 12), "fast": (5, 40)},
            lock_step=True,
            audit=True,
        )
        record(loader, steps)
        for _ in range(2):
            train(loader, model, optimizer)
        assert loader.report().overlapped_share == 0
        lost = loader.audited()
        loader.drain()
        return flat(model), lost, loader.report()

    results = on_ranks(size, program)
    model = network()
    take_alone(model, make(model), steps, size)
    for parameters, lost, report in results:
        torch.testing.assert_close(parameters, flat(model), rtol=1e-11, atol=1e-13)
        assert lost < 1e-12
        assert report.updates == len(steps)
        assert sum(worker.samples for worker in report.workers) == 2 * 203


@pytest.mark.parametrize("size", [1, 2, 4])
def test_epoch_covers_every_sample_once(size: int) -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted("adaptive-hogbatch", device_class=classes(here))
        return [train(loader, model, optimizer) for _ in range(3)], loader.report()

    results = on_ranks(size, program)
    for epoch in range(3):
        seen = [i for batches, _ in results for batch in batches[epoch] for i in batch]
        assert sorted(seen) == list(range(203))
    report = results[0][1]
    assert sum(worker.samples for worker in report.workers) == 3 * 203
    assert report.updates == sum(len(b) for batches, _ in results for b in batches)


def test_lost_updates_never_exceed_counted_overlaps() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(device_class=classes(here), audit=True)
        for _ in range(3):
            train(loader, model, optimizer)
        return loader.audited(), loader.report().overlapped_share

    for lost, overlapped in on_ranks(3, program):
        assert 0 <= lost <= overlapped + 1e-12


def test_staleness_counts_updates_of_others_since_hand_out() -> None:
    """All get a batch before any steps, so rank r's gradient is r updates old."""
    size = 3

    def program(here: World) -> list[int]:
        loader, model, optimizer = adapted(length=4 * size * 2)
        found = []
        for _, x, y in loader:
            here.transport.barrier()  # all have a batch in hand
            loss_of(model, x, y).backward()
            for rank in range(size):
                if rank == here.rank:
                    optimizer.step()
                    found.append(loader.last_staleness)
                here.transport.barrier()
        workers = loader.report().workers
        assert workers[here.rank].staleness == pytest.approx(sum(found) / len(found))
        return found

    assert on_ranks(size, program) == [[rank, rank] for rank in range(size)]


class Killed(Exception):
    pass


def die(here: World, iterator: Any) -> None:
    """End as a killed process does: with a batch in hand, and without any cleanup."""
    _held.append(iterator)  # so that the loop is not closed
    here.transport.announce_departure("it was killed")
    raise Killed


_held: list[Any] = []


@pytest.fixture(autouse=True)
def release_killed_iterators() -> Iterator[None]:
    yield
    _held.clear()


@pytest.mark.parametrize("killed", [0, 1])
def test_other_workers_finish_epoch_after_a_worker_dies(killed: int) -> None:
    results: dict[int, Any] = {}
    has_its_second = threading.Event()  # else the others may take all samples before

    def program(here: World) -> None:
        loader, model, optimizer = adapted(ranks_may_leave=True, device_class=classes(here))
        done: list[int] = []
        iterator = iter(loader)
        for number, (indices, x, y) in enumerate(iterator):
            if here.rank != killed:
                assert has_its_second.wait(30)
            elif number == 1:
                has_its_second.set()
                results["left"] = indices.tolist()
                die(here, iterator)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            done += indices.tolist()
            results[here.rank] = done
        results["report"] = loader.report()

    with pytest.raises(Killed):
        on_ranks(3, program)
    assert set(results["left"]) <= {i for r in {0, 1, 2} - {killed} for i in results[r]}
    assert sorted(i for r in range(3) for i in results[r]) == list(range(203))
    report = results["report"]
    assert sum(worker.taken_over for worker in report.workers) == len(results["left"])
    assert not report.workers[killed].is_present


def test_dead_worker_raises_error_with_its_rank_by_default() -> None:
    def program(here: World) -> None:
        loader, model, optimizer = adapted()
        if here.rank == 1:
            iterator = iter(loader)
            next(iterator)
            die(here, iterator)
        with pytest.raises(PeerError, match=r"rank 1 left \(it was killed"):
            train(loader, model, optimizer)

    with pytest.raises(Killed):
        on_ranks(2, program)


def test_busy_share_never_exceeds_one_within_epoch() -> None:
    """Regression: time within an epoch counted only at its end, so the share was a million."""

    def program(here: World) -> None:
        loader, model, optimizer = adapted(device_class=classes(here))
        for _, x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            shares = [worker.busy for worker in loader.report().workers]
            assert 0 < shares[here.rank] <= 1
            assert max(shares) <= 1
        assert all(worker.busy <= 1 for worker in loader.report().workers)

    on_ranks(2, program)


def test_batch_without_step_counts_as_done() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted()
        seen = [i for indices, *_ in loader for i in indices.tolist()]
        with pytest.raises(RuntimeError, match="step\\(\\) without a current batch"):
            optimizer.step()
        return seen, loader.report(), flat(model)

    results = on_ranks(2, program)
    assert sorted(i for seen, *_ in results for i in seen) == list(range(203))
    assert results[0][1].updates == 0
    assert torch.equal(results[0][2], flat(network()))


def test_samples_of_worker_that_breaks_go_to_others() -> None:
    def program(here: World) -> list[int]:
        loader, model, optimizer = adapted()
        if here.rank == 1:
            for _ in loader:
                break
            return flattened(train(loader, model, optimizer))
        seen = flattened(train(loader, model, optimizer))
        assert sorted(seen) == list(range(203))
        return flattened(train(loader, model, optimizer))

    second_epoch = on_ranks(2, program)
    assert sorted(second_epoch[0] + second_epoch[1]) == list(range(203))


def test_only_fast_workers_evaluate_losses() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted(device_class=classes(here))
        train(loader, model, optimizer)
        calls = []

        def mean_loss(batch: Any) -> torch.Tensor:
            calls.append(len(batch[0]))
            return loss_of(model, *batch[1:])

        found = [loader.evaluate(mean_loss, batch=size) for size in (30, 4096)]
        other = loader.evaluate(mean_loss, dataset=data(50))
        loader.drain()
        _, x, y = data()[:]
        expected = loss_of(model, x, y).item()
        assert found == pytest.approx([expected, expected], rel=1e-12)
        _, x, y = data(50)[:]
        assert other == pytest.approx(loss_of(model, x, y).item(), rel=1e-12)
        return sum(calls)

    assert on_ranks(3, program) == [0, 2 * 203 + 50, 0]


def test_worker_waits_for_its_copy_before_others_may_write() -> None:
    """A GPU copies page-locked memory asynchronously, while the host continues."""

    def program(here: World) -> list[str]:
        loader, model, optimizer = adapted(device_class="fast")
        train(loader, model, optimizer)
        calls: list[str] = []
        copies: Any = loader._writer._copy
        refresh, wait, end = copies.refresh, copies.wait, loader._ledger.end
        copies.refresh = lambda: (calls.append("copy"), refresh())
        copies.wait = lambda: (calls.append("wait"), wait())
        loader._ledger.end = lambda: (calls.append("end"), end())
        loader.drain()
        loader.evaluate(lambda batch: loss_of(model, *batch[1:]))
        return calls

    assert on_ranks(2, program) == [["copy", "wait", "end", "copy", "wait", "end"]] * 2


@pytest.mark.parametrize(("make", "scaling"), [(sgd, "linear"), (momentum, "none"), (adam, "none")])
def test_summed_loss_trains_like_mean_loss(make: Any, scaling: str) -> None:
    def program(here: World, reduction: str) -> torch.Tensor:
        options = {"lock_step": True, "lr_scaling": scaling, "device_class": classes(here)}
        loader, model, optimizer = adapted(make=make, loss_reduction=reduction, **options)
        for _, x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y) ** 2
            (loss.sum() if reduction == "sum" else loss.mean()).backward()
            optimizer.step()
        return flat(model)

    both = [on_ranks(2, lambda here, r=r: program(here, r))[0] for r in ("mean", "sum")]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)


def test_loader_resumes_from_state_of_another_loader() -> None:
    def program(here: World) -> Any:
        loader, model, optimizer = adapted("adaptive-hogbatch")
        train(loader, model, optimizer)
        state = loader.state_dict()
        following = train(loader, model, optimizer)
        other, model, optimizer = adapted("adaptive-hogbatch")
        other.load_state_dict(state)
        with pytest.raises(ValueError, match="mode is 'adaptive-hogbatch', the state's 'abs'"):
            other.load_state_dict({**state, "mode": "abs"})
        return following[:1], train(other, model, optimizer)[:1]

    assert all(first == again for first, again in on_ranks(1, program))


@pytest.mark.parametrize("what", ["drain", "evaluate"])
def test_drain_and_evaluate_raise_within_epoch(what: str) -> None:
    def program(here: World) -> None:
        loader, model, optimizer = adapted()
        for _, x, y in loader:
            with pytest.raises(RuntimeError, match=rf"loader.{what}\(\) within an epoch"):
                loader.drain() if what == "drain" else loader.evaluate(torch.zeros_like)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        loader.drain()

    on_ranks(2, program)


def test_loaded_sizes_of_another_device_class_are_ignored() -> None:
    """On another number of ranks every worker loads the state of rank 0, whatever its class."""

    def program(here: World) -> Any:
        fast, *_ = adapted("adaptive-hogbatch", device_class="fast", sizes=None)
        fast._sizer.resume(8, 16)
        state = fast.state_dict()

        def resumed(**options: Any) -> Any:
            loader, *_ = adapted("adaptive-hogbatch", **options)
            loader.load_state_dict(state)
            return loader.state_dict()

        same_class = resumed(device_class="fast", sizes=None)
        assert (same_class["thresholds"], same_class["size"]) == ([8, 16], 16)
        slow = resumed(device_class="slow", sizes=None)
        assert (slow["thresholds"], slow["size"]) == (None, 1)
        given = resumed(device_class="fast", sizes={"fast": (2, 4)})
        assert (given["thresholds"], given["size"]) == ([2, 4], 4)

    on_ranks(1, program)


def test_tied_parameters_stay_tied() -> None:
    def program(here: World) -> None:
        model = network()
        model[2].weight = model[0].bias_of = torch.nn.Parameter(model[2].weight.detach())
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
        loader = hvd.adapt(
            DataLoader(data(), BATCH), optimizer, "hogbatch", device_class=classes(here)
        )
        train(loader, model, optimizer)
        loader.drain()
        assert model[2].weight is model[0].bias_of
        assert model[2].weight.data_ptr() == model[0].bias_of.data_ptr()
        model[2].weight = torch.nn.Parameter(model[2].weight.detach())
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
        with pytest.raises(ValueError, match=r"'0.bias_of' and '2.weight' share memory"):
            hvd.adapt(DataLoader(data(), BATCH), optimizer, "hogbatch")

    on_ranks(2, program)


def test_replaced_shared_tensors_raise() -> None:
    def program(here: World) -> None:
        loader, model, optimizer = adapted(make=momentum, device_class=classes(here))
        train(loader, model, optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with pytest.raises(RuntimeError, match=r"state 'momentum_buffer' of parameter 0, \[4, 5\]"):
            next(iter(loader))
        loader, model, optimizer = adapted(device_class=classes(here))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        with pytest.raises(RuntimeError, match=r"parameter 0, .* has been replaced since adapt"):
            next(iter(loader))

    on_ranks(2, program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_class": "tpu"}, "a device class must be one of cpu, gpu, slow, fast, got 'tpu'"),
        ({"device_class": "gpu"}, "'gpu' must have its parameters on a GPU, and they are on cpu"),
        ({"sizes": {"slow": (8, 4)}}, "thresholds of device class 'slow' are crossed"),
        ({"min_batch": 20}, "min_batch=20 is above batch_size=16 of the DataLoader"),
        ({"min_batch": 9, "max_batch": 8}, "min_batch=9 is above max_batch=8"),
        ({"alpha": 1.0}, "alpha must be a number above 1, got 1.0"),
        ({"alpha": math.inf}, "alpha must be a number above 1, got inf"),
        ({"alpha": math.nan}, "alpha must be a number above 1, got nan"),
        ({"alpha": "2"}, "alpha must be a number above 1, got '2'"),
        ({"beta": 0.0}, "beta must lie in 0..1, or be 'measured', got 0.0"),
        ({"beta": 1.5}, "beta must lie in 0..1"),
        ({"grain": 8}, "grain must be 1, got 8"),
        ({"merge_every": 0}, "merge_every must be at least 1"),
        ({"lr_scaling": "adascale"}, "lr_scaling must be one of none, linear, sqrt"),
        ({"nodes": [[0], [0]]}, "nodes must have each of the ranks"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    def program(here: World) -> None:
        with pytest.raises((ValueError, hvd.HorovodInternalError), match=message):
            adapted(**options)

    on_ranks(1, program)


def test_optimizer_and_loader_options_that_hogbatch_lacks_raise() -> None:
    def program(here: World) -> None:
        for changes, message in (
            ({"backward_passes_per_step": 2}, "use backward_passes_per_step=1, got 2"),
            ({"local_clip_norm": 1.0}, "it does not support local_clip_norm"),
            ({"check_every": 5}, "it does not support check_every"),
        ):
            model = network()
            optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **changes)
            with pytest.raises(ValueError, match=message):
                hvd.adapt(DataLoader(data(), 4), optimizer, "hogbatch")
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        with pytest.raises(ValueError, match="use a DataLoader with num_workers=0, got 1"):
            hvd.adapt(DataLoader(data(), 4, num_workers=1), optimizer, "hogbatch", lock_step=True)
        with pytest.raises(ValueError, match="use a DataLoader with in_order=True"):
            hvd.adapt(DataLoader(data(), 4, in_order=False), optimizer, "hogbatch")

    on_ranks(1, program)


def test_order_longer_than_data_set_raises() -> None:
    def program(here: World) -> None:
        loader, *_ = adapted(order=lambda epoch: [*range(203), 0])
        with pytest.raises(
            ValueError, match=r"rank 0: an epoch .* the 203 samples .* order of 204"
        ):
            next(iter(loader))

    on_ranks(1, program)


@pytest.mark.parametrize("option", ["ranks_may_leave", "audit"])
def test_ranks_may_leave_and_audit_require_a_single_node(option: str) -> None:
    """Regression: an audit counted changes by merges as lost by steps."""

    def program(here: World) -> None:
        with pytest.raises(ValueError, match=f"{option}=True is for the ranks of one host, got"):
            adapted(nodes=[[0], [1]], **{option: True})

    on_ranks(2, program)


def test_differing_options_raise_on_every_rank() -> None:
    def program(here: World) -> None:
        with pytest.raises(hvd.HorovodInternalError, match="rank 1: alpha=3"):
            adapted(alpha=2.0 + here.rank)

    on_ranks(2, program)


def test_more_workers_than_cores_log_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("collectives.cores.allowed_cores", lambda: frozenset("01"))

    def program(here: World) -> None:
        adapted()

    on_ranks(3, program)
    (warning,) = [text for text in caplog.messages if "workers of hogbatch" in text]
    assert warning.startswith("3 workers of hogbatch on CPUs share 2 cores (ranks 0, 1, 2), ")


@pytest.mark.parametrize("nodes", [None, [[0], [1]]])
def test_compression_warnings_appear_only_if_nodes_exchange(
    nodes: list[list[int]] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a warning on the density came right before one that nothing is exchanged."""

    def program(here: World) -> None:
        model = torch.nn.Linear(FEATURES, 1000).double()
        optimizer = hvd.DistributedOptimizer(
            adam(model), model.named_parameters(), hvd.Compression.gtopk(density=0.01)
        )
        options = {"device_class": "slow", "sizes": {"slow": 4}, "nodes": nodes}
        loader = hvd.adapt(DataLoader(data(20), BATCH), optimizer, "hogbatch", **options)
        for _, x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

    on_ranks(2, program)
    for warning in ("leaves 60 of 6,000 entries", "Adam after compression loses accuracy"):
        assert sum(warning in text for text in caplog.messages) == (nodes is not None)


def test_beta_weights_updates_of_workers_that_write_in_place() -> None:
    def program(here: World) -> Any:
        loader, *_ = adapted(device_class=classes(here))
        table = loader._table
        table["updates"], table["overlapped"] = 10, 4
        here.transport.barrier()
        found = [loader._node.weighted_updates(beta) for beta in (1.0, 0.5, "measured")]
        here.transport.barrier()
        return found

    assert on_ranks(2, program)[0] == [[10.0, 10.0], [5.0, 10.0], [6.0, 10.0]]


def loader_with_unit_gradients(
    length: int, batch: int, nodes: Any
) -> tuple[Any, torch.Tensor, Any]:
    """Return a loader, one weight that begins at 0, and its optimizer: each gradient is 1."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    loader = hvd.adapt(
        DataLoader(TensorDataset(torch.ones(length, 1).double()), batch),
        optimizer,
        "hogbatch",
        device_class="slow",
        sizes={"slow": 1},
        nodes=nodes,
        merge_every=length,
    )
    return loader, weight, optimizer


@pytest.mark.parametrize("nodes", [None, [[0], [1]]])
def test_epoch_moves_model_as_far_as_synchronous_steps(nodes: Any) -> None:
    """Regression: half as far on two nodes: rates were by the global batch, models are averaged."""
    size, batch, length = 2, 4, 64
    turn = threading.Barrier(size)  # as many batches for both

    def program(here: World) -> float:
        loader, weight, optimizer = loader_with_unit_gradients(length, batch, nodes)
        for (x,) in loader:
            optimizer.zero_grad()
            (x @ weight).mean().backward()
            turn.wait(30)
            for rank in range(size):
                if rank == here.rank:
                    optimizer.step()
                turn.wait(30)
        loader.drain()
        return weight.item()

    assert on_ranks(size, program) == [-length / (size * batch)] * size


def test_faster_node_moves_model_no_further() -> None:
    """Regression: merges weighted sums by samples again, so 1.6 times as far at 57 to 7 samples."""
    batch, length, ahead = 4, 64, 40
    is_ahead = threading.Event()

    def program(here: World) -> tuple[float, int]:
        loader, weight, optimizer = loader_with_unit_gradients(length, batch, [[0], [1]])
        steps = 0
        for (x,) in loader:
            assert here.rank == 0 or is_ahead.wait(30)
            optimizer.zero_grad()
            (x @ weight).mean().backward()
            optimizer.step()
            steps += 1
            if here.rank == 0 and steps == ahead:
                is_ahead.set()
        loader.drain()
        return weight.item(), steps

    results = on_ranks(2, program)
    assert results[0][1] >= ahead
    assert [moved for moved, _ in results] == [-length / (2 * batch)] * 2


@pytest.mark.parametrize("density", [None, 0.2])
def test_nodes_merge_models_during_training(density: float | None) -> None:
    """Four ranks, two to a node; what top-k has not sent stays on its node until `drain`."""
    compression = hvd.Compression.gtopk(density=density) if density else hvd.Compression.none

    def program(here: World) -> Any:
        loader, model, optimizer = adapted(
            device_class=classes(here),
            nodes=[[0, 1], [2, 3]],
            compression=compression,
            merge_every=60,
        )
        seen = [flattened(train(loader, model, optimizer)) for _ in range(3)]
        merges = loader._node.merging.merges
        loader.drain()
        return seen, flat(model), merges

    results = on_ranks(4, program)
    for epoch in range(3):
        assert sorted(i for seen, *_ in results for i in seen[epoch]) == list(range(203))
    for _, parameters, _ in results:
        torch.testing.assert_close(parameters, results[0][1], rtol=1e-12, atol=1e-14)
        assert not torch.equal(parameters, flat(network()))
    assert [merges for *_, merges in results] == [12, 0, 12, 0]
