"""Checkpoint files: each is written under a temporary name, synced and renamed.

    checkpoint-00000042-step-1200/
        all-of-2.safetensors      all-of-2.json       state equal on every rank; rank 0 writes it
        rank-0-of-2.safetensors   rank-0-of-2.json    a rank's own state: residuals, generators
        rank-1-of-2.safetensors   rank-1-of-2.json

A part exists if its JSON file exists, and a checkpoint is whole if all its parts exist. The JSON
file holds the size and the SHA-256 of the tensors' file, and a checksum of itself.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import operator
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, SupportsIndex

import torch

from ...errors import DamagedError, FormatError
from ...exchange.buckets.arrays import as_bytes
from .tree import DTYPES, Flattened, Json

ALL: Final = "all"
FORMAT: Final = 1
# Limits for names in a folder, which anybody may have created: gtopk writes no longer numbers, and
# no job has that many ranks.
LAST_NUMBER: Final = 10**18 - 1
LAST_STEP: Final = 2**63 - 1
_FOLDER: Final = re.compile(r"checkpoint-([0-9]{8,18})-step-([0-9]{1,19})")
_FILE: Final = re.compile(r"(all|rank-[0-9]{1,6})-of-([0-9]{1,6})\.json")
_MOST_ABSENT: Final = 3  # absent parts that an error lists
_TEMPORARY_SUFFIX: Final = ".part"  # suffix of a file that is being written
# The largest JSON file that is read, and thus written: a sparse file may have any size.
_MOST_JSON_BYTES: Final = 1 << 30
_MOST_HEADER_BYTES: Final = 100_000_000  # the longest header that safetensors reads
_WITH_CHECKSUM: Final = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "part":\n(.*)\}\n', re.DOTALL)


class Part(NamedTuple):
    """One part of checkpoint `number` in a folder; name: "all" or, for example, "rank-3"."""

    number: int
    step: int
    ranks: int
    name: str

    @property
    def folder(self) -> str:
        return f"checkpoint-{self.number:08d}-step-{self.step}"

    @property
    def file(self) -> str:
        """Return the path of its JSON file, relative to the folder of all checkpoints."""
        return f"{self.folder}/{self.name}-of-{self.ranks}.json"


class Content(NamedTuple):
    """The content of a checkpoint's part.

    attempt: a text that is equal in all parts of one checkpoint.
    before: the number of the newest checkpoint that was whole when this one was begun; 0 for none.
    """

    attempt: str
    state: Flattened
    before: int = 0


def whole_number(name: str, value: SupportsIndex, least: int) -> int:
    """Return an integer from Python, NumPy or torch as an int that fits into a folder's name.

    Raises TypeError for anything else, including floats and bools. Raises ValueError for a number
    below `least`, or one that is too large for a folder's name.
    """
    is_truth = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    try:
        number = None if is_truth else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(
            f"{name} must be an integer, got {value!r}; count in integers, or pass int({name})"
        )
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > LAST_STEP:
        raise ValueError(f"{name} must be at most {LAST_STEP}, got {number}")
    return number


def name_of(rank: int) -> str:
    """Return the name of a rank's own part."""
    return f"rank-{rank}"


def parts_of(number: int, step: int, ranks: int) -> list[Part]:
    """Return the parts of a whole checkpoint."""
    return [*_each_part(number, step, ranks)]


def missing_parts(number: int, step: int, ranks: int, found: Container[Part]) -> list[Part]:
    """Return the first few absent parts: a file's name may claim any number of ranks."""
    return [*islice((p for p in _each_part(number, step, ranks) if p not in found), _MOST_ABSENT)]


def _each_part(number: int, step: int, ranks: int) -> Iterator[Part]:
    # Lazy: a file's name may claim a million ranks.
    names = chain([ALL], map(name_of, range(ranks)))
    return (Part(number, step, ranks, name) for name in names)


def path_of(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a folder of checkpoints.

    Raises ValueError for "", which Path takes for the current folder, and for a checkpoint's own
    folder, in which no checkpoint would be found.
    """
    if not os.fspath(folder):
        raise ValueError("folder must be a path, got ''; the current folder is '.'")
    path = Path(folder)
    if _FOLDER.fullmatch(path.name):
        raise ValueError(f"'{path}' is one checkpoint; pass the folder of all, '{path.parent}'")
    return path


def ensure_folder(folder: Path) -> Path:
    """Return a folder of checkpoints; create it if it does not exist (any more)."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def list_parts(folder: Path) -> list[Part]:
    """Return the existing parts, also while a job is writing to the folder."""
    parts = []
    for path, match in _checkpoints(folder):
        try:
            files = os.listdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            continue  # the job has removed it: a newer one is whole
        for file in filter(None, map(_FILE.fullmatch, files)):
            part = Part(int(match[1]), int(match[2]), int(file[2]), file[1])
            if part.file == f"{path.name}/{file[0]}":  # excludes numbers with leading zeros
                parts.append(part)
    return parts


def complete_checkpoints(parts: Iterable[Part]) -> list[Part]:
    """Return the part "all" of each checkpoint that has all its parts, the newest first."""
    existing = set(parts)
    shared = sorted((part for part in existing if part.name == ALL), reverse=True)
    return [part for part in shared if not missing_parts(*part[:3], existing)]


def remove_checkpoints(folder: Path, unwanted: Callable[[int], bool]) -> None:
    """Remove the checkpoints with unwanted numbers; other ranks may do so at the same time."""
    for path, match in _checkpoints(folder):
        if unwanted(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _checkpoints(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    # A list: callers remove checkpoints during the iteration.
    for path in list(folder.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        is_canonical = match and Part(int(match[1]), int(match[2]), 0, ALL).folder == path.name
        if match and is_canonical and path.is_dir():
            yield path, match


def write_part(folder: Path, part: Part, content: Content) -> None:
    """Write a part atomically: it is whole or absent, even if the process or machine crashes.

    Raises OSError on a disk error, after removing the temporary file. Raises ValueError for content
    that `read_part` would reject.
    """
    path = folder / part.file
    path.parent.mkdir(exist_ok=True)
    # Sync the new folder's name: without it, a crash could lose a finished checkpoint.
    sync(folder)
    tensors = content.state.tensors
    record = {
        "format": FORMAT,
        "attempt": content.attempt,
        "before": content.before,
        "step": part.step,
        "ranks": part.ranks,
        "name": part.name,
        "tensors": write_tensors(path.with_suffix(".safetensors"), tensors) if tensors else None,
        "state": content.state.tree,
    }
    # Written last: the JSON file makes the part exist.
    data = encode_with_checksum(record)
    if len(data) > _MOST_JSON_BYTES:
        raise ValueError(
            f"{part.file} would have {len(data)} bytes, and at most {_MOST_JSON_BYTES} are read: "
            "save large data as tensors that need no gradient, or NumPy arrays, of real numbers"
        )
    with temporary_path(path) as unfinished:
        unfinished.write_bytes(data)


def encode_with_checksum(record: Json) -> bytes:
    """Return a record as JSON, wrapped together with its checksum."""
    # JSON has no NaN, and `tree` marks it as "$float": a NaN here is a bug.
    body = json.dumps(record, indent=1, allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    return b'{"sha256": "%b", "part":\n%b}\n' % (digest, body)


def decode_with_checksum(content: bytes) -> Json:
    """Return the record; raise DamagedError if the checksum does not match."""
    found = _WITH_CHECKSUM.fullmatch(content)
    if found is None:
        raise DamagedError("it is truncated, or not a part of a checkpoint")
    if hashlib.sha256(found[2]).hexdigest().encode() != found[1]:
        raise DamagedError("its SHA-256 does not match its content")
    try:
        return json.loads(found[2])
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is not valid JSON: {error}") from None


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write a .safetensors file, and return its "bytes" and "sha256".

    The bytes are hashed while they are written, in one pass, without a copy.
    """
    # Widest dtypes first, so that each tensor begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        dtype, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # Pad, so that the tensors begin at a multiple of 8, as in safetensors' own files.
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_BYTES:
        raise ValueError(
            f"{len(names)} tensors have a header of {len(text)} bytes, and at most "
            f"{_MOST_HEADER_BYTES} are read: save fewer tensors, such as one in place of a list"
        )
    digest = hashlib.sha256()
    with temporary_path(path) as unfinished, open(unfinished, "wb") as stream:
        pieces: list[bytes | memoryview] = [struct.pack("<Q", len(text)), text]
        for piece in (*pieces, *(bits_of(tensors[name]) for name in names)):
            digest.update(piece)
            stream.write(piece)
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


def bits_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a dense tensor on the host."""
    bits: memoryview = as_bytes(tensor).numpy().data
    return bits


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end, sync it to the disk and rename it to `path`.

    An OSError names the file; the temporary file is then removed.
    """
    unfinished = path.with_name(path.name + _TEMPORARY_SUFFIX)
    try:
        yield unfinished
        # Sync before the rename: a crash must not keep the name and lose the content.
        sync(unfinished)
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    # The new name is durable only once its folder is synced, too.
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and keep its names without it.
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def read_part(folder: Path, part: Part) -> Content:
    """Return a part's content.

    Raises OSError, DamagedError or FormatError; the last two name the file.
    """
    content, expected = read_json(folder, part)
    if expected is None:
        return content
    path = (folder / part.file).with_suffix(".safetensors")
    with naming(path):
        return content._replace(state=Flattened(content.state.tree, read_tensors(path, expected)))


def read_json(folder: Path, part: Part) -> tuple[Content, Json]:
    """Return a part's content without its tensors, and the JSON entry about the tensors' file.

    Raises the errors of `read_part`.
    """
    path = folder / part.file
    with naming(path):
        record = decode_with_checksum(read_file(path, _MOST_JSON_BYTES))
        if not isinstance(record, dict):
            raise DamagedError(f"it must hold a dict, got {type(record).__name__}")
        before = record.get("before", 0)
        if type(before) is not int:
            raise DamagedError(f"its 'before' must be an integer, got {before!r}")
        try:
            # Reject True and 1.0, which equal 1 but were never written.
            if type(record["format"]) is not int:
                raise DamagedError(f"its format is {record['format']!r}")
            if record["format"] != FORMAT:
                raise FormatError(
                    f"its format is {record['format']!r}, and this version of gtopk reads {FORMAT}"
                )
            content = Content(str(record["attempt"]), Flattened(record["state"], {}), before)
            tensors_entry = record["tensors"]
            recorded = Part(part.number, record["step"], record["ranks"], record["name"])
        except KeyError as error:
            raise DamagedError(f"it lacks {error}") from None
        # A renamed or copied file has a correct checksum, but belongs to another checkpoint.
        if recorded != part:
            raise DamagedError(f"it belongs to {recorded.file}")
    return content, tensors_entry


def read_tensors(path: Path, expected: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; expected: its expected size and SHA-256.

    The file is read once, so that the checked bytes are those that are used.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not isinstance(expected, dict) or type(expected.get("bytes")) is not int:
        raise DamagedError("the size of its tensors' file is not recorded")
    # Checked before reading: a truncated file need not be hashed.
    if path.stat().st_size != expected["bytes"]:
        raise DamagedError(f"it has {path.stat().st_size} bytes of {expected['bytes']}")
    content = read_file(path, expected["bytes"])
    if hashlib.sha256(content).hexdigest() != expected.get("sha256"):
        raise DamagedError("its SHA-256 differs from the one in its JSON")
    try:
        tensors: dict[str, torch.Tensor] = load(content)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise DamagedError(f"{name!r} is of {tensor.dtype}, which gtopk does not write")
    return tensors


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return a file's content; raise DamagedError if it is too long, or not a regular file."""
    # Without O_NONBLOCK, opening a pipe with this name would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError("it is not a regular file")
        if status.st_size > most_bytes:
            raise DamagedError(f"it is longer than {most_bytes} bytes")
        if status.st_size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise MemoryError  # with overcommitted memory, reading could get this process killed
        # Read one byte more, to detect a file that has grown since.
        return stream.read(status.st_size + 1)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a file's name to errors about its content; turn a MemoryError into an OSError.

    Another host may have enough memory, so the file does not count as damaged.
    """
    try:
        yield
    except MemoryError:
        why = "not enough memory to read"
        raise OSError(errno.ENOMEM, why, f"{path.parent.name}/{path.name}") from None
    except (DamagedError, FormatError) as error:
        raise type(error)(f"{path.parent.name}/{path.name}: {error}") from None
