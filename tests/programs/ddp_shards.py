"""For ranks of ddp_checks.py: DDP's hook exchanges shards instead of gTop-k's picks."""

import copy
from typing import Any

import pytest
import torch
from checks import equal, weights
from ddp_adamw import IN_ORDER, distributed, hooked, loss, saved, train
from ddp_hook import (
    RANK,
    SIZE,
    SMALL_BUCKETS,
    Net,
    Recorder,
    assert_alike,
    summed,
    wrapped,
)
from ddp_hook import train as train_by_sgd
from torch.nn.parallel import DistributedDataParallel

import gtopk.torch as hvd
from collectives.algorithms import shards
from gtopk.compression import Compression
from gtopk.ddp import GTopKState, gtopk_hook
from gtopk.errors import HorovodInternalError
from gtopk.optim.distributed import DistributedOptimizer

shards.BLOCK = 8  # so that the small model has entries in each shard
SHARDS = Compression.shards(3, 3)


def sharded(buckets: dict[str, Any] = IN_ORDER, **options: Any) -> tuple[Any, Any, GTopKState]:
    return hooked(0.001, buckets, compression=SHARDS, **options)


def owner_errors(state: GTopKState, model: Any) -> torch.Tensor:
    (held,) = state.state_dict(model)["held"].values()
    return torch.cat([parts["owner_error"].reshape(-1) for parts in held.values()])


def left(state: GTopKState, model: Any) -> torch.Tensor:
    """Return everything that the ranks have not sent, including owner errors."""
    (held,) = state.state_dict(model)["held"].values()
    unsent = [
        sum(parts[what] for what in ("residual", "owner_error") if what in parts)
        for _, parts in sorted(held.items())
    ]
    return summed(torch.cat([each.reshape(-1) for each in unsent]))


def test_sharded_hook_is_bit_identical_to_distributed_optimizer() -> None:
    """With AdamW, also with accumulated passes and with clipping; and with SGD."""
    for options, passes in (({}, 1), ({"local_residual": False}, 2)):
        ours, optimizer, _ = sharded(**options)
        theirs, other = distributed(compression=SHARDS, backward_passes_per_step=passes, **options)
        for step in range(10):
            for each in (optimizer, other):
                each.zero_grad()
            for _ in range(passes - 1):
                with ours.no_sync():
                    loss(ours, 100 + step).backward()
                loss(theirs, 100 + step).backward()
            for model, each in ((ours, optimizer), (theirs, other)):
                loss(model, step).backward()
                each.step()
            assert torch.equal(weights(ours), weights(theirs)), (options, step)

    compression = Compression.shards(3, 2, momentum_correction=0.9)
    ours, theirs = wrapped(GTopKState(compression=compression), **IN_ORDER), Net()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.1),
        theirs.named_parameters(),
        compression,
        groups=[list(theirs.parameters())],
    )
    train_by_sgd(ours, range(8))
    train(theirs, optimizer, range(8))  # of the same batches and loss
    assert torch.equal(weights(ours), weights(theirs))


def test_rebuilt_ddp_buckets_conserve_gradient_and_owner_errors() -> None:
    state = GTopKState(compression=SHARDS)
    model = wrapped(None)
    recorder = Recorder(state)
    model.register_comm_hook(state, recorder.hook)
    begun = weights(model)
    for steps in (range(1), range(1, 2)):
        train_by_sgd(model, steps)
        recorder.assert_nothing_is_lost(model, begun)
        assert_alike(model)
    assert recorder.buckets > 1
    errors = owner_errors(state, model)
    assert bool(errors.any())
    owners = summed((errors != 0).to(torch.float64))
    assert float(owners.max()) == 1.0  # the new buckets' owners have those of the old ones

    model, optimizer, state = sharded(SMALL_BUCKETS)
    train(model, optimizer, range(7))
    assert_alike(model)
    assert state.progress.steps == 7


def test_resumed_sharded_run_is_bit_identical() -> None:
    model, optimizer, state = sharded()
    train(model, optimizer, range(4))
    before = saved(model, optimizer, state)
    train(model, optimizer, range(4, 9))
    resumed, again, fresh = sharded()
    resumed.module.load_state_dict(before["model"])
    again.load_state_dict(before["optimizer"])
    fresh.load_state_dict(before["state"], resumed)
    train(resumed, again, range(4, 9))
    assert torch.equal(weights(resumed), weights(model))
    assert equal(saved(resumed, again, fresh), saved(model, optimizer, state))


def test_owner_errors_of_other_ranks_move_to_the_new_owners() -> None:
    """The state is of two more ranks, one of which has a residual and owner errors everywhere."""
    model, optimizer, state = sharded()
    train(model, optimizer, range(4))
    gathered = hvd.broadcast_object(state.gather_state(model))
    more = copy.deepcopy(gathered["held"][0])
    for parts in more.values():
        parts["owner_error"] = torch.ones_like(parts["owner_error"])
    held = {**gathered["held"], SIZE: more, SIZE + 1: {}}
    gathered = {**gathered, "ranks": SIZE + 2, "held": held}
    total = left(state, model) + torch.cat(
        [
            (parts["residual"] + parts["owner_error"]).reshape(-1)
            for _, parts in sorted(more.items())
        ]
    )
    state.load_state_dict(gathered, model)
    torch.testing.assert_close(left(state, model), total, rtol=1e-12, atol=1e-12)
    train(model, optimizer, range(4, 6))
    assert_alike(model)
    owners = summed((owner_errors(state, model) != 0).to(torch.float64))
    assert float(owners.max()) == 1.0


def test_switching_between_shards_and_gtopk_conserves_the_residual() -> None:
    model, optimizer, state = sharded()
    train(model, optimizer, range(4))
    total = left(state, model)
    gtopk = GTopKState(0.1, optimizer=optimizer)
    gtopk.load_state_dict(state.state_dict(model), model)
    other = DistributedDataParallel(Net(), **IN_ORDER)
    other.module.load_state_dict(model.module.state_dict())
    other.register_comm_hook(alone := GTopKState(0.1), gtopk_hook)
    alone.load_state_dict(state.state_dict(model), other)
    (0.0 * loss(other, 0)).backward()
    update = torch.cat([p.grad.reshape(-1) for _, p in sorted(other.module.named_parameters())])
    torch.testing.assert_close(update + left(alone, other), total, rtol=1e-12, atol=1e-12)

    back, also, again = sharded()
    again.load_state_dict(gtopk.state_dict(model), back)
    train(back, also, range(4))
    assert_alike(back)


def test_skipped_step_changes_no_state_and_not_the_shards_turn() -> None:
    model, optimizer, state = sharded(SMALL_BUCKETS)
    for step in range(7):
        before = saved(model, optimizer, state)
        optimizer.zero_grad()
        bad = (RANK, step) == (SIZE - 1, 4)
        spoilt = (torch.inf if bad else 0.0) * model.module.layers[0].bias.sum()
        (loss(model, step) + spoilt).backward()
        optimizer.step()
        assert equal(saved(model, optimizer, state), before) == (step == 4)
    assert (state.skipped_steps, state.progress.steps) == (1, 6)
    assert_alike(model)


def test_frozen_layer_keeps_its_owner_errors_also_when_loaded() -> None:
    model, optimizer, state = sharded()
    train(model, optimizer, range(4))
    layer = model.module.layers[1].weight

    def of_layer() -> Any:
        held = state.state_dict(model)["held"][RANK]["layers.1.weight"]
        return copy.deepcopy([layer.detach(), held["residual"], held["owner_error"]])

    layer.requires_grad_(False)
    before = of_layer()
    train(model, optimizer, range(4, 6))
    assert equal(of_layer(), before)
    elsewhere = state.state_dict(model)  # as if other ranks had owned all of it
    elsewhere["held"][RANK]["layers.1.weight"]["owner_error"].fill_(1.0 + RANK)
    state.load_state_dict(elsewhere, model)
    train(model, optimizer, range(6, 8))
    layer.requires_grad_(True)
    train(model, optimizer, range(8, 10))
    owners = summed((owner_errors(state, model) != 0).to(torch.float64))
    assert float(owners.max()) == 1.0
    assert_alike(model)


def test_ranks_out_of_batches_join_in_sharded_exchange() -> None:
    model, optimizer, _ = sharded({**SMALL_BUCKETS, "find_unused_parameters": True})
    with model.join():
        train(model, optimizer, range(2 + RANK))
    assert_alike(model)


def test_different_shard_bits_are_an_error_quoting_both() -> None:
    model = wrapped(GTopKState(compression=Compression.shards(3, 2 + RANK % 2)))
    with pytest.raises(HorovodInternalError, match=r"bits=2.*bits=3"):
        loss(model, 0).backward()


def test_unsupported_hook_options_are_refused() -> None:
    for options, expected in (
        ({"compression": Compression.oktopk(0.1)}, r"takes Compression\.gtopk\(.*OkTopK"),
        ({"compression": Compression.auto()}, r"or Compression\.shards\(.*Automatic"),
        ({"compression": Compression.none}, "DistributedOptimizer takes all of them"),
        ({"compression": SHARDS, "density": 0.1}, "not both: got density and Shards"),
        ({"compression": SHARDS, "values": "int8"}, "not both: got values and Shards"),
        ({"compression": Compression.shards(dense_vectors=True)}, "leave out dense, dense_vec"),
        ({"dense_under": 9}, "DDP's hook exchanges whole buckets"),
    ):
        with pytest.raises(ValueError, match=expected):
            GTopKState(**options)
    assert GTopKState(compression=Compression.gtopk(0.5)).compression.density == 0.5
