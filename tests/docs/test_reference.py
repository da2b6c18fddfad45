"""Every name that a script may import is on a page of the reference, and every option is told."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from gtopk.compression import Compression
from gtopk.optimizer import DistributedOptimizer

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md")
)


@pytest.mark.parametrize(
    "module",
    ["collectives", "gtopk", "gtopk.ddp", "gtopk.fsdp", "gtopk.torch", "gtopk.torch.elastic"],
)
def test_every_name_has_its_place(module: str) -> None:
    home = rf"\b{re.escape(module)}" if module != "gtopk.torch" else r"\b(gtopk\.torch|hvd)"
    names = importlib.import_module(module).__all__
    assert [name for name in names if not re.search(rf"{home}\.{name}\b", REFERENCE)] == []


def test_the_optimizer_names_every_compression() -> None:
    told = inspect.getdoc(DistributedOptimizer) or ""
    names = [name for name in vars(Compression) if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"\.{name}\b", told)] == []


def test_ddps_page_names_every_option_of_its_hook() -> None:
    page = (DOCS / "from-ddp.md").read_text(encoding="utf-8")
    section = page.split("\n## Options\n")[1].split("\n## ")[0]
    options = {field.name for field in fields(Compression.gtopk)} - {"density", "_"}
    options -= {"dense_vectors", "dense_under"}  # as `dense`: refused
    told = set(re.findall(r"`(\w+)=?`", section))
    assert options - told == set()
