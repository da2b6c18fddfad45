"""The standard library's docstrings and code: real text, the same every time."""

from __future__ import annotations

import platform

import pytest
import torch

from models.data.docstrings import load_code, load_docstrings
from models.data.malformed import MalformedFile


def as_text(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode()


def test_docstring_text_has_the_standard_librarys_docstrings() -> None:
    text = load_docstrings()
    assert text.origin == f"docstrings of Python {platform.python_version()}'s standard library"
    assert text.vocabulary == 256
    assert len(text.train) > 500_000
    assert 0.05 < len(text.test) / len(text.train) < 0.2
    assert "Metaclass for defining Abstract Base Classes" in as_text(text.train)


def test_every_tenth_docstring_is_held_out_whole(tmp_path) -> None:
    for name in ("b.py", "a.py"):
        source = "".join(f'def f():\n    """{name} {i}\n    two"""\n' for i in range(6))
        (tmp_path / name).write_text(source + 'x = \'"""\'\n')
    text = load_docstrings(tmp_path)
    order = [f"{name} {i}\ntwo" for name in ("a.py", "b.py") for i in range(6)]
    assert as_text(text.test) == order[9]
    assert as_text(text.train) == "\n\n".join(order[:9] + order[10:])


def test_code_text_omits_docstrings_and_holds_out_every_tenth_module(tmp_path) -> None:
    for number in range(10):
        text = f'def f():\n    """told {number}"""\n    return {number}\n'
        (tmp_path / f"m{number}.py").write_text(text)
    text = load_code(tmp_path)
    assert text.origin == f"code of Python {platform.python_version()}'s standard library"
    code = [f"def f():\n\n    return {number}\n" for number in range(10)]
    assert as_text(text.test) == code[9]
    assert as_text(text.train) == "\n\n".join(code[:9])


@pytest.mark.parametrize("load", [load_docstrings, load_code])
def test_missing_standard_library_sources_are_an_error(load, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="the sources of Python's standard library"):
        load(tmp_path)


def test_module_that_is_not_utf_8_is_named(tmp_path) -> None:
    (tmp_path / "a.py").write_bytes('"""Sträucher"""\n'.encode("latin-1"))
    with pytest.raises(MalformedFile, match=r"a\.py, byte 6: is not UTF-8: invalid"):
        load_docstrings(tmp_path)


def test_docstring_after_a_byte_order_mark_is_read(tmp_path) -> None:
    source = "".join(f'def f():\n    """{i}"""\n' for i in range(9))
    (tmp_path / "a.py").write_text(f'"""first"""\n{source}', encoding="utf-8-sig")
    assert as_text(load_docstrings(tmp_path).train).startswith("first\n\n0")
