"""Training features, on one rank or on several that share the device: one case each.

Without a launcher it makes a process group of one; under mpirun and torchrun it is one rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from common import CaseSkipped, arguments, init_group_of_one, on_gpu, run_cases, tests_of

import gtopk
import gtopk.torch as hvd
from gtopk.runtime.launch import launched_by

DEVICE = arguments().device
GPU = on_gpu(DEVICE)
PLACE = "cuda:0" if GPU else "cpu"
STEPS = 6
Compression = hvd.Compression


def join() -> bool:
    """Join the ranks; return whether torch.distributed is initialized."""
    if launched_by() is None:
        init_group_of_one(DEVICE)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")  # NCCL refuses ranks that share a GPU
    hvd.init()
    return torch.distributed.is_initialized()


BY_TORCH = join()
RANK, SIZE = hvd.rank(), hvd.size()
if GPU:
    torch.cuda.set_device(0)  # all ranks share it


def network(place: str = PLACE, dtype: torch.dtype = torch.float64, **to: Any) -> torch.nn.Module:
    """Return a small convolutional network, the same on all ranks."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    return model.to(device=place, dtype=dtype, **to)


def batch(step: int, place: str = PLACE, dtype: torch.dtype = torch.float64, **to: Any) -> Any:
    """Return this rank's inputs of a step."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    drawn = torch.randn(6, 3, 8, 8, generator=generator, dtype=torch.float64)
    return drawn.to(device=place, dtype=dtype, **to)


def loss_of(model: Callable[..., Any], *of_batch: Any, **to: Any) -> torch.Tensor:
    """Return a loss of a step's inputs."""
    loss: torch.Tensor = model(batch(*of_batch, **to)).square().mean()
    return loss


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer that most cases use."""
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def distributed(model: torch.nn.Module, compression: Any, **options: Any) -> Any:
    """Return the optimizer of `sgd`, distributed."""
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression, **options)


def train(
    place: str = PLACE,
    compression: Any = Compression.none,
    steps: int = STEPS,
    wrap: Callable[[Any], Any] = lambda model: model,
    to: dict[str, Any] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return the weights after some steps on a device."""
    model = network(place, **(to or {}))
    forward, optimizer = wrap(model), distributed(model, compression, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(forward, step, place, **(to or {})).backward()
        optimizer.step()
    return weights(model)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights on the host, after checking that the ranks have the same."""
    full_parameters = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()
    ]
    found = torch.cat([p.detach().cpu().reshape(-1) for p in full_parameters])
    rows = hvd.allgather_object(found.view(torch.uint8).numpy().tobytes())
    assert len(set(rows)) == 1, "the ranks' models are not the same"
    return found


def assert_trains_as_on_host(compression: Any, **options: Any) -> None:
    """Train on the device and on the host, and compare the weights."""
    expected = train("cpu", compression, **options)
    assert_close(train(PLACE, compression, **options), expected)


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float = 1e-6) -> None:
    """Compare weights; a GPU's layers sum in another order than the host's."""
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative / 10)
    assert not torch.equal(expected, expected[:1].expand_as(expected))


def require(here: bool, what: str) -> None:
    """Skip the case unless it applies here."""
    if not here:
        raise CaseSkipped(what)


# ---- compressions


def test_every_compression_method() -> None:
    for name in ("gtopk", "topk", "oktopk", "hierarchical"):
        assert_trains_as_on_host(getattr(Compression, name)(density=0.05))


def test_values_in_16_bits() -> None:
    assert_trains_as_on_host(Compression.gtopk(density=0.05, values="bf16"))


def test_momentum_correction() -> None:
    assert_trains_as_on_host(Compression.gtopk(density=0.05, momentum_correction=0.9))


def test_adam_correction() -> None:
    assert_trains_as_on_host(Compression.gtopk(density=0.05, adam_correction=(0.9, 0.99)))


def test_adamw_wrapped() -> None:
    # AdamW's first steps all have about one length, so rounding decides: the host's may differ.
    for compression in (Compression.gtopk(density=0.05), Compression.shards()):
        model = network(dtype=torch.float32)
        own = torch.optim.AdamW(model.parameters(), lr=0.01, fused=GPU)
        optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), compression)
        losses = []
        for _ in range(14):
            optimizer.zero_grad()
            loss = loss_of(model, 0, PLACE, torch.float32)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], losses
        weights(model)


def test_dense() -> None:
    assert_trains_as_on_host(Compression.none)
    for compression in (Compression.fp16, Compression.bf16):
        assert_close(train(PLACE, compression), train("cpu", compression), 1e-2)


def test_auto() -> None:
    # The choice depends on clocks, so only the agreement of the ranks is checked.
    train(PLACE, Compression.auto(density=0.05), steps=12)


# ---- models and gradients


def test_channels_last() -> None:
    assert_trains_as_on_host(
        Compression.gtopk(density=0.05), to={"memory_format": torch.channels_last}
    )


def test_clipping() -> None:
    assert_trains_as_on_host(Compression.gtopk(density=0.05), global_clip_norm=0.1)
    assert_trains_as_on_host(Compression.gtopk(density=0.05), local_clip_norm=0.1)


def test_torch_compile() -> None:
    # Several ranks would each compile the same C++ and CUDA at once.
    backend = "inductor" if GPU and SIZE == 1 else "aot_eager"
    found = train(
        compression=Compression.gtopk(density=0.05),
        wrap=lambda model: torch.compile(model, backend=backend),
    )
    assert_close(found, train("cpu", Compression.gtopk(density=0.05)))


def test_training_on_a_users_stream() -> None:
    require(GPU, "of CUDA")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_trains_as_on_host(Compression.gtopk(density=0.05))


def test_model_captured_as_a_cuda_graph() -> None:
    """Forward and backward are replayed: no hook is called, and gradients stay in one place."""
    model, inputs = network(), batch(0)

    def backward() -> None:
        model(inputs).square().mean().backward()

    if GPU:
        replay = capture(backward, model)
    else:  # here gradients also come without hooks

        def replay() -> None:
            parameters = list(model.parameters())
            found = torch.autograd.grad(model(inputs).square().mean(), parameters)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad
                parameter.grad.data.copy_(gradient)  # without a new version, as a graph writes

    optimizer = distributed(model, Compression.gtopk(density=0.05))
    for step in range(STEPS):
        inputs.copy_(batch(step))
        replay()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_close(weights(model), train("cpu", Compression.gtopk(density=0.05)))


def test_cuda_graph_captured_after_some_steps() -> None:
    """Some steps by hooks, then a graph of the same optimizer."""
    require(GPU, "of CUDA")
    gtopk_ = Compression.gtopk(density=0.05)
    model, inputs = network(), batch(0)
    optimizer = distributed(model, gtopk_)

    def backward() -> None:
        model(inputs).square().mean().backward()

    replay: Callable[[], None] = backward
    for step in range(STEPS):
        if step == STEPS // 2:
            replay = capture(backward, optimizer)
        elif step < STEPS // 2:
            optimizer.zero_grad()
        inputs.copy_(batch(step))
        replay()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_close(weights(model), train("cpu", gtopk_))


def capture(work: Callable[[], None], owner: Any) -> Callable[[], None]:
    """Return the work as a CUDA graph; each replay sets the gradients anew.

    owner: the model or optimizer whose `zero_grad` clears the gradients.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            owner.zero_grad()
            work()
    torch.cuda.current_stream().wait_stream(side)
    owner.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def test_amp_and_grad_scaler() -> None:
    model = network(dtype=torch.float32)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    optimizer = distributed(model, Compression.gtopk(density=0.05), scaler=scaler)
    losses, scales = [], []
    for step in range(14):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16 if GPU else torch.bfloat16):
            loss = loss_of(model, 0, PLACE, torch.float32).float()
        overflow = float("inf") if step == 7 and RANK == 0 else 1.0
        scaler.scale(loss * overflow).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert losses[-1] < losses[0], losses
    assert scales[7] == scales[6] / 2, scales  # on all ranks, because one saw an infinity
    weights(model)


# ---- other training loops


def test_local_sgd() -> None:
    def trained(place: str) -> torch.Tensor:
        model = network(place)
        optimizer = gtopk.LocalSGD(
            sgd(model),
            inner_steps=3,
            compression=Compression.gtopk(density=0.2),
            named_parameters=model.named_parameters(),
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, place).backward()
            optimizer.step()
        return weights(model)

    assert_close(trained(PLACE), trained("cpu"))


def test_checkpoints() -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0)

    def begin() -> tuple[torch.nn.Module, Any]:
        model = network()
        own = sgd(model, momentum=0.9)
        gtopk_ = Compression.gtopk(density=0.05)
        return model, hvd.DistributedOptimizer(own, model.named_parameters(), gtopk_)

    def train_steps(model: torch.nn.Module, optimizer: Any, steps: range) -> torch.Tensor:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return weights(model)

    model, optimizer = begin()
    train_steps(model, optimizer, range(3))
    gtopk.save_checkpoint(folder, model, optimizer, step=3)
    expected = train_steps(model, optimizer, range(3, 6))
    other, resumed = begin()
    assert gtopk.load_latest(folder, other, resumed) is not None
    assert_close(train_steps(other, resumed, range(3, 6)), expected, 1e-9)


def test_elastic() -> None:
    model = network()
    optimizer = distributed(model, Compression.gtopk(density=0.05))
    begun: list[int] = []

    @hvd.elastic.run
    def attempt(state: Any) -> None:
        begun.append(state.done)
        while state.done < STEPS:
            optimizer.zero_grad()
            loss_of(model, state.done).backward()
            optimizer.step()
            state.done += 1
            if state.done == 4 and len(begun) == 1:
                raise hvd.HorovodInternalError("as if a link broke")
            if state.done % 2 == 0:
                state.commit()

    attempt(hvd.elastic.TorchState(model, optimizer, done=0))
    assert begun == [0, 2]
    assert_close(weights(model), train("cpu", Compression.gtopk(density=0.05)))


# ---- Horovod's collectives, of the device's tensors


def test_collectives() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        mine = torch.full((1000,), RANK + 1, device=PLACE, dtype=dtype)
        summed = hvd.allreduce(mine, op=hvd.Sum)
        assert (summed.device, summed.dtype) == (mine.device, dtype)
        assert summed.tolist() == [SIZE * (SIZE + 1) / 2] * 1000
        gathered = hvd.allgather(mine[: RANK + 1])
        assert gathered.tolist() == [r + 1 for r in range(SIZE) for _ in range(r + 1)]
        assert hvd.broadcast(mine, SIZE - 1).tolist() == [SIZE] * 1000
        rows = torch.arange(SIZE, device=PLACE).to(dtype)
        received = hvd.alltoall(rows)
        assert isinstance(received, torch.Tensor)
        assert received.tolist() == [RANK] * SIZE
        in_place = mine.clone()
        hvd.allreduce_(in_place, op=hvd.Max)
        assert in_place.tolist() == [SIZE] * 1000
        several = hvd.grouped_allreduce([mine, mine[:5]], op=hvd.Min)
        assert [each.tolist() for each in several] == [[1] * 1000, [1] * 5]


# ---- hooks of torch.distributed


def test_ddp_hook() -> None:
    from torch.nn.parallel import DistributedDataParallel

    from gtopk.ddp import GTopKState, gtopk_hook

    require(BY_TORCH, "of torch.distributed's ranks")
    results = []
    for density in (None, 1.0, 0.05):
        model = network()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
        if density is not None:
            ddp.register_comm_hook(GTopKState(density=density), gtopk_hook)
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            optimizer.step()
        results.append(weights(model))
    assert_close(results[1], results[0], 1e-9)
    assert not torch.equal(results[2], results[0])


def test_fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    require(BY_TORCH, "of torch.distributed's ranks")
    require(not GPU or SIZE == 1, "gloo has not all of FSDP's collectives on GPUs")
    mesh = init_device_mesh(DEVICE, (SIZE, 1), mesh_dim_names=("replicate", "shard"))
    model = network()
    for layer in list(model.children())[::3]:  # those with parameters
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    gtopk.fsdp.replicate(model, mesh["replicate"], density=1.0)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert_close(weights(model), train("cpu", Compression.none))


if __name__ == "__main__":
    failed = run_cases(tests_of(globals()), f"rank {RANK} of {SIZE} on {DEVICE}")
    hvd.shutdown()
    if BY_TORCH:
        torch.distributed.destroy_process_group()
    sys.exit(bool(failed))
