"""Fuzz all readers of bytes with damaged and hostile input: they read it, or raise their own error.

    python tests/programs/fuzz_readers.py --messages 1000000
    python tests/programs/fuzz_readers.py --target objects --messages 100000 --seed 7

Any other error than a reader promises ends the program; the input is then added to tests/corpus,
which every run reads first. A reader has 10 seconds and 2 GiB for an input.
`tests/programs/fuzz_wire.py` does the same for the messages between ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from collectives.transports import local_world
from gtopk import load_latest, save_checkpoint
from gtopk.compression import Compression
from gtopk.errors import DamagedError
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.object_codec import ObjectFormatError, decode, encode
from gtopk.runtime.object_codec.codec import HEADER, HEADER_BYTES
from gtopk.runtime.world import world
from gtopk.torch.checkpoint import CheckpointError, Loaded
from gtopk.torch.checkpoint.files import decode_with_checksum, encode_with_checksum, read_tensors
from gtopk.torch.checkpoint.tree import flatten, unflatten
from models.data import classification
from models.data.an4 import read_transcript, read_wav
from models.data.cifar10 import IMAGE_BYTES, read_binary_batch, read_pickled_batch
from models.data.image_folder import central_box, decoded
from models.data.libsvm import read_classes, read_multilabel
from models.data.mnist import read_idx
from models.data.ptb import read_ptb
from models.data.xml import read_xml
from tests import published_files

CORPUS = Path(__file__).parents[1] / "corpus"
MOST_SECONDS = 10
MOST_BYTES = 2 << 30
BORDERS = [
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**63,
    2**64 - 1,
]


class Target(NamedTuple):
    """A reader of bytes.

    some:   makes valid bytes.
    read:   reads bytes, through a file if it reads files, and returns the result.
    errors: the errors that it promises for invalid bytes.
    sealed: gives damaged bytes a matching checksum, so that the code behind the check is reached.
    cost:   how many times as long an input takes as for other readers; it gets as many fewer.
    """

    some: Callable[[random.Random], bytes]
    read: Callable[[bytes, Path], Any]
    errors: tuple[type[Exception], ...]
    sealed: Callable[[bytes], bytes] = lambda content: content
    cost: int = 1


def some_object(dice: random.Random, depth: int = 0) -> Any:
    """Return an object of any type that travels between ranks."""
    if depth > 3 or dice.random() < 0.4:
        return dice.choice(
            [
                *(None, True, -1, 2**63, 2**70, 1.5, float("nan"), 1j, "text", b"bytes"),
                *(np.float32(2), np.arange(3), np.array(["a", "bc"]), np.zeros((0, 2), np.bool_)),
                *(torch.ones(2, 2), torch.tensor(3), torch.ones(1).bfloat16(), torch.Size([2])),
                *(torch.nn.Parameter(torch.ones(2)), torch.float16, torch.device("cpu"), {1, "a"}),
                *(slice(1, 2), range(3), np.str_("x"), np.bytes_(b"x")),
            ]
        )
    parts = [some_object(dice, depth + 1) for _ in range(dice.randrange(4))]
    pairs: dict[Any, Any] = dict(zip(["a", "$b", 3], parts, strict=False))
    return dice.choice([parts, tuple(parts), pairs, OrderedDict(pairs)])


def some_record(dice: random.Random) -> bytes:
    """Return the content of a checkpoint part's JSON file."""
    tree = flatten({"model": some_object(dice), "lr": [0.1, (1, 2)]}).tree
    return encode_with_checksum(
        {"format": 1, "attempt": "word", "step": 1, "tensors": None, "state": tree}
    )


def read_record(content: bytes, file: Path) -> Any:
    record = decode_with_checksum(content)
    tensors = defaultdict(lambda: torch.zeros(2))
    return unflatten(record.get("state") if isinstance(record, dict) else record, tensors)


def sealed_record(content: bytes) -> bytes:
    """Return the same text with a matching checksum."""
    body = content[len('{"sha256": "') + 64 + len('", "part":\n') : -2]
    return b'{"sha256": "%b", "part":\n%b}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


# Two checkpoints of one rank, by step; any file of the newer one may be replaced by the input.
_OLDER, _NEWER = 1, 2


@functools.cache
def two_checkpoints() -> dict[str, bytes]:
    """Return the files in a folder of checkpoints, by relative path."""
    with tempfile.TemporaryDirectory() as folder, world.entered(local_world(1)[0]):
        model = torch.nn.Linear(2, 2)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            Compression.gtopk(density=0.5),
        )
        for step in (_OLDER, _NEWER):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            save_checkpoint(folder, model, optimizer, step=step, plain={1: [0.5, (np.ones(2),)]})
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def some_part(dice: random.Random) -> bytes:
    """Return a JSON file of the newer checkpoint."""
    files = two_checkpoints()
    return files[dice.choice([n for n in sorted(files) if f"step-{_NEWER}" in n and "json" in n])]


def load_part(content: bytes, file: Path) -> Any:
    """Load from a folder whose newer checkpoint has this file: one of the two must be returned."""
    name = "rank-0-of-1.json" if b'"name": "rank-0"' in content else "all-of-1.json"
    folder = fresh_folder(file)
    for path, held in two_checkpoints().items():
        is_fed = path.endswith(f"step-{_NEWER}/{name}")
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content if is_fed else held)
    found = loaded_from(folder)
    assert found is not None
    if found.step == _OLDER:
        raise DamagedError("the newer one was passed over")
    assert found.step == _NEWER
    return found


def some_names(dice: random.Random) -> bytes:
    """Return the paths of files in a folder of checkpoints, one per line."""
    two_checkpoints()  # created here, outside the first input's time limit
    numbers = [dice.randrange(1, 100) for _ in range(3)]
    names = [f"{name}-of-2.json" for name in ("all", "rank-0", "rank-1")]
    return "".join(
        f"checkpoint-{n:08d}-step-{n}/{name}\n" for n in numbers for name in names
    ).encode()


def load_names(content: bytes, file: Path) -> Any:
    """Load from a folder with a complete checkpoint, and empty files with these names."""
    folder = fresh_folder(file)
    for path, held in two_checkpoints().items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(held)
    for line in content.split(b"\n"):
        name, _, inner = line.partition(b"/")
        with contextlib.suppress(OSError, ValueError):  # names that no file can have
            place = os.path.join(os.fsencode(folder), name.replace(b"..", b""))
            os.makedirs(place, exist_ok=True)
            with open(os.path.join(place, inner.replace(b"/", b"")), "xb"):
                pass
    found = loaded_from(folder)
    assert found is not None
    assert found.step == _NEWER
    return found


def fresh_folder(file: Path) -> Path:
    folder = file.with_name("checkpoints")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def loaded_from(folder: Path) -> Loaded | None:
    """Load, without warnings about skipped checkpoints."""
    with contextlib.redirect_stderr(io.StringIO()), world.entered(local_world(1)[0]):
        return load_latest(folder, None)


def sealed_object(content: bytes) -> bytes:
    if len(content) < HEADER_BYTES:
        return content
    magic, version, flags, head_bytes, _ = HEADER.unpack_from(content)
    if random.Random(content).random() < 0.7:
        head_bytes = min(head_bytes, len(content) - HEADER_BYTES)
    crc = zlib.crc32(content[HEADER_BYTES:])
    return HEADER.pack(magic, version, flags, head_bytes, crc) + content[HEADER_BYTES:]


def some_tensors(dice: random.Random) -> bytes:
    shapes = [dice.choice([(), (0,), (3,), (2, 2), (1, 0, 5)]) for _ in range(dice.randrange(1, 4))]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
    tensors = {f"t{i}": torch.zeros(s, dtype=dice.choice(dtypes)) for i, s in enumerate(shapes)}
    return save(tensors, {"format": "pt"})


def read_file_of_tensors(content: bytes, file: Path) -> Any:
    file.write_bytes(content)
    checksums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return read_tensors(file, checksums)


def some_npz(dice: random.Random) -> bytes:
    rows, stream = dice.choice([3, 10, 40]), io.BytesIO()
    x = np.linspace(0, 1, rows * 2, dtype=dice.choice([np.float32, np.float64])).reshape(rows, 2)
    how = dice.choice([np.savez, np.savez_compressed])
    how(stream, x=x, y=np.arange(rows) % 3)
    return stream.getvalue()


def read_npz(content: bytes, file: Path) -> Any:
    path = file.with_suffix(".npz")
    path.write_bytes(content)
    return classification.load(str(path))


def sealed_zip(content: bytes) -> bytes:
    """Return the archive with checksums that match its members, as they are checked first."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos = archive.infolist()
        data = bytearray(content)
        for info in infos:
            start = info.header_offset
            name_bytes, extra_bytes = struct.unpack_from("<HH", data, start + 26)
            begin = start + 30 + name_bytes + extra_bytes
            raw = bytes(data[begin : begin + info.compress_size])
            if info.compress_type == zipfile.ZIP_DEFLATED:
                raw = zlib.decompressobj(-15).decompress(raw, 1 << 20)
            crc = struct.pack("<L", zlib.crc32(raw))
            at = data.find(struct.pack("<L", info.CRC), start)
            while at >= 0:
                data[at : at + 4] = crc
                at = data.find(struct.pack("<L", info.CRC), at + 4)
        return bytes(data)
    except Exception:  # a damaged archive may raise anything
        return content


def some_rows(dice: random.Random) -> bytes:
    """Return rows of an extreme multi-label file, with its header."""
    rows = []
    for _ in range(dice.randrange(1, 6)):
        labels = ",".join(map(str, sorted(dice.sample(range(20), dice.randrange(4)))))
        indices = sorted(dice.sample(range(50), dice.randrange(5)))
        rows.append(" ".join([labels, *(f"{i}:{dice.choice([1, 0.25, '1e-3'])}" for i in indices)]))
    return "\n".join([f"{len(rows)} 50 20", *rows, ""]).encode()


def as_file(read: Callable[[Path], Any]) -> Callable[[bytes, Path], Any]:
    """Return a reader of bytes that writes them to a file and reads it."""

    def of_bytes(content: bytes, file: Path) -> Any:
        file.write_bytes(content)
        return read(file)

    return of_bytes


def read_binary(file: Path) -> Any:
    return read_classes(file, features=50, feature_base=0, classes=(-1, 1))


def some_binary(dice: random.Random) -> bytes:
    rows = [f"{dice.choice([-1, 1])} {dice.randrange(50)}:{dice.random()}\n" for _ in range(4)]
    return "".join(rows).encode()


def read_listed(file: Path) -> Any:
    return read_multilabel(file, features=50, feature_base=0, labels=20, label_base=0)


def some_batch(dice: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Return two images of CIFAR-10's shape and their labels."""
    pixels = np.frombuffer(dice.randbytes(2 * IMAGE_BYTES), np.uint8)
    return pixels, np.array([dice.randrange(10), dice.randrange(10)])


def some_idx(dice: random.Random) -> bytes:
    rows = dice.randrange(1, 5)
    array = np.frombuffer(dice.randbytes(rows * 6), np.uint8).reshape(rows, 2, 3)
    return published_files.idx(array)


def some_sentences(dice: random.Random) -> bytes:
    words = [["the", "<unk>", "N", "cat", "n't"][dice.randrange(5)] for _ in range(12)]
    return " {} {} {} \n {} {} \n{} {} {} {} {}\n {} {}\n".format(*words).encode()


def read_sentences(content: bytes, file: Path) -> Any:
    """Read a text for training and its first line for testing."""
    folder = file.parent
    (folder / "ptb.train.txt").write_bytes(content)
    (folder / "ptb.valid.txt").write_bytes(content[: content.find(b"\n") + 1])
    text = read_ptb(folder)
    assert int(text.test.max()) < text.vocabulary
    return text


def some_wav(dice: random.Random) -> bytes:
    return published_files.wav(np.frombuffer(dice.randbytes(2 * dice.randrange(1, 40)), np.int16))


def some_image(dice: random.Random) -> bytes:
    pixels = np.frombuffer(dice.randbytes(9 * 8 * 3), np.uint8).reshape(9, 8, 3)
    return published_files.image(pixels, dice.choice(["PNG", "JPEG"]))


TARGETS = {
    "objects": Target(
        lambda dice: encode(some_object(dice)),
        lambda content, file: decode(content, allow_pickle=False),
        (ObjectFormatError,),
        sealed_object,
    ),
    "checkpoint_json": Target(some_record, read_record, (DamagedError,), sealed_record),
    "checkpoint_loaded": Target(
        some_part, load_part, (CheckpointError, DamagedError), sealed_record, cost=3
    ),
    "checkpoint_names": Target(some_names, load_names, (), cost=3),
    "checkpoint_tensors": Target(some_tensors, read_file_of_tensors, (DamagedError,)),
    "classification_npz": Target(some_npz, read_npz, (ValueError,), sealed_zip),
    "xml": Target(some_rows, as_file(read_xml), (ValueError,)),
    "libsvm_classes": Target(some_binary, as_file(read_binary), (ValueError,)),
    "libsvm_multilabel": Target(
        lambda dice: some_rows(dice).partition(b"\n")[2], as_file(read_listed), (ValueError,)
    ),
    "idx": Target(some_idx, as_file(lambda file: read_idx(file, 3)), (ValueError,)),
    "cifar10_binary": Target(
        lambda dice: published_files.binary_batch(*some_batch(dice)),
        as_file(lambda file: read_binary_batch(file, 2)),
        (ValueError,),
    ),
    "cifar10_pickle": Target(
        lambda dice: published_files.pickled_batch(*some_batch(dice)),
        as_file(lambda file: read_pickled_batch(file, 2)),
        (ValueError,),
    ),
    "ptb": Target(some_sentences, read_sentences, (ValueError,)),
    "an4_transcript": Target(
        lambda dice: dice.choice([b"YES\n", b"IT'S A RUBOUT\r\n", b"GO"]),
        as_file(read_transcript),
        (ValueError,),
    ),
    "wav": Target(some_wav, as_file(read_wav), (ValueError,)),
    "image": Target(some_image, as_file(lambda file: decoded(file, 4, central_box)), (ValueError,)),
}


def mutated(content: bytes, other: bytes, dice: random.Random) -> bytes:
    """Return the content with one thing changed."""
    data = bytearray(content or b"\0")
    at = dice.randrange(len(data))
    end = min(len(data), at + dice.choice([1, 2, 4, 8, 16]))
    match dice.randrange(9):
        case 0:
            data[at] ^= 1 << dice.randrange(8)
        case 1:
            data[at] = dice.choice([0, 1, 127, 128, 254, 255, dice.randrange(256)])
        case 2:
            del data[at:]
        case 3:
            del data[at:end]
        case 4:
            data[at:at] = data[at:end]
        case 5:
            width = dice.choice([1, 2, 4, 8])
            number = (dice.choice(BORDERS) + dice.choice([-1, 0, 1])) % 2 ** (8 * width)
            data[at : at + width] = number.to_bytes(width, dice.choice(["little", "big"]))
        case 6:
            cut = dice.randrange(len(other)) if other else 0
            data[at:] = other[cut:]
        case 7:
            cut = dice.randrange(len(other)) if other else 0
            data[at:end] = other[cut : cut + end - at]
        case _:  # numbers as text
            digits = [i for i, byte in enumerate(data) if byte in b"0123456789"]
            if digits:
                place = dice.choice(digits)
                data[place : place + 1] = dice.choice([b"-1", b"9" * 30, b"1e999", b"null", b"[["])
    return bytes(data)


def attempt(name: str, content: bytes, file: Path) -> str:
    """Read bytes and return the outcome; keep the input of an unexpected error, and raise."""
    target = TARGETS[name]
    signal.alarm(MOST_SECONDS)
    try:
        target.read(content, file)
    except target.errors as error:
        return type(error).__name__
    except BaseException:
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / hashlib.sha256(content).hexdigest()[:16]
        kept.write_bytes(content)
        print(f"{name} does not read {kept} as it promises\n", end="", flush=True)
        raise
    finally:
        signal.alarm(0)
    return "read"


def replay(name: str, file: Path) -> int:
    """Read a target's corpus, and return its number of files."""
    kept = sorted((CORPUS / name).glob("*"))
    for path in kept:
        attempt(name, path.read_bytes(), file)
    return len(kept)


def fuzz(name: str, inputs: int, seed: int, file: Path) -> Counter[str]:
    """Read a number of damaged inputs; return how often each outcome occurred."""
    target, ends = TARGETS[name], Counter[str]()
    dice = random.Random(f"{name}/{seed}")
    valid = [target.some(dice) for _ in range(100)]
    valid += [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    # Not all of a checkpoint's JSON: the arrays that it names are in another file.
    assert sum(attempt(name, content, file) == "read" for content in valid[:100]) > 50
    for number in range(inputs // target.cost):
        dice = random.Random(f"{name}/{seed}/{number}")
        content = dice.choice(valid)
        for _ in range(dice.choice([1, 1, 1, 2, 3])):
            content = mutated(content, dice.choice(valid), dice)
        if dice.random() < 0.85:
            content = target.sealed(content)
        ends[attempt(name, content, file)] += 1
    return ends


def bounded() -> None:
    """Limit this process to a little more memory than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="of all targets")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    bounded()
    names = arguments.target or list(TARGETS)
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as where:
        file = Path(where) / "input"
        for name in names:
            kept, begun = replay(name, file), time.process_time()
            ends = fuzz(name, arguments.messages // len(names), arguments.seed, file)
            counts = json.dumps(dict(ends.most_common()))
            seconds = time.process_time() - begun
            print(f"{name}: {kept} kept, {ends.total():,} new inputs: {counts} in {seconds:.0f} s")
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"none crashed, hung or was misread; at most {growth} MiB were in use")
    return 0


if __name__ == "__main__":
    sys.exit(main())
