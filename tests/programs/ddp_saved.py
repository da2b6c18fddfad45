"""For ranks of ddp_checks.py: the residuals of DDP's hook, saved and loaded."""

import copy
import gc
import io
import itertools
import re
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.config  # before any optimizer: models are compiled here
from checks import logged, weights
from ddp_hook import RANK, SIZE, SMALL_BUCKETS, Net, batch, summed, train, wrapped
from torch.distributed import checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import gtopk
import gtopk.torch as hvd
from gtopk.ddp import GTopKState, gtopk_hook
from gtopk.torch.checkpoint.dcp import Reader, Writer


def test_gather_state_gives_rank_0_all_residuals() -> None:
    state = GTopKState(0.05)
    model = wrapped(state)
    train(model, range(3))
    gathered = state.gather_state(model)
    assert list(gathered["held"]) == (list(range(SIZE)) if RANK == 0 else [RANK])
    mine = state.state_dict(model)["held"][RANK]
    for name, tensors in mine.items():
        total = summed(tensors["residual"])
        if RANK == 0:
            parts = [held[name]["residual"] for held in gathered["held"].values()]
            torch.testing.assert_close(sum(parts), total, rtol=1e-12, atol=1e-12)


def test_residuals_are_saved_loaded_and_checked_by_shape() -> None:
    state = GTopKState(0.05)
    model = wrapped(state)
    train(model, range(3))
    saved = state.state_dict(model), {k: v.clone() for k, v in model.state_dict().items()}
    train(model, range(3, 6))

    again = GTopKState(0.05)
    resumed = wrapped(again)
    resumed.load_state_dict(saved[1])
    again.load_state_dict(saved[0], resumed)
    train(resumed, range(3, 6))
    # DDP's first step has one bucket, so it selects from another vector.
    assert again.progress.steps == 6
    total = {name: summed(t["residual"]) for name, t in saved[0]["held"][RANK].items()}
    fresh = GTopKState(0.05)
    fresh.load_state_dict({**saved[0], "steps": 3}, model)
    for name, tensors in fresh.state_dict(model)["held"][RANK].items():
        assert torch.equal(summed(tensors["residual"]), total[name])
    wrong = {**saved[0], "held": {RANK: {"layers.0.weight": {"residual": torch.ones(3)}}}}
    expected = re.escape("the residual of 'layers.0.weight' has the shape [3]")
    with pytest.raises(ValueError, match=expected):
        again.load_state_dict(wrong, resumed)


def check_after_failed_backward(is_loaded: bool) -> None:
    """Train on in a new DDP around the model: the old one does not recover from the error."""
    state, alone = GTopKState(0.05), GTopKState(0.05)
    model, undisturbed = wrapped(state), wrapped(alone)
    for each in (model, undisturbed):
        train(each, range(3))
    saved = state.state_dict(model)

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("broken off")

    broken = model.module.layers[0].weight.register_hook(fail)
    with pytest.raises(ArithmeticError, match="broken off"):
        model(batch(3)).square().mean().backward()  # the other layers' buckets are being exchanged
    broken.remove()
    if is_loaded:
        state.load_state_dict(saved, model)
    nets = [model.module, undisturbed.module]
    del model, undisturbed, each  # and the hooks that DDP has on parameters
    gc.collect()
    for net, one in zip(nets, (state, alone), strict=True):
        again = DistributedDataParallel(net, **SMALL_BUCKETS)
        again.register_comm_hook(one, gtopk_hook)
        train(again, range(3, 6))
        del again
        gc.collect()
    assert torch.equal(*map(weights, nets))
    assert state.progress.steps == 6


def test_failed_backward_pass_leaves_no_trace_in_later_steps() -> None:
    check_after_failed_backward(is_loaded=False)


def test_state_loaded_after_a_failed_backward_continues_as_saved() -> None:
    check_after_failed_backward(is_loaded=True)


def test_saving_between_backward_and_step_is_warned_of_once() -> None:
    state = GTopKState(0.05)
    model = wrapped(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def saves(*, stepped: bool) -> list[str]:
        model(batch(0)).square().mean().backward()
        if stepped:
            optimizer.step()
        return [text for text in logged(lambda: state.state_dict(model)) if "backward()" in text]

    assert saves(stepped=True) == []
    (message,) = saves(stepped=False)
    assert message.startswith(
        f"rank {RANK}: the hook's state is saved between backward() and step()"
    )
    assert saves(stepped=False) == []
    fresh = GTopKState(0.05)
    fresh.load_state_dict(state.state_dict(model), model)
    assert logged(lambda: fresh.state_dict(model)) == []


def test_failed_backward_pass_is_not_in_the_saved_state() -> None:
    state = GTopKState(0.05)
    model = wrapped(state)
    train(model, range(3))
    before = state.state_dict(model)["held"][RANK]
    first = model.module.layers[0].weight

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("broken off")

    broken = first.register_hook(fail)
    with pytest.raises(ArithmeticError, match="broken off"):
        model(batch(3)).square().mean().backward()
    broken.remove()
    after = state.state_dict(model)["held"][RANK]
    for name, parts in before.items():
        assert all(torch.equal(after[name][what], part) for what, part in parts.items()), name


def test_pickling_a_gtopk_state_is_refused_naming_state_dict() -> None:
    state = GTopKState(0.05)
    model = wrapped(state)
    expected = r"a GTopKState can be neither copied nor pickled.* state\.state_dict\(model\)"
    for steps in (range(0), range(2)):
        train(model, steps)
        for each in (state, model):  # DDP's model holds the state of its hook
            with pytest.raises(TypeError, match=expected):
                torch.save({"of": each}, io.BytesIO())
        with pytest.raises(TypeError, match=expected):
            copy.deepcopy(state)


def test_new_hook_state_loads_residuals_from_gtopk_and_torch_checkpoints() -> None:
    """Also from torch.distributed.checkpoint, which loads only keys that the state already has."""
    state = GTopKState(0.05, momentum_correction=0.9)
    model = wrapped(state)
    train(model, range(3))
    ours, theirs = (hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None) for _ in "ab")
    gtopk.save_checkpoint(ours, None, None, residuals=state.state_dict(model))
    dcp.save({"residuals": state.state_dict(model)}, storage_writer=Writer(theirs))
    for folder in (ours, theirs):
        fresh = GTopKState(0.05, momentum_correction=0.9)
        fresh.load_state_dict(gtopk.load_latest(folder, None).values["residuals"], model)
        assert fresh.progress.steps == 3
        assert mass(fresh, model) == mass(state, model) > 0
    fresh = GTopKState(0.05, momentum_correction=0.9)
    loaded = {"residuals": fresh.state_dict(model)}
    dcp.load(loaded, storage_reader=Reader(theirs))
    assert logged(lambda: fresh.load_state_dict(loaded["residuals"], model)) == []
    held, saved = (each.state_dict(model)["held"][RANK] for each in (fresh, state))
    for name, parts in saved.items():
        assert parts.keys() == held[name].keys() == {"residual", "velocity"}
        assert all(torch.equal(held[name][what], part) for what, part in parts.items())
    assert fresh.progress.steps == 3


def test_hook_state_not_loaded_with_sgd_is_reported_once() -> None:
    """SGD without momentum has no state: its groups note that there was a residual."""

    def made(gives: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer, GTopKState]:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = GTopKState(0.05, optimizer=optimizer if gives else None)
        model = DistributedDataParallel(net, **SMALL_BUCKETS)
        model.register_comm_hook(state, gtopk_hook)
        return model, optimizer, state

    def steps(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()

    def warnings_of(call: Callable[[], None]) -> list[str]:
        return [text for text in logged(call) if "the state of the hook was not" in text]

    for gives in (False, True):
        model, optimizer, state = made(gives)
        fresh = optimizer.state_dict()
        assert warnings_of(lambda each=(model, optimizer): steps(*each)) == []
        saved, held = copy.deepcopy(optimizer.state_dict()), state.state_dict(model)
        for loaded, is_kept in ((saved, False), (saved, True), (fresh, False)):
            model, optimizer, state = made(gives)
            optimizer.load_state_dict(loaded)
            if is_kept:
                state.load_state_dict(held, model)
            warnings = warnings_of(lambda each=(model, optimizer): steps(*each))
            assert len(warnings) == (SIZE > 1 and loaded is saved and not is_kept), warnings
            for text in warnings:
                norm = re.search(r"\(a norm of (\S+) on the rank that saved\)", text)
                own = [parts["residual"].reshape(-1) for parts in held["held"][RANK].values()]
                assert norm is not None, text
                assert float(norm[1]) == float(f"{float(torch.cat(own).norm()):.3g}") > 0
            # No note stays in the optimizer: plain torch can read its groups.
            assert optimizer.param_groups[0].keys() == fresh["param_groups"][0].keys()


def test_dcp_loads_a_state_saved_before_the_first_step() -> None:
    """SGD's saved state has a note of the residual from then on; loading does not require it."""
    state = GTopKState(0.05)
    model = wrapped(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)

    def saved() -> dict[str, object]:
        return {"optimizer": optimizer.state_dict(), "residuals": state.state_dict(model)}

    dcp.save(saved(), checkpoint_id=folder)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    loaded = saved()
    assert mass(state, model) > 0 or SIZE == 1
    dcp.load(loaded, checkpoint_id=folder)
    state.load_state_dict(loaded["residuals"], model)
    assert mass(state, model) == state.progress.steps == 0


class Wrapper(torch.nn.Module):
    """Has a submodule with the name that DDP gives to its wrapped module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def mass(state: GTopKState, model: torch.nn.Module) -> float:
    (held,) = state.state_dict(model)["held"].values()
    return sum(float(tensors["residual"].abs().sum()) for tensors in held.values())


def test_residuals_match_parameters_under_any_model_wrapper() -> None:
    for make in (Net, Wrapper):
        plain = make()
        inner = torch.compile(plain, backend="eager")
        model = DistributedDataParallel(inner, bucket_cap_mb=1)
        state = GTopKState(0.05)
        model.register_comm_hook(state, gtopk_hook)
        train(model, range(2))
        saved = mass(state, model)
        assert saved > 0
        ways = (plain, inner, model, torch.compile(model, backend="eager"))
        for one, other in itertools.product(ways, ways):
            fresh = GTopKState(0.05)
            fresh.load_state_dict(state.state_dict(one), other)
            assert mass(fresh, other) == saved


def test_residuals_of_unknown_parameters_are_reported_and_kept() -> None:
    state, fresh, again = (GTopKState(0.05) for _ in range(3))
    model = wrapped(state)
    train(model, range(2))
    other = torch.nn.Sequential(Net())
    messages = logged(lambda: fresh.load_state_dict(state.state_dict(model), other))
    messages += logged(lambda: again.load_state_dict(fresh.state_dict(other), model))
    warnings = [
        text for text in messages if "cannot be applied: the model has no parameter" in text
    ]
    assert len(warnings) == 1
    assert f"rank {RANK}: residuals for 'layers.0.bias', 'layers.0.weight'" in warnings[0]
    assert mass(again, model) == mass(state, model) > 0


def test_wrong_model_or_state_is_refused() -> None:
    state = GTopKState(0.05)
    model = wrapped(state)
    train(model, range(2))
    with pytest.raises(ValueError, match=r"has the residuals of another model: .* no copy"):
        state.state_dict(copy.deepcopy(model.module))
    saved = state.state_dict(model)
    for no_model in (None, saved, list(model.parameters())):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
            state.state_dict(no_model)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
        state.load_state_dict(model, saved)
    for no_state in (None, "", {}, model.state_dict(), {"format": 1}, {**saved, "ranks": "2"}):
        with pytest.raises(ValueError, match="of a rank"):
            state.load_state_dict(no_state, model)
    assert mass(state, model) > 0


def test_resumed_run_with_unchanged_buckets_is_bit_identical() -> None:
    usual = {"momentum_correction": 0.9}
    for options, correction in (
        ({"find_unused_parameters": True}, usual),
        ({"bucket_cap_mb": 25}, usual),
        ({"bucket_cap_mb": 25}, {"adam_correction": (0.9, 0.99)}),
    ):
        state = GTopKState(0.05, **correction)
        model = wrapped(state, **options)
        train(model, range(3))
        saved = state.state_dict(model), {k: v.clone() for k, v in model.state_dict().items()}
        train(model, range(3, 6))

        again = GTopKState(0.05, **correction)
        resumed = wrapped(again, **options)
        resumed.load_state_dict(saved[1])
        again.load_state_dict(saved[0], resumed)
        train(resumed, range(3, 6))
        assert torch.equal(weights(resumed), weights(model)), options
