"""The notebook is generated from the tutorial alone."""

from __future__ import annotations

import json

from docs.make.notebook import NOTEBOOK, PAGE, notebook


def test_notebook_is_up_to_date_with_the_tutorial() -> None:
    made = notebook(PAGE.read_text(encoding="utf-8"))
    assert NOTEBOOK.read_text(encoding="utf-8") == made, "run: python docs/make/notebook.py"


def test_notebook_writes_files_and_runs_commands_but_no_pip_install() -> None:
    page = 'Words.\n\n```bash\npip install x\ngtopk a\n```\n```python title="a.py"\nb = 1\n```\n'
    cells = json.loads(notebook(page))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["code", "markdown", "code", "code"]
    texts = ["".join(cell["source"]) for cell in cells]
    assert texts[1:] == ["Words.", "%%bash\nset -e\ngtopk a", "%%writefile a.py\nb = 1"]


def test_notebook_stores_shown_text_as_command_output() -> None:
    page = "```bash\na\n```\n\nProse.\n\n```bash\nb\n```\n\n```text\nc\nd\n```\n"
    cells = json.loads(notebook(page))["cells"][1:]
    assert [cell["cell_type"] for cell in cells] == ["code", "markdown", "code"]
    assert cells[0]["outputs"] == []
    assert cells[2]["outputs"][0]["text"] == ["c\n", "d\n"]
