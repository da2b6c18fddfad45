"""Reads WAV files of speech corpora: one channel of 16-bit samples, not compressed."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path
from typing import Final

import numpy as np

from .malformed import MalformedFile

MOST_SECONDS: Final = 600
_MOST_HEADER_BYTES: Final = 1 << 20
_EXTENSIBLE: Final = 0xFFFE  # WAVE_FORMAT_EXTENSIBLE, whose GUID tells the samples' format
_PCM_GUID: Final = bytes.fromhex("0100000000001000800000aa00389b71")


def read_wav(path: str | Path, rate: int) -> np.ndarray:
    """Return the samples, float32 [n] in -1..1; rate: samples a second, which the file must have.

    Raises MalformedFile, a ValueError that names file and reason; OSError.
    """
    path = Path(path)
    most = 2 * MOST_SECONDS * rate + _MOST_HEADER_BYTES
    with path.open("rb") as stream:
        try:
            with wave.open(_as_plain_pcm(stream.read(most))) as file:
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


def _as_plain_pcm(content: bytes) -> io.BytesIO:
    """Return a file whose extensible "fmt " chunk for PCM is changed to a plain one.

    Before 3.12 Python's wave reads only the plain one.
    """
    place = 12  # after RIFF, the length and WAVE
    while place + 8 <= len(content):
        name, length = struct.unpack_from("<4sI", content, place)
        body = place + 8
        if name == b"fmt ":
            fields = content[body : body + length]
            is_extensible = fields[:2] == struct.pack("<H", _EXTENSIBLE)
            if is_extensible and fields[24:40] == _PCM_GUID:
                content = content[:body] + struct.pack("<H", 1) + content[body + 2 :]
            break
        place = body + length + length % 2
    return io.BytesIO(content)
