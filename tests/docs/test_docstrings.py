"""Docstrings in the reference: arguments become a list, drawings stay unchanged."""

from __future__ import annotations

from docs.make.docstrings import as_rst


def rst(text: str) -> str:
    return "\n".join(as_rst(text.splitlines()))


def test_docstring_argument_lines_become_a_list() -> None:
    shown = rst("Do it.\n\nk, n: how many,\n    and more.\n*args:  the rest.\nRaises ValueError.")
    assert shown == (
        "Do it.\n\n``k``, ``n``\n    how many,\n    and more.\n``*args``\n    the rest.\n\n"
        "Raises ValueError."
    )


def test_docstring_drawing_becomes_a_literal_block() -> None:
    text = "One.\n\n    a: b_\n    c -> d\n\n    `e`"
    assert rst(f"{text}\nTwo.") == text.replace("One.\n\n", "One.\n\n::\n\n") + "\n\nTwo."


def test_docstring_markup_characters_are_escaped() -> None:
    shown = rst("2 * 3 in `a_b`, allreduce_ |x|, a lone ` here.\nNone: no name.")
    assert shown == "2 \\* 3 in 'a\\_b', allreduce\\_ \\|x\\|, a lone ' here.\nNone: no name."
    assert rst("The `k_` law: always.") == "The ``k_`` law: always."
