"""Files of the Extreme Classification Repository and LIBSVM: read, or refused by name."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import numpy as np
import pytest

from models.data.catalogue import SHAPES, read_libsvm
from models.data.libsvm import read_classes, read_multilabel
from models.data.malformed import MalformedFile
from models.data.rows import LabelledRows
from models.data.synthetic_xml import resized, synthesise, write_xml
from models.data.xml import read_xml

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
    ("ending", "packed"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)],
    ids=["", "gz", "bz2"],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["unix", "dos"])
def test_xml_file_is_read_compressed_or_plain_with_any_line_ending(
    tmp_path, ending, packed, end
) -> None:
    content = (HEADER + LINES).replace(b"\n", end)
    rows = read_xml(written(tmp_path / f"train{ending}", packed(content)))
    assert as_lists(rows) == ROWS
    assert (rows.features.width, rows.labels.width, rows.origin) == (10, 20, f"train{ending}")


def test_xml_lines_may_end_in_spaces_or_without_a_newline(tmp_path) -> None:
    path = written(tmp_path / "train", HEADER + b"3,17 0:0.25  9:1.5 \n\t4:1\t\n5")
    assert as_lists(read_xml(path)) == ROWS


def test_multilabel_file_without_header_is_read_with_given_dimensions(tmp_path) -> None:
    dimensions = {"features": 10, "labels": 20}
    path = written(tmp_path / "slide", LINES)
    assert as_lists(read_multilabel(path, feature_base=0, label_base=0, **dimensions)) == ROWS
    path = written(tmp_path / "libsvm", b"4,18 1:0.25 10:1.5\n 5:1\n6 \n")
    assert as_lists(read_multilabel(path, feature_base=1, label_base=1, **dimensions)) == ROWS


def test_libsvm_file_has_one_class_per_row(tmp_path) -> None:
    path = written(tmp_path / "w8a", b"-1 1:1 300:1 \n+1 2:1 \n")
    assert as_lists(read_libsvm("w8a", path)) == [([0], {0: 1, 299: 1}), ([1], {1: 1})]
    path = written(tmp_path / "covtype", b"2 1:1\n1 54:-0.5\n")
    assert as_lists(read_libsvm("covtype", path)) == [([1], {0: 1}), ([0], {53: -0.5})]
    with pytest.raises(MalformedFile, match=r"covtype: .*54, but input file contains 55 features"):
        read_libsvm("covtype", written(path, b"2 55:1\n"))
    with pytest.raises(MalformedFile, match="covtype: row 2 has label 3, which is none of 1, 2"):
        read_libsvm("covtype", written(path, b"2 5:1\n3 5:1\n"))
    with pytest.raises(ValueError, match=r"delicious is multilabel.*use read_multilabel"):
        read_libsvm("delicious", path)


def test_written_xml_file_is_read_back(tmp_path) -> None:
    rows = synthesise(SMALL, 200)
    write_xml(tmp_path / "train", rows)
    read = read_xml(tmp_path / "train")
    assert arrays(read)[:2] == arrays(rows)[:2]
    assert arrays(read)[3:] == arrays(rows)[3:]
    np.testing.assert_allclose(read.features.values, rows.features.values, rtol=1e-5)
    assert [part.dtype for part in (read.features.offsets, read.labels.offsets)] == [np.int64] * 2


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", r"line 1: must be a header, 'rows features labels', got ''"),
        (LINES, r"line 1: must be a header, 'rows features labels', got '3,17 0:0.25 9:1.5'"),
        (b"3 10\n" + LINES, r"line 1: must be a header"),
        (b"3 10 -1\n" + LINES, r"line 1: must be a header"),
        (b"3 0 20\n" + LINES, r"the number of features must lie in 1\.\.2147483647, got 0"),
        (b"3 10 3000000000\n" + LINES, r"the number of labels must lie in 1\.\."),
        (b"4 10 20\n" + LINES, r"train: holds 3 rows .*, its header says 4"),
        (b"2 10 20\n" + LINES, r"train: holds 3 rows .*, its header says 2"),
        (b"4 10 20\n" + LINES + b"\n", r"train: holds 3 rows .*, its header says 4"),
        (b"3 10 17\n" + LINES, r"row 1 has label 17, which is not a whole number in 0\.\.16"),
        (b"1 10 20\n0.5 1:1\n", r"row 1 has label 0.5, which is not a whole number in 0\.\.19"),
        (b"1 10 20\n4,3,4 1:1\n", r"a row has a label twice"),
        (b"3 9 20\n" + LINES, r"train: n_features was set to 9"),
        (b"1 10 20\n1 2:1 2:1\n", r"train: .*sorted and unique"),
        (b"1 10 20\n1 2:1 1:1\n", r"train: .*sorted and unique"),
        (b"1 10 20\n1 2:nan\n", r"train: holds a value that is not finite"),
        (b"1 10 20\n1 2:1e39\n", r"train: holds a value that is not finite"),
        (b"1 10 20\nx 1:1\n", r"train: could not convert string to float"),
        (b"1 10 20\n1 x:1\n", r"train: invalid literal for int"),
    ],
)
def test_xml_errors_name_the_file_and_reason(tmp_path, content, error) -> None:
    path = written(tmp_path / "train", content)
    with pytest.raises(MalformedFile, match=error):
        read_xml(path)


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_truncated_or_damaged_compressed_xml_is_refused(tmp_path, ending, pack) -> None:
    random = np.random.default_rng(1)
    lines = [f"{n % 20} {n % 10}:{random.random()}\n" for n in range(500)]
    packed = pack(b"500 10 20\n" + "".join(lines).encode())
    path = tmp_path / f"train{ending}"
    middle = len(packed) // 2
    damaged = packed[:middle] + bytes([packed[middle] ^ 0xFF]) + packed[middle + 1 :]
    for content in (packed[:7], packed[:middle], packed[:-1], damaged, b"1 10 20\n1 1:1\n"):
        with pytest.raises(MalformedFile, match=f"train{ending}"):
            read_xml(written(path, content))


def test_libsvm_file_without_rows_is_refused(tmp_path) -> None:
    path = written(tmp_path / "w8a", b"")
    with pytest.raises(MalformedFile, match=r"w8a: has no rows"):
        read_classes(path, features=10, feature_base=1, classes=(-1, 1))
    with pytest.raises(MalformedFile, match=r"w8a: has no rows"):
        read_multilabel(path, features=10, feature_base=1, labels=3, label_base=0)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"features": 0}, "features must lie in 1..2147483647, got 0"),
        ({"feature_base": 2}, "feature_base must be 0 or 1, got 2"),
        ({"classes": ()}, "classes must be numbers, none of them twice"),
        ({"classes": (1, 1)}, "classes must be numbers, none of them twice"),
    ],
)
def test_read_classes_refuses_arguments_out_of_range(tmp_path, changed, error) -> None:
    path = written(tmp_path / "w8a", b"1 1:1\n")
    with pytest.raises(ValueError, match=error):
        read_classes(path, **{"features": 10, "feature_base": 1, "classes": (-1, 1), **changed})


def test_read_classes_requires_the_feature_base(tmp_path) -> None:
    path = written(tmp_path / "w8a", b"1 1:1\n")
    with pytest.raises(TypeError, match="feature_base"):
        read_classes(path, features=10, classes=(-1, 1))
