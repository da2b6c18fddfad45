"""Parses many lines of a file of sparse rows at once, in NumPy, with `text_line`'s results.

The bytes that separate numbers are found first; the kind of the number between two of them is known
from these two alone:

    bytes   \n 3 , 1 7   0 : 0 . 2 5   9 : 1 \n
    parted  |    |     |   |   |     |   |   |
    role      L    L     I   W   F     I   W        Label, Index, Whole part, Fraction

Digits are then turned into numbers eight at a time, in the bytes of one 64-bit word. Values that
this does not give exactly (1e-30, 19 digits) go through Python's float. A malformed line goes to
`parse_line`, which finds the reason. Values are Python's float rounded to float32, to the bit.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Final

import numpy as np

from .rows import LabelledRows, LabelLists, SparseRows
from .text_line import MOST_DIGITS, Layout, Numbering, parse_line, parse_value

_NEWLINE, _SPACE, _COMMA, _COLON, _DOT, _CONTROL = range(6)
_KINDS: Final = 6
_BAD, _NOTHING, _LABEL, _INDEX, _WHOLE, _BEFORE_DOT, _FRACTION = range(7)

_KIND_OF: Final = np.full(256, _CONTROL, np.uint8)
for _bytes, _kind in ((b"\n", _NEWLINE), (b" \t", _SPACE), (b",", _COMMA), (b":", _COLON)):
    _KIND_OF[list(_bytes)] = _kind
_KIND_OF[ord(".")] = _DOT

_IS_LETTER: Final = np.zeros(256, bool)  # of a number; 0 fills up short ones
_IS_LETTER[list(b"\x000123456789+-.eE")] = True
_MOST_LETTERS: Final = 64
_MOST_IN_A_WORD: Final = 19  # any digits
_POWERS: Final = 10 ** np.arange(_MOST_IN_A_WORD + 1, dtype=np.uint64)
_EXACT_POWERS: Final = 10.0 ** np.arange(23)
_FAR: Final = np.uint64(1000)  # a power of ten beyond those of all numbers here
_FINITE: Final = 1e38  # and below it, in float32, too
_WORD: Final = 8  # digits
_LEAD: Final = MOST_DIGITS  # bytes before the block: words end where a number ends


class BadLine(ValueError):
    """Raised with the reason for a malformed line of a block, and its number from 0."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def parse_block(block: bytes, layout: Layout) -> LabelledRows:
    """Return the rows in a block of lines, each of which ends in a newline.

    Raises BadLine for the first malformed line.
    """
    text = np.frombuffer(b"\n" * _LEAD + block, np.uint8)
    numbers = _Numbers(text)
    at = np.flatnonzero(_parts(text[_LEAD - 1 :])) + (_LEAD - 1)
    kinds = _KIND_OF[text[at]]
    before, after = kinds[:-1], kinds[1:]
    starts, ends = at[:-1] + 1, at[1:]
    roles = _roles(layout.labels is not None, bool(layout.classes))[
        before * np.uint8(2 * _KINDS) + after * np.uint8(2) + (ends > starts)
    ]
    suspects = [ends[roles == _BAD]]  # places in lines that are malformed
    newlines = np.flatnonzero(after == _NEWLINE)

    tokens = np.flatnonzero(roles == _INDEX)
    offsets = np.concatenate([[0], np.searchsorted(tokens, newlines)])
    indices, in_range = numbers.numbered(starts[tokens], ends[tokens], layout.features)
    suspects.append(ends[tokens[~in_range]])
    suspects.append(ends[tokens[1:][~_ascends(indices, offsets)]])

    reals = np.flatnonzero((roles == _WHOLE) | (roles == _BEFORE_DOT))
    stops = np.where(roles[reals] == _BEFORE_DOT, reals + 1, reals)
    values, finite = numbers.real(starts[reals], ends[reals], ends[stops])
    suspects.append(ends[reals[~finite]])

    label_offsets, labels, width = np.zeros_like(offsets), np.empty(0, np.int32), 0
    if layout.labels is not None:
        tokens = np.flatnonzero(roles == _LABEL)
        label_offsets = np.concatenate([[0], np.searchsorted(tokens, newlines, side="right")])
        labels, in_range = numbers.numbered(starts[tokens], ends[tokens], layout.labels)
        width = layout.labels.number
        suspects.append(ends[tokens[~in_range]])
        suspects.append(ends[newlines[_has_twice(labels, label_offsets)]])
    elif layout.classes:
        leads = before[reals] == _NEWLINE
        labels, known = _class_numbers(values[leads], layout.classes)
        suspects.append(ends[reals[leads][~known]])
        values, label_offsets = values[~leads], np.arange(len(offsets))
        width = len(layout.classes)

    if bad := [places.min() for places in suspects if places.size]:
        raise _explained(block, int(min(bad)) - _LEAD, layout)
    features = SparseRows(offsets, indices, values.astype(np.float32), layout.features.number)
    return LabelledRows(features, LabelLists(label_offsets, labels, width), "")


def _parts(text: np.ndarray) -> np.ndarray:
    """Return the places at which a number may end, bool [bytes]."""
    parts: np.ndarray = text <= ord(" ")
    for byte in b",.:":
        parts |= text == byte
    return parts


@cache
def _roles(has_labels: bool, has_classes: bool) -> np.ndarray:
    """Return the role of text between two kinds of bytes, [before, after, whether not empty]."""
    roles = np.full((_KINDS, _KINDS, 2), _BAD, np.uint8)
    for before, after, something, role in (
        (_SPACE, _SPACE, 0, _NOTHING),
        (_SPACE, _NEWLINE, 0, _NOTHING),
        (_SPACE, _COLON, 1, _INDEX),
        (_COLON, _SPACE, 1, _WHOLE),
        (_COLON, _NEWLINE, 1, _WHOLE),
        *((_COLON, _DOT, something, _BEFORE_DOT) for something in (0, 1)),
        *((_DOT, after, n, _FRACTION) for after in (_SPACE, _NEWLINE) for n in (0, 1)),
    ):
        roles[before, after, something] = role
    ends = (_SPACE, _NEWLINE)
    if has_labels:
        roles[_NEWLINE, _SPACE, 0] = _NOTHING
        for before in (_NEWLINE, _COMMA):
            roles[before, (*ends, _COMMA), 1] = _LABEL
    elif has_classes:
        roles[_NEWLINE, ends, 1] = _WHOLE
        roles[_NEWLINE, _DOT] = _BEFORE_DOT
    else:
        roles[_NEWLINE, ends, 0] = _NOTHING
        roles[_NEWLINE, _COLON, 1] = _INDEX
    return roles.reshape(-1)


class _Numbers:
    """The numbers in a text, by the places where they start and end."""

    def __init__(self, text: np.ndarray) -> None:
        self._text = text
        # One word for each place, with the bytes from there on: they overlap.
        self._words = np.ndarray((len(text) - _WORD + 1,), "<u8", text, strides=(1,))
        self._powers_at = np.flatnonzero((text == ord("e")) | (text == ord("E")))

    def numbered(
        self, starts: np.ndarray, ends: np.ndarray, numbering: Numbering
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 numbers from 0, and which of them are valid and in range."""
        numbers, sure = self._whole(starts, ends)
        numbers -= np.uint64(numbering.base)  # smaller numbers become very large
        return numbers.astype(np.int32), sure & (numbers < numbering.number)

    def real(
        self, starts: np.ndarray, points: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return float64 values, and which of them are valid and finite in float32.

        points: where the part before the decimal point ends; equal to `ends` without a point.
        """
        first = self._text[starts]
        negative = first == ord("-")
        unsigned = starts + (negative | (first == ord("+")))
        powers, sure_powers, stops = self._powers(starts, ends)
        points = np.minimum(points, stops)
        whole, sure = self._whole(unsigned, points)
        sure &= sure_powers
        digits, places = points - unsigned, np.zeros(len(starts), np.int64)
        dotted = np.flatnonzero(points < stops)
        if dotted.size:
            begins = points[dotted] + 1
            places[dotted] = stops[dotted] - begins
            fractions, sure_fractions = self._whole(begins, stops[dotted])
            shifts = _POWERS[np.minimum(places[dotted], _MOST_IN_A_WORD)]
            fits = (whole[dotted] == 0) | (digits[dotted] + places[dotted] <= _MOST_IN_A_WORD)
            whole[dotted] = whole[dotted] * shifts + fractions
            sure[dotted] &= sure_fractions & fits
        powers -= places
        sure &= (digits + places > 0) & (np.abs(powers) < len(_EXACT_POWERS))
        # Both are exact up to 2**53: their quotient, or product, is rounded once.
        exact_powers = _EXACT_POWERS[np.minimum(np.abs(powers), len(_EXACT_POWERS) - 1)]
        values = whole / exact_powers
        up = np.flatnonzero(powers > 0)
        values[up] = whole[up] * exact_powers[up]
        sure[_may_round_twice(whole, values)] = False
        sure &= values < _FINITE
        np.negative(values, out=values, where=negative)
        finite = np.ones(len(starts), bool)
        rest = np.flatnonzero(~sure)
        if rest.size:
            values[rest], finite[rest] = self._any_form(starts[rest], ends[rest])
        return values, finite

    def _powers(
        self, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the powers of ten of numbers, which are certain, and where the mantissas end.

        - 1 . 2 5 e - 0 7         power -7
                  ^ here
        """
        powers, sure, stops = np.zeros(len(starts), np.int64), np.ones(len(starts), bool), ends
        marks = self._powers_at
        if not marks.size:
            return powers, sure, stops
        nearest = marks[np.minimum(np.searchsorted(marks, starts), marks.size - 1)]
        named = np.flatnonzero((nearest >= starts) & (nearest < ends))
        begins = nearest[named] + 1
        stops = ends.copy()
        stops[named] = nearest[named]
        sign = self._text[begins]
        negative = sign == ord("-")
        begins += negative | (sign == ord("+"))
        numbers, digits = self._whole(begins, ends[named])
        sure[named] = digits & (begins < ends[named]) & (numbers < _FAR)
        powers[named] = np.where(negative, -1, 1) * np.minimum(numbers, _FAR).astype(np.int64)
        return powers, sure, stops

    def _any_form(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the results of `real`, by Python's float."""
        lengths = ends - starts
        letters = np.arange(min(int(lengths.max()), _MOST_LETTERS))
        there = letters < lengths[:, None]
        texts = np.where(there, self._text[np.minimum(starts[:, None] + letters, ends[:, None])], 0)
        if lengths.max() <= _MOST_LETTERS and _IS_LETTER[texts].all():
            with suppress(ValueError), np.errstate(over="ignore"):
                values = texts.view(f"S{len(letters)}")[:, 0].astype(np.float64)
                return values, np.isfinite(values.astype(np.float32))
        found = [
            parse_value(self._text[start:end].tobytes())
            for start, end in zip(starts, ends, strict=True)
        ]
        finite = np.array([value is not None for value in found])
        return np.array([value or 0.0 for value in found]), finite

    def _whole(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return uint64 numbers, 0 for an empty text; and which are all digits and below 1e19."""
        lengths = ends - starts
        numbers, sure = _eight_digits(self._words[ends - _WORD], np.minimum(lengths, _WORD))
        for read in range(_WORD, MOST_DIGITS, _WORD):
            long = np.flatnonzero(lengths > read)
            if long.size:
                high, sure_high = _eight_digits(
                    self._words[ends[long] - read - _WORD], np.minimum(lengths[long] - read, _WORD)
                )
                numbers[long] += high * _POWERS[read]
                sure[long] &= sure_high & (high < 10 ** min(_WORD, _MOST_IN_A_WORD - read))
        return numbers, sure & (lengths <= MOST_DIGITS)


def _eight_digits(words: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers in the last `counts` bytes of words, and which are all digits.

    bytes   a b c d e f g h      the first is the lowest of a little-endian word
    pairs   ab  cd  ef  gh       x * 10 + the next one, in all bytes at once
    fours   abcd    efgh
    all     abcdefgh
    """
    foreign = ((_WORD - counts) * 8).astype(np.uint64)
    x = words ^ np.uint64(0x3030303030303030)
    x >>= foreign
    x <<= foreign
    not_digits = (x + np.uint64(0x7676767676767676) | x) & np.uint64(0x8080808080808080)
    x *= np.uint64(10 * 2**8 + 1)
    x >>= np.uint64(8)
    x &= np.uint64(0x00FF00FF00FF00FF)
    x *= np.uint64(100 * 2**16 + 1)
    x >>= np.uint64(16)
    x &= np.uint64(0x0000FFFF0000FFFF)
    x *= np.uint64(10000 * 2**32 + 1)
    x >>= np.uint64(32)
    return x, not_digits == 0


def _may_round_twice(mantissas: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the places of values that are not exact and lie where float32 rounds up or down."""
    places = np.flatnonzero(mantissas >= 2**53)
    lost_bits = values[places].view(np.int64) & (2**29 - 1)
    close: np.ndarray = places[np.abs(lost_bits - 2**28) <= 4]
    return close


def _ascends(indices: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return for each entry but the first whether it is above the one before, or begins a row."""
    ascends: np.ndarray = indices[1:] > indices[:-1]
    begins = offsets[1:-1]
    ascends[begins[(begins > 0) & (begins < len(indices))] - 1] = True
    return ascends


def _has_twice(labels: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return for each row whether it has a label twice, bool [rows]."""
    twice = np.zeros(len(offsets) - 1, bool)
    if _ascends(labels, offsets).all():
        return twice
    rows = np.repeat(np.arange(len(twice)), np.diff(offsets))
    order = np.lexsort((labels, rows))
    alike = (np.diff(labels[order]) == 0) & (np.diff(rows[order]) == 0)
    twice[rows[order][1:][alike]] = True
    return twice


def _class_numbers(values: np.ndarray, classes: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return int32 numbers of classes, and which are known."""
    numbers = np.full(len(values), -1, np.int32)
    for number, value in enumerate(classes):
        numbers[values == value] = number
    return numbers, numbers >= 0


def _explained(block: bytes, place: int, layout: Layout) -> BadLine:
    """Return the error for the line that contains a place, or ends at it."""
    line = block.count(b"\n", 0, place)
    begin = block.rfind(b"\n", 0, place) + 1
    try:
        parse_line(block[begin : block.index(b"\n", place)], layout)
    except ValueError as error:
        return BadLine(line, str(error))
    raise AssertionError(f"a line was refused without a reason: {block[begin:][:200]!r}")
