"""Penn Treebank for language models: a sentence per line, words separated by spaces.

     pierre <unk> N years old will join the board as a nonexecutive director nov. N \\n

The end of a line is the word <eos>. The vocabulary is that of the training text, the most frequent
word first; other words in the test text are refused.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from .lanes import Text
from .malformed import MalformedFile

END: Final = "<eos>"
MOST_BYTES: Final = 1 << 30  # of a text
_WORD: Final = re.compile(r"[^ \t]+")  # str.split would also split at non-breaking spaces
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def read_ptb(folder: str | Path) -> Text:
    """Return ptb.train.txt for training and ptb.valid.txt for testing, as gTop-k's authors do.

    Raises FileNotFoundError that names the missing file, MalformedFile, OSError.
    """
    train_path, test_path = (Path(folder) / f"ptb.{part}.txt" for part in ("train", "valid"))
    for path in (train_path, test_path):
        if not path.is_file():
            raise FileNotFoundError(
                f"no {path.name} in '{folder}': ptb.train.txt and ptb.valid.txt are needed"
            )
    counts = Counter(word for words in _sentences(train_path) for word in words)
    order = sorted(counts, key=lambda word: (-counts[word], word))
    numbers = {word: number for number, word in enumerate(order)}
    train, test = (_numbered(path, numbers) for path in (train_path, test_path))
    return Text(train, test, len(numbers), "Penn Treebank")


def _numbered(path: Path, numbers: dict[str, int]) -> torch.Tensor:
    found: list[int] = []
    for line, words in enumerate(_sentences(path), start=1):
        try:
            found += [numbers[word] for word in words]
        except KeyError as error:
            reason = f"{error} is not in the training text; write such words as <unk>"
            raise MalformedFile(path, line, reason) from error
    return torch.from_numpy(np.array(found, np.int64))


def _sentences(path: Path) -> Iterator[list[str]]:
    """Yield the words of each line, with <eos> at its end."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise MalformedFile(path, None, f"has {size} bytes; at most {MOST_BYTES} are read")
    content = path.read_bytes()
    if not content:
        raise MalformedFile(path, None, "is empty")
    if content.startswith(codecs.BOM_UTF8):
        raise MalformedFile(path, 1, "begins with a byte-order mark: save it without one")
    lines = content.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedFile(path, number, f"is not UTF-8: {error}") from error
        if control := _CONTROL.search(text):
            raise MalformedFile(path, number, f"has the control character {control.group()!r}")
        words = _WORD.findall(text)
        if not words:
            raise MalformedFile(path, number, "holds no word")
        yield [*words, END]
