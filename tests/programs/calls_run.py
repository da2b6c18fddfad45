"""A script that calls gtopk.run on its own functions, and prints the results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import gtopk
import gtopk.torch as hvd
from gtopk import settings
from gtopk.runtime.world import world


@dataclasses.dataclass(frozen=True)
class Settings:
    """A script's own class."""

    scale: float
    rank: int | None = None


def trains(options: argparse.Namespace, *, states: dict[str, Any]) -> dict[str, Any]:
    """Return facts about this rank, and the sum over the ranks of the argument."""
    scale = options.settings.scale
    hvd.init()
    print(f"rank {hvd.rank()} prints", flush=True)
    total = hvd.allreduce(torch.full((2,), scale * (hvd.rank() + 1)), op=hvd.Sum)
    assert isinstance(options.settings, Settings)
    options.settings = dataclasses.replace(options.settings, rank=hvd.rank())
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "total": total,
        "states": states,
        "options": options,
    }


def fails_on(rank: int) -> None:
    """Raise on one rank, while the others wait for it."""
    hvd.init()
    if hvd.rank() == rank:
        raise ZeroDivisionError("on purpose")
    hvd.barrier()


def dies_on(rank: int) -> None:
    """Kill one rank, while the others wait for it."""
    hvd.init()
    Path("began", str(os.getpid())).touch()
    hvd.barrier()
    if hvd.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


def keeps_secrets() -> dict[str, list[str]]:
    """Return this rank's secrets, and the command lines of all processes."""
    hvd.init()
    guard = world._guard
    assert guard is not None
    assert guard._heartbeat is not None
    hvd.barrier()  # all companions are running
    here = Path("/proc/self/environ").read_bytes().split(b"\0")
    prefix = f"{settings.RUN_SECRET.name}=".encode()
    (own,) = (line.removeprefix(prefix) for line in here if line.startswith(prefix))
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command_lines.append(path.read_text(errors="replace"))
    hvd.barrier()  # and they were, while each rank looked
    assert any("gtopk.runtime.liveness.companion" in words for words in command_lines)
    return {
        "secrets": [guard._heartbeat._setting.secret, own.decode()],
        "command_lines": command_lines,
    }


def error_of(call: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    try:
        call(*args, **kwargs)
    except gtopk.RankError as error:
        return {"rank": error.rank, "text": str(error), "traceback": error.traceback}
    raise AssertionError("no rank failed")


def scene_trains() -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    options = argparse.Namespace(settings=Settings(0.5), epochs=3)
    results = gtopk.run(trains, (options,), {"states": states}, np=2, output_filename="printed")
    moment = states["optimizer"]["state"][0]["exp_avg"]
    for rank, result in enumerate(results):
        expected = argparse.Namespace(settings=Settings(0.5, rank), epochs=3)
        assert result["options"] == expected
        assert torch.equal(result["states"]["optimizer"]["state"][0]["exp_avg"], moment)
        assert torch.equal(result["total"], torch.full((2,), 1.5))
    return {"ranks": [[result["rank"], result["size"]] for result in results]}


def scene_fails() -> dict[str, Any]:
    return error_of(gtopk.run, fails_on, (1,), np=2, use_gloo=True)


def scene_keeps_secrets() -> dict[str, Any]:
    """Record everything that can be recorded, including output of this process and the launcher."""
    Path("kept").mkdir()
    verbose = {"GTOPK_LOG": "debug", "GTOPK_RUN": "kept/run", "GTOPK_TIMELINE": "kept/timeline"}
    os.environ.update(verbose)
    errors = os.dup(2)
    with open("kept/launcher", "w") as file:
        os.dup2(file.fileno(), 2)
        try:
            results = gtopk.run(
                keeps_secrets, np=2, use_gloo=True, verbose=True, output_filename="kept/printed"
            )
        finally:
            os.dup2(errors, 2)
            os.close(errors)
    for name in verbose:
        del os.environ[name]
    secrets = {secret for result in results for secret in result["secrets"]}
    forms = {form for secret in secrets for form in (secret.encode(), bytes.fromhex(secret))}
    written = [path for path in Path("kept").rglob("*") if path.is_file()]
    return {
        "secrets": len(secrets),
        "files": len(written),
        "on_command_lines": [
            words
            for result in results
            for words in result["command_lines"]
            if any(secret in words for secret in secrets)
        ],
        "written": [
            str(path) for path in written if any(form in path.read_bytes() for form in forms)
        ],
    }


def scene_dies() -> dict[str, Any]:
    Path("began").mkdir()
    return error_of(gtopk.run, dies_on, (1,), np=2, hosts="10.9.9.8:1,10.9.9.9:1")


if __name__ == "__main__":
    results = {scene: globals()[f"scene_{scene}"]() for scene in sys.argv[1:]}
    print(json.dumps(results), flush=True)
