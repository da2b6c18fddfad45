"""torch.distributed.checkpoint and gtopk read each other's checkpoints."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import gtopk
import gtopk.torch as hvd
from gtopk import load_latest, save_checkpoint
from gtopk.errors import CheckpointError
from gtopk.runtime.world import world
from gtopk.torch.checkpoint.archive import Archive
from gtopk.torch.checkpoint.dcp import Reader, Writer


class Run:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1 * (seed + 1))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        for _ in range(seed):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 4)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self):
        """Return the state under save_checkpoint's names."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": 3,
        }


@pytest.fixture(autouse=True)
def one_process():
    """Ignore DCP's warning that it runs without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def test_dcp_reads_a_checkpoint_of_gtopk(ranks, tmp_path):
    saved = Run(seed=3)

    def save(rank):
        save_checkpoint(
            tmp_path, saved.model, saved.optimizer, None, 7, scheduler=saved.scheduler, epoch=3
        )

    ranks(1, save)
    other = Run(seed=1)
    state = {**other.state(), "epoch": 0}
    reader = Reader(tmp_path)
    dcp.load(state, storage_reader=reader)
    assert repr(state) == repr(saved.state())
    assert reader.path == tmp_path / "checkpoint-00000001-step-7"


def test_gtopk_reads_a_checkpoint_of_dcp(ranks, tmp_path):
    saved = Run(seed=3)
    dcp.save(saved.state(), storage_writer=Writer(tmp_path, 5))

    def load(rank):
        other = Run(seed=1)
        found = load_latest(
            tmp_path, other.model, other.optimizer, scheduler=other.scheduler, generators=False
        )
        assert found.step == 5
        assert found.values == {"epoch": 3}
        return repr(other.state())

    for size in (1, 2):
        assert ranks(size, load) == [repr(saved.state())] * size
    state = {**Run(seed=1).state(), "epoch": 0}
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert repr(state) == repr(saved.state())
    assert not list(tmp_path.glob("*/shard-*"))


class Pair:
    """A model and two optimizers of the same kind and number of steps."""

    def __init__(self, kind, steps):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.first, self.second = kind(self.model), kind(self.model)
        for _ in range(steps):
            for optimizer in (self.first, self.second):
                optimizer.zero_grad()
                self.model(torch.randn(5, 4)).square().sum().backward()
                optimizer.step()

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.first.state_dict(),
            "critic": self.second.state_dict(),
        }


def sgd(model, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


KINDS = {
    "without a state": lambda model: sgd(model, momentum=0),
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
    "gTop-k": lambda model: hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), hvd.Compression.gtopk(density=0.2)
    ),
    "dense": lambda model: hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), hvd.Compression.none
    ),
    "LocalSGD": lambda model: gtopk.LocalSGD(
        sgd(model), inner_steps=2, compression=hvd.Compression.gtopk(density=0.2)
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_optimizer_gets_its_state_back_from_dcp(ranks, tmp_path, caplog, kind):
    def program(rank):
        saved = Pair(kind, steps=4)
        dcp.save(saved.state(), storage_writer=Writer(tmp_path))
        other = Pair(kind, steps=0)
        load_latest(tmp_path, other.model, other.first, critic=other.second, generators=False)
        assert repr(other.state()) == repr(saved.state())

    ranks(1, program)
    assert "lost" not in caplog.text


def sending_all(model):
    return hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), hvd.Compression.gtopk(density=1.0)
    )


@pytest.mark.parametrize("kind", [*KINDS.values(), sending_all], ids=[*KINDS, "density 1"])
def test_dcp_load_logs_residuals_that_the_target_has_no_place_for(ranks, tmp_path, caplog, kind):
    """DCP loads only the target's keys; gTop-k has a residual only after its first step."""

    def messages():
        return sorted(r.getMessage() for r in caplog.records if r.name == "gtopk")

    def program(rank):
        saved = Pair(kind, steps=4)
        dcp.save(saved.state(), storage_writer=Writer(tmp_path))
        for name in ("critic", "optimizer"):
            held = saved.state()[name].get("gtopk", {}).get("held", {0: {}})[0]
            residual = [parts["residual"].flatten() for parts in held.values()]
            norms[name] = float(torch.cat([torch.zeros(1), *residual]).norm())
        dcp.load(Pair(kind, steps=4).state(), storage_reader=Reader(tmp_path))
        dcp.load({"model": saved.model.state_dict()}, storage_reader=Reader(tmp_path))
        assert messages() == []
        dcp.load(Pair(kind, steps=0).state(), storage_reader=Reader(tmp_path))

    norms: dict[str, float] = {}
    ranks(1, program)
    lost = ["critic", "optimizer"] if kind is KINDS["gTop-k"] else []
    for name, text in zip(lost, messages(), strict=True):
        assert f"has the ranks' residuals of '{name}', but the state to load into" in text
        assert f"(its norm: {norms[name]:.3g})" in text
        assert norms[name] > 0


def test_any_object_with_a_state_gets_it_back_from_dcp(ranks, tmp_path):
    """Also under keys that are not text, in other kinds of dicts, and without a dict."""

    class Thing:
        def __init__(self, state=None):
            self.state = state or {}

        def state_dict(self):
            return self.state

        load_state_dict = __init__

    def scheduler(milestones):
        optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
        inner = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
        return torch.optim.lr_scheduler.ChainedScheduler([inner])

    saved = {
        "scheduler": scheduler([3, 5, 5]),
        "thing": Thing({(1, 2): {"a": 1}, None: [{}, {True: 2}], "none": {}}),
        "empty": Thing(),
    }
    dcp.save(
        {name: each.state_dict() for name, each in saved.items()}, storage_writer=Writer(tmp_path)
    )

    def load(rank):
        others = {
            "scheduler": scheduler([3, 7]),
            "thing": Thing({(1, 2): {}, None: [{}, {True: 0}], "none": {}}),
            "empty": Thing(),
        }
        assert load_latest(tmp_path, None, **others).values == {}
        return [repr(each.state_dict()) for each in others.values()]

    assert ranks(1, load) == [[repr(each.state_dict()) for each in saved.values()]]


EACH_RANKS_OWN = {
    "LocalSGD": KINDS["LocalSGD"],
    "op=Adasum": lambda model: hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum),
}


@pytest.mark.parametrize("name", EACH_RANKS_OWN)
def test_dcp_writer_refuses_rank_specific_state_of_several_ranks(ranks, tmp_path, name):
    def program(rank):
        pair = Pair(EACH_RANKS_OWN[name], steps=2)
        for state in (pair.state(), pair.first.state_dict()):
            plans = []
            for of in range(2):
                planner = DefaultSavePlanner()
                planner.set_up_planner(state, is_coordinator=of == 0)
                plans.append(planner.create_local_plan())
            plans, _ = planner.create_global_plan(plans)
            with pytest.raises(ValueError, match=f"of {name}, whose .*save_checkpoint"):
                Writer(tmp_path).prepare_global_plan(plans)
            dcp.save(state, storage_writer=Writer(tmp_path))  # of a single rank

    ranks(1, program)


def test_plain_data_has_dcps_text_keys_unless_the_target_has_others(ranks, tmp_path):
    history = {1: 0.5, 2: 0.25}
    dcp.save({"history": history, "epoch": 3}, storage_writer=Writer(tmp_path))

    def load(rank):
        written = load_latest(tmp_path, None).values
        assert load_latest(tmp_path, None, history={0: 0.0}).values["history"] == history
        return written

    assert ranks(1, load) == [{"history": {"1": 0.5, "2": 0.25}, "epoch": 3}]


def test_dcps_own_reader_reads_a_checkpoint_of_gtopk(ranks, tmp_path):
    hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    model = torch.nn.Linear(2, 3)
    path = ranks(1, lambda rank: save_checkpoint(tmp_path, model, None).path)[0]
    state = {"model": torch.nn.Linear(2, 3).state_dict()}
    dcp.load(state, storage_reader=hf_storage.HuggingFaceStorageReader(str(path)))
    assert torch.equal(state["model"]["weight"], model.weight)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_dcp_reader_names_a_folder_that_cannot_be_listed(tmp_path, name):
    (tmp_path / "file").touch()
    match = f"no checkpoint in {tmp_path / name} can be listed: .*; pass the folder that"
    with pytest.raises(CheckpointException, match=match):
        dcp.load({}, storage_reader=Reader(tmp_path / name))


def test_dcp_reader_skips_damaged_checkpoints(ranks, tmp_path):
    with pytest.raises(CheckpointException, match="is whole: found none"):
        dcp.load({}, storage_reader=Reader(tmp_path))
    for epoch in (1, 2):
        dcp.save({"epoch": epoch}, storage_writer=Writer(tmp_path))
    (path,) = tmp_path.glob("*2-step-0/all-of-1.json")
    path.write_bytes(path.read_bytes()[:-9])
    state = {"epoch": 0}
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert state == {"epoch": 1}
    for path in tmp_path.glob("*/all-of-1.json"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointException, match=r"all-of-1\.json: it is truncated"):
        dcp.load({"epoch": 0}, storage_reader=Reader(tmp_path))


def test_dcp_readers_of_all_ranks_read_one_checkpoint_during_saves(tmp_path):
    def save(value, **options):
        state = {"model": {"weight": torch.full((4,), value)}}
        dcp.save(state, storage_writer=Writer(tmp_path, **options))

    states, readers, planners, plans = [], [], [], []
    for step in (1, 2):  # each rank looks separately, the second after another save
        save(float(step), step=step)
        reader, planner = Reader(tmp_path), DefaultLoadPlanner()
        states.append({"model": {"weight": torch.zeros(4)}})
        planner.set_up_planner(states[-1], reader.read_metadata(), is_coordinator=step == 1)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        readers.append(reader)
        planners.append(planner)
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for reader, planner, plan in zip(readers, planners, plans, strict=True):
        reader.read_data(planner.finish_plan(plan), planner)
    assert [state["model"]["weight"].tolist() for state in states] == [[2.0] * 4] * 2
    assert {reader.path for reader in readers} == {tmp_path / "checkpoint-00000002-step-2"}


def test_dcp_reader_finds_a_checkpoint_that_a_job_completed_meanwhile(tmp_path, monkeypatch):
    dcp.save({"epoch": 1}, storage_writer=Writer(tmp_path))
    read = Reader._read

    def job_moves_on(reader, part):
        if part.number == 1:
            dcp.save({"epoch": 2}, storage_writer=Writer(tmp_path))
            shutil.rmtree(tmp_path / part.folder)
        return read(reader, part)

    monkeypatch.setattr(Reader, "_read", job_moves_on)
    state = {"epoch": 0}
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert state == {"epoch": 2}


def test_find_raises_when_files_that_dcp_wrote_are_lost(ranks, tmp_path):
    for epoch in (1, 2):
        dcp.save({"epoch": epoch}, storage_writer=Writer(tmp_path))
    for path in tmp_path.glob("*/all-of-1.json"):
        path.unlink()

    def program(rank):
        with pytest.raises(CheckpointError, match=r"2 lacks .*all-of-1\.json; .* 1 lacks"):
            Archive(tmp_path, 2).find()

    ranks(1, program)


class Shards(DefaultSavePlanner):
    """A planner for a rank with one shard, as DCP creates from a DTensor."""

    def __init__(self, first_row, shard, size):
        super().__init__()
        self.shard = shard
        chunk = ChunkStorageMetadata(torch.Size([first_row, 0]), shard.shape)
        properties = TensorProperties.create_from_tensor(shard)
        data = TensorWriteData(chunk, properties, torch.Size(size))
        index = MetadataIndex("model.weight", chunk.offsets)
        self.plan = SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=data)])

    def resolve_data(self, write_item):
        return self.shard


def test_shards_of_several_ranks_are_joined(ranks, tmp_path):
    tensor, writer = torch.arange(35.0).reshape(7, 5), Writer(tmp_path, 3)
    planners = [Shards(first, tensor[first : first + 3], tensor.shape) for first in (0, 3, 6)]
    plans = writer.prepare_global_plan([planner.plan for planner in planners])
    results = [
        writer.write_data(plan, planner).value()
        for plan, planner in zip(plans, planners, strict=True)
    ]
    paths = {"model.weight": ("model", "weight")}
    writer.finish(Metadata({}, planner_data=paths), results)

    def load(rank):
        model = torch.nn.Linear(5, 7, bias=False)
        assert load_latest(tmp_path, model, generators=False).step == 3
        return model.weight.tolist()

    assert ranks(2, load) == [tensor.tolist()] * 2


@pytest.mark.matrix
def test_dtensor_shards_are_joined_and_divided_again(forked, tmp_path):
    job = forked(2, "checkpoint_shards.py", str(tmp_path))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("shards are as they were") == 2


def test_dcp_writer_refuses_a_step_that_is_no_integer(ranks, tmp_path):
    with pytest.raises(TypeError, match=r"step must be an integer, got 5\.0"):
        Writer(tmp_path, 5.0)
    dcp.save(Run(seed=1).state(), storage_writer=Writer(tmp_path, torch.tensor(5)))
    assert ranks(1, lambda rank: load_latest(tmp_path, None).step) == [5]


def test_step_given_to_dcp_does_not_change_the_runs_step_count(ranks, tmp_path):
    """It may be an epoch; a record would then mark the wrong steps as repeated."""
    dcp.save(Run(seed=1).state(), storage_writer=Writer(tmp_path, 5))
    steps = ranks(1, lambda rank: (load_latest(tmp_path, None).step, world.current().step))
    assert steps == [(5, 0)]


def test_dcp_planner_that_does_not_flatten_is_supported(ranks, tmp_path):
    saved = Run(seed=2)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(saved.state(), storage_writer=Writer(tmp_path, 5), planner=planner)

    def load(rank):
        other = Run(seed=1)
        found = load_latest(
            tmp_path, other.model, other.optimizer, scheduler=other.scheduler, generators=False
        )
        assert found.values == {"epoch": 3}
        return repr(other.state())

    assert ranks(2, load) == [repr(saved.state())] * 2
