"""WAV files as speech corpora have them: one channel of 16-bit samples, not compressed."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Final

import numpy as np

from .malformed import MalformedFile

MOST_SECONDS: Final = 600


def read_wav(path: str | Path, rate: int) -> np.ndarray:
    """Return the samples, float32 [n] in -1..1; rate: samples a second, which the file must have.

    Raises MalformedFile, a ValueError that names file and reason; OSError.
    """
    path = Path(path)
    with path.open("rb") as stream:
        try:
            with wave.open(stream) as file:
                told = file.getparams()
                if (told.nchannels, told.sampwidth, told.framerate) != (1, 2, rate):
                    raise ValueError(
                        f"must be one channel of 16 bits at {rate} Hz, got {told.nchannels} of "
                        f"{8 * told.sampwidth} at {told.framerate} Hz"
                    )
                held = path.stat().st_size // 2
                if not 1 <= told.nframes <= min(held, MOST_SECONDS * rate):
                    raise ValueError(
                        f"announces {told.nframes} samples in {held} pairs of bytes; 1 to "
                        f"{MOST_SECONDS} seconds are read"
                    )
                content = file.readframes(told.nframes)
                if len(content) != 2 * told.nframes:
                    raise ValueError(f"ends after {len(content) // 2} of {told.nframes} samples")
        except (wave.Error, EOFError, RuntimeError, ValueError) as error:
            reason = f"is no WAV file that can be read: {str(error) or 'it ends too soon'}"
            raise MalformedFile(path, None, reason) from error
    return np.frombuffer(content, "<i2").astype(np.float32) / 2**15
