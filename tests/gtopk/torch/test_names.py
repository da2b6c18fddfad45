"""The names, import paths and signatures of Horovod that scripts rely on."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import gtopk.torch as hvd

ROOT = Path(__file__).parent.parent.parent.parent

# All functions of horovod.torch 0.28.1, with their parameters and defaults. NONE is
# Compression.none, WORLD global_process_set.
SIGNATURES = {
    "init": "(comm=None, process_sets=None)",
    "shutdown": "()",
    "is_initialized": "()",
    "size": "()",
    "rank": "()",
    "local_size": "()",
    "local_rank": "()",
    "cross_size": "()",
    "cross_rank": "()",
    "mpi_threads_supported": "()",
    "mpi_enabled": "()",
    "gloo_enabled": "()",
    "mpi_built": "()",
    "gloo_built": "()",
    "ddl_built": "()",
    "ccl_built": "()",
    "cuda_built": "()",
    "rocm_built": "()",
    "nccl_built": "()",
    "start_timeline": "(file_path, mark_cycles=False)",
    "stop_timeline": "()",
    "allreduce": "(tensor, average=None, name=None, compression=NONE, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD)",
    "allreduce_": "(tensor, average=None, name=None, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD)",
    "allreduce_async": "(tensor, average=None, name=None, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD)",
    "allreduce_async_": "(tensor, average=None, name=None, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD)",
    "grouped_allreduce": "(tensors, average=None, name=None, compression=NONE, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD)",
    "grouped_allreduce_": "(tensors, average=None, name=None, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD)",
    "grouped_allreduce_async": "(tensors, average=None, name=None, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD)",
    "grouped_allreduce_async_": "(tensors, average=None, name=None, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD)",
    "sparse_allreduce_async": "(tensor, name, op, process_set=WORLD)",
    "allgather": "(tensor, name=None, process_set=WORLD)",
    "allgather_async": "(tensor, name=None, process_set=WORLD)",
    "grouped_allgather": "(tensors, name=None, process_set=WORLD)",
    "grouped_allgather_async": "(tensors, name=None, process_set=WORLD)",
    "broadcast": "(tensor, root_rank, name=None, process_set=WORLD)",
    "broadcast_": "(tensor, root_rank, name=None, process_set=WORLD)",
    "broadcast_async": "(tensor, root_rank, name=None, process_set=WORLD)",
    "broadcast_async_": "(tensor, root_rank, name=None, process_set=WORLD)",
    "alltoall": "(tensor, splits=None, name=None, process_set=WORLD)",
    "alltoall_async": "(tensor, splits=None, name=None, process_set=WORLD)",
    "reducescatter": "(tensor, name=None, compression=NONE, op=0, process_set=WORLD, "
    "prescale_factor=1.0, postscale_factor=1.0)",
    "reducescatter_async": "(tensor, name=None, op=0, process_set=WORLD, "
    "prescale_factor=1.0, postscale_factor=1.0)",
    "grouped_reducescatter": "(tensors, name=None, compression=NONE, op=0, process_set=WORLD, "
    "prescale_factor=1.0, postscale_factor=1.0)",
    "grouped_reducescatter_async": "(tensors, name=None, op=0, process_set=WORLD, "
    "prescale_factor=1.0, postscale_factor=1.0)",
    "poll": "(handle)",
    "synchronize": "(handle)",
    "join": "(device=-1)",
    "barrier": "(process_set=WORLD)",
    "broadcast_parameters": "(params, root_rank)",
    "broadcast_optimizer_state": "(optimizer, root_rank, model=None)",
    "broadcast_object": "(obj, root_rank=0, name=None, process_set=WORLD)",
    "allgather_object": "(obj, name=None)",
    "ProcessSet": "(ranks_or_comm)",
    "add_process_set": "(process_set)",
    "remove_process_set": "(process_set)",
    "SyncBatchNorm": "(num_features, eps=1e-05, momentum=0.1, affine=True, "
    "track_running_stats=True)",
}
OPTIMIZER = (
    "(optimizer, named_parameters=None, compression=NONE, backward_passes_per_step=1, op=0, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, "
    "process_set=WORLD)"
)
REDUCTIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
OTHERS = ("Compression", "DistributedOptimizer", "HorovodInternalError", "global_process_set")
# Names available only through their module's path.
IN_MPI_OPS_ALONE = ("is_homogeneous", "HorovodInternalError")
NOT_IN_MPI_OPS = (
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "broadcast_object",
    "allgather_object",
    "SyncBatchNorm",
)


def parameters_of(text: str) -> list[inspect.Parameter]:
    """Return the parameters in a line of the table."""
    known = {"NONE": hvd.Compression.none, "WORLD": hvd.global_process_set}
    return parameters(eval(f"lambda {text[1:-1]}: None", known))


def parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return a function's parameters, without their types."""
    given = inspect.signature(function).parameters.values()
    return [parameter.replace(annotation=inspect.Parameter.empty) for parameter in given]


def test_all_lists_every_public_name() -> None:
    public = {
        name
        for name, value in vars(hvd).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(hvd.__all__)
    assert hvd.__all__ == sorted(set(hvd.__all__))


def test_every_name_of_horovod_is_exported() -> None:
    assert {*SIGNATURES, *REDUCTIONS, *OTHERS} - set(hvd.__all__) == set()


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_and_defaults_are_horovods(name: str) -> None:
    given, horovods = parameters(getattr(hvd, name)), parameters_of(SIGNATURES[name])
    assert given[: len(horovods)] == horovods
    # Parameters unknown to Horovod must be optional.
    assert all(further.default is not inspect.Parameter.empty for further in given[len(horovods) :])


def test_optimizer_parameters_are_in_horovods_order() -> None:
    by_position = [
        parameter
        for parameter in parameters(hvd.DistributedOptimizer)
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert by_position == parameters_of(OPTIMIZER)


def test_reductions_have_horovods_numbers() -> None:
    assert [getattr(hvd, name) for name in REDUCTIONS] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            "mpi_ops",
            (*(set(SIGNATURES) - set(NOT_IN_MPI_OPS)), *REDUCTIONS, "global_process_set"),
        ),
        ("compression", ("Compression",)),
        ("functions", NOT_IN_MPI_OPS[:4]),
        ("optimizer", ("DistributedOptimizer",)),
    ],
)
def test_horovods_import_paths_give_the_same_objects(path: str, names: tuple[str, ...]) -> None:
    module = importlib.import_module(f"gtopk.torch.{path}")
    assert getattr(hvd, path) is module  # hvd.mpi_ops.Sum, without another import
    for name in names:
        assert getattr(module, name) is getattr(hvd, name)
        assert name in module.__all__


def test_some_names_are_only_in_mpi_ops() -> None:
    for name in IN_MPI_OPS_ALONE:
        assert name in hvd.mpi_ops.__all__
    assert hvd.mpi_ops.HorovodInternalError is hvd.HorovodInternalError
    assert parameters(hvd.mpi_ops.is_homogeneous) == []


def test_elastic_and_sync_batch_norm_are_modules() -> None:
    batch_norm = importlib.import_module("gtopk.torch.sync_batch_norm")
    assert batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
    elastic = importlib.import_module("gtopk.torch.elastic")
    assert hvd.elastic is elastic
    for name in ("run", "TorchState", "ElasticSampler"):
        assert hasattr(elastic, name)


def test_compression_has_horovods_classes() -> None:
    from gtopk.torch.compression import Compressor, FP16Compressor, NoneCompressor

    assert hvd.Compression.none is NoneCompressor
    assert hvd.Compression.fp16 is FP16Compressor
    assert issubclass(NoneCompressor, Compressor)
    assert issubclass(FP16Compressor, Compressor)


def test_horovods_error_is_a_runtime_error() -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert hvd.HorovodInternalError.__name__ == "HorovodInternalError"


def test_from_gtopk_import_torch_is_the_same_module() -> None:
    from gtopk import torch

    assert torch is hvd


def test_import_loads_no_optional_package() -> None:
    optional = ("mpi4py", "cupy", "sklearn", "rich", "matplotlib", "horovod", "cloudpickle")
    program = (
        "import json, sys; import gtopk.torch as hvd; hvd.Compression.gtopk(density=0.1); "
        f"print(json.dumps([name for name in {optional!r} if name in sys.modules]))"
    )
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == []
    assert child.stderr == ""


def test_nccl_built_gives_no_warning() -> None:
    # Without NCCL, CuPy warns on import.
    program = "import gtopk.torch as hvd; print(hvd.nccl_built())"
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert child.stdout.strip().isdigit(), child.stderr
