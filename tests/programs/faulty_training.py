"""A training job on any number of ranks; one can be made to fail at a given point.

Argument: a JSON object.

    steps         steps of the whole training; 0: up to the next checkpoint
    folder        the folder for checkpoints; the job resumes from the last one
    every         steps between checkpoints
    pause         seconds before each step
    fault         {"rank": 2, "phase": PHASE, "step": 7, "way": WAY}, or null; step: after the one
                  from which the job resumes; rank null: every rank
    nan_every     steps between gradients that are not finite on one rank; 0: none

Prints for each rank "rank R is PID", the step from which it goes on, each step that it saves,
"fired at TIME" when the fault happens, and a digest of the parameters at the end.

    PHASE        where
    start        before hvd.init; WAY may be "waits": until the file "go" is in the folder
    backward     in the gradient hook of the middle layer
    exchange     while gradients are exchanged; exits and exceptions: after backward, meanwhile
    checkpoint   after the temporary file was written, before it is renamed
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import light_torch  # noqa: F401

import torch

import gtopk
import gtopk.torch as hvd
from gtopk.runtime.coordinator.operation import Event
from gtopk.runtime.launch import launched_by
from gtopk.runtime.world import world

PLAN = json.loads(sys.argv[1])
FAULT = PLAN.get("fault") or {}
NAN_EVERY = PLAN.get("nan_every", 0)


def route_to_other_half(change: str) -> None:
    """Drop packets to the hosts of the other half of the ranks, or stop doing so."""
    half = SIZE // 2
    for other in range(half, SIZE) if half > RANK else range(half):
        route = ["blackhole", f"10.0.0.{other + 1}/32"]
        subprocess.run(["ip", "route", change, *route], check=True)


def end_by_way() -> None:
    way = FAULT["way"]
    print(f"fired at {time.time()}\n", end="", flush=True)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "segfault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    elif way == "exit 3":
        sys.exit(3)
    elif way == "exit 0":
        sys.exit(0)
    elif way == "os._exit":
        os._exit(0)
    elif way == "exception":
        raise RuntimeError("boom")
    elif way == "memory":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
        torch.empty(1 << 30)
    elif way == "cut":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    elif way == "cut for a while":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        time.sleep(2)
        subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
    elif way == "halved":
        route_to_other_half("add")
    elif way == "halved for a while":
        route_to_other_half("add")
        time.sleep(2)
        route_to_other_half("del")
    elif way == "lossy":
        # A queue of a few packets, which drops the rest.
        queue = "tbf rate 5mbit burst 8kb limit 12kb"
        subprocess.run(
            ["tc", "qdisc", "replace", "dev", "eth0", "root", *queue.split()], check=True
        )
    elif way == "waits":
        while not (Path(PLAN["folder"]) / "go").exists():
            time.sleep(0.05)
    elif way == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ValueError(way)


begin = 0


def due(phase: str, step: int) -> bool:
    here = FAULT.get("phase") == phase and FAULT["rank"] in (RANK, None)
    return here and FAULT["step"] == step - begin


JOB = launched_by()
assert JOB is not None
RANK, SIZE = JOB.rank, JOB.size
print(f"rank {RANK} is {os.getpid()}\n", end="", flush=True)
if due("start", 0):
    end_by_way()
hvd.init()

torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 1)
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    model.named_parameters(),
    hvd.Compression.gtopk(density=0.05),
    bucket_bytes=1024,
    check_every=5,
)
FOLDER = Path(PLAN["folder"])


def save(step: int) -> None:
    """Save a checkpoint, in which the fault may happen before the file is renamed."""
    replace = os.replace

    def replace_or_end(*paths: Any) -> None:
        if due("checkpoint", step):
            end_by_way()
        replace(*paths)

    os.replace = replace_or_end
    try:
        gtopk.save_checkpoint(FOLDER, model, optimizer, step=step)
    finally:
        os.replace = replace


current = 0


def on_gradient(gradient: torch.Tensor) -> None:
    if due("backward", current):
        end_by_way()


def on_event(event: Event) -> None:
    """Fail in the engine's thread, in the middle of the reduction."""
    gradients = event.what == "execute" and "gradients" in event.name
    if event.phase == "begin" and gradients and due("exchange", current):
        end_by_way()


model[2].weight.register_hook(on_gradient)
IN_ENGINE = FAULT.get("way") in ("killed", "segfault", "os._exit", "stopped", "memory")
if IN_ENGINE:
    world.current().engine.add_observer(on_event)
loaded = gtopk.load_latest(FOLDER, model, optimizer)
begin = loaded.step if loaded else 0
print(f"rank {RANK} goes on from {begin}\n", end="", flush=True)
for current in range(begin, end := PLAN["steps"] or begin + PLAN["every"]):
    time.sleep(PLAN.get("pause", 0.0))
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1000 * current + RANK)
    inputs = torch.randn(8, 20, generator=generator)
    if NAN_EVERY and current % NAN_EVERY == NAN_EVERY - 1 and current // NAN_EVERY % SIZE == RANK:
        inputs[0, 0] = torch.nan
    (model(inputs).squeeze() - inputs.sum(1).sin()).square().mean().backward()
    if not IN_ENGINE and due("exchange", current):
        end_by_way()
    optimizer.step()
    if (current + 1) % PLAN["every"] == 0:
        save(current + 1)
        print(f"rank {RANK} saved step {current + 1}\n", end="", flush=True)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(f"at step {end} digest {digest.hexdigest()}\n", end="", flush=True)
hvd.shutdown()
