"""Files of the Extreme Classification Repository and LIBSVM: read whole, or refused by name."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from models.data import text_file
from models.data.catalogue import SHAPES, read_libsvm
from models.data.libsvm import read_classes, read_multilabel
from models.data.malformed import MalformedFile
from models.data.rows import LabelledRows
from models.data.synthetic_xml import resized, synthesise, write_xml
from models.data.xml import read_split, read_xml, read_xml_pair

SMALL = resized(SHAPES["amazon-670k"], features=500, labels=300)
HEADER = b"3 10 20\n"
LINES = b"3,17 0:0.25 9:1.5\n 4:1\n5 \n"
ROWS = [([3, 17], {0: 0.25, 9: 1.5}), ([], {4: 1.0}), ([5], {})]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def as_lists(rows: LabelledRows) -> list[tuple[list[int], dict[int, float]]]:
    features, labels = rows.features, rows.labels
    return [
        (
            labels.indices[labels.offsets[row] : labels.offsets[row + 1]].tolist(),
            dict(
                zip(
                    features.indices[features.offsets[row] : features.offsets[row + 1]].tolist(),
                    features.values[features.offsets[row] : features.offsets[row + 1]].tolist(),
                    strict=True,
                )
            ),
        )
        for row in range(len(rows))
    ]


def arrays(rows: LabelledRows) -> list[bytes]:
    features, labels = rows.features, rows.labels
    parts = features.offsets, features.indices, features.values, labels.offsets, labels.indices
    return [part.tobytes() for part in parts]


@pytest.mark.parametrize(
    "packed",
    [bytes, gzip.compress, bz2.compress, lzma.compress],
    ids=["", "gz", "bz2", "xz"],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["unix", "dos"])
def test_one_file_is_read_packed_or_not_and_whatever_ends_its_lines(tmp_path, packed, end) -> None:
    content = (HEADER + LINES).replace(b"\n", end)
    rows = read_xml(written(tmp_path / "train", packed(content)), cache=False)
    assert as_lists(rows) == ROWS
    assert (rows.features.width, rows.labels.width, rows.origin) == (10, 20, "train")


def test_the_last_line_may_lack_its_end_and_lines_may_end_in_spaces(tmp_path) -> None:
    path = written(tmp_path / "train", HEADER + b"3,17 0:0.25  9:1.5 \n\t4:1\t\n5")
    assert as_lists(read_xml(path)) == ROWS


def test_two_files_say_what_one_does(tmp_path) -> None:
    features = written(tmp_path / "X", b"3 10\n0:0.25 9:1.5\n4:1\n\n")
    labels = written(tmp_path / "Y", b"3 20\n3:1 17:1.0\n\n5:1\n")
    assert as_lists(read_xml_pair(features, labels)) == ROWS


def test_a_copy_without_a_header_is_read_when_told_what_it_said(tmp_path) -> None:
    told = {"features": 10, "labels": 20, "label_base": 0}
    path = written(tmp_path / "slide", LINES)
    assert as_lists(read_multilabel(path, feature_base=0, **told)) == ROWS
    path = written(tmp_path / "libsvm", b"3,17 1:0.25 10:1.5\n 5:1\n5 \n")
    assert as_lists(read_multilabel(path, feature_base=1, **told)) == ROWS


def test_a_binary_file_of_libsvm_has_one_class_a_row(tmp_path) -> None:
    path = written(tmp_path / "w8a", b"-1 1:1 300:1 \n+1 2:1 \n")
    assert as_lists(read_libsvm("w8a", path)) == [([0], {0: 1, 299: 1}), ([1], {1: 1})]
    path = written(tmp_path / "covtype", b"2 1:1\n1 54:-0.5\n")
    assert as_lists(read_libsvm("covtype", path)) == [([1], {0: 1}), ([0], {53: -0.5})]
    with pytest.raises(MalformedFile, match=r"covtype, line 1: feature 55 must lie in 1\.\.54"):
        read_libsvm("covtype", written(path, b"2 55:1\n"))
    with pytest.raises(ValueError, match=r"delicious is multilabel.*use read_multilabel"):
        read_libsvm("delicious", path)


def test_what_is_written_is_read_through_blocks_of_any_size(tmp_path, monkeypatch) -> None:
    rows = synthesise(SMALL, 200)
    path = tmp_path / "train"
    write_xml(path, rows)
    for block_bytes in (7, 1000, 1 << 20):
        monkeypatch.setattr(text_file, "BLOCK_BYTES", block_bytes)
        read = read_xml(path, cache=False)
        assert arrays(read)[:2] == arrays(rows)[:2]
        assert arrays(read)[3:] == arrays(rows)[3:]
        np.testing.assert_allclose(read.features.values, rows.features.values, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", r"train: is empty"),
        (gzip.compress(b"", mtime=0), r"train: is empty"),
        (b"\n" + LINES, r"line 1: must be a header, 'rows features labels', got ''"),
        (b"PK\3\4" + LINES, r"train: is a zip archive: unpack it first \(unzip train\)"),
        (b"\x28\xb5\x2f\xfd" + LINES, r"train: is packed by zstd: unpack it first"),
        (LINES, r"line 1: must be a header, 'rows features labels', got '3,17 0:0.25 9:1.5'"),
        (b"3 10\n" + LINES, r"line 1: must be a header"),
        (b"3 10 -1\n" + LINES, r"line 1: must be a header"),
        (b"3 0 20\n" + LINES, r"line 1: the number of features must lie in 1\.\.2147483647, got 0"),
        (b"3 10 3000000000\n" + LINES, r"line 1: the number of labels must lie in 1\.\."),
        (b"4 10 20\n" + LINES, r"train: ends after 3 rows where its header says 4"),
        (b"2 10 20\n" + LINES, r"line 4: a row more than the 2 of the header"),
        (HEADER + LINES + b"\n", r"line 5: a row more than the 3 of the header"),
        (b"3 10 17\n" + LINES, r"line 2: label 17 must lie in 0\.\.16"),
        (b"3 9 20\n" + LINES, r"line 2: feature 9 must lie in 0\.\.8: there are 9, counted from 0"),
        (b"4 10 20\n" + LINES + b"x 1:1\n", r"line 5: label 'x' must be a whole number"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path, content, error) -> None:
    path = written(tmp_path / "train", content)
    with pytest.raises(MalformedFile, match=error):
        read_xml(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_file_that_is_cut_off_or_damaged_is_refused(tmp_path, pack) -> None:
    random = np.random.default_rng(1)
    lines = [f"{n % 20} {n % 10}:{random.random()}\n" for n in range(500)]
    packed = pack(b"500 10 20\n" + "".join(lines).encode())
    path = tmp_path / "train"
    for cut in (7, len(packed) // 2, len(packed) - 1):
        with pytest.raises(
            MalformedFile, match=r"train, line .*(zip|xz).* is truncated or damaged"
        ):
            read_xml(written(path, packed[:cut]))
    middle = len(packed) // 2
    damaged = packed[:middle] + bytes([packed[middle] ^ 0xFF]) + packed[middle + 1 :]
    with pytest.raises(MalformedFile):
        read_xml(written(path, damaged))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_file_without_a_row_is_no_set(tmp_path, pack) -> None:
    path = written(tmp_path / "w8a", pack(b""))
    with pytest.raises(MalformedFile, match=r"w8a: is empty$"):
        read_classes(path, features=10, feature_base=1, classes=(-1, 1))
    with pytest.raises(MalformedFile, match=r"w8a: is empty$"):
        read_multilabel(path, features=10, feature_base=1, labels=3, label_base=0)


def test_all_streams_of_a_bzip2_file_are_read(tmp_path, monkeypatch) -> None:
    parts = b"3 10", b" 20\n", b"", LINES[:9], LINES[9:], b""
    path = written(tmp_path / "train", b"".join(map(bz2.compress, parts)))
    for block_bytes in (5, 1 << 20):
        monkeypatch.setattr(text_file, "BLOCK_BYTES", block_bytes)
        assert as_lists(read_xml(path, cache=False)) == ROWS


def test_a_later_stream_of_a_bzip2_file_that_is_damaged_is_refused(tmp_path) -> None:
    lines = b"".join(b"-1 %d:1\n" % (1 + n % 7) for n in range(500))
    first, later = bz2.compress(lines), bz2.compress(lines[:350])
    damaged = [later[:n] + bytes([later[n] ^ 0xFF]) + later[n + 1 :] for n in (0, 12, 50, -2)]
    cut = [later[:n] for n in (1, 4, len(later) // 2, -1)]
    for end in (*damaged, *cut, b"garbage", b"\0"):
        path = written(tmp_path / "w8a", first + end)
        with pytest.raises(MalformedFile, match=r"w8a, line .*the bzip2 file is truncated or dam"):
            read_libsvm("w8a", path)
        assert list(tmp_path.iterdir()) == [path]
    assert len(read_libsvm("w8a", written(path, first + later))) == 550


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(text_file, "MOST_LINE_BYTES", 4000)
    monkeypatch.setattr(text_file, "BLOCK_BYTES", 1000)
    path = written(tmp_path / "train", HEADER + b"3 5:1\n" + b"1" * 9000)
    with pytest.raises(MalformedFile, match="line 3: longer than 4000 bytes"):
        read_xml(path)


def test_two_files_that_do_not_belong_together_are_refused(tmp_path) -> None:
    features = written(tmp_path / "X", b"2 10\n0:0.25\n4:1\n")
    labels = written(tmp_path / "Y", b"3 20\n3:1\n4:1\n5:1\n")
    with pytest.raises(MalformedFile, match=r"Y: has 3 rows where .*X has 2"):
        read_xml_pair(features, labels)
    with pytest.raises(MalformedFile, match=r"Y, line 3: label 5 has weight 0.5"):
        read_xml_pair(features, written(labels, b"2 20\n3:1\n5:0.5\n"))


def test_a_split_file_says_which_rows_are_for_training(tmp_path) -> None:
    path = written(tmp_path / "split", b"1 3\n3 2\n")
    rows = read_xml(written(tmp_path / "all", HEADER + LINES))
    assert as_lists(rows.take(read_split(path, len(rows)))) == [ROWS[0], ROWS[2]]
    assert read_split(path, 3, column=1).tolist() == [2, 1]
    with pytest.raises(ValueError, match=r"column must lie in 0\.\.1, got 2"):
        read_split(path, 3, column=2)
    for content, error in (
        (b"1 3\n3\n", r"split, line 2: must be 2 numbers of rows"),
        (b"1 3\n3 x\n", r"split, line 2: must be 2 numbers of rows"),
        (b"1 3\n\n", r"split, line 2: must be 2 numbers of rows"),
        (b"1 3\n0 3\n", r"split, line 2: row 0 must lie in 1\.\.3"),
        (b"1 3\n4 3\n", r"split, line 2: row 4 must lie in 1\.\.3"),
        (b"1 3\n1 2\n", r"split: lists row 1 twice in column 0"),
    ):
        with pytest.raises(MalformedFile, match=error):
            read_split(written(path, content), 3)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"features": 0}, "features must lie in 1..2147483647, got 0"),
        ({"feature_base": 2}, "feature_base must be 0 or 1, got 2"),
        ({"classes": ()}, "classes must be numbers, none of them twice"),
        ({"classes": (1, 1)}, "classes must be numbers, none of them twice"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path, changed, error) -> None:
    path = written(tmp_path / "w8a", b"1 1:1\n")
    with pytest.raises(ValueError, match=error):
        read_classes(path, **{"features": 10, "feature_base": 1, "classes": (-1, 1), **changed})


def test_what_numbers_count_from_must_be_said(tmp_path) -> None:
    path = written(tmp_path / "w8a", b"1 1:1\n")
    with pytest.raises(TypeError, match="feature_base"):
        read_classes(path, features=10, classes=(-1, 1))


# ---- the cache beside the file


def test_a_file_is_parsed_once_and_mapped_from_then_on(tmp_path, monkeypatch) -> None:
    path = tmp_path / "train"
    write_xml(path, synthesise(SMALL, 50))
    parsed = read_xml(path)
    monkeypatch.setattr(text_file, "parse_block", None)
    mapped = read_xml(path)
    assert arrays(mapped) == arrays(parsed)
    assert not mapped.features.values.flags.owndata
    assert mapped.origin == "train"
    assert {entry.name for entry in tmp_path.iterdir()} == {"train", "train.rows"}


def test_a_file_that_changed_is_parsed_anew(tmp_path) -> None:
    path = written(tmp_path / "train", HEADER + LINES)
    read_xml(path)
    same_size = written(path, HEADER + LINES.replace(b"0.25", b"0.75"))
    os.utime(same_size, ns=(1, 1))
    assert as_lists(read_xml(path))[0][1] == {0: 0.75, 9: 1.5}
    assert as_lists(read_xml(path))[0][1] == {0: 0.75, 9: 1.5}


def test_a_file_read_in_another_way_is_parsed_anew(tmp_path) -> None:
    path = written(tmp_path / "train", b"1 1:1\n")
    for base in (0, 1, 0):
        rows = read_classes(path, features=10, feature_base=base, classes=(-1, 1))
        assert rows.features.indices.tolist() == [1 - base]


def cached(folder: Path) -> tuple[Path, Path]:
    """Return a file that was read once, and its cache."""
    path = folder / "train"
    write_xml(path, synthesise(SMALL, 20))
    read_xml(path)
    return path, folder / "train.rows"


def test_a_damaged_cache_is_passed_over(tmp_path) -> None:
    path, cache = cached(tmp_path)
    fresh, sound = arrays(read_xml(path)), cache.read_bytes()
    record_end = sound.index(b"}") + 1
    indices = sound.index(fresh[1])
    for damaged in (
        b"",
        sound[:10],
        sound[:-1],
        sound + b"\0",
        b"x" + sound[1:],
        sound[:20] + b"\xff" + sound[21:],
        sound[: record_end - 20] + b"nonsense" + sound[record_end - 12 :],
        sound.replace(b'"version": 2', b'"version": 1'),
        sound[:indices] + b"\xff\xff\xff\x7f" + sound[indices + 4 :],
        sound[:-40] + bytes(40),  # the labels, as a power loss may leave them
        sound.replace(b'"origin": "train"', b'"origin": "brain"'),
        sound[:24] + b"[" * 200_000,
    ):
        assert damaged != sound
        cache.write_bytes(damaged)
        assert arrays(read_xml(path)) == fresh
        assert cache.read_bytes() == sound


def test_a_damaged_cache_under_a_checksum_that_fits_points_nowhere_else(tmp_path) -> None:
    path, cache = cached(tmp_path)
    fresh, sound = arrays(read_xml(path)), cache.read_bytes()
    for array, value in ((0, b"\1"), (1, b"\xff\xff\xff\x7f"), (3, b"\1"), (4, b"\xff" * 4)):
        place = sound.index(fresh[array])
        body = sound[16:place] + value + sound[place + len(value) :]
        cache.write_bytes(sound[:8] + zlib.crc32(body).to_bytes(8, "little") + body)
        assert arrays(read_xml(path)) == fresh
        assert cache.read_bytes() == sound


def test_a_cache_has_its_name_only_when_the_disk_has_it(tmp_path, monkeypatch) -> None:
    path = written(tmp_path / "train", HEADER + LINES)
    done: list[tuple[str, int]] = []
    sync, replace = os.fsync, Path.replace

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        done.append(("sync", os.fstat(descriptor).st_size))

    def noted_replace(written: Path, target: Path) -> Path:
        done.append(("replace", written.stat().st_size))
        return replace(written, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    read_xml(path)
    size = (tmp_path / "train.rows").stat().st_size
    assert done == [("sync", size), ("replace", size)]


def test_where_no_cache_can_be_written_there_is_none(tmp_path, monkeypatch) -> None:
    path = written(tmp_path / "train", HEADER + LINES)

    def refuse(*arguments: object) -> None:
        raise PermissionError(30, "Read-only file system")

    real_open = Path.open
    monkeypatch.setattr(
        Path, "open", lambda p, mode="r", **o: refuse() if "x" in mode else real_open(p, mode, **o)
    )
    assert as_lists(read_xml(path)) == ROWS
    monkeypatch.undo()
    monkeypatch.setattr(Path, "replace", refuse)
    assert as_lists(read_xml(path)) == ROWS
    assert list(tmp_path.iterdir()) == [path]
