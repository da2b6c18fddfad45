"""Small files in the formats of published data sets, byte for byte."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path

import numpy as np
from PIL import Image


def idx(array: np.ndarray) -> bytes:
    """Return an IDX file of bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def binary_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Return a file of CIFAR-10's binary version."""
    rows = labels.astype(np.uint8)[:, None], images.reshape(len(labels), -1)
    return np.concatenate(rows, axis=1).tobytes()


def pickled_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Return a file of CIFAR-10's Python version, as Python 2's cPickle wrote it.

    Every new object is put into the memo, and a repeated name is taken from there.
    """
    out, memo = io.BytesIO(), {}

    def put(code: bytes) -> None:
        out.write(code + b"q" + bytes([len(memo) + 1]))
        memo[code] = len(memo) + 1

    def text(value: bytes) -> None:
        code = b"U" + bytes([len(value)]) + value
        if code in memo:
            out.write(b"h" + bytes([memo[code]]))
        else:
            put(code)

    def number(value: int) -> None:
        if 0 <= value < 1 << 8:
            out.write(b"K" + bytes([value]))
        elif 0 <= value < 1 << 16:
            out.write(b"M" + struct.pack("<H", value))
        else:
            out.write(b"J" + struct.pack("<i", value))

    rows, row_bytes = images.reshape(len(labels), -1).shape
    out.write(b"\x80\x02")
    put(b"}")
    out.write(b"(")
    text(b"batch_label")
    text(b"training batch 1 of 5")
    text(b"labels")
    put(b"]")
    out.write(b"(")
    for label in labels.tolist():
        number(label)
    out.write(b"e")
    text(b"data")
    put(b"cnumpy.core.multiarray\n_reconstruct\n")
    put(b"cnumpy\nndarray\n")
    number(0)
    put(b"\x85")
    text(b"b")
    put(b"\x87")
    put(b"R")
    out.write(b"(")
    number(1)
    number(rows)
    number(row_bytes)
    put(b"\x86")
    put(b"cnumpy\ndtype\n")
    text(b"u1")
    number(0)
    number(1)
    put(b"\x87")
    put(b"R")
    out.write(b"(")
    number(3)
    text(b"|")
    out.write(b"NNN")
    number(-1)
    number(-1)
    number(0)
    put(b"t")
    out.write(b"b\x89T" + struct.pack("<i", images.size) + images.tobytes())
    put(b"t")
    out.write(b"b")
    text(b"filenames")
    put(b"]")
    out.write(b"(")
    for row in range(min(rows, 3)):
        text(b"leptodactylus_pentadactylus_s_%06d.png" % row)
    out.write(b"eu.")
    return out.getvalue()


def wav(samples: np.ndarray, rate: int = 16_000, channels: int = 1) -> bytes:
    """Return a WAV file of int16 samples."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return out.getvalue()


def image(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    """Return an image file of uint8 [rows, columns, 3]."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def recordings(folder: Path, part: str, texts: list[str], seconds: float = 0.2) -> None:
    """Write an AN4 manifest and the files that it lists."""
    (folder / part).mkdir(parents=True)
    lines = []
    for number, text in enumerate(texts):
        name = f"{part}/{number}"
        samples = np.random.default_rng(number).normal(0, 3000, int(16_000 * seconds))
        (folder / f"{name}.wav").write_bytes(wav(samples))
        (folder / f"{name}.txt").write_text(text + "\n")
        lines.append(f"{name}.wav,{name}.txt\n")
    (folder / f"an4_{part}_manifest.csv").write_text("".join(lines))
