"""Docstrings as the reference shows them: arguments as a list, drawings as they are."""

from __future__ import annotations

from docs.make.docstrings import as_rst


def rst(text: str) -> str:
    return "\n".join(as_rst(text.splitlines()))


def test_named_lines_become_a_list() -> None:
    told = rst("Do it.\n\nk, n: how many,\n    and more.\n*args:  the rest.\nRaises ValueError.")
    assert told == (
        "Do it.\n\n``k``, ``n``\n    how many,\n    and more.\n``*args``\n    the rest.\n\n"
        "Raises ValueError."
    )


def test_a_drawing_stays_as_it_is() -> None:
    text = "One.\n\n    a: b_\n    c -> d\n\n    `e`"
    assert rst(f"{text}\nTwo.") == text.replace("One.\n\n", "One.\n\n::\n\n") + "\n\nTwo."


def test_a_sentence_means_no_more_than_it_says() -> None:
    told = rst("2 * 3 in `a_b`, allreduce_ |x|, a lone ` here.\nNone: no name.")
    assert told == "2 \\* 3 in 'a\\_b', allreduce\\_ \\|x\\|, a lone ' here.\nNone: no name."
    assert rst("The `k_` law: always.") == "The ``k_`` law: always."
