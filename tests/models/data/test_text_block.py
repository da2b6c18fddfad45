"""Blocks say what each of their lines says; a malformed one is refused, with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.data.text_block import BadLine, parse_block
from models.data.text_line import Layout, Numbering, parse_line

LAYOUTS = {
    "list": Layout(Numbering(0, 50), Numbering(0, 40)),
    "one-based list": Layout(Numbering(1, 50), Numbering(1, 40)),
    "class": Layout(Numbering(1, 50), None, (-1.0, 1.0)),
    "entries": Layout(Numbering(0, 50)),
}


def one_by_one(block: bytes, layout: Layout) -> list[tuple[list[int], list[int], list[float]]]:
    """Return what `parse_line` says, values in float32; raise BadLine as `parse_block` does."""
    lines = []
    for number, line in enumerate(block.split(b"\n")[:-1]):
        try:
            labels, indices, values = parse_line(line, layout)
        except ValueError as error:
            raise BadLine(number, str(error)) from error
        lines.append((labels, indices, np.array(values, np.float32).tolist()))
    return lines


def at_once(block: bytes, layout: Layout) -> list[tuple[list[int], list[int], list[float]]]:
    rows = parse_block(block, layout)
    features, labels = rows.features, rows.labels
    return [
        (
            labels.indices[labels.offsets[row] : labels.offsets[row + 1]].tolist(),
            features.indices[features.offsets[row] : features.offsets[row + 1]].tolist(),
            features.values[features.offsets[row] : features.offsets[row + 1]].tolist(),
        )
        for row in range(len(rows))
    ]


def outcome(read, block: bytes, layout: Layout):
    try:
        return read(block, layout)
    except BadLine as error:
        return error.line, str(error)


LETTERS = st.sampled_from(b"0123456789 :,.-+eE\n\t\x00\r#nafi")
TOKENS = st.sampled_from(
    [
        *(b"0", b"7", b"49", b"50", b"-1", b"+1", b"1", b"0.25", b".5", b"5.", b"-.", b"1e-3"),
        *(
            b"-1.25E-05",
            b"12345678e+3",
            b"3.5e38",
            b"1e-400",
            b"5e-46",
            b"1e",
            b"1e-",
            b".e5",
            b"1e1e1",
        ),
        *(b"123456789", b"0.1234567890123456", b"12345678.12345678", b"9" * 30, b"1e39", b"nan"),
        *(b"", b" ", b"  ", b":", b",", b"\n", b"\n ", b" 3:", b",4", b"\t"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(TOKENS | LETTERS.map(lambda byte: bytes([byte])), max_size=30))
@example([b"3:1e5."])
@example([b"1:", b"1.2", b".3"])
@example([b"3,4,3"])
def test_whatever_the_bytes_a_block_says_what_its_lines_say(tokens) -> None:
    block = b"".join(tokens) + b"\n"
    for layout in LAYOUTS.values():
        assert outcome(at_once, block, layout) == outcome(one_by_one, block, layout)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.sampled_from(["{!r}", "{:.17g}", "{:.6g}", "{:.16f}", "{:+.9g}", "{:e}"]),
)
def test_values_are_those_of_python_rounded_to_float32(values, form) -> None:
    texts = [form.format(value) for value in values]
    block = "".join(f"0:{text}\n" for text in texts).encode()
    read = parse_block(block, LAYOUTS["entries"]).features.values
    assert read.tobytes() == np.array([float(text) for text in texts]).astype("f4").tobytes()


def test_a_value_halfway_between_two_of_float32_is_rounded_as_python_rounds_it() -> None:
    halfway = 1 + 2**-24  # 25 digits: more than are read at once
    texts = [
        f"{halfway + step * 2**-52:.{digits}f}" for step in range(-3, 4) for digits in (15, 16)
    ]
    block = "".join(f"0:{text}\n" for text in texts).encode()
    read = parse_block(block, LAYOUTS["entries"]).features.values
    assert read.tolist() == [float(np.float32(float(text))) for text in texts]


MALFORMED = {
    b"": "the line is empty; a row without labels begins with a space",
    b"1:0.5 2:1": "the line begins with the entry '1:0.5'; a row without labels begins",
    b"3, 4:1": "label '' must be a whole number in digits",
    b"1.0 2:1": "label '1.0' must be a whole number in digits",
    b"40 2:1": "label 40 must lie in 0..39: there are 40, counted from 0",
    b"7,3,7 2:1": "label 7 comes twice",
    b"3 5": "'5' must be a pair index:value",
    b"3 qid:4 5:1": "feature 'qid' must be a whole number in digits",
    b"3 50:1": "feature 50 must lie in 0..49: there are 50, counted from 0",
    b"3 -1:1": "feature '-1' must be a whole number in digits",
    b"3 99999999999999999999:1": "must lie in 0..49",
    b"3 5:1 5:2": "feature 5 comes twice: indices must ascend in a row",
    b"3 5:1 4:2": "feature 4 comes too late: indices must ascend in a row",
    b"3 5:": "value '' of feature 5 is no number",
    b"3 5: 1": "value '' of feature 5 is no number",
    b"3 5:1:2": "value '1:2' of feature 5 is no number",
    b"3 5:one": "value 'one' of feature 5 is no number",
    b"3 5:1_000": "value '1_000' of feature 5 is no number",
    b"3 5:nan": "value 'nan' of feature 5 is not finite in float32",
    b"3 5:-Infinity": "value '-Infinity' of feature 5 is not finite in float32",
    b"3 5:1e39": "value '1e39' of feature 5 is not finite in float32",
    b"3 5:1 # text": "'#' must be a pair index:value",
    b"3 5:\xff": "value '\\xff' of feature 5 is no number",
    b"3\x005:1": "byte 0x00 is part of no number",
    b"3 5:1\r 6:1": "byte 0x0d is part of no number",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_line_is_named_with_the_reason(line) -> None:
    with pytest.raises(BadLine) as error:
        parse_block(b"3 5:1\n 6:1\n" + line + b"\n" + b"nonsense\n", LAYOUTS["list"])
    assert error.value.line == 2
    assert MALFORMED[line] in str(error.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "the line must begin with its label"),
        (b" 1:1", "the line must begin with its label"),
        (b"0 1:1", "label '0' is none of -1, 1"),
        (b"1,1 1:1", "label '1,1' is none of -1, 1"),
        (b"1 0:1", "feature 0 must lie in 1..50: there are 50, counted from 1"),
    ],
)
def test_a_class_must_be_one_of_those_given(line, reason) -> None:
    with pytest.raises(BadLine, match=reason):
        parse_block(line + b"\n", LAYOUTS["class"])


def test_numbers_count_from_what_the_layout_says() -> None:
    block = b"3,7 5:1 9:1\n 1:2\n"
    zero = at_once(block, LAYOUTS["list"])
    assert zero == [([3, 7], [5, 9], [1, 1]), ([], [1], [2])]
    one = at_once(block, LAYOUTS["one-based list"])
    assert one == [([2, 6], [4, 8], [1, 1]), ([], [0], [2])]
