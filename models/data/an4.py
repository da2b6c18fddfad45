"""AN4 in the usual layout: manifests of recordings and their transcripts.

    an4_train_manifest.csv     wav/an1-mblw-b.wav,txt/an1-mblw-b.txt
    an4_val_manifest.csv       ... a line for each recording, the shortest first

Paths are relative to the manifest's folder, or absolute. A transcript is one line of capitals. All
are read, and their letters checked, before training begins.
"""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from .malformed import MalformedFile
from .speech import RATE, SpeechData, Utterance, numbered, spectrogram

MOST_BYTES: Final = 1 << 20  # of a transcript
MOST_MANIFEST_BYTES: Final = 1 << 28


class Recording(NamedTuple):
    """A recording of a manifest. letters: int64 [n], of the spoken text."""

    path: Path
    letters: torch.Tensor


class Recordings:
    """A manifest's recordings, each read on access."""

    def __init__(self, recordings: list[Recording]) -> None:
        self.recordings = recordings

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, number: int) -> Utterance:
        """Return a recording; raise MalformedFile unless it is a WAV file of 16 kHz."""
        recording = self.recordings[number]
        samples = torch.from_numpy(read_wav(recording.path))
        return Utterance(spectrogram(samples), recording.letters)


def read_an4(folder: str | Path) -> SpeechData:
    """Return both parts. Raises FileNotFoundError that names the missing file, MalformedFile."""
    train, test = (
        Recordings(read_manifest(Path(folder) / f"an4_{part}_manifest.csv"))
        for part in ("train", "val")
    )
    return SpeechData(train, test, "AN4")


def read_manifest(path: str | Path) -> list[Recording]:
    """Return the recordings that a manifest lists; all their files must exist.

    Raises FileNotFoundError, MalformedFile that names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path.name} in '{path.parent}': an4_train_manifest.csv and an4_val_manifest.csv "
            "are needed, a line wav,txt for each recording"
        )
    recordings = []
    lines = _text(path, MOST_MANIFEST_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        fields = line.split(",")
        if len(fields) != 2 or not all(fields):
            raise MalformedFile(path, number, f"must be wav,txt, got {line[:80]!r}")
        wav, transcript = (path.parent / field for field in fields)
        for each in (wav, transcript):
            if not _is_file(each):
                raise MalformedFile(path, number, f"there is no file {str(each)[:200]!r}")
        recordings.append(Recording(wav, read_transcript(transcript)))
    if not recordings:
        raise MalformedFile(path, None, "lists no recording")
    return recordings


def read_wav(path: str | Path) -> np.ndarray:
    """Return the samples, float32 [n] in -1..1, of one channel of 16 bits at 16 kHz.

    Raises MalformedFile, a ValueError that names the file and the reason; OSError.
    """
    try:
        with wave.open(str(path)) as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            if form != (1, 2, RATE):
                raise ValueError(
                    f"must be one channel of 16 bits at {RATE} Hz, got {form[0]} of "
                    f"{8 * form[1]} at {form[2]} Hz"
                )
            content = file.readframes(file.getnframes())
            if not content or len(content) != 2 * file.getnframes():
                raise ValueError(f"ends after {len(content) // 2} of {file.getnframes()} samples")
    except (wave.Error, EOFError, RuntimeError, ValueError) as error:
        reason = f"is not a readable WAV file: {str(error) or 'it ends too soon'}"
        raise MalformedFile(Path(path), None, reason) from error
    return np.frombuffer(content, "<i2").astype(np.float32) / 2**15


def read_transcript(path: str | Path) -> torch.Tensor:
    """Return the letters of a text of one line; raise MalformedFile."""
    path = Path(path)
    lines = _text(path, MOST_BYTES).splitlines()
    if len(lines) != 1 or not lines[0].strip():
        raise MalformedFile(path, None, f"must be one line of text, has {len(lines)}")
    try:
        return numbered(lines[0].strip())
    except ValueError as error:
        raise MalformedFile(path, 1, str(error)) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _text(path: Path, most_bytes: int) -> str:
    if (size := path.stat().st_size) > most_bytes:
        raise MalformedFile(path, None, f"has {size} bytes; at most {most_bytes} are read")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason}"
        raise MalformedFile(path, None, reason, byte=error.start) from error
