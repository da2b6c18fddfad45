"""Links between our own pages lead somewhere: files, and headings in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Written by a build from the docstrings: their headings are not in the file.
MADE = ROOT / "docs" / "reference"


def without_code(text: str) -> str:
    """Return a page without its fenced blocks, in which brackets are code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Return what a page links to, and shows as pictures."""
    text = without_code(page.read_text(encoding="utf-8"))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as both GitHub and the site make them."""
    headings = re.findall(
        r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE
    )
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        found = target.is_file() and target.is_relative_to(ROOT)
        if found and anchor and not target.is_relative_to(MADE):
            found = anchor in anchors(target)
        if not found:
            broken.append(link)
    assert broken == []


def test_external_links_use_https() -> None:
    plain = [link for page in PAGES for link in links(page) if link.startswith("http:")]
    assert plain == []


def test_link_check_skips_code_and_finds_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A [b] heading: `c`\n[one](#a-b-heading-c) [two](nowhere.md)\n```\n[3](x)\n```\n"
    )
    assert links(page) == ["#a-b-heading-c", "nowhere.md"]
    assert anchors(page) == {"a-b-heading-c"}


FOLDERS = "gtopk|collectives|mpi_scripts|models|tests|docs"


def files(text: str) -> set[str]:
    """Return the files of this project that a text names: by path, and tests by their names."""
    paths = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/]+\.\w+)\b", text)
    return {*paths, *re.findall(r"(?<![\w/.-])(test_\w+\.py)\b", text)}


def test_every_project_file_named_in_the_docs_exists() -> None:
    named = {name: page for page in PAGES for name in files(page.read_text(encoding="utf-8"))}
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    gone = {
        f"{page.relative_to(ROOT)}: {name}"
        for name, page in named.items()
        if name not in tests and not (ROOT / name).exists()
    }
    assert gone == set()


def test_file_check_finds_named_project_files() -> None:
    text = "`gtopk/nowhere.py`, tests/gtopk/test_a.py:12, test_b.py and x/gtopk/c.py"
    assert files(text) == {"gtopk/nowhere.py", "tests/gtopk/test_a.py", "test_b.py"}


def references_of(path: Path) -> tuple[list[str], list[str]]:
    """Return the headings and the docs files that a module's messages refer to."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    titles = [
        ast.literal_eval(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "page"
        if isinstance(node.args[0], ast.Constant)  # the report and the demo make pages
    ]
    texts = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    )
    return titles, [text for text in texts if isinstance(text, str) and "docs/" in text]


def test_error_messages_refer_to_existing_headings_and_no_docs_files() -> None:
    sent, files = [], []
    for package in ("gtopk", "collectives"):
        for path in (ROOT / package).rglob("*.py"):
            titles, named = references_of(path)
            sent += titles
            files += named
    headings = {
        heading
        for page in PAGES
        for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert sent
    assert set(sent) <= headings
    assert files == []
