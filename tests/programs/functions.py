"""Run on any number of ranks: everyone ends up with the root's parameters, state and objects."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import light_torch  # noqa: F401

import pytest
import torch

import gtopk.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ROOT = SIZE - 1
os.environ.pop("GTOPK_ALLOW_PICKLE", None)


def raises(kind: type[Exception], call: Callable[[], object], *parts: str) -> None:
    """Check that a call raises, with all of these parts in its text."""
    with pytest.raises(kind) as caught:
        call()
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def same_everywhere(obj: Any) -> bool:
    """Tell whether this object has the same text on every rank."""
    return len(set(hvd.allgather_object(repr(obj)))) == 1


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 2), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(4, 2)
    )


def take_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 2, 2)).square().sum().backward()
        optimizer.step()


def test_broadcast_parameters_copies_the_roots_in_place() -> None:
    expected = make_model(ROOT).state_dict()
    for select in (
        lambda model: model.state_dict(),
        lambda model: [*model.named_parameters(), *model.named_buffers()],
        lambda model: [*model.parameters(), *model.buffers()],
        lambda model: (pair for pair in model.state_dict().items()),
    ):
        model = make_model(RANK)
        weight = model[0].weight
        hvd.broadcast_parameters(select(model), root_rank=ROOT)
        assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
        assert model[0].weight is weight
        assert weight.requires_grad
        assert weight.grad_fn is None


def test_broadcast_parameters_takes_a_generator() -> None:
    model = make_model(RANK)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=ROOT)
    assert torch.equal(model[3].bias, make_model(ROOT)[3].bias)


def test_broadcast_parameters_takes_every_layout_and_dtype() -> None:
    dtypes = (
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.complex64,
        torch.float8_e4m3fn,
    )

    def make(value: int) -> list[torch.Tensor]:
        return [
            *(torch.full((3, 2), float(value)).to(dtype) for dtype in dtypes),
            torch.full((2, 3, 4, 4), value).to(memory_format=torch.channels_last),
            torch.full((4, 6), value)[:, ::2],
            torch.full((), value),
            torch.full((0, 3), value),
            # Like rotary tables and masks: elements that share memory.
            torch.full((1,), value).expand(5),
            torch.full((2, 1, 3), value).expand(2, 4, 3),
            torch.arange(5).mul(value).unfold(0, 3, 1),
            # One element and none, with any stride.
            torch.full((4,), float(value))[::4],
            torch.full((4,), float(value))[4::4],
            torch.full((4, 4), value).t()[:1, ::4],
            torch.full((4,), float(value)).to(torch.float8_e4m3fn)[::4],
            torch.complex(torch.ones(3), torch.full((3,), float(value))).conj(),
            torch.complex(torch.ones(3), torch.full((3,), float(value))).conj().imag,
        ]

    tensors = make(RANK)
    hvd.broadcast_parameters(tensors, root_rank=ROOT)
    for tensor, roots in zip(tensors, make(ROOT), strict=True):
        assert torch.equal(tensor.to(torch.complex64), roots.to(torch.complex64)), tensor.dtype


def test_broadcast_parameters_refuses_other_types() -> None:
    model = make_model(RANK)
    raises(ValueError, lambda: hvd.broadcast_parameters(torch.ones(2), 0), "invalid params of type")
    raises(ValueError, lambda: hvd.broadcast_parameters(None, 0), "invalid params of type")
    named = torch.nn.Linear(2, 2).named_parameters()
    assert len([*named]) == 2
    raises(ValueError, lambda: hvd.broadcast_parameters(named, 0), "read to its end")
    raises(ValueError, lambda: hvd.broadcast_parameters(model, 0), "pass model.state_dict()")
    layers = [*model]
    raises(ValueError, lambda: hvd.broadcast_parameters(layers, 0), "number 0 is of type", "Conv2d")
    raises(ValueError, lambda: hvd.broadcast_parameters({"a": 1}, 0), "'a' is of type", "int")
    raises(ValueError, lambda: hvd.broadcast_parameters([torch.ones(2)], SIZE), f"0..{SIZE - 1}")


def test_parameter_shapes_that_differ_are_an_error_on_all_ranks() -> None:
    if SIZE == 1:
        return
    shape = (3,) if RANK == 0 else (4,)
    params = {"a": torch.full((2,), RANK), "b": torch.zeros(shape), "c": torch.full((2,), RANK)}
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.broadcast_parameters(params, ROOT),
        "broadcast.b",
        "rank 0",
        "[3]",
        "[4]",
    )
    assert params["a"].tolist() == params["c"].tolist() == [ROOT, ROOT]


def test_unsupported_tensor_is_named_on_every_rank() -> None:
    """Also if another rank could send its own, and would wait."""
    eye = torch.eye(2)
    cannot = [
        (eye.to_sparse(), "torch.sparse_coo"),
        (eye.to_sparse_csr(), "torch.sparse_csr"),
        (eye.to("meta"), "meta device"),
        (torch.quantize_per_tensor(eye, 0.1, 0, torch.quint8), "quantized"),
        (torch.nested.nested_tensor([eye]), "nested"),
        (torch.nn.parameter.UninitializedParameter(), "no size yet"),
    ]
    for everywhere in (True, False):
        for tensor, why in cannot:
            mine = tensor if everywhere or RANK == SIZE - 1 else eye
            params = {"a": torch.full((2,), RANK), "b": mine, "c": torch.full((2,), RANK)}
            text = raises(
                hvd.HorovodInternalError,
                lambda params=params: hvd.broadcast_parameters(params, ROOT),
                "broadcast.b",
                why,
            )
            assert same_everywhere(text)
            assert params["a"].tolist() == params["c"].tolist() == [ROOT, ROOT]
    expanded = torch.full((2, 1), float(RANK)).expand(2, 3)
    if SIZE > 1:
        raises(
            hvd.HorovodInternalError,
            lambda: hvd.broadcast_parameters({"m": expanded if RANK else torch.ones(2, 3)}, 0),
            "broadcast.m",
            "expanded from [2, 1] to [2, 3]",
        )


def test_broadcast_object_returns_the_roots_object() -> None:
    obj = {
        "rank": RANK,
        "nested": [(1.5, None), OrderedDict(a=b"b"), {2, 3}],
        "tensor": torch.full((2,), RANK),
        "large": "x" * 100_000 * (RANK + 1),
    }
    own = obj if RANK == ROOT else None
    received = hvd.broadcast_object(own, root_rank=ROOT, name="settings")
    assert received["rank"] == ROOT
    assert received["nested"] == obj["nested"]
    assert received["tensor"].tolist() == [ROOT, ROOT]
    assert len(received["large"]) == 100_000 * SIZE
    assert (received is obj) == (RANK == ROOT)
    assert hvd.broadcast_object(f"from {RANK}") == "from 0"
    raises(ValueError, lambda: hvd.broadcast_object(1, SIZE), f"0..{SIZE - 1}", f"got {SIZE}")


def test_allgather_object_returns_objects_in_rank_order() -> None:
    gathered = hvd.allgather_object({"rank": RANK, "list": list(range(RANK))})
    assert gathered == [{"rank": rank, "list": list(range(rank))} for rank in range(SIZE)]
    assert hvd.allgather_object(None, name="nothing") == [None] * SIZE


class Opaque:
    def __reduce__(self) -> str:
        raise RuntimeError("no way")


def test_unsendable_root_object_is_the_same_error_everywhere() -> None:
    obj = {"a": [Opaque()]} if RANK == ROOT else 1
    words = (f"rank {ROOT}:", "Opaque at ['a'][0]", "GTOPK_ALLOW_PICKLE=1 on every rank")
    raises(TypeError, lambda: hvd.broadcast_object(obj, ROOT), *words)
    assert hvd.broadcast_object(RANK, ROOT) == ROOT


def test_unsendable_object_of_one_rank_is_the_same_error_everywhere() -> None:
    obj = (1, Opaque()) if RANK == ROOT else 1
    raises(TypeError, lambda: hvd.allgather_object(obj), f"rank {ROOT}:", "Opaque at [1]")
    assert hvd.allgather_object(RANK) == list(range(SIZE))


def test_pickles_need_the_allow_pickle_setting_on_every_rank() -> None:
    path = PurePath("/data") / str(RANK)
    os.environ["GTOPK_ALLOW_PICKLE"] = "1"
    try:
        assert hvd.broadcast_object(path, ROOT) == PurePath(f"/data/{ROOT}")
        assert hvd.allgather_object(path) == [PurePath(f"/data/{rank}") for rank in range(SIZE)]
        raises(TypeError, lambda: hvd.allgather_object([Opaque()]), "Opaque at [0]", "no way")
        if SIZE == 1:
            return
        if RANK == 0:
            del os.environ["GTOPK_ALLOW_PICKLE"]
        plain = 0 if RANK == 0 else path
        words = (f"of rank {ROOT} holds a pickle", "is not 1 on rank 0")
        raises(TypeError, lambda: hvd.broadcast_object(path, ROOT), *words)
        raises(TypeError, lambda: hvd.allgather_object(plain), "is not 1 on rank 0")
        assert hvd.allgather_object(0) == [0] * SIZE
    finally:
        os.environ.pop("GTOPK_ALLOW_PICKLE", None)


MAKERS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.SGD,
    lambda params, **options: torch.optim.SGD(params, momentum=0.9, weight_decay=0.1, **options),
    lambda params, **options: torch.optim.AdamW(params, amsgrad=True, **options),
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
]


def content(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer's whole state in a form that can be compared bit for bit."""

    def plain(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return type(part), part.dtype, part.tolist()
        if isinstance(part, dict):
            return {key: plain(value) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return type(part)(map(plain, part))
        return type(part), part

    return plain(optimizer.state_dict())


def test_broadcast_optimizer_state_copies_the_roots_for_every_optimizer() -> None:
    for make in MAKERS:
        for distributed in (False, True):
            for steps in (
                lambda rank: 3 * (rank == ROOT),
                lambda rank: rank + 1,
                lambda rank: rank < ROOT,
            ):
                model = make_model(RANK)
                optimizer = make(model.parameters(), lr=0.01 * (RANK + 1))
                groups = optimizer.param_groups
                group = groups[0]
                take_steps(model, optimizer, int(steps(RANK)))
                before = copy.deepcopy(model.state_dict())
                wrapped = (
                    hvd.DistributedOptimizer(optimizer, model.named_parameters())
                    if distributed
                    else optimizer
                )
                roots = content(wrapped)
                hvd.broadcast_optimizer_state(wrapped, root_rank=ROOT)
                if RANK == ROOT:
                    assert content(wrapped) == roots
                assert same_everywhere(content(wrapped)), type(optimizer)
                assert wrapped.param_groups[0]["lr"] == 0.01 * (ROOT + 1)
                assert wrapped.param_groups is groups
                assert groups[0] is group
                # No step was taken to create state: the parameters are unchanged.
                assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
                hvd.broadcast_parameters(model.state_dict(), root_rank=ROOT)
                torch.manual_seed(0)
                take_steps(model, wrapped, 2)
                assert same_everywhere([p.tolist() for p in model.parameters()]), type(optimizer)


def test_broadcast_optimizer_state_keeps_existing_tensors() -> None:
    model = make_model(RANK)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01 * (RANK + 1)))
    take_steps(model, optimizer, RANK + 1)
    lr = optimizer.param_groups[0]["lr"]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    steps = [state["step"] for state in optimizer.state.values()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=ROOT)
    assert optimizer.param_groups[0]["lr"] is lr
    assert abs(lr.item() - 0.01 * (ROOT + 1)) < 1e-6
    for state, moment, step in zip(optimizer.state.values(), moments, steps, strict=True):
        assert state["exp_avg"] is moment
        assert state["step"] is step
        assert step.item() == ROOT + 1


def test_shared_lr_tensor_is_split_if_the_roots_groups_differ() -> None:
    model = make_model(RANK)
    shared = torch.tensor(0.1)
    first, second = (shared, torch.tensor(0.2)) if RANK == ROOT else (shared, shared)
    groups = [{"params": [model[0].weight], "lr": first}, {"params": [model[0].bias], "lr": second}]
    optimizer = torch.optim.Adam(groups, foreach=False)
    hvd.broadcast_optimizer_state(optimizer, root_rank=ROOT)
    rates = [round(group["lr"].item(), 3) for group in optimizer.param_groups]
    assert rates == [0.1, 0.2]


def test_scheduler_continues_from_the_roots_learning_rate() -> None:
    model = make_model(RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if RANK == ROOT:
        optimizer.param_groups[0]["lr"] = 8.0
    hvd.broadcast_optimizer_state(optimizer, root_rank=ROOT)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 4.0


def test_broadcast_optimizer_options_keep_types_and_none_buffers() -> None:
    model = make_model(RANK)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.5 + RANK / 100, 0.9))
    optimizer.param_groups[0]["note"] = {"by": RANK, "when": None}
    optimizer.state[model[3].bias] = {"momentum_buffer": None, "parts": [torch.full((2,), RANK)]}
    optimizer.state["calls"] = {"count": RANK}
    hvd.broadcast_optimizer_state(optimizer, root_rank=ROOT)
    assert optimizer.param_groups[0]["betas"] == (0.5 + ROOT / 100, 0.9)
    assert optimizer.param_groups[0]["note"] == {"by": ROOT, "when": None}
    assert optimizer.state["calls"] == {"count": ROOT}
    state = optimizer.state[model[3].bias]
    assert state["momentum_buffer"] is None
    assert state["parts"][0].tolist() == [ROOT, ROOT]


def test_broadcast_optimizer_state_refuses_lbfgs() -> None:
    optimizer = torch.optim.LBFGS(make_model(0).parameters())
    raises(ValueError, lambda: hvd.broadcast_optimizer_state(optimizer, 0), "LBFGS")


def test_optimizer_unlike_the_roots_is_the_same_error_everywhere() -> None:
    if SIZE == 1:
        return
    model = make_model(0)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[1:] if RANK == 0 else parameters, lr=0.1)
    raises(
        ValueError,
        lambda: hvd.broadcast_optimizer_state(optimizer, ROOT),
        "rank 0 has parameter 0 of group 0, [4]",
        f"rank {ROOT} has parameter 0 of group 0, [4, 3, 2, 2]",
    )
    kind = torch.optim.Adam if RANK == 0 else torch.optim.SGD
    other = kind(parameters, lr=0.1)
    words = ("rank 0 has optimizer Adam", f"rank {ROOT} has optimizer SGD")
    raises(ValueError, lambda: hvd.broadcast_optimizer_state(other, ROOT), *words)


def test_unsendable_optimizer_state_is_the_same_error_everywhere() -> None:
    optimizer = torch.optim.SGD(make_model(0).parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = Opaque()
    words = ("Opaque at ['optimizer']['groups'][0]['hook']", f"rank {ROOT}")
    raises(TypeError, lambda: hvd.broadcast_optimizer_state(optimizer, ROOT), *words)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
    hvd.barrier()
    hvd.shutdown()
    print(f"rank {RANK}: every function does as it says\n", end="", flush=True)
