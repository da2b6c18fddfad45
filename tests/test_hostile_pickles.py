"""No pickle is ever executed without permission, wherever it arrives."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import pickle
import re
import socket
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch

import gtopk
from gtopk.errors import DamagedError
from gtopk.runtime import object_codec as objects
from gtopk.runtime.object_codec.codec import HEADER, MAGIC, VERSION
from gtopk.runtime.runner import call as report
from gtopk.torch.checkpoint import CheckpointError, load_latest
from gtopk.torch.checkpoint.files import encode_with_checksum
from gtopk.torch.checkpoint.tree import unflatten
from models.data import load
from models.data.an4 import read_transcript, read_wav
from models.data.cifar10 import read_binary_batch, read_pickled_batch
from models.data.image_folder import central_box, decoded
from models.data.malformed import MalformedFile
from models.data.mnist import read_idx
from models.data.xml import read_xml

ROOT = Path(__file__).parents[1]

# The files that may use pickles or execute text, and why.
ALLOWED = {
    "gtopk/runtime/object_codec/codec.py": "pickle",  # where GTOPK_ALLOW_PICKLE=1
    "gtopk/runtime/object_codec/types.py": "pickle",
    "gtopk/torch/checkpoint/dcp.py": "torch.save",  # for DCP's planner, in memory
    "gtopk/transformers.py": "torch.load",  # Trainer's file, with weights_only: executes nothing
    "gtopk/as_horovod/__main__.py": "exec",  # the user's own script
    "models/data/cifar10.py": "pickle",  # may create NumPy arrays, and nothing else
}
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load"}


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (open, (str(self.canary), "w"))


@pytest.fixture
def canary(tmp_path, monkeypatch):
    monkeypatch.delenv("GTOPK_ALLOW_PICKLE", raising=False)
    path = tmp_path / "canary"
    pickle.loads(pickle.dumps(Hostile(path))).close()
    assert path.exists()  # if it is unpickled
    path.unlink()
    yield path
    assert not path.exists()


def message_with_pickle(pickled: bytes, flags: int) -> bytes:
    """Return a message between ranks that holds a pickle; flags: whether its header says so."""
    _, _, _, head_bytes, _ = HEADER.unpack_from(message := objects.encode(pickled))
    of_bytes = msgpack.packb(msgpack.ExtType(objects.Code.BYTES, b""))
    of_pickle = msgpack.packb(msgpack.ExtType(objects.Code.PICKLE, b""))
    body = message[HEADER.size :].replace(of_bytes, of_pickle, 1)
    return HEADER.pack(MAGIC, VERSION, flags, head_bytes, zlib.crc32(body)) + body


def test_message_between_ranks_is_never_unpickled(canary):
    hostile = pickle.dumps(Hostile(canary))
    allowed = objects.encode([Hostile(canary)], allow_pickle=True)
    for content in (
        hostile,
        allowed,
        message_with_pickle(hostile, 0),
        message_with_pickle(hostile, 1),
    ):
        with pytest.raises(objects.ObjectFormatError):
            objects.decode(content)
        with pytest.raises(objects.ObjectFormatError):
            report.read_report(content, allow_pickle=False)


def test_checkpoint_file_is_never_unpickled(canary, tmp_path, threads):
    from gtopk.runtime.world import world

    hostile = pickle.dumps(Hostile(canary))
    message = base64.b64encode(message_with_pickle(hostile, 1)).decode()
    with pytest.raises(DamagedError, match="holds a pickle"):
        unflatten({"$object": message}, {})
    stream = io.BytesIO()
    torch.save({"state": Hostile(canary)}, stream)
    name = "checkpoint-00000001-step-1"
    record = {"format": 1, "attempt": "x", "step": 1, "ranks": 1, "tensors": None}

    def open_with(**files):
        folder = tmp_path / "saved"
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part in ("all", "rank-0"):
            content = files.get(
                part.replace("-", "_"), encode_with_checksum({**record, "name": part, "state": {}})
            )
            (folder / name / f"{part}-of-1.json").write_bytes(content)

        def program(transport):
            with world.entered(transport), pytest.raises(CheckpointError):
                load_latest(folder, torch.nn.Linear(1, 1))

        threads(1, program)

    open_with(all=hostile)
    open_with(all=stream.getvalue())
    open_with(
        rank_0=encode_with_checksum({**record, "name": "rank-0", "state": {"$object": message}})
    )


def test_data_set_is_never_unpickled(canary, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.array([Hostile(canary)] * 9, object), y=np.arange(9))
    (tmp_path / "y.npz").write_bytes(pickle.dumps(Hostile(canary)))
    for name in ("x.npz", "y.npz"):
        with pytest.raises(ValueError, match=r"not an \.npz file with arrays x and y"):
            load(str(tmp_path / name))
    file = tmp_path / "file"
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        file.write_bytes(pickle.dumps(Hostile(canary), protocol))
        for read in (
            lambda: read_pickled_batch(file, 1),
            lambda: read_binary_batch(file, 1),
            lambda: read_idx(file, 1),
            lambda: read_wav(file),
            lambda: decoded(file, 4, central_box),
            lambda: read_xml(file),
            lambda: read_transcript(file),
        ):
            with pytest.raises(MalformedFile):
                read()


def executes(node: ast.AST) -> set[str]:
    """Return the imports and calls in a piece of code that can execute what they read."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names} & MODULES
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").split(".")[0]} & MODULES
    if isinstance(node, ast.Call):
        pickles = {ast.unparse(word) for word in node.keywords} & {"allow_pickle=True"}
        return ({ast.unparse(node.func)} & CALLS) | pickles
    return set()


def test_only_allowed_code_can_execute_what_it_reads():
    found = {}
    for package in ("collectives", "gtopk", "models", "mpi_scripts"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if names := set().union(*map(executes, ast.walk(tree))):
                found[str(path.relative_to(ROOT))] = names
    assert found == {path: {name} for path, name in ALLOWED.items()}


def inodes(pid: int) -> set[str]:
    """Return the sockets of a process."""
    links = (Path("/proc") / str(pid) / "fd").glob("*")
    targets = []
    for link in links:
        try:
            targets.append(str(link.readlink()))
        except OSError:  # closed meanwhile
            continue
    return {match[1] for target in targets if (match := re.match(r"socket:\[(\d+)\]", target))}


def family(root: int) -> set[int]:
    """Return a process and all its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    members, grown = {root}, 0
    while grown != len(members):
        grown = len(members)
        members |= {pid for pid, parent in parents.items() if parent in members}
    return members


def ports(pids: set[int]) -> set[tuple[str, int, int]]:
    """Return address, port and type of all sockets on which these processes listen."""
    own = set().union(*map(inodes, pids))
    found = set()
    for table, kind, state in (
        ("tcp", socket.SOCK_STREAM, "0A"),
        ("tcp6", socket.SOCK_STREAM, "0A"),
        ("udp", socket.SOCK_DGRAM, "07"),
    ):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in own:
                address, port = fields[1].split(":")
                v6 = table.endswith("6")
                host = "::1" if v6 else socket.inet_ntoa(struct.pack("<L", int(address, 16)))
                found.add((("127.0.0.1" if host == "0.0.0.0" else host), int(port, 16), kind))
    return found


def fire(listening_ports: set[tuple[str, int, int]], hostile: bytes) -> None:
    """Send a pickle to each port at the same time: as raw bytes, and framed for some protocols."""
    frames = (
        hostile,
        struct.pack(">i", len(hostile)) + hostile,  # multiprocessing.connection
        struct.pack("<q", len(hostile)) + hostile,
        b"PUT /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(hostile) + hostile,
        bytes(32) + struct.pack("<Q", 1 << 62) + bytes(32) + hostile,
    )

    def send(port_address: tuple[str, int, int], frame: bytes) -> None:
        host, port, kind = port_address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, kind) as one, contextlib.suppress(OSError):
            one.settimeout(1)
            one.connect((host, port))
            one.sendall(frame)
            one.shutdown(socket.SHUT_WR)
            one.recv(4096)

    shots = list(product(listening_ports, frames))
    with ThreadPoolExecutor(len(shots)) as pool:
        list(pool.map(send, *zip(*shots, strict=True)))


@pytest.mark.parametrize(
    "launcher", ["use_gloo", pytest.param("use_mpi", marks=pytest.mark.matrix)]
)
def test_job_survives_pickles_sent_to_its_ports_and_loads_none(
    canary, tmp_path, monkeypatch, caplog, launcher
):
    monkeypatch.syspath_prepend(ROOT / "tests" / "programs")
    from under_fire import sum_until

    ended, results = tmp_path / "ended", []
    job = threading.Thread(
        target=lambda: results.append(gtopk.run(sum_until, [str(ended)], np=2, **{launcher: True}))
    )
    job.start()
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ended.rank-*"))) < 2 and job.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pids = family(int(Path("/proc/self").readlink().name))
        listening_ports = ports(pids)
        # gtopk's own ports are only for this host, or for processes that know the secret.
        assert listening_ports
        fire(listening_ports, pickle.dumps(Hostile(canary)))
    finally:
        ended.touch()
        job.join(60)
    assert results == [[[2.0, 3.0], [2.0, 3.0]]], sys.stderr
    assert "not a rank" in caplog.text
