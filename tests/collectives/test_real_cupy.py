"""The real CuPy, which imports without a GPU, against the code's uses and the stand-ins."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.collectives import fake_cuda
from tests.collectives.cupy_uses import COMMUNICATOR, Use, uses
from tests.gtopk import posing

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/programs/describe_cupy.py"
FOLDERS = ("collectives", "gtopk", "mpi_scripts", "tests")

# The class that each stand-in represents, and the stand-in's additional names.
MODELS: dict[type, tuple[str, set[str]]] = {
    fake_cuda.ndarray: ("cupy.ndarray", {"computed", "launch", "sized_by_values"}),
    fake_cuda.Device: ("cupy.cuda.Device", set()),
    fake_cuda.Event: ("cupy.cuda.Event", {"numbers"}),
    fake_cuda.Stream: ("cupy.cuda.Stream", {"numbers"}),
    fake_cuda.RawModule: ("cupy.RawModule", set()),
    fake_cuda.Communicator: (COMMUNICATOR, {"meet", "run"}),
    posing.Posing: ("cupy.ndarray", {"content", "__getattr__"}),
}
OF_PYTHON = set(dir(type("Plain", (), {}))) | {"__annotations__", "__firstlineno__"}
# Stand-ins written as `SimpleNamespace(...)` or `vars(...).update(...)`.
NAMESPACES = {
    "tests/collectives/kernels/device/test_cuda.py": ("module", "cupy"),
    "tests/gtopk/exchange/buckets/test_arrays.py": ("cupy", "cupy.cuda"),
}


@functools.cache
def used() -> list[Use]:
    """Return all uses of CuPy in our code and in the tests of GPUs."""
    own = {Path(__file__).name, "cupy_uses.py", PROGRAM.name}
    return [
        use
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name not in own
        for use in uses(path)
    ]


def stand_in_names() -> dict[str, str]:
    """Return every name that a stand-in has, and its stand-in."""
    names = {}
    for model, (stands_for, own) in MODELS.items():
        for name in set(vars(model)) - own - OF_PYTHON:
            if not name.startswith("_") or name.startswith("__"):
                names[f"{stands_for}.{name}"] = f"{model.__module__}.{model.__qualname__}"
    cuda = fake_cuda.Cuda(gpus=1)
    for root, module in cuda.modules().items():
        for name, value in vars(module).items():
            if not name.startswith("__"):
                names[f"{root}.{name}"] = fake_cuda.__name__
                if name == "runtime":
                    names |= {f"{root}.{name}.{n}": fake_cuda.__name__ for n in vars(value)}
    cuda.off.set()
    for file, (variable, root) in NAMESPACES.items():
        names |= dict.fromkeys(namespace_names(ROOT / file, variable, root), file)
    return names


def namespace_names(path: Path, variable: str, root: str) -> set[str]:
    """Return the CuPy names that a file gives a stand-in by keyword arguments."""

    def of(call: ast.Call, owner: str) -> set[str]:
        found = set()
        for keyword in call.keywords:
            name = f"{owner}.{keyword.arg}"
            found |= {name} | (of(keyword.value, name) if is_namespace(keyword.value) else set())
        return found

    def is_namespace(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) == "SimpleNamespace"

    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable:
            found |= of(node.value, root) if is_namespace(node.value) else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".cuda).update"):
            found |= of(node, "cupy.cuda")
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the description of these names in the installed CuPy."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("no cupy here: pip install cupy-cuda13x")
    if shutil.which("g++") is None:
        pytest.skip("no g++ here to make the libnccl with that CuPy asks for")
    folder = tmp_path_factory.mktemp("nccl")
    empty = ("g++", "-x", "c++", "-shared", "-o", folder / "libnccl.so.2", "-")
    subprocess.run(empty, input=b"", check=True)
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env={**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": str(ROOT)},
        input=json.dumps(sorted({use.name for use in used()} | set(stand_in_names()))),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    described: dict[str, Any] = json.loads(done.stdout)
    return described


def test_every_cupy_name_used_exists_in_cupy(real: dict[str, Any]) -> None:
    names = {use.name: use.where for use in used()}
    assert {*names} >= {"cupy.cuda.Stream.from_external", "cupy.RawModule", f"{COMMUNICATOR}.send"}
    missing = {name: where for name, where in names.items() if real["names"][name] is None}
    assert missing == {}


def test_every_cupy_call_fits_its_signature(real: dict[str, Any]) -> None:
    unfit, bound = [], 0
    for use in used():
        parameters = real["names"][use.name]
        if use.arguments and parameters is not None:
            by_position, by_name = use.arguments
            signature = inspect.Signature(
                [
                    inspect.Parameter(
                        name,
                        inspect._ParameterKind[kind],
                        default=None if optional and "VAR" not in kind else inspect.Parameter.empty,
                    )
                    for name, kind, optional in parameters
                ]
            )
            try:
                signature.bind(*range(by_position), **dict.fromkeys(by_name))
                bound += 1
            except TypeError as error:
                unfit.append(f"{use.where}: {use.name}{signature}: {error}")
    assert unfit == []
    assert bound > 80


def test_stand_ins_have_nothing_that_cupy_lacks(real: dict[str, Any]) -> None:
    # Also dunder methods: CuPy's arrays have no __index__; a stand-in with one would hide errors.
    names = stand_in_names()
    assert {*names} >= {"cupy.ndarray.__getitem__", "cupy.cuda.runtime.eventQuery"}
    assert {name: who for name, who in names.items() if real["names"][name] is None} == {}


def test_fake_nccl_takes_the_arguments_of_cupys(real: dict[str, Any]) -> None:
    assert fake_cuda.NAMES.items() <= real["constants"].items()
    for name in ("send", "recv", "allReduce", "reduce", "broadcast", "check_async_error", "abort"):
        model = inspect.signature(getattr(fake_cuda.Communicator, name))
        assert len(real["names"][f"{COMMUNICATOR}.{name}"]) == len(model.parameters) - 1, name


def test_arrays_of_cupy_and_stand_ins_have_no_index_method(real: dict[str, Any]) -> None:
    import cupy

    for array in (cupy.ndarray, fake_cuda.ndarray, posing.Posing):
        assert not hasattr(array, "__index__")


def test_external_stream_is_accepted_without_warning_and_not_destroyed(
    real: dict[str, Any],
) -> None:
    assert real["complaints"] == []
