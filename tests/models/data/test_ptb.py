"""Penn Treebank: words by frequency, ends of lines, and refused files."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.data.malformed import MalformedFile
from models.data.ptb import read_ptb


def write_set(folder: Path, train: bytes, valid: bytes) -> None:
    (folder / "ptb.train.txt").write_bytes(train)
    (folder / "ptb.valid.txt").write_bytes(valid)


def test_ptb_words_are_numbered_by_frequency_with_eos_per_line(tmp_path) -> None:
    write_set(tmp_path, b" no it was n't <unk> \n it was \n it was N \n", b" N was it\n")
    text = read_ptb(tmp_path)
    order = ["<eos>", "it", "was", "<unk>", "N", "n't", "no"]
    assert text.vocabulary == len(order)
    assert [order[n] for n in text.train.tolist()] == (
        [
            "no",
            "it",
            "was",
            "n't",
            "<unk>",
            "<eos>",
            "it",
            "was",
            "<eos>",
            "it",
            "was",
            "N",
            "<eos>",
        ]
    )
    assert [order[n] for n in text.test.tolist()] == ["N", "was", "it", "<eos>"]
    assert text.origin == "Penn Treebank"


def test_ptb_words_split_only_at_spaces_tabs_and_newlines(tmp_path) -> None:
    odd = ["10\u00a0000", "a\u2028b", "c\u0085d", "\u3000"]
    content = f"{' '.join(odd)}\r\n\tx  y\t\r\n".encode()
    write_set(tmp_path, content, " ".join(odd).encode())
    text = read_ptb(tmp_path)
    assert text.vocabulary == len({*odd, "x", "y", "<eos>"})
    assert len(text.train) == len(odd) + 4
    assert len(text.test) == len(odd) + 1


def test_ptb_errors_name_the_file_and_line(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no ptb\.train\.txt in .* are needed"):
        read_ptb(tmp_path)
    cases = {
        (b"a b\n", b"a\nb c\n"): r"valid\.txt, line 2: 'c' is not in the training text",
        (b"a\n\nb\n", b"a\n"): r"train\.txt, line 2: holds no word",
        (b"a\xff\n", b"a\n"): r"train\.txt, line 1: is not UTF-8",
        (b"a\n", b"a\x00\n"): r"valid\.txt, line 1: has the control character '\\x00'",
        (b"", b"a\n"): r"train\.txt: is empty",
        (b"a\n", b""): r"valid\.txt: is empty",
        (b"\xef\xbb\xbfa\n", b"a\n"): r"train\.txt, line 1: begins with a byte-order mark",
        (b"a\n", b"a\ra\n"): r"valid\.txt, line 1: has the control character '\\r'",
    }
    for (train, valid), reason in cases.items():
        write_set(tmp_path, train, valid)
        with pytest.raises(MalformedFile, match=reason):
            read_ptb(tmp_path)
