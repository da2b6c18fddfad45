"""Collectives on tensors with lazy conjugation or negation, or unusual strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gtopk.torch as hvd


def results_of(collective, tensor):
    """Return a tensor after a collective, or after one in place."""
    result = collective(tensor)
    return [each.tolist() for each in (result if isinstance(result, tuple) else [result])]


COLLECTIVES = [
    hvd.allgather,
    hvd.allreduce,
    hvd.reducescatter,
    lambda t: hvd.alltoall(t, [len(t), *[0] * (hvd.size() - 1)]),
    lambda t: hvd.broadcast(t, 1),
    lambda t: tuple(hvd.grouped_allgather([t, t])),
    lambda t: tuple(hvd.grouped_reducescatter([t, t])),
]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_negated_view_gives_the_result_of_a_plain_tensor(ranks, collective):
    """For example the imaginary part of a conjugate, which shares the number's memory."""

    def program(rank):
        strided = torch.complex(torch.ones(2), torch.tensor([1.0 + rank, 2.0])).conj().imag
        side_by_side = torch._neg_view(torch.tensor([1.0 + rank, 2.0]))
        plain = torch.tensor([-1.0 - rank, -2.0])
        views = (strided, side_by_side)
        assert all(view.is_neg() for view in views)
        return [results_of(collective, each) for each in (*views, plain)]

    for strided, side_by_side, plain in ranks(2, program):
        assert strided == side_by_side == plain


@pytest.mark.parametrize(
    "collective", [lambda t: hvd.allreduce_(t, op=hvd.Sum), lambda t: hvd.broadcast_(t, 1)]
)
def test_in_place_collective_on_a_negated_view_stores_the_result(ranks, collective):
    def program(rank):
        memory = torch.tensor([1.0 + rank, 2.0])
        plain = -memory
        view = torch._neg_view(memory)
        assert collective(view) is view
        assert view.tolist() == (-memory).tolist() == collective(plain).tolist()

    ranks(2, program)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("elements", [0, 1])
def test_tensor_of_at_most_one_element_may_have_any_stride(ranks, collective, dtype, elements):
    """Torch calls them contiguous, but refuses views of them with other dtypes."""

    def program(rank):
        odd = torch.full((3, 4), rank).to(dtype)[:elements, ::4]
        even = odd.clone(memory_format=torch.contiguous_format).reshape(elements, 1)
        assert odd.stride() != even.stride()
        assert results_of(collective, odd) == results_of(collective, even)

    ranks(2, program)


TAKES_A_TENSOR = {
    "allreduce": (),
    "allreduce_": (),
    "allreduce_async": (),
    "allreduce_async_": (),
    "allgather": (),
    "allgather_async": (),
    "broadcast": (0,),
    "broadcast_": (0,),
    "broadcast_async": (0,),
    "broadcast_async_": (0,),
    "alltoall": (),
    "alltoall_async": (),
    "reducescatter": (),
    "reducescatter_async": (),
    "sparse_allreduce_async": ("name", hvd.Sum),
}
TAKES_TENSORS = [name for name in hvd.__all__ if name.startswith("grouped_")]


def test_tables_here_list_every_operation_on_tensors():
    words = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
    of_objects = {"broadcast_parameters", "broadcast_optimizer_state"}
    found = {
        name
        for name in hvd.__all__
        if any(word in name for word in words) and "object" not in name and name not in of_objects
    }
    assert found == {*TAKES_A_TENSOR, *TAKES_TENSORS}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1.5, "float"),
        ([1.0, 2.0], "list"),
        (np.ones(2), "numpy.ndarray"),
        (None, "NoneType"),
        ("one", "str"),
    ],
)
@pytest.mark.parametrize("name", TAKES_A_TENSOR)
def test_error_names_the_type_of_an_argument_that_is_no_tensor(ranks, name, value, kind):
    def program(rank):
        with pytest.raises(TypeError, match=f"^{name} needs a torch tensor, got {kind}; "):
            getattr(hvd, name)(value, *TAKES_A_TENSOR[name])
        hvd.barrier()

    ranks(2, program)


@pytest.mark.parametrize("name", TAKES_TENSORS)
def test_grouped_operation_takes_only_iterables_of_tensors(ranks, name):
    one = torch.ones(2)
    needs = f"^{name} needs a list of torch tensors, "

    def program(rank):
        operation = getattr(hvd, name)
        for value, got in (
            (one, "got torch.Tensor"),
            (1.5, "got float"),
            ([one, 2.0], "but number 1 is float"),
            ([np.ones(2)], "but number 0 is numpy.ndarray"),
        ):
            with pytest.raises(TypeError, match=needs + got):
                operation(value)
        result = operation(each for each in (one.clone(), one.clone()))
        outputs = hvd.synchronize(result) if isinstance(result, int) else result
        assert len(outputs) == 2

    ranks(2, program)


TAKES_DENSE = [name for name in TAKES_A_TENSOR if not name.startswith("sparse")]
UNFIT = {
    "is of layout torch.sparse_coo": lambda: torch.eye(2).to_sparse(),
    "is of layout torch.sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "is quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "is nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
    "is on the meta device": lambda: torch.ones(2, device="meta"),
    "has no size yet": torch.nn.UninitializedParameter,
}


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*quanti"
)
@pytest.mark.parametrize("why", UNFIT)
@pytest.mark.parametrize("name", [*TAKES_DENSE, *TAKES_TENSORS])
def test_error_says_why_a_tensor_without_dense_memory_is_refused(ranks, name, why):
    tensor = UNFIT[why]()
    arguments = [[tensor]] if name in TAKES_TENSORS else [tensor, *TAKES_A_TENSOR[name]]

    def program(rank):
        with pytest.raises(
            ValueError, match=rf"^Tensor type .* is not supported by {name}: it {why}"
        ):
            getattr(hvd, name)(*arguments)
        hvd.barrier()

    ranks(2, program)


def test_sparse_tensor_of_unsupported_dtype_leaves_nothing_in_flight(ranks):
    tensor = torch.eye(2, dtype=torch.complex64).to_sparse()

    def program(rank):
        before = hvd.allreduce_async(torch.ones(1))
        with pytest.raises(ValueError, match=r"^Tensor type .* is not supported\.$"):
            hvd.sparse_allreduce_async(tensor, "x", hvd.Sum)
        after = hvd.allreduce_async(torch.ones(1))
        assert after == before + 1  # no handle between them
        hvd.synchronize(before), hvd.synchronize(after)

    ranks(1, program)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_uninitialized_parameter_is_refused_before_compression(ranks, compression):
    def program(rank):
        with pytest.raises(ValueError, match="it has no size yet"):
            hvd.allreduce(torch.nn.UninitializedParameter(), compression=compression)

    ranks(2, program)


IN_PLACE = {
    "allreduce_": lambda t: hvd.allreduce_(t, op=hvd.Sum),
    "allreduce_async_": lambda t: hvd.synchronize(hvd.allreduce_async_(t, op=hvd.Max)),
    "Adasum": lambda t: hvd.allreduce_(t, op=hvd.Adasum),
    "grouped_allreduce_": lambda t: hvd.grouped_allreduce_([t], op=hvd.Sum),
    "broadcast_": lambda t: hvd.broadcast_(t, 1),
    "broadcast_parameters": lambda t: hvd.broadcast_parameters({"t": t}, 1),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autograd_detects_tensors_that_a_collective_overwrote(ranks, name, dtype):
    """Otherwise autograd silently computes a gradient from other values than the loss."""

    def program(rank):
        weight = torch.ones(3, dtype=dtype, requires_grad=True)
        factor = torch.full((3,), 1.0 + rank, dtype=dtype)
        loss = (weight * factor).sum()
        IN_PLACE[name](factor)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    ranks(2, program)
