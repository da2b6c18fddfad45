"""Uses of CuPy: each of its names that a Python file mentions, and its calls, from the syntax.

Methods of arrays that are arguments cannot be followed, so they are not found here. The
stand-ins have no methods that CuPy lacks, so code that uses more fails on a stand-in.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMMUNICATOR = "cupy.cuda.nccl.NcclCommunicator"

# Our functions and attributes that return a module of CuPy, or an object of one of its classes.
FROM_CALLS = {
    "cupy": "cupy",
    "load_cupy": "cupy",
    "load_nccl": "cupy.cuda.nccl",
    "module_of": "cupy",
}
FROM_ATTRIBUTES = {
    "cupy": "cupy",
    "_cupy": "cupy",
    "nccl": "cupy.cuda.nccl",
    "_nccl": COMMUNICATOR,
}
# Parameters of these names: the transport's closures receive the communicator.
FROM_PARAMETERS = {"cupy": "cupy", "nccl": COMMUNICATOR}
IMPORTERS = ("import_module", "importorskip")

# What CuPy's functions return; its classes return their objects.
RETURNED = {
    "cupy.cuda.get_current_stream": "cupy.cuda.Stream",
    "cupy.cuda.Stream.from_external": "cupy.cuda.Stream",
    "cupy.cuda.Stream.end_capture": "cupy.cuda.Graph",
    "cupy.cuda.Stream.record": "cupy.cuda.Event",
    "cupy.get_default_memory_pool": "cupy.cuda.MemoryPool",
    **{
        f"cupy.{name}": "cupy.ndarray"
        for name in ("arange", "asarray", "empty", "from_dlpack", "ones", "zeros", "zeros_like")
    },
}


class Use(NamedTuple):
    """One mention of a name. arguments: of a call, the number by position and the names."""

    name: str
    where: str
    arguments: tuple[int, tuple[str, ...]] | None


def uses(path: Path) -> Iterator[Use]:
    """Return the uses of CuPy in a file."""
    text = path.read_text(encoding="utf-8")
    if "cupy" in text or "nccl" in text:
        yield from _Reader(str(path)).read(ast.parse(text), {})


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file

    def read(self, node: ast.AST, names: dict[str, str]) -> Iterator[Use]:
        """Return the uses in a node, in order; names: variables and their CuPy names."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given = {a.arg: FROM_PARAMETERS[a.arg] for a in arguments if a.arg in FROM_PARAMETERS}
            hidden = {a.arg for a in arguments} - set(given)
            names = {**{n: o for n, o in names.items() if n not in hidden}, **given}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cupy":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield self._use(node, names[alias.asname or alias.name], None)
        elif isinstance(node, ast.Import):
            names |= {a.asname or "cupy": "cupy" for a in node.names if a.name == "cupy"}
        elif isinstance(node, ast.Call):
            found = self._cupy_name(node.func, names)
            if found and "." in found:
                by_name = tuple(k.arg for k in node.keywords if k.arg)
                unpacked = any(isinstance(a, ast.Starred) for a in node.args)
                unpacked |= any(k.arg is None for k in node.keywords)
                yield self._use(node, found, None if unpacked else (len(node.args), by_name))
        elif isinstance(node, ast.Attribute):
            found = self._cupy_name(node, names)
            if found and "." in found:
                yield self._use(node, found, None)
        for child in ast.iter_child_nodes(node):
            yield from self.read(child, names)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                self._bind(target, node.value, names)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr, names)

    def _bind(self, target: ast.expr, value: ast.expr, names: dict[str, str]) -> None:
        if isinstance(target, ast.Tuple):
            several = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            same = value.elt if isinstance(value, ast.GeneratorExp) else value
            values = value.elts if several else [same] * len(target.elts)  # type: ignore[attr-defined]
            for part, its in zip(target.elts, values, strict=True):
                self._bind(part, its, names)
        elif isinstance(target, ast.Name):
            found = self._cupy_name(value, names)
            names.pop(target.id, None)
            if found:
                names[target.id] = found

    def _cupy_name(self, node: ast.expr, names: dict[str, str]) -> str | None:
        """Return the CuPy name that an expression stands for: its own, or its class."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._cupy_name(node.value, names)
            if owner:
                return f"{owner}.{node.attr}"
            of_torch = ast.unparse(node.value).startswith("torch.")  # torch.cuda.nccl
            return None if of_torch else FROM_ATTRIBUTES.get(node.attr)
        if isinstance(node, ast.Call):
            return self._returned_by(node, names)
        return None

    def _returned_by(self, node: ast.Call, names: dict[str, str]) -> str | None:
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else None
        called = function.id if isinstance(function, ast.Name) else called
        first = node.args[0] if node.args else None
        if called in IMPORTERS and isinstance(first, ast.Constant):
            module = str(first.value)
            return module if module.partition(".")[0] == "cupy" else None
        found = self._cupy_name(function, names)
        if found and "." in found:
            return found if found.rpartition(".")[2][0].isupper() else RETURNED.get(found)
        return FROM_CALLS.get(called or "")

    def _use(
        self, node: ast.expr | ast.stmt, name: str, arguments: tuple[int, tuple[str, ...]] | None
    ) -> Use:
        return Use(name, f"{self.file}:{node.lineno}", arguments)
