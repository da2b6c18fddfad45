"""A benchmark on threads, small enough for tests, run once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gtopk.cli.bench.collectives import main
from gtopk.cli.bench.collectives.cases import Results

WORDS = "--transport local --ranks 2 3 --lengths 3000 --densities 0.01 0.1 --rounds 2"


@pytest.fixture(scope="session")
def json_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "collectives.json"
    words = [*WORDS.split(), "--formats", "blocks+exact", "raw+bf16", "--bandwidth", "1e8"]
    assert main([*words, "--json", str(path)]) == 0
    return path


@pytest.fixture
def results(json_file: Path) -> Results:
    return json.loads(json_file.read_text())
