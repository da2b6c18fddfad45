"""The script in docs/checkpoints.md does what the page says."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import gtopk.torch as hvd

DOC = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


@pytest.fixture
def run_script(tmp_path, monkeypatch, capsys):
    """Run the script on the page, on one rank, with these arguments; return what it printed."""
    (code,) = re.findall(r'```python\n("""Train.*?)```', DOC, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(code)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            hvd.shutdown()
        return capsys.readouterr().out

    return run


def test_checkpoint_script_resumes_where_it_stopped(run_script, tmp_path):
    uninterrupted = run_script(tmp_path / "uninterrupted", 33)
    run_script(tmp_path / "broken", 28)  # the last save is of step 25
    names = sorted(path.name for path in (tmp_path / "broken").iterdir())
    assert names == ["checkpoint-00000004-step-20", "checkpoint-00000005-step-25"]
    assert run_script(tmp_path / "broken", 33) == uninterrupted
    assert uninterrupted.startswith("step 33, weights ")


def test_checkpoint_files_are_those_on_the_page(run_script, tmp_path):
    run_script(tmp_path / "saved", 5)
    (folder,) = (tmp_path / "saved").iterdir()
    shown = set(re.findall(r"(?:all|rank-0)-of-2\.\w+", DOC))
    assert {path.name for path in folder.iterdir()} == {n.replace("-of-2", "-of-1") for n in shown}
