"""Make the same calls on Horovod or on gtopk, and print their outcomes.

Argument: horovod.torch or gtopk.torch. Each rank prints a line: its number, a space, and a JSON
object of every call's outcome: [what it returned] or [the exception's type, its text, its types].

Some calls are left out because Horovod 0.28.1 crashes: is_homogeneous() before init, an alltoall of
a scalar, and a process set with a rank that does not exist. After an init() with duplicate process
sets was refused, no other init() works in that process.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from typing import Any

import light_torch  # noqa: F401

import torch

FACE = sys.argv[1]
FOLDER = tempfile.mkdtemp()
hvd: Any = importlib.import_module(FACE)
outcomes: dict[str, list[str]] = {}

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REAL = (torch.float16, torch.float32, torch.float64)
REDUCTIONS = ("Average", "Sum", "Min", "Max", "Product")


def describe(value: Any) -> str:
    """Return a description of a value that can be compared."""
    if isinstance(value, torch.Tensor):
        kind = "sparse " if value.is_sparse else ""
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        grad = " with gradient" if value.requires_grad else ""
        return f"{kind}{value.dtype} {list(value.shape)} {dense.double().tolist()}{grad}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    if isinstance(value, dict):
        inside = ", ".join(f"{key}: {describe(value[key])}" for key in value)
        return f"{type(value).__name__}({inside})"
    if value is None or isinstance(value, (bool, int, float, str, type)):
        return repr(value) if not isinstance(value, type) else value.__name__
    return type(value).__name__


def call(name: str, function: Callable[[], Any]) -> Any:
    """Record what a call returns or raises."""
    assert name not in outcomes, name
    result = None
    try:
        result = function()
        outcomes[name] = [describe(result)]
    except Exception as error:
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        outcomes[name] = [type(error).__name__, " ".join(str(error).split())[:200], kinds]
    return result


def calls(**functions: Callable[[], Any]) -> None:
    for name, function in functions.items():
        call(name.replace("_", " "), function)


# ---- before init

TOPOLOGY = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
BUILT = ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm")
ENABLED = ("mpi_enabled", "gloo_enabled")
OTHERS = ("is_initialized", "mpi_threads_supported", "stop_timeline", "shutdown")
for word in (*TOPOLOGY, *ENABLED, *OTHERS):
    call(f"{word} before init", lambda word=word: getattr(hvd, word)())
for word in BUILT:
    call(f"type of {word}_built", lambda word=word: type(getattr(hvd, f"{word}_built")()))
ones = torch.ones(2)
calls(
    start_timeline_before_init=lambda: hvd.start_timeline(f"{FOLDER}/timeline"),
    allreduce_before_init=lambda: hvd.allreduce(ones),
    allreduce_async_before_init=lambda: hvd.allreduce_async(ones),
    grouped_allreduce_before_init=lambda: hvd.grouped_allreduce([ones]),
    allgather_before_init=lambda: hvd.allgather(ones),
    broadcast_before_init=lambda: hvd.broadcast(ones, 0),
    alltoall_before_init=lambda: hvd.alltoall(ones),
    reducescatter_before_init=lambda: hvd.reducescatter(ones),
    barrier_before_init=lambda: hvd.barrier(),
    join_before_init=lambda: hvd.join(),
    broadcast_object_before_init=lambda: hvd.broadcast_object(1),
    allgather_object_before_init=lambda: hvd.allgather_object(1),
    add_process_set_before_init=lambda: hvd.add_process_set([0]),
    init_with_a_word=lambda: hvd.init("everybody"),
    init_with_another_word_for_sets=lambda: hvd.init(process_sets="static"),
    is_initialized_after_refusals=lambda: hvd.is_initialized(),
)

# ---- lifecycle

calls(
    init=lambda: hvd.init(process_sets="dynamic"),
    init_again=lambda: hvd.init(),
    is_initialized=lambda: hvd.is_initialized(),
    is_homogeneous=lambda: hvd.mpi_ops.is_homogeneous(),
    mpi_threads_supported=lambda: hvd.mpi_threads_supported(),
    start_timeline_not_asked_for=lambda: hvd.start_timeline(f"{FOLDER}/timeline"),
    stop_timeline=lambda: hvd.stop_timeline(),
)
for word in TOPOLOGY:
    call(word, lambda word=word: getattr(hvd, word)())
RANK, SIZE = hvd.rank(), hvd.size()
ODD = SIZE - 1  # the rank that differs
for word in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
    call(f"the constant {word}", lambda word=word: getattr(hvd, word))
for word in ("rocm_built", "ProcessSet", "global_process_set"):
    call(f"mpi_ops.{word}", lambda word=word: getattr(hvd.mpi_ops, word) is getattr(hvd, word, 0))
calls(
    bases_of_HorovodInternalError=lambda: [k.__name__ for k in hvd.HorovodInternalError.__mro__],
    compress_none=lambda: hvd.Compression.none.compress(torch.ones(1)),
    compress_fp16=lambda: hvd.Compression.fp16.compress(torch.ones(1))[0],
    compress_fp16_of_integers=lambda: hvd.Compression.fp16.compress(torch.ones(1).int())[0],
    decompress_fp16=lambda: hvd.Compression.fp16.decompress(
        *hvd.Compression.fp16.compress(torch.ones(1).double())
    ),
)
for word in ("compression", "elastic", "functions", "mpi_ops", "optimizer"):
    call(f"hvd.{word} without an import of its own", lambda word=word: type(getattr(hvd, word)))

# ---- allreduce


def own(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    """Return this rank's integers, exact in every dtype."""
    shape = shape or (2, 3)
    flat = torch.arange(int(torch.tensor(shape).prod())) * (RANK + 1) + RANK + 1
    return flat.reshape(shape).to(dtype)


for dtype in (*WHOLE, *REAL, torch.bfloat16, torch.bool):
    short = str(dtype).removeprefix("torch.")
    for word in REDUCTIONS:
        call(
            f"allreduce {short} {word}",
            lambda dtype=dtype, word=word: hvd.allreduce(own(dtype), op=getattr(hvd, word)),
        )
    call(f"allreduce {short} by default", lambda dtype=dtype: hvd.allreduce(own(dtype)))
    call(f"allgather {short}", lambda dtype=dtype: hvd.allgather(own(dtype)))
    call(f"broadcast {short}", lambda dtype=dtype: hvd.broadcast(own(dtype), ODD))
    call(f"alltoall {short}", lambda dtype=dtype: hvd.alltoall(own(dtype, 2 * SIZE)))
    call(f"reducescatter {short}", lambda dtype=dtype: hvd.reducescatter(own(dtype), op=hvd.Sum))

EVEN = torch.tensor([2.0, 4.0])
view = torch.zeros(4)


def in_place(function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = function(tensor, *args, **kwargs)
    return result, tensor, result is tensor


def handle_of(handle: Any) -> Any:
    """Return the results of what scripts do with a handle."""
    return type(handle).__name__, bool(handle), {handle: 1}[handle], hvd.synchronize(handle)


calls(
    allreduce_negative_whole_average=lambda: hvd.allreduce(torch.tensor([-3, 3]) * (RANK + 1)),
    allreduce_average_true=lambda: hvd.allreduce(own(), average=True),
    allreduce_average_false=lambda: hvd.allreduce(own(), average=False),
    allreduce_positional_average=lambda: hvd.allreduce(own(), False),
    allreduce_a_name_in_place_of_average=lambda: hvd.allreduce(own(), "name"),
    allreduce_op_and_average=lambda: hvd.allreduce(own(), average=True, op=hvd.Sum),
    allreduce_unknown_op=lambda: hvd.allreduce(own(), op=17),
    allreduce_prescale=lambda: hvd.allreduce(EVEN, op=hvd.Sum, prescale_factor=0.5),
    allreduce_postscale=lambda: hvd.allreduce(EVEN, op=hvd.Sum, postscale_factor=4),
    allreduce_average_postscale=lambda: hvd.allreduce(EVEN, postscale_factor=4),
    allreduce_integers_prescale=lambda: hvd.allreduce(
        torch.tensor([4, 7]), op=hvd.Sum, prescale_factor=0.5
    ),
    allreduce_integers_postscale=lambda: hvd.allreduce(
        torch.tensor([4, 7]), op=hvd.Sum, postscale_factor=0.75
    ),
    allreduce_min_prescale=lambda: hvd.allreduce(EVEN, op=hvd.Min, prescale_factor=0.5),
    allreduce_scalar=lambda: hvd.allreduce(torch.tensor(RANK + 1.0)),
    allreduce_nothing=lambda: hvd.allreduce(torch.empty(0)),
    allreduce_no_tensor=lambda: hvd.allreduce([1.0, 2.0]),
    allreduce_strided=lambda: hvd.allreduce(own(torch.float32, 3, 2).t()),
    allreduce_fp16=lambda: hvd.allreduce(own(), compression=hvd.Compression.fp16),
    allreduce_keeps_its_input=lambda: (lambda t: (hvd.allreduce(t), t))(own()),
    allreduce_in_place=lambda: in_place(hvd.allreduce_, own()),
    allreduce_in_place_of_a_view=lambda: (in_place(hvd.allreduce_, view[1:3].fill_(RANK)), view),
    allreduce_in_place_strided=lambda: hvd.allreduce_(own(torch.float32, 3, 2).t()),
    allreduce_in_place_of_a_leaf=lambda: hvd.allreduce_(own().requires_grad_()),
    allreduce_in_place_of_a_parameter=lambda: hvd.allreduce_(torch.nn.Parameter(own())),
    allreduce_async=lambda: handle_of(hvd.allreduce_async(own())),
    allreduce_async_in_place=lambda: handle_of(hvd.allreduce_async_(own())),
    allreduce_async_of_bool=lambda: hvd.synchronize(hvd.allreduce_async(own() > 2)),
    grouped_allreduce=lambda: hvd.grouped_allreduce([own(), own(torch.float64, 2)]),
    grouped_allreduce_of_a_tuple=lambda: hvd.grouped_allreduce((own(), EVEN)),
    grouped_allreduce_of_nothing=lambda: hvd.grouped_allreduce([]),
    grouped_allreduce_of_two_dtypes=lambda: hvd.grouped_allreduce([own(), own(torch.int32)]),
    grouped_allreduce_in_place=lambda: in_place(hvd.grouped_allreduce_, [own(), own()]),
    grouped_allreduce_async=lambda: handle_of(hvd.grouped_allreduce_async([own(), EVEN])),
    grouped_allreduce_async_in_place=lambda: handle_of(
        hvd.grouped_allreduce_async_([own(), own()])
    ),
    grouped_allreduce_op_and_average=lambda: hvd.grouped_allreduce(
        [own()], average=True, op=hvd.Sum
    ),
    grouped_allreduce_fp16=lambda: hvd.grouped_allreduce(
        [own(), EVEN], compression=hvd.Compression.fp16
    ),
    adasum_of_equals=lambda: hvd.allreduce(torch.ones(4), op=hvd.Adasum),
    adasum_of_strangers=lambda: hvd.allreduce(torch.eye(SIZE)[RANK], op=hvd.Adasum),
)


def sparse(rows: list[int], value: float) -> torch.Tensor:
    values = torch.full((len(rows), 2), value)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (4, 2))


def sparse_result(op: int) -> Any:
    handle = hvd.sparse_allreduce_async(sparse([RANK, 3], RANK + 1.0), "sparse", op)
    result = handle()
    return callable(handle), result, result.is_coalesced()


calls(
    sparse_allreduce_average=lambda: sparse_result(hvd.Average),
    sparse_allreduce_sum=lambda: sparse_result(hvd.Sum),
    sparse_allreduce_max=lambda: sparse_result(hvd.Max),
    sparse_allreduce_of_dense=lambda: hvd.sparse_allreduce_async(own(), "dense", hvd.Sum)(),
    allreduce_of_sparse=lambda: hvd.allreduce(sparse([0], 1.0)),
)

# ---- allgather, broadcast, alltoall, reducescatter

RAGGED = torch.full((RANK + 1, 2), float(RANK))
calls(
    allgather_ragged=lambda: hvd.allgather(RAGGED),
    allgather_nothing_from_one=lambda: hvd.allgather(torch.full((RANK, 2), float(RANK))),
    allgather_nothing=lambda: hvd.allgather(torch.empty(0, 2)),
    allgather_scalar=lambda: hvd.allgather(torch.tensor(1.0)),
    allgather_strided=lambda: hvd.allgather(own(torch.float32, 3, 2).t()),
    allgather_async=lambda: handle_of(hvd.allgather_async(RAGGED)),
    grouped_allgather=lambda: hvd.grouped_allgather([RAGGED, own()]),
    grouped_allgather_async=lambda: handle_of(hvd.grouped_allgather_async([RAGGED, own()])),
    broadcast=lambda: hvd.broadcast(own(), 0),
    broadcast_keeps_its_input=lambda: (lambda t: (hvd.broadcast(t, 0), t))(own()),
    broadcast_scalar=lambda: hvd.broadcast(torch.tensor(RANK), ODD),
    broadcast_in_place=lambda: in_place(hvd.broadcast_, own(), 0),
    broadcast_in_place_of_a_leaf=lambda: hvd.broadcast_(own().requires_grad_(), 0),
    broadcast_async=lambda: handle_of(hvd.broadcast_async(own(), 0)),
    broadcast_async_in_place=lambda: handle_of(hvd.broadcast_async_(own(), 0)),
    broadcast_of_no_rank=lambda: hvd.broadcast(own(), SIZE),
    broadcast_of_a_negative_rank=lambda: hvd.broadcast(own(), -1),
    alltoall=lambda: hvd.alltoall(own(torch.float32, 2 * SIZE)),
    alltoall_splits=lambda: hvd.alltoall(
        torch.arange(2.0 * SIZE), splits=torch.tensor([2] * SIZE, dtype=torch.int32)
    ),
    alltoall_uneven=lambda: hvd.alltoall(
        torch.full((SIZE * (RANK + 1),), RANK), splits=[RANK + 1] * SIZE
    ),
    alltoall_to_one=lambda: hvd.alltoall(torch.ones(2), splits=[2] + [0] * (SIZE - 1)),
    alltoall_indivisible=lambda: hvd.alltoall(torch.ones(2 * SIZE + 1)),
    alltoall_splits_too_large=lambda: hvd.alltoall(torch.ones(1), splits=[5] * SIZE),
    alltoall_splits_too_small=lambda: hvd.alltoall(torch.ones(2 * SIZE), splits=[1] * SIZE),
    alltoall_splits_too_many=lambda: hvd.alltoall(torch.ones(SIZE + 1), splits=[1] * (SIZE + 1)),
    alltoall_splits_int64=lambda: hvd.alltoall(
        torch.ones(SIZE), splits=torch.ones(SIZE, dtype=torch.int64)
    ),
    alltoall_async=lambda: handle_of(hvd.alltoall_async(own(torch.float32, 2 * SIZE))),
    alltoall_async_splits=lambda: handle_of(hvd.alltoall_async(torch.ones(SIZE), [1] * SIZE)),
    reducescatter=lambda: hvd.reducescatter(own(torch.float32, 2 * SIZE, 2)),
    reducescatter_uneven=lambda: hvd.reducescatter(own(torch.float32, 2 * SIZE + 1), op=hvd.Sum),
    reducescatter_fewer_rows=lambda: hvd.reducescatter(own(torch.float32, 1), op=hvd.Sum),
    reducescatter_positional=lambda: hvd.reducescatter(
        own(), "a name", hvd.Compression.fp16, hvd.Sum
    ),
    reducescatter_scaled=lambda: hvd.reducescatter(
        own(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
    ),
    reducescatter_min=lambda: hvd.reducescatter(own(), op=hvd.Min),
    reducescatter_adasum=lambda: hvd.reducescatter(own(), op=hvd.Adasum),
    reducescatter_scalar=lambda: hvd.reducescatter(torch.tensor(1.0)),
    reducescatter_async=lambda: handle_of(hvd.reducescatter_async(own(), "async", hvd.Sum)),
    grouped_reducescatter=lambda: hvd.grouped_reducescatter([own(), own()], op=hvd.Sum),
    grouped_reducescatter_async=lambda: handle_of(hvd.grouped_reducescatter_async([own(), EVEN])),
)

# ---- autograd


def gradient(function: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    leaf = tensor.clone().requires_grad_()
    result = function(leaf)
    results = result if isinstance(result, (list, tuple)) else [result]
    total = sum(
        (r * torch.arange(1.0, r.numel() + 1).reshape(r.shape) * (RANK + 1)).sum()
        for r in results
        if r.is_floating_point()
    )
    total.backward()
    return leaf.grad


calls(
    gradient_of_allreduce=lambda: gradient(hvd.allreduce, own()),
    gradient_of_allreduce_sum=lambda: gradient(lambda t: hvd.allreduce(t, op=hvd.Sum), own()),
    gradient_of_allreduce_scaled=lambda: gradient(
        lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=2.0, postscale_factor=4.0), own()
    ),
    gradient_of_allreduce_min=lambda: gradient(lambda t: hvd.allreduce(t, op=hvd.Min), own()),
    gradient_of_grouped_allreduce=lambda: gradient(
        lambda t: hvd.grouped_allreduce([t, 2 * t]), own()
    ),
    gradient_of_allgather=lambda: gradient(hvd.allgather, RAGGED),
    gradient_of_grouped_allgather=lambda: gradient(
        lambda t: hvd.grouped_allgather([t, 2 * t]), RAGGED
    ),
    gradient_of_broadcast=lambda: gradient(lambda t: hvd.broadcast(t, 0), own()),
    gradient_of_alltoall=lambda: gradient(hvd.alltoall, own(torch.float32, 2 * SIZE)),
    gradient_of_alltoall_splits=lambda: gradient(
        lambda t: hvd.alltoall(t, splits=[RANK + 1] * SIZE), torch.ones(SIZE * (RANK + 1))
    ),
    gradient_of_reducescatter=lambda: gradient(
        lambda t: hvd.reducescatter(t), own(torch.float32, 2 * SIZE)
    ),
    gradient_of_reducescatter_sum=lambda: gradient(
        lambda t: hvd.reducescatter(t, op=hvd.Sum), own(torch.float32, 2 * SIZE)
    ),
    gradient_of_grouped_reducescatter=lambda: gradient(
        lambda t: hvd.grouped_reducescatter([t, 2 * t], op=hvd.Sum), own(torch.float32, 2 * SIZE)
    ),
)

# ---- handles and names


def twice() -> Any:
    handle = hvd.allreduce_async(own())
    return type(hvd.synchronize(handle)).__name__, hvd.synchronize(handle)


def other_order() -> Any:
    names = ["left", "right"]
    handles = {
        name: hvd.allreduce_async(torch.full((2,), float(len(name))), name=name)
        for name in (names if RANK != ODD else reversed(names))
    }
    return [hvd.synchronize(handles[name]) for name in names]


def poll_until_done() -> Any:
    handle = hvd.allreduce_async(own())
    while not hvd.poll(handle):
        pass
    return type(hvd.poll(handle)).__name__, hvd.synchronize(handle)


calls(
    synchronize_twice=twice,
    synchronize_an_unknown_handle=lambda: hvd.synchronize(123456),
    poll=poll_until_done,
    poll_an_unknown_handle=lambda: hvd.poll(123456),
    ranks_may_differ_in_order=other_order,
)


# ---- mismatches: an error on every rank, and the job continues

ALIKE = RANK != ODD
calls(
    mismatch_of_shape=lambda: hvd.allreduce(torch.ones(2 if ALIKE else 3), name="m1"),
    mismatch_of_rank=lambda: hvd.allreduce(torch.ones((2, 3) if ALIKE else 6), name="m2"),
    mismatch_of_dtype=lambda: hvd.allreduce(torch.ones(2).to(REAL[ALIKE]), name="m3"),
    mismatch_of_op=lambda: hvd.allreduce(ones, name="m4", op=hvd.Sum if ALIKE else hvd.Min),
    mismatch_of_average=lambda: hvd.allreduce(ones, name="m5", average=ALIKE),
    mismatch_of_prescale=lambda: hvd.allreduce(ones, name="m6", prescale_factor=1.0 + ALIKE),
    mismatch_of_postscale=lambda: hvd.allreduce(ones, name="m7", postscale_factor=1.0 + ALIKE),
    mismatch_of_broadcast_shape=lambda: hvd.broadcast(torch.ones(2 + ALIKE), 0, name="m8"),
    mismatch_of_broadcast_root=lambda: hvd.broadcast(ones, int(ALIKE), name="m9"),
    mismatch_of_broadcast_dtype=lambda: hvd.broadcast(ones.to(REAL[ALIKE]), 0, name="m10"),
    mismatch_of_allgather_columns=lambda: hvd.allgather(torch.ones(2, 2 + ALIKE), name="m11"),
    mismatch_of_allgather_rank=lambda: hvd.allgather(
        torch.ones((2, 1) if ALIKE else 2), name="m12"
    ),
    mismatch_of_allgather_dtype=lambda: hvd.allgather(ones.to(REAL[ALIKE]), name="m13"),
    mismatch_of_alltoall_columns=lambda: hvd.alltoall(torch.ones(SIZE, 2 + ALIKE), name="m14"),
    mismatch_of_reducescatter_shape=lambda: hvd.reducescatter(torch.ones(4 + ALIKE), name="m15"),
    mismatch_of_synchronize=lambda: hvd.synchronize(
        hvd.allreduce_async(torch.ones(2 + ALIKE), name="m16")
    ),
    a_name_serves_again_after_a_mismatch=lambda: hvd.allreduce(ones, name="m1"),
    and_with_another_shape=lambda: hvd.allreduce(torch.ones(5), name="m1"),
)


# ---- functions


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))


def trained(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    for p in model.parameters():
        p.grad = torch.full_like(p, RANK + 1.0)
    optimizer.step()
    return optimizer


def broadcast_state(kind: type[torch.optim.Optimizer], only_root: bool, **options: Any) -> Any:
    model = model_of(0)
    optimizer = kind(model.parameters(), **{**options, "lr": 0.5 + RANK})
    if RANK == 0 or not only_root:
        trained(optimizer, model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state_dict()
    group = {name: value for name, value in state["param_groups"][0].items() if name != "params"}
    return [
        dict(sorted(group.items())),
        {k: dict(sorted(v.items())) for k, v in state["state"].items()},
    ]


def parameters_after(params: Callable[[torch.nn.Module], Any]) -> Any:
    model = model_of(RANK)
    result = hvd.broadcast_parameters(params(model), root_rank=0)
    same = torch.equal(model[0].weight, model_of(0)[0].weight)
    return result, same


calls(
    broadcast_parameters_of_a_state_dict=lambda: parameters_after(lambda m: m.state_dict()),
    broadcast_parameters_of_a_dict=lambda: parameters_after(lambda m: dict(m.named_parameters())),
    broadcast_parameters_of_pairs=lambda: parameters_after(lambda m: list(m.named_parameters())),
    broadcast_parameters_of_tensors=lambda: parameters_after(lambda m: list(m.parameters())),
    broadcast_parameters_of_a_generator=lambda: parameters_after(lambda m: m.named_parameters()),
    broadcast_parameters_of_a_tuple=lambda: parameters_after(lambda m: tuple(m.parameters())),
    broadcast_parameters_of_a_number=lambda: hvd.broadcast_parameters(1, 0),
    broadcast_parameters_of_no_tensors=lambda: hvd.broadcast_parameters({"a": 1}, 0),
    broadcast_state_of_SGD=lambda: broadcast_state(torch.optim.SGD, False, momentum=0.9),
    broadcast_state_of_SGD_to_empty=lambda: broadcast_state(torch.optim.SGD, True, momentum=0.9),
    broadcast_state_of_Adam=lambda: broadcast_state(torch.optim.Adam, False),
    broadcast_state_of_Adam_to_empty=lambda: broadcast_state(torch.optim.Adam, True),
    broadcast_state_of_LBFGS=lambda: hvd.broadcast_optimizer_state(
        torch.optim.LBFGS(model_of(0).parameters()), 0
    ),
    broadcast_object=lambda: hvd.broadcast_object({"rank": RANK, "list": [1, None, "a"]}, 0),
    broadcast_object_default_root=lambda: hvd.broadcast_object((RANK, 1.5)),
    broadcast_object_named=lambda: hvd.broadcast_object([RANK], ODD, name="an object"),
    broadcast_object_of_tensors=lambda: hvd.broadcast_object({"t": torch.ones(2) * RANK}, ODD),
    broadcast_object_of_a_set=lambda: type(hvd.broadcast_object({1, 2}, 0)),
    allgather_object=lambda: hvd.allgather_object({"rank": RANK, "more": "x" * RANK}),
    allgather_object_named=lambda: hvd.allgather_object(RANK, name="objects"),
)


# ---- DistributedOptimizer


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    return model


def distributed(model: torch.nn.Module, **options: Any) -> Any:
    options = {"named_parameters": model.named_parameters()} | options
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **options)


def loss(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.tensor([[1.0 + RANK, 2.0]])).sum()


def steps(count: int = 1, passes: int = 1, **options: Any) -> Any:
    model = linear()
    optimizer = distributed(model, **options)
    for _ in range(count):
        for _ in range(passes):
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def clipped() -> Any:
    model = linear()
    optimizer = distributed(model)
    loss(model).backward()
    optimizer.synchronize()
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    return gradients, list(model.parameters())


def step_after_synchronize() -> Any:
    model = linear()
    optimizer = distributed(model)
    loss(model).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [w.category.__name__ for w in caught if "synchronize" in str(w.message)]


def zero_grad_too_early() -> Any:
    model = linear()
    optimizer = distributed(model)
    loss(model).backward()
    try:
        optimizer.zero_grad()
    finally:
        optimizer.synchronize()


def too_many_passes() -> Any:
    model = linear()
    optimizer = distributed(model)
    loss(model).backward()
    try:
        loss(model).backward()
    finally:
        optimizer.synchronize()


def unused_parameter() -> Any:
    model = torch.nn.ModuleDict({"used": linear(), "unused": linear()})
    optimizer = distributed(model)
    loss(model["used"]).backward()
    optimizer.step()
    unused = [p.grad for p in model["unused"].parameters()]
    return list(model["used"].parameters()), unused


def sparse_embedding(**options: Any) -> Any:
    model = torch.nn.Embedding(3, 2, sparse=True)
    torch.nn.init.zeros_(model.weight)
    optimizer = distributed(model, **options)
    model(torch.tensor([RANK, 2])).sum().backward()
    optimizer.step()
    return model.weight


def attributes() -> Any:
    model = linear()
    optimizer = distributed(model, backward_passes_per_step=2)
    return [
        type(optimizer).__name__,
        isinstance(optimizer, torch.optim.SGD),
        sorted(optimizer._parameter_names.values()),
        optimizer.op,
        optimizer.gradient_predivide_factor,
        optimizer.backward_passes_per_step,
        optimizer.process_set.process_set_id,
        optimizer._compression.__name__,
        len(optimizer._requires_update),
        len(optimizer._handles),
        list(optimizer._allreduce_delay.values()),
    ]


def with_closure() -> Any:
    model = linear()
    optimizer = distributed(model)

    loss(model).backward()
    return optimizer.step(lambda: loss(model))


class Halving(importlib.import_module(f"{FACE}.compression").Compressor):
    """A user's compressor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Any:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * 2


def scheduled() -> Any:
    model = linear()
    optimizer = distributed(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return optimizer.param_groups[0]["lr"], list(model.parameters())


def loaded() -> Any:
    model = linear()
    optimizer = distributed(model)
    loss(model).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.25
    result = optimizer.load_state_dict(state)
    return result, optimizer.param_groups[0]["lr"], sorted(state)


twin = linear()
calls(
    optimizer=lambda: steps(),
    optimizer_two_steps=lambda: steps(2),
    optimizer_sum=lambda: steps(op=hvd.Sum),
    optimizer_fp16=lambda: steps(compression=hvd.Compression.fp16),
    optimizer_with_a_users_compressor=lambda: steps(compression=Halving),
    optimizer_predivide=lambda: steps(gradient_predivide_factor=float(SIZE)),
    optimizer_accumulates=lambda: steps(passes=2, backward_passes_per_step=2),
    optimizer_groups=lambda: steps(groups=1),
    optimizer_num_groups=lambda: steps(num_groups=1),
    optimizer_groups_of_parameters=lambda: (
        lambda m: distributed(m, groups=[list(m.parameters())])
    )(linear()),
    optimizer_without_names=lambda: steps(named_parameters=None),
    optimizer_adasum=lambda: steps(op=hvd.Adasum),
    optimizer_clips=clipped,
    optimizer_steps_after_synchronize=step_after_synchronize,
    optimizer_zero_grad_too_early=zero_grad_too_early,
    optimizer_too_many_passes=too_many_passes,
    optimizer_unused_parameter=unused_parameter,
    optimizer_sparse=lambda: sparse_embedding(),
    optimizer_sparse_as_dense=lambda: sparse_embedding(sparse_as_dense=True),
    optimizer_attributes=attributes,
    optimizer_closure=with_closure,
    optimizer_scheduled=scheduled,
    optimizer_loads=loaded,
    optimizer_zero_grad_set_to_none=lambda: distributed(linear()).zero_grad(set_to_none=True),
    optimizer_set_backward_passes=lambda: distributed(linear()).set_backward_passes_per_step(2),
    optimizer_no_passes=lambda: distributed(linear(), backward_passes_per_step=0),
    optimizer_predivide_of_a_sum=lambda: distributed(
        linear(), op=hvd.Sum, gradient_predivide_factor=2.0
    ),
    optimizer_min=lambda: distributed(linear(), op=hvd.Min),
    optimizer_no_pairs=lambda: distributed(linear(), named_parameters=[1, 2]),
    optimizer_same_name_twice=lambda: distributed(
        twin, named_parameters=[("a", twin.weight), ("a", twin.bias)]
    ),
    optimizer_a_parameter_unnamed=lambda: distributed(twin, named_parameters=[("a", twin.weight)]),
    optimizer_groups_of_a_word=lambda: distributed(linear(), groups="all"),
    optimizer_parameter_in_two_groups=lambda: (
        lambda m: distributed(m, groups=[[m.weight], [m.weight, m.bias]])
    )(linear()),
    optimizer_negative_groups=lambda: distributed(linear(), groups=-1),
    optimizer_adasum_skip_synchronize=lambda: (
        distributed(linear(), op=hvd.Adasum).skip_synchronize().__enter__()
    ),
    allreduce_after_optimizers=lambda: hvd.allreduce(own()),
)


# ---- SyncBatchNorm, elastic


def elastic_state() -> Any:
    model = linear()
    state = hvd.elastic.TorchState(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), epoch=RANK
    )
    state.sync()
    synced = state.epoch
    state.epoch = 7
    state.restore()
    restored = state.epoch
    state.epoch = 9
    state.commit()
    state.epoch = 11
    state.restore()
    return synced, restored, state.epoch, state.model is model


def sampler() -> Any:
    found = hvd.elastic.ElasticSampler(list(range(10)), shuffle=False)
    first = list(found)
    found.record_batch(0, 2)
    found.reset()
    return first, len(found), list(found), found.state_dict()


runs: list[int] = []


@(hvd.elastic.run if hasattr(hvd, "elastic") else lambda function: function)
def elastic_loop(state: Any) -> Any:
    runs.append(1)
    if len(runs) == 1:
        raise hvd.HorovodInternalError("once")
    return state.epoch


calls(
    SyncBatchNorm_on_the_cpu=lambda: hvd.SyncBatchNorm(2)(torch.ones(2, 2)),
    SyncBatchNorm_is_a=lambda: [k.__name__ for k in hvd.SyncBatchNorm.__mro__[1:3]],
    elastic_state=elastic_state,
    elastic_sampler=sampler,
    HostsUpdatedInterrupt=lambda: (
        importlib.import_module(
            FACE.replace("horovod.torch", "horovod.common.exceptions").replace(
                "gtopk.torch", "gtopk.exceptions"
            )
        )
        .HostsUpdatedInterrupt(True)
        .skip_sync
    ),
)

# ---- ranks that make different numbers of calls: from here on all calls have names, as Horovod
# numbers unnamed ones by all the calls that a rank has made before


def same_name_twice() -> Any:
    first = hvd.allreduce_async(own(), name="twin") if RANK != ODD else None
    try:
        second = hvd.allreduce_async(own(), name="twin") if RANK != ODD else None
        refused = None
    except ValueError as error:
        second, refused = None, type(error).__name__
    hvd.barrier()  # while it is pending
    first = first or hvd.allreduce_async(own(), name="twin")
    del second
    return hvd.synchronize(first), refused if RANK != ODD else "ValueError"


call("same name twice in flight", same_name_twice)


# ---- process sets


def dynamic_set() -> Any:
    alone = hvd.add_process_set([ODD])
    return_values = [type(alone).__name__, alone.ranks, alone.process_set_id, alone.included()]
    return_values += [alone.size()]
    if alone.included():
        return_values.append(alone.rank())
        return_values.append(hvd.allreduce(own(), name="a", op=hvd.Sum, process_set=alone))
        return_values.append(hvd.broadcast(own(), ODD, process_set=alone))
        return_values.append(hvd.allgather(own(), process_set=alone))
        return_values.append(hvd.barrier(process_set=alone))
    return_values.append(hvd.remove_process_set(alone))
    return [*return_values, alone.process_set_id, alone.ranks, alone.size(), alone.included()]


def outside() -> Any:
    alone = hvd.add_process_set(hvd.ProcessSet([ODD]))
    found = []
    for attempt in (
        lambda: alone.rank(),
        lambda: hvd.allreduce(ones, name="outside", process_set=alone),
        lambda: hvd.allgather(ones, name="outside", process_set=alone),
        lambda: hvd.broadcast(ones, ODD, process_set=alone),
        lambda: hvd.barrier(process_set=alone),
        lambda: hvd.broadcast_object(1, ODD, process_set=alone),
    ):
        try:
            attempt()
            found.append("went well")
        except Exception as error:
            found.append(type(error).__name__)
    hvd.barrier()
    hvd.remove_process_set(alone)
    return found


unregistered = call("a set not registered", lambda: hvd.ProcessSet([0]))
calls(
    its_ranks=lambda: unregistered.ranks,
    its_id=lambda: unregistered.process_set_id,
    its_size=lambda: unregistered.size(),
    its_rank=lambda: unregistered.rank(),
    included_in_it=lambda: unregistered.included(),
    allreduce_on_it=lambda: hvd.allreduce(ones, process_set=unregistered),
    a_set_of_a_range=lambda: hvd.ProcessSet(range(SIZE)).ranks,
    a_set_out_of_order=lambda: hvd.ProcessSet([1, 0]).ranks,
    a_set_of_words=lambda: hvd.ProcessSet(["a"]),
    a_set_of_a_number=lambda: hvd.ProcessSet(1),
    a_set_of_nobody=lambda: hvd.ProcessSet([]).ranks,
    a_set_with_a_rank_twice=lambda: hvd.ProcessSet([0, 0]).ranks,
    the_global_set=lambda: (
        hvd.global_process_set.process_set_id,
        hvd.global_process_set.ranks,
        hvd.global_process_set.size(),
        hvd.global_process_set.rank(),
        hvd.global_process_set.included(),
    ),
    a_dynamic_set=dynamic_set,
    a_set_from_outside=outside,
    the_global_set_again=lambda: hvd.add_process_set(range(SIZE)),
    remove_the_global_set=lambda: hvd.remove_process_set(hvd.global_process_set),
    remove_an_unregistered_set=lambda: hvd.remove_process_set(hvd.ProcessSet([0])),
    allreduce_after_process_sets=lambda: hvd.allreduce(own(), name="after sets"),
)


# ---- join and barrier


def joins_early() -> Any:
    """The last rank joins at once; the others do two more allreduces, which is all Horovod can."""
    results = []
    if ALIKE:
        results.append(hvd.allreduce(torch.ones(2), name="while joined"))
        results.append(hvd.allreduce(torch.ones(2), name="while joined, sum", op=hvd.Sum))
        for refused in (
            lambda: hvd.allgather(ones, name="gather while joined"),
            lambda: hvd.broadcast(ones, 0, name="broadcast while joined"),
            lambda: hvd.alltoall(torch.ones(SIZE), name="alltoall while joined"),
            lambda: hvd.reducescatter(ones, name="reducescatter while joined"),
        ):
            try:
                results.append(refused())
            except Exception as error:
                results.append(type(error).__name__)
    last = hvd.join()
    return results, type(last).__name__, last in range(SIZE)


calls(
    barrier=lambda: hvd.barrier(),
    join=joins_early,
    allreduce_after_join=lambda: hvd.allreduce(own(), name="after join"),
)


# ---- signatures


def signature(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={describe(p.default)}" for p in parameters
    )


PATHS = ("", "mpi_ops", "compression", "functions", "optimizer", "elastic", "sync_batch_norm")
for path in PATHS:
    module = importlib.import_module(f"{FACE}.{path}".rstrip("."))
    for word, value in sorted(vars(module).items()):
        home = getattr(value, "__module__", "") or ""
        public = home.startswith(("horovod", "gtopk")) or isinstance(value, int)
        # Names that Horovod's other modules import are not part of their API.
        borrowed = path in PATHS[2:] and FACE == "horovod.torch" and home != module.__name__
        if word.startswith("_") or isinstance(value, types.ModuleType) or borrowed or not public:
            continue
        title = f"signature of {path}.{word}".replace(" .", " ")
        call(title, lambda value=value: signature(value) if callable(value) else type(value))

# ---- after shutdown

calls(
    shutdown=lambda: hvd.shutdown(),
    is_initialized_after_shutdown=lambda: hvd.is_initialized(),
    rank_after_shutdown=lambda: hvd.rank(),
    allreduce_after_shutdown=lambda: hvd.allreduce(ones),
    shutdown_again=lambda: hvd.shutdown(),
)

print(f"{RANK} {json.dumps(outcomes)}\n", end="", flush=True)
