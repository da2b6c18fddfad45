"""mpi_scripts/train_xml.py: every method in one run, the plot, and messages about bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from models.data.catalogue import SHAPES
from models.data.synthetic_xml import resized, synthesise, write_xml


def files(folder: Path) -> list[str]:
    """Write a training and a test file; return their arguments."""
    shape = resized(SHAPES["amazon-670k"], features=300, labels=60)
    arguments = []
    for stream, part in enumerate(("train", "test")):
        write_xml(folder / part, synthesise(shape, 300, stream=stream))
        arguments += [f"--{part}", str(folder / part)]
    return arguments


@pytest.mark.matrix
def test_train_xml_plots_every_method_and_reports_bad_input_once(mpirun, tmp_path) -> None:
    good = files(tmp_path)
    small = ["--hidden", "16", "--batch-size", "10", "--lr", "2", "--negatives", "20"]
    small += ["--mega-batch", "100", "--local-steps", "2"]
    malformed = tmp_path / "malformed"
    malformed.write_text("2 300 60\n3 1:1\n3 1:1 1:2\n")
    other = tmp_path / "other"
    other.write_text("1 299 60\n3 1:1\n")
    bad = {
        "give --train FILE --test FILE, or --synthetic NAME": good[:2],
        f"{malformed}: Feature indices in SVMlight/LibSVM data file should be sorted and unique": [
            "--train",
            str(malformed),
            *good[2:],
        ],
        "the same features and labels, got 300 and 60 in train": [*good[:2], "--test", str(other)],
        "with --evaluations 200 there are only 1 of 300 rows": [*good, "--evaluations", "200"],
        "must be one of amazon-670k": ["--synthetic", "mnist"],
        "argument --density: must lie in (0, 1], got '1.5'": [*good, "--density", "1.5"],
        "--merge-density: must lie in (0, 1], got 'nan'": [*good, "--merge-density", "nan"],
    }
    everything = [*good, *small, "--epochs", "3", "--evaluations", "1", "--out", str(tmp_path)]
    runs = [everything, *bad.values()]
    done = mpirun(2, "train_runs.py", "train_xml.py", json.dumps(runs))
    assert done.returncode == 0, done.stderr
    (code, out, err), *others = (ranks := json.loads(done.stdout))[0]
    assert code == 0, err
    assert all(end == [0, "", ""] for end in others)
    record = json.loads((tmp_path / "train_xml.json").read_text())
    page = (tmp_path / "train_xml.html").read_text()
    labels = [curve["label"] for curve in record["curves"]]
    assert labels == [
        *("Adaptive SGD", "K-step averaging", "Elastic averaging", "CROSSBOW"),
        *("S-SGD", "S-SGD with gTop-k"),
    ]
    for curve in record["curves"]:
        reached = [point["precisions"]["1"] for point in curve["points"]]
        assert max(reached) > 3 * reached[0] + 0.05, curve
        samples = [point["samples"] for point in curve["points"]]
        assert samples == [300 * n for n in range(4)]
        assert page.count(f"</svg>{curve['label']}</li>") == 2
        assert len(re.findall(rf"^{curve['label']}: \d+ samples", out, re.MULTILINE)) == 3
    assert "P@1 over time: train, 2 ranks" in page
    for words, run in zip(bad, ranks[1:], strict=True):
        assert [code for code, _, _ in run] == [2, 2]
        assert words in run[0][2]
        assert run[0][2].startswith("train_xml.py: error: ")
        assert run[0][2].count("error") == 1
