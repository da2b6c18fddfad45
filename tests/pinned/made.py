"""What must not move, as today's code makes it.

    names.json    every public name and every dotted name of the documentation, with its parameters
    wire.json     a message in each format, in hexadecimal
    checkpoint/   of two ranks after six steps, and values.json: what is in it
    run/          the record of two ranks that took six steps

`PYTHONPATH=. python tests/pinned/made.py` writes these files anew. Do so only where the change is
meant: after it a release cannot read what an earlier one wrote, or a script must change.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gtopk
from collectives import SparseVector
from collectives.transports import LocalTransport, local_world, run_ranks
from collectives.wire import INDEX_CODES, VALUE_CODES, Format, encode
from gtopk.runtime.world import world
from tests.gtopk.held import held
from tests.gtopk.torch.checkpoint.run import Run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS, STEPS = 2, 6
NOT_HERE = ("accelerate", "lightning", "transformers")  # they need what may not be installed
MODULES = (
    *("collectives", "gtopk", "gtopk.torch", "gtopk.torch.elastic", "gtopk.torch.mpi_ops"),
    *("gtopk.ddp", "gtopk.fsdp", "gtopk.horovod", "gtopk.local_sgd"),
)
DOTTED = re.compile(r"\b(?:gtopk|collectives)(?:\.[a-zA-Z_]\w*)+")
_VALUES = (type(None), bool, int, float, str, tuple)


def parameters(target: object) -> list[str] | None:
    """Return a callable's parameters with their defaults, in order; None for what takes none."""
    if not callable(target):
        return None
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    return [_shown(parameter) for parameter in found]


def _shown(parameter: inspect.Parameter) -> str:
    kind = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    keyword = "(keyword) " if parameter.kind == parameter.KEYWORD_ONLY else ""
    text = f"{keyword}{kind}{parameter.name}"
    if parameter.default is parameter.empty:
        return text
    plain = isinstance(parameter.default, _VALUES)
    return f"{text}={parameter.default!r}" if plain else f"{text}=..."


def resolved(name: str) -> object:
    """Return what a dotted name stands for, its modules imported; raise AttributeError for none."""
    words = name.split(".")
    found: object = importlib.import_module(words[0])
    for place, word in enumerate(words[1:], 2):
        try:
            found = getattr(found, word)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(words[:place]))
            except ModuleNotFoundError as error:
                raise AttributeError(f"{name}: {error}") from None
    return found


def public_names() -> Iterator[str]:
    """Yield the names of every public module, and all that the pages write with their dots."""
    for module in MODULES:
        yield module
        yield from (f"{module}.{name}" for name in importlib.import_module(module).__all__)
    for module in NOT_HERE:
        source = (ROOT / "gtopk" / f"{module}.py").read_text(encoding="utf-8")
        (names,) = re.findall(r"^__all__ = (\[[^\]]*\])", source, re.MULTILINE)
        yield from (f"gtopk.{module}.{name}" for name in ast.literal_eval(names))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in DOTTED.findall(page.read_text(encoding="utf-8")):
            if not name.startswith(tuple(f"gtopk.{module}" for module in NOT_HERE)):
                yield name


def names_of(name: str) -> list[str]:
    """Return the parameters of a public name that takes some."""
    found = parameters(resolved(name))
    assert found is not None
    return found


def names() -> dict[str, list[str] | None]:
    """Return the parameters of every public name; None: of what takes none."""
    found = {}
    for name in sorted(set(public_names())):
        if name.startswith(tuple(f"gtopk.{module}." for module in NOT_HERE)):
            found[name] = None
            continue
        try:
            found[name] = parameters(resolved(name))
        except AttributeError:  # `gtopk.css`, say
            continue
    return found


def messages() -> dict[str, str]:
    """Return a message in every format: 5 of 1,000 entries, with the bits of an algorithm."""
    indices = np.array([0, 3, 4, 517, 999], np.int32)
    values = np.array([1.5, -2.25, 0.0078125, 65504.0, -0.1], np.float32)
    vector = SparseVector(indices, values, 1000)
    extra = np.array([0b10110], np.uint8)
    return {
        f"{index} {value}": encode(vector, 5, format=Format(index, value), extra=extra, number=7)
        .message.tobytes()
        .hex()
        for index in INDEX_CODES
        for value in VALUE_CODES
    }


def trained(folder: Path, record: Path, transport: LocalTransport) -> dict[str, Any]:
    """Train on this rank, recorded; save a checkpoint; return what is in it."""
    with world.entered(transport):
        gtopk.record(str(record))
        run = Run()
        for step in range(STEPS):
            gtopk.log(loss=1 / (1 + step))
            gtopk.log_samples(4)
            run.steps(1)
        run.save(folder, STEPS)
        return state(run)


def state(run: Run) -> dict[str, Any]:
    """Return the state of a run as values that JSON has exactly."""
    return {
        "parameters": {name: t.double().tolist() for name, t in run.model.state_dict().items()},
        "residual": held(run.optimizer).astype(np.float64).tolist(),
        "momentum": [
            each["momentum_buffer"].double().tolist()
            for each in run.optimizer.state_dict()["state"].values()
        ],
        "learning_rate": run.optimizer.param_groups[0]["lr"],
        "scheduler_steps": run.scheduler.state_dict()["last_epoch"],
        "loader": json.loads(json.dumps(plain(run.loader.state_dict()))),
    }


def plain(value: Any) -> Any:
    """Return a state with its tensors and arrays as lists."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def key_paths(content: Any, path: str = "") -> list[str]:
    """Return where in a JSON document there is what; of lists only the first element."""
    if isinstance(content, dict):
        return [
            each for key in sorted(content) for each in key_paths(content[key], f"{path}/{key}")
        ]
    if isinstance(content, list):
        return [each for one in content[:1] for each in key_paths(one, f"{path}[]")] or [path]
    return [path]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    for folder in ("checkpoint", "run"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
    write_json(HERE / "names.json", names())
    write_json(HERE / "wire.json", messages())
    program = partial(trained, HERE / "checkpoint", HERE / "run")
    write_json(HERE / "values.json", run_ranks(local_world(RANKS), program))


if __name__ == "__main__":
    main()
