"""The reference has every public name, and every option is documented."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md")
)


# Names by which a page may call a module besides its own.
CALLED = {"gtopk.torch": r"(gtopk\.torch|hvd)", "gtopk.local_sgd": r"gtopk(\.local_sgd)?"}


def exported(module: str) -> list[str]:
    """Return a module's __all__, from its source: what it needs may not be installed."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return names


@pytest.mark.parametrize(
    "module",
    [
        *("collectives", "gtopk", "gtopk.torch", "gtopk.torch.elastic"),
        *("gtopk.accelerate", "gtopk.ddp", "gtopk.fsdp", "gtopk.horovod", "gtopk.lightning"),
        "gtopk.local_sgd",
    ],
)
def test_every_exported_name_is_in_the_reference(module: str) -> None:
    home = CALLED.get(module, re.escape(module))
    names = exported(module)
    assert names
    assert [name for name in names if not re.search(rf"\b{home}\.{name}\b", REFERENCE)] == []


def test_optimizer_docstring_names_every_compression() -> None:
    docstring = inspect.getdoc(DistributedOptimizer) or ""
    names = [name for name in vars(Compression) if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"\.{name}\b", docstring)] == []


def test_ddp_page_names_every_hook_option() -> None:
    page = (DOCS / "from-ddp.md").read_text(encoding="utf-8")
    section = page.split("\n## Options\n")[1].split("\n## ")[0]
    options = {field.name for field in fields(Compression.gtopk)} - {"density", "_"}
    options -= {"dense_vectors", "dense_under"}  # as `dense`: refused
    documented = set(re.findall(r"`(\w+)=?`", section))
    assert options - documented == set()
