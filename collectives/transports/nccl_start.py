"""Start of NCCL: gathers the facts of every rank, and opens a connection with a test sum."""

from __future__ import annotations

from ..errors import PeerError
from .device_choice import GpuFacts, GpuRoute
from .gpu import Gpu, facts_here, load_cupy, load_nccl
from .nccl_collectives import CupyCollectives
from .torch_collectives import TorchCollectives
from .transport import Transport

Collectives = CupyCollectives | TorchCollectives


def gather_facts(host: Transport, device: int | None) -> list[GpuFacts]:
    """Return every rank's facts; device: the GPU that this one uses, None: by its place."""
    messages = host.allgather(facts_here(host, device).encode())
    return [
        GpuFacts.read(message, rank) for message, rank in zip(messages, host.ranks, strict=True)
    ]


def open_gpu(device: int | None) -> Gpu:
    """Open a GPU with CuPy."""
    cupy = load_cupy("nccl")
    return Gpu(cupy, load_nccl(), cupy.cuda.Device(device))


def open_collectives(
    carrying: GpuRoute,
    host: Transport,
    gpu: Gpu | None,
    device: int,
    seconds: float,
    torch_backend: str,
) -> Collectives:
    """Connect the ranks, and test a sum over them; a collective.

    gpu: this rank's, where NCCL is reached through CuPy. seconds: the longest wait for a peer.
    Raises PeerError where a rank does not come, or the sum is wrong, and errors of CUDA, NCCL and
    torch. After any failure no host message of it is still on its way.
    """
    opened: Collectives
    if carrying is GpuRoute.TORCH:
        opened = TorchCollectives(host, device, seconds, backend=torch_backend)
    else:
        assert gpu is not None
        opened = CupyCollectives(host, gpu, seconds)
    try:
        total, wanted = opened.sum_of_ranks(), host.size * (host.size + 1) / 2
        if total != [wanted] * len(total):
            raise PeerError(
                f"{carrying.value} adds up 1 to {host.size} over the ranks to {total[0]:g} in "
                f"place of {wanted:g} on rank {host.ranks[host.rank]}"
            )
    except BaseException as error:
        # Whatever has failed: a kernel of the test may still wait for a peer, and would for ever.
        opened.abort(f"its start-up test failed: {error}")
        raise
    return opened
