"""Foreign or manipulated files in the folder are skipped, and complete checkpoints stay."""

from __future__ import annotations

import hashlib
import json
import os
import random

import pytest
import torch

import gtopk.torch as hvd
from gtopk import CheckpointError, load_latest, save_checkpoint
from gtopk.errors import DamagedError
from gtopk.torch.checkpoint.files import (
    FORMAT,
    LAST_NUMBER,
    LAST_STEP,
    decode_with_checksum,
    encode_with_checksum,
)
from gtopk.torch.checkpoint.state import NOTHING_OWN
from tests.gtopk.torch.checkpoint.run import Run

NAMES = ("all", "rank-0", "rank-1")
REPLICATED = {"others": {}, "held": ["optimizer"], "steps": 1}


def record(name, state, **more):
    fields = {"format": FORMAT, "attempt": "x", "before": 0, "step": 9, "ranks": 2, "name": name}
    return {**fields, "tensors": None, "state": state, **more}


def write_all(folder, replicated, own, **more):
    for name in NAMES:
        state = replicated if name == "all" else own
        (folder / f"{name}-of-2.json").write_bytes(
            encode_with_checksum(record(name, state, **more))
        )


def nested_deep(folder):
    """Write JSON nested as deeply as Python can just read."""
    for name in NAMES:
        body = json.dumps(record(name, "here" if name == "all" else NOTHING_OWN)).encode()
        body = body.replace(b'"here"', b"[" * 500 + b"]" * 500)
        digest = hashlib.sha256(body).hexdigest().encode()
        sealed = b'{"sha256": "%b", "part":\n%b}\n' % (digest, body)
        (folder / f"{name}-of-2.json").write_bytes(sealed)


def sparse(folder):
    write_all(folder, REPLICATED, NOTHING_OWN, tensors={"bytes": 1 << 40, "sha256": "0" * 64})
    for name in NAMES:
        with open(folder / f"{name}-of-2.safetensors", "wb") as file:
            file.truncate(1 << 40)


HELD = {"format": 1, "ranks": 2, "steps": 1, "lanes": [], "held": {"0": {"weight": 1}}}
FAULTS = {
    "pipes": lambda f: [os.mkfifo(f / f"{name}-of-2.json") for name in NAMES],
    "folders": lambda f: [(f / f"{name}-of-2.json").mkdir() for name in NAMES],
    "devices": lambda f: [(f / f"{name}-of-2.json").symlink_to("/dev/zero") for name in NAMES],
    "larger than the memory": sparse,
    "nested deep": nested_deep,
    "a list": lambda f: [
        (f / f"{n}-of-2.json").write_bytes(encode_with_checksum([1, 2])) for n in NAMES
    ],
    "own empty": lambda f: write_all(f, REPLICATED, {}),
    "own text": lambda f: write_all(f, REPLICATED, "text"),
    "replicated empty": lambda f: write_all(f, {}, NOTHING_OWN),
    "replicated text": lambda f: write_all(f, "text", NOTHING_OWN),
    "an object": lambda f: write_all(f, {"$object": "AAAA"}, NOTHING_OWN),
    "others": lambda f: write_all(f, {**REPLICATED, "others": [1]}, NOTHING_OWN),
    "steps": lambda f: write_all(f, {**REPLICATED, "steps": "many"}, NOTHING_OWN),
    "a tree": lambda f: write_all(f, REPLICATED, {**NOTHING_OWN, "tree": "["}),
    "a tensor": lambda f: write_all(f, {**REPLICATED, "model": {"$tensor": "w"}}, NOTHING_OWN),
    "generators": lambda f: write_all(f, REPLICATED, {**NOTHING_OWN, "generators": {"torch": 1}}),
    "held": lambda f: write_all(f, REPLICATED, {**NOTHING_OWN, "held": {"optimizer": HELD}}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", [2, 3])
def test_foreign_files_are_skipped_and_displace_no_checkpoint(ranks, tmp_path, fault, size):
    def program(rank):
        model = torch.nn.Linear(2, 2)
        save_checkpoint(tmp_path, model, None, step=1)
        hvd.barrier()
        if rank == 0:
            folder = tmp_path / "checkpoint-00000009-step-9"
            folder.mkdir()
            FAULTS[fault](folder)
        hvd.barrier()
        assert load_latest(tmp_path, model, generators=False).step == 1
        save_checkpoint(tmp_path, model, None, step=10)

    ranks(size, program)
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"checkpoint-00000001-step-1", "checkpoint-00000010-step-10"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-00000009-step-9/all-of-99999999999.json",
        "checkpoint-00000009-step-9/all-of-999999999.json",
        "checkpoint-00000009-step-9/rank-\u0667-of-\u0669.json",
        "checkpoint-00000009-step-9/all-of-02.json",
        f"checkpoint-{10**40}-step-9/all-of-2.json",
        f"checkpoint-00000009-step-{10**40}/all-of-2.json",
        "checkpoint-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0669-step-\u0669/all-of-1.json",
        "checkpoint-9-step-9/all-of-1.json",
        "checkpoint-0000000009-step-9/all-of-1.json",
        "checkpoint-00000009-step-09/all-of-1.json",
    ],
)
def test_empty_file_with_a_checkpoint_like_name_is_skipped(ranks, tmp_path, name):
    def program(rank):
        save_checkpoint(tmp_path, None, None, step=1)
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        hvd.barrier()
        assert load_latest(tmp_path, None, generators=False).step == 1
        save_checkpoint(tmp_path, None, None, step=2)
        assert load_latest(tmp_path, None, generators=False).step == 2

    ranks(2, program)


def test_save_raises_beyond_the_last_number_or_step(ranks, tmp_path):
    folder = tmp_path / f"checkpoint-{LAST_NUMBER}-step-{LAST_STEP}"
    folder.mkdir()
    (folder / "all-of-1.json").touch()

    def program(rank):
        with pytest.raises(CheckpointError, match=f"has a checkpoint {LAST_NUMBER}, .*remove it"):
            save_checkpoint(tmp_path, None, None)
        with pytest.raises(ValueError, match=f"step must be at most {LAST_STEP}, got"):
            save_checkpoint(tmp_path / "other", None, None, step=LAST_STEP + 1)
        save_checkpoint(tmp_path / "other", None, None, step=LAST_STEP)
        return load_latest(tmp_path / "other", None, generators=False).step

    assert ranks(2, program) == [LAST_STEP] * 2


def test_checkpoint_that_a_script_cannot_load_is_kept_with_the_others(ranks, tmp_path):
    """The script loads other objects, or the newest checkpoint is of another model."""

    def program(rank):
        model = torch.nn.Linear(2, 2)
        save_checkpoint(tmp_path, model, None, step=1)
        save_checkpoint(tmp_path, torch.nn.Linear(3, 3), None, step=2)
        with pytest.raises(RuntimeError, match="size mismatch"):
            load_latest(tmp_path, model, generators=False)
        for step in (3, 4):
            save_checkpoint(tmp_path, model, None, step=step, keep=2)

    ranks(2, program)
    steps = sorted(path.name[-1] for path in tmp_path.iterdir())
    assert steps == ["2", "3", "4"]


SHAPES = {
    "a loader of a number": ("loader", 1.5),
    "groups of a number": ("optimizer", {"state": {}, "param_groups": 7}),
    "an optimizer of text": ("optimizer", "Adam"),
}


def reseal(path, name, value):
    """Replace a value in a part's state, and update the checksum."""
    content = decode_with_checksum(path.read_bytes())
    content["state"][name] = value
    path.write_bytes(encode_with_checksum(content))


class Schedule:
    """A script's own schedule, which does not validate its state."""

    def state_dict(self):
        return {"factor": 2}

    def load_state_dict(self, state):
        self.factor = state["factor"]


def fresh():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, hvd.elastic.ElasticSampler(range(12))


@pytest.mark.parametrize("which", ["a loader of a number", "groups of a number"])
def test_unusable_state_makes_all_ranks_load_the_older_checkpoint(ranks, tmp_path, capfd, which):
    def program(rank):
        for step in (1, 2):
            save_checkpoint(tmp_path, *fresh(), step=step, schedule=Schedule())
        hvd.barrier()
        if rank == 0:
            reseal(tmp_path / "checkpoint-00000002-step-2" / "all-of-2.json", *SHAPES[which])
        hvd.barrier()
        found = load_latest(tmp_path, *fresh(), schedule=Schedule())
        save_checkpoint(tmp_path, *fresh(), step=3, keep=1)
        return found.step

    assert ranks(2, program) == [1, 1]
    assert "checkpoint-00000002-step-2 cannot be loaded: " in capfd.readouterr().err
    # The state may be from another version, so it is not removed.
    assert (tmp_path / "checkpoint-00000002-step-2").is_dir()


@pytest.mark.parametrize("which", ["an optimizer of text", "a loader of a number"])
def test_error_names_the_unusable_checkpoint_when_there_is_no_older_one(ranks, tmp_path, which):
    def program(rank):
        save_checkpoint(tmp_path, *fresh(), step=1)
        hvd.barrier()
        if rank == 0:
            reseal(tmp_path / "checkpoint-00000001-step-1" / "all-of-2.json", *SHAPES[which])
        hvd.barrier()
        with pytest.raises(CheckpointError, match="checkpoint-00000001-step-1 cannot be") as error:
            load_latest(tmp_path, *fresh())
        return type(error.value.__cause__)

    assert ranks(2, program) == [DamagedError] * 2


def test_object_that_fails_to_load_on_one_rank_makes_all_load_the_older(ranks, tmp_path):
    class Strict(Schedule):
        def state_dict(self):
            return {}

    def program(rank):
        save_checkpoint(tmp_path, *fresh(), step=1, schedule=Schedule())
        save_checkpoint(tmp_path, *fresh(), step=2, schedule=Strict())
        schedule = Schedule() if rank == 0 else Lenient()
        return load_latest(tmp_path, *fresh(), schedule=schedule).step

    class Lenient(Schedule):
        def load_state_dict(self, state):
            self.factor = state.get("factor")

    assert ranks(2, program) == [1, 1]


REPLACEMENTS = (None, True, -1, 2**62, 1.5, float("nan"), "text", [], {}, {"$float": "-inf"})
SGD = ("state", "optimizer")
ADAPTED = ("state", "loader", "controller")
HELD_PATH = ("state", "held", "optimizer")
LEAVES = [
    ("all", (*SGD, "state", "$dict", 0, 1), [1, 2]),
    ("all", (*SGD, "state", "$dict", 0, 1, "momentum_buffer"), {"$float": "nan"}),
    ("all", (*SGD, "param_groups", 0, "lr"), "text"),
    ("all", (*SGD, "param_groups", 0, "momentum"), {"$float": "nan"}),
    ("all", (*SGD, "param_groups", 0, "params"), "text"),
    ("all", ("state", "model", "$ordered", "0.bias"), True),
    ("all", ("state", "model", "$ordered", "1.num_batches_tracked"), {"$float": "nan"}),
    ("all", (*ADAPTED, "sizes", 1), 2**62),
    ("all", (*ADAPTED, "sizes", 1), -4),
    ("all", (*ADAPTED, "sizes"), [8]),
    ("all", (*ADAPTED, "damping"), [1.0, 1.0, 1.0]),
    ("all", ("state", "loader", "noise", "variance"), {"$float": "nan"}),
    ("all", ("state", "others", "scheduler", "gamma"), []),
    ("all", ("state", "steps"), -1),
    ("all", ("format",), {"a": 1}),
    ("rank-1", (*HELD_PATH, "format"), "1"),
    ("rank-1", (*HELD_PATH, "ranks"), 0),
    ("rank-1", (*HELD_PATH, "holds"), "text"),
    ("rank-1", (*HELD_PATH, "lanes"), [7]),
    ("rank-1", (*HELD_PATH, "held", "$dict", 0, 1, "1.bias"), {}),
    ("rank-1", (*HELD_PATH, "held", "$dict", 0, 1, "1.bias", "residual"), [1.0]),
    (
        "rank-1",
        (*HELD_PATH, "held", "$dict", 0, 1, "1.bias", "residual", "$tensor"),
        "held.optimizer.held.1.0.weight.residual",
    ),
]


def mutate(folder, part, path, value):
    """Replace a value in a part's record, and update the checksum."""
    file = folder / "checkpoint-00000002-step-5" / f"{part}-of-2.json"
    content = decode_with_checksum(file.read_bytes())
    at = content
    for key in path[:-1]:
        at = at[key]
    assert path[-1] in at if isinstance(at, dict) else path[-1] < len(at)
    at[path[-1]] = value
    body = json.dumps(content).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    file.write_bytes(b'{"sha256": "%b", "part":\n%b}\n' % (digest, body))


@pytest.fixture
def trained(ranks, tmp_path):
    """Return a folder with checkpoints of two ranks after three and five steps."""

    def program(rank):
        run = Run().steps(3)
        run.save(tmp_path, 3)
        run.steps(2).save(tmp_path, 5)

    ranks(2, program)
    return tmp_path


def resumed_step(folder):
    """Resume a run, train, and return the step at which it resumed."""
    run = Run()
    found = run.load(folder)
    run.steps(2)
    return found.step


@pytest.mark.parametrize(("part", "path", "value"), LEAVES)
def test_changed_value_in_one_part_makes_all_ranks_load_the_older_one(
    ranks, trained, part, path, value
):
    mutate(trained, part, path, value)
    if path[-1] == "$tensor":
        assert value in str((trained / "checkpoint-00000002-step-5/rank-1-of-2.json").read_text())
    assert ranks(2, lambda rank: resumed_step(trained)) == [3, 3]


def places_of(tree, path=()):
    yield path
    items = tree.items() if isinstance(tree, dict) else ()
    items = enumerate(tree) if isinstance(tree, list) else items
    for key, value in items:
        yield from places_of(value, (*path, key))


@pytest.mark.timeout(240)
def test_any_changed_value_is_loaded_or_skipped_or_named_in_the_error(ranks, trained):
    """Sample the leaves of all parts of a run; a script's plain data may be anything."""
    intact = {
        part: (trained / "checkpoint-00000002-step-5" / f"{part}-of-2.json").read_bytes()
        for part in NAMES
    }
    places = [
        (part, path)
        for part in NAMES
        for path in places_of(decode_with_checksum(intact[part]))
        if path and "note" not in path
    ]
    dice = random.Random(39)
    for part, path in dice.sample(places, 40):
        value = dice.choice(REPLACEMENTS)
        mutate(trained, part, path, value)

        def program(rank):
            try:
                return resumed_step(trained)
            except (CheckpointError, ValueError, RuntimeError) as error:
                return str(error)

        one, other = ranks(2, program)
        named = [isinstance(each, str) and "checkpoint-00000002" in each for each in (one, other)]
        assert (one, other) in ((3, 3), (5, 5)) or all(named), (part, path, value, one, other)
        (trained / "checkpoint-00000002-step-5" / f"{part}-of-2.json").write_bytes(intact[part])


def test_deeply_nested_dicts_are_saved_and_loaded(ranks, tmp_path):
    """As JSON they are nested three times as deeply as allowed for objects between ranks."""
    nested = {0: "x"}
    for _ in range(45):
        nested = {0: nested}

    def program(rank):
        save_checkpoint(tmp_path, None, None, nested=nested)
        return load_latest(tmp_path, None, generators=False).values["nested"]

    assert ranks(2, program) == [nested] * 2
