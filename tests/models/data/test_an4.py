"""AN4: recordings and transcripts, in batches; errors name the file and the place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.data.an4 import read_an4, read_manifest, read_wav
from models.data.malformed import MalformedFile
from models.data.speech import RATE
from tests.published_files import recordings, wav


def test_an4_train_and_test_parts_are_read_from_manifests(tmp_path) -> None:
    recordings(tmp_path, "train", ["YES", "RUBOUT G M E F"])
    recordings(tmp_path, "val", ["IT'S"])
    data = read_an4(tmp_path)
    assert (len(data.train), len(data.test), data.origin) == (2, 1, "AN4")
    utterance = data.train[0]
    assert utterance.spectrogram.shape == (161, 1 + int(0.2 * RATE) // 160)
    assert utterance.letters.tolist() == [26, 6, 20]
    assert data.test[0].letters.tolist() == [10, 21, 1, 20]


def test_malformed_an4_manifest_or_transcript_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no an4_train_manifest\.csv in .* wav,txt"):
        read_an4(tmp_path)
    recordings(tmp_path, "train", ["YES", "NO"])
    path = tmp_path / "an4_train_manifest.csv"
    manifest = path.read_bytes()
    cases: dict[bytes, str] = {
        b"": "lists no recording",
        manifest + b"train/0.wav\n": r"line 3: must be wav,txt, got 'train/0\.wav'",
        manifest + b",\n": r"line 3: must be wav,txt, got ','",
        manifest.replace(b"1.wav", b"7.wav"): r"line 2: there is no file .*7\.wav",
        manifest.replace(b"1.wav", b"\0.wav"): "line 2: there is no file",
        manifest.replace(b"1.wav", b"x" * 5000): "line 2: there is no file",
        manifest + b"\xff": rf"byte {len(manifest)}: is not UTF-8",
    }
    for content, reason in cases.items():
        path.write_bytes(content)
        with pytest.raises(MalformedFile, match=reason):
            read_manifest(path)
    path.write_bytes(manifest)
    for text, reason in (
        ("yes\n", r"0\.txt, line 1: letter 'y' at place 0 is none of"),
        ("YES_\n", r"letter '_' at place 3"),
        ("YES\nNO\n", "must be one line of text, has 2"),
        (" \n", "must be one line of text, has 1"),
        ("", "must be one line of text, has 0"),
    ):
        (tmp_path / "train" / "0.txt").write_text(text)
        with pytest.raises(MalformedFile, match=reason):
            read_manifest(path)


def test_wav_file_must_be_complete_mono_16_bit_at_16_khz(tmp_path) -> None:
    path, samples = tmp_path / "a.wav", np.array([0, 1, -(2**15), 2**15 - 1])
    path.write_bytes(wav(samples))
    assert read_wav(path).tolist() == (samples / 2**15).tolist()
    intact = wav(samples)
    cases = {
        wav(samples, rate=8000): "must be one channel of 16 bits at 16000 Hz, got 1 of 16 at 8000",
        wav(samples, channels=2): "got 2 of 16 at 16000 Hz",
        intact[:-2]: "ends after 3 of 4 samples",
        intact[:30]: "it ends too soon",
        intact[:40] + b"\xf8\xff\xff\x7f" + intact[44:]: "ends after 4 of 1073741820 samples",
        wav(samples[:0]): "ends after 0 of 0 samples",
        b"": "it ends too soon",
        b"RIFX" + intact[4:]: "does not start with RIFF id",
        b"OggS" * 20: "does not start with RIFF id",
    }
    for content, reason in cases.items():
        path.write_bytes(content)
        with pytest.raises(MalformedFile) as caught:
            read_wav(path)
        assert reason in str(caught.value)
        assert str(path) in str(caught.value)


def test_an4_manifest_paths_may_be_absolute(tmp_path) -> None:
    recordings(tmp_path / "there", "train", ["YES"])
    lines = (tmp_path / "there" / "an4_train_manifest.csv").read_text().strip().split(",")
    manifest = tmp_path / "an4_train_manifest.csv"
    manifest.write_text(",".join(str(tmp_path / "there" / each) for each in lines))
    (recording,) = read_manifest(manifest)
    assert recording.path == Path(tmp_path / "there" / lines[0])
    assert torch.equal(recording.letters, torch.tensor([26, 6, 20]))
