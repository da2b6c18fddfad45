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
