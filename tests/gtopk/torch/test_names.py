"""The names, import paths and signatures of Horovod that scripts rely on."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gtopk.torch as hvd

ROOT = Path(__file__).parent.parent.parent.parent

# Every name, and the parameters a script may pass by position or by name, in Horovod's order.
REDUCE = ("tensor", "average", "name", "op", "prescale_factor", "postscale_factor")
PARAMETERS = {
    "init": ("comm",),
    "shutdown": (),
    "is_initialized": (),
    "rank": (),
    "size": (),
    "local_rank": (),
    "local_size": (),
    "cross_rank": (),
    "cross_size": (),
    "mpi_built": (),
    "mpi_enabled": (),
    "allreduce": (
        "tensor",
        "average",
        "name",
        "compression",
        "op",
        "prescale_factor",
        "postscale_factor",
    ),
    "allreduce_": REDUCE,
    "allreduce_async": REDUCE,
    "allreduce_async_": REDUCE,
    "allgather": ("tensor", "name"),
    "allgather_async": ("tensor", "name"),
    "broadcast": ("tensor", "root_rank", "name"),
    "broadcast_": ("tensor", "root_rank", "name"),
    "broadcast_async": ("tensor", "root_rank", "name"),
    "broadcast_async_": ("tensor", "root_rank", "name"),
    "poll": ("handle",),
    "synchronize": ("handle",),
    "barrier": (),
    "broadcast_parameters": ("params", "root_rank"),
    "broadcast_optimizer_state": ("optimizer", "root_rank", "model"),
    "broadcast_object": ("obj", "root_rank", "name"),
    "allgather_object": ("obj", "name"),
    "DistributedOptimizer": (
        "optimizer",
        "named_parameters",
        "compression",
        "backward_passes_per_step",
        "op",
        "gradient_predivide_factor",
    ),
}
DEFAULTS = {
    "average": None,
    "backward_passes_per_step": 1,
    "comm": None,
    "compression": hvd.Compression.none,
    "gradient_predivide_factor": 1.0,
    "model": None,
    "name": None,
    "named_parameters": None,
    "postscale_factor": 1.0,
    "prescale_factor": 1.0,
}
REDUCTIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
OTHERS = ("Compression", "HorovodInternalError")


def test_what_is_exported_is_what_is_there() -> None:
    public = {
        name
        for name, value in vars(hvd).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(hvd.__all__)
    assert hvd.__all__ == sorted(set(hvd.__all__))


def test_the_names_that_training_scripts_use_are_there() -> None:
    assert {*PARAMETERS, *REDUCTIONS, *OTHERS} - set(hvd.__all__) == set()


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_come_in_horovods_order(name: str) -> None:
    given = inspect.signature(getattr(hvd, name)).parameters
    leading = list(given)[: len(PARAMETERS[name])]
    assert tuple(leading) == PARAMETERS[name]
    # What Horovod does not know must never be required.
    further = list(given.values())[len(leading) :]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in further)
    for parameter in leading:
        if parameter in DEFAULTS:
            assert given[parameter].default == DEFAULTS[parameter], parameter


def test_defaults_that_differ_by_function_are_horovods() -> None:
    def default(function: object, parameter: str) -> object:
        return inspect.signature(function).parameters[parameter].default  # type: ignore[arg-type]

    assert default(hvd.allreduce, "op") is None
    assert default(hvd.DistributedOptimizer, "op") == hvd.Average
    assert default(hvd.broadcast_object, "root_rank") == 0
    for function in (hvd.broadcast, hvd.broadcast_parameters, hvd.broadcast_optimizer_state):
        assert default(function, "root_rank") is inspect.Parameter.empty


def test_reductions_have_horovods_numbers() -> None:
    assert [getattr(hvd, name) for name in REDUCTIONS] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            "mpi_ops",
            (*list(PARAMETERS)[: list(PARAMETERS).index("barrier") + 1], *REDUCTIONS),
        ),
        ("compression", ("Compression",)),
        (
            "functions",
            (
                "broadcast_parameters",
                "broadcast_optimizer_state",
                "broadcast_object",
                "allgather_object",
            ),
        ),
        ("optimizer", ("DistributedOptimizer",)),
    ],
)
def test_horovods_import_paths_give_the_same_objects(path: str, names: tuple[str, ...]) -> None:
    module = importlib.import_module(f"gtopk.torch.{path}")
    assert getattr(hvd, path) is module  # hvd.mpi_ops.Sum, without another import
    for name in names:
        assert getattr(module, name) is getattr(hvd, name)
        assert name in module.__all__


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


def test_importing_needs_nothing_but_torch_and_numpy() -> None:
    optional = ("mpi4py", "cupy", "sklearn", "rich", "matplotlib", "horovod", "cloudpickle")
    program = (
        "import json, sys; import gtopk.torch as hvd; hvd.Compression.gtopk(density=0.1); "
        f"print(json.dumps([name for name in {optional!r} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert done.stderr == ""
