"""The notebook is the tutorial: made from it, and from it alone."""

from __future__ import annotations

import json

from docs.make.notebook import NOTEBOOK, PAGE, notebook


def test_the_notebook_is_made_from_the_tutorial() -> None:
    made = notebook(PAGE.read_text(encoding="utf-8"))
    assert NOTEBOOK.read_text(encoding="utf-8") == made, "run: python docs/make/notebook.py"


def test_files_are_written_commands_run_and_nothing_is_installed() -> None:
    page = 'Words.\n\n```bash\npip install x\ngtopk a\n```\n```python title="a.py"\nb = 1\n```\n'
    cells = json.loads(notebook(page))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["code", "markdown", "code", "code"]
    texts = ["".join(cell["source"]) for cell in cells]
    assert texts[1:] == ["Words.", "%%bash\nset -e\ngtopk a", "%%writefile a.py\nb = 1"]


def test_what_the_page_shows_after_a_command_is_stored_as_its_output() -> None:
    page = "```bash\na\n```\n\nProse.\n\n```bash\nb\n```\n\n```text\nc\nd\n```\n"
    cells = json.loads(notebook(page))["cells"][1:]
    assert [cell["cell_type"] for cell in cells] == ["code", "markdown", "code"]
    assert cells[0]["outputs"] == []
    assert cells[2]["outputs"][0]["text"] == ["c\n", "d\n"]
