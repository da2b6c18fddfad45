"""A script that calls gtopk.run on functions of its own, and tells what came of it as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import gtopk
import gtopk.torch as hvd


def trains(scale: float, *, states: dict[str, Any]) -> dict[str, Any]:
    """Return what only this rank knows, and the sum over ranks of what it was given."""
    hvd.init()
    print(f"rank {hvd.rank()} prints", flush=True)
    total = hvd.allreduce(torch.full((2,), scale * (hvd.rank() + 1)), op=hvd.Sum)
    return {"rank": hvd.rank(), "size": hvd.size(), "total": total, "states": states}


def fails_on(rank: int) -> None:
    """Raise on one rank, where the others wait for it."""
    hvd.init()
    if hvd.rank() == rank:
        raise ZeroDivisionError("on purpose")
    hvd.barrier()


def dies_on(rank: int) -> None:
    """Be killed on one rank, where the others wait for it."""
    hvd.init()
    Path("began", str(os.getpid())).touch()
    hvd.barrier()
    if hvd.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


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
    results = gtopk.run(trains, (0.5,), {"states": states}, np=2, output_filename="printed")
    moment = states["optimizer"]["state"][0]["exp_avg"]
    for result in results:
        assert torch.equal(result["states"]["optimizer"]["state"][0]["exp_avg"], moment)
        assert torch.equal(result["total"], torch.full((2,), 1.5))
    return {"ranks": [[result["rank"], result["size"]] for result in results]}


def scene_fails() -> dict[str, Any]:
    return error_of(gtopk.run, fails_on, (1,), np=2, use_gloo=True)


def scene_dies() -> dict[str, Any]:
    Path("began").mkdir()
    return error_of(gtopk.run, dies_on, (1,), np=2, hosts="10.9.9.8:1,10.9.9.9:1")


if __name__ == "__main__":
    told = {scene: globals()[f"scene_{scene}"]() for scene in sys.argv[1:]}
    print(json.dumps(told), flush=True)
