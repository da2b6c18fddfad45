"""The direct transport: MPI, with GPU messages sent from memory to memory if it is CUDA-aware.

A host message announces each GPU message and its size; both use the same MPI stream:

    send()     announce  wait for the caller's CUDA stream  Isend from the GPU
    receive()  learn the size, allocate GPU memory, wait until it is free  receive into it

If messages are checked or paced, all are staged, as the host has to do that.

MPI does not follow CUDA streams: the host polls an event until the message is ready, or until
earlier work on the memory has ended.

Dense collectives are staged: MPI libraries reduce GPU memory only in blocking calls, which would
wait for ever for a rank that has left.

A library may claim to be CUDA-aware and still crash, for example without a matching driver. So,
before a rank relies on it, a child process tries it: an MPI world of one process that sends to
itself. The trial tests this host's library and GPU, not the network between hosts.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

import numpy as np

from ..vector import Array, is_on_device
from .gpu import gpus_of_cupy, is_reached, load_cupy
from .mpi import MpiTransport
from .polling import wait_until
from .staged import StagedTransport, TransferHeader, TransferMethod
from .transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI


def open_mpi(
    communicator: MPI.Intracomm | None = None, timeout_seconds: float = 600.0
) -> Transport:
    """Return the MPI transport; if every rank has CuPy and a GPU, one that carries GPU messages.

    A collective. GPU messages are direct if the MPI library has passed the trial on every host,
    else staged through pinned host memory.
    """
    return open_for_gpus(MpiTransport(communicator, timeout_seconds))


def open_for_gpus(host: MpiTransport) -> Transport:
    """Return a transport for host and GPU messages; `host` itself if a rank has no GPU."""
    if not _on_all_ranks(host, bool(gpus_of_cupy())):
        return host
    # One trial for each host, as its ranks use the same library.
    is_first_on_host = host.neighbours()[0] == host.rank
    if not _on_all_ranks(host, not (is_first_on_host and why_staged())):
        return StagedTransport(host)
    return DirectTransport(host)


def _on_all_ranks(transport: Transport, value: bool) -> bool:
    result = np.array([value], np.int32)
    transport.allreduce(result, "min")
    return bool(result[0])


class DirectTransport(StagedTransport):
    """The ranks of an MPI transport, each with a GPU."""

    def __init__(self, host: Transport, parent: StagedTransport | None = None) -> None:
        """host: the MPI transport, or a view of it."""
        super().__init__(host, parent)
        self._carrier: MpiTransport = host.carrier  # type: ignore[attr-defined]

    def send(self, message: Array, to: int) -> Callable[[], None]:
        if not is_on_device(message) or self.handles_messages:
            return super().send(message, to)
        if message.dtype != np.uint8 or message.ndim != 1 or not message.flags.c_contiguous:
            raise ValueError(
                f"a message must be contiguous uint8 [m], got {message.dtype} "
                f"{list(message.shape)} with strides {message.strides} on rank "
                f"{self.ranks[self.rank]}"
            )
        header_sent = self._announce(TransferMethod.MPI, message, to)
        # MPI reads the memory at once, even if CUDA streams have yet to write there.
        self._wait_for_stream(message)
        self.traffic.count(message.size)
        sent = self._carrier.send_on(self.host, message, self.ranks[to])

        def finish() -> None:
            header_sent()
            sent()

        return finish

    def _receive_body(self, header: TransferHeader, source: int) -> Array:
        if header.method is not TransferMethod.MPI:
            return super()._receive_body(header, source)
        # The pool may return memory that pending work on the stream still uses.
        message: Array = self._cupy.empty(header.message_bytes, np.uint8)
        self._wait_for_stream(message)
        self._carrier.receive_into_on(self.host, message, self.ranks[source])
        return message

    def _wait_for_stream(self, array: Array) -> None:
        """Wait until the current stream of an array's GPU has finished its work so far."""
        cuda = self._cupy.cuda
        with array.device:  # type: ignore[attr-defined]
            event = cuda.get_current_stream().record(cuda.Event(disable_timing=True))
        wait_until(
            lambda: is_reached(event, self._cupy) or None, self.host, [], self.timeout_seconds
        )

    def allgather(self, message: Array) -> list[Array]:
        """Return every rank's message; each is sent to every rank, P-1 times.

        Fewer and longer messages would need copies on the GPU.
        """
        if not is_on_device(message):
            return self.host.allgather(message)
        return self.exchange_with_all([message] * self.size)


# Longer than CUDA and MPI take to start; limits how long a hanging MPI holds up the ranks.
_TRIAL_SECONDS: Final = 30.0
_TRIAL_SIZES: Final = (64, 1 << 20)  # bytes: one sent at once, one after the receiver's clearance
_SUCCESS: Final = "what arrived is what was sent"

# Variables that make a process a launcher's rank; other OMPI_MCA_ variables are the user's.
_LAUNCHERS: Final = (
    *("OMPI_", "PMI", "PRTE_", "HYDRA", "HYDI_", "MPI_LOCAL", "SLURM_", "PALS_", "FLUX_"),
)
_OPEN_MPI_LAUNCHERS: Final = tuple(
    f"OMPI_MCA_{part}" for part in ("ess", "orte", "pmix", "prte", "schizo")
)


def why_staged() -> str:
    """Return why MPI cannot take a GPU's memory here; "" if it can."""
    if not claims_cuda(import_module("mpi4py.MPI").__file__):
        return "the MPI library does not claim to be CUDA-aware"
    failure = run_trial()
    return f"the MPI library claims to be CUDA-aware, but a trial {failure}" if failure else ""


def claims_cuda(library: str | None) -> bool:
    """Ask an MPI library, or a library that has loaded it, whether it accepts GPU arrays.

    Open MPI has MPIX_Query_cuda_support, MPICH MPIX_GPU_query_support (kind 0: CUDA). A library
    with neither does not accept them.
    """
    loaded = ctypes.CDLL(library)
    if hasattr(loaded, "MPIX_Query_cuda_support"):
        return bool(loaded.MPIX_Query_cuda_support())
    if hasattr(loaded, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        failed = loaded.MPIX_GPU_query_support(ctypes.c_int(0), ctypes.byref(supported))
        return not failed and bool(supported.value)
    return False


def run_trial(seconds: float = _TRIAL_SECONDS) -> str:
    """Let a child send GPU memory to itself over MPI; return how that failed, or ""."""
    # The child uses this process's module path, including additions by the script.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {__name__} import {send_to_self.__name__}; {send_to_self.__name__}()"
    )
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=without_launcher(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end in {seconds:g} s"
    if child.returncode < 0:
        return f"died: {signal.strsignal(-child.returncode)}"
    # Not only the exit code: an MPI that ends a process may exit with 0.
    passed = child.returncode == 0 and _SUCCESS.encode() in child.stdout
    return "" if passed else f"ended with exit code {child.returncode}"


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that make a process a launcher's rank."""

    def makes_a_rank(name: str) -> bool:
        if name.startswith("OMPI_MCA_"):
            return name.startswith(_OPEN_MPI_LAUNCHERS)
        return name.startswith(_LAUNCHERS)

    return {name: value for name, value in environ.items() if not makes_a_rank(name)}


def send_to_self() -> None:
    """Send GPU memory from this process to itself; runs in the child."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an expected outcome
    mpi, cupy = import_module("mpi4py.MPI"), load_cupy("mpi")
    for size in _TRIAL_SIZES:
        sent = (cupy.arange(size) % 251).astype(np.uint8)
        received = cupy.zeros_like(sent)
        cupy.cuda.get_current_stream().synchronize()
        request = mpi.COMM_SELF.Isend([sent, mpi.BYTE], 0)
        mpi.COMM_SELF.Recv([received, mpi.BYTE], 0)
        request.Wait()
        if not bool((sent == received).all()):
            sys.exit(1)
    print(_SUCCESS)
