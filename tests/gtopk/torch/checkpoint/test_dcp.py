"""torch.distributed.checkpoint reads what we write, and writes what we read."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
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

from gtopk import load_latest, save_checkpoint
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
        """Return the state under the names that save_checkpoint has for it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": 3,
        }


@pytest.fixture(autouse=True)
def one_process():
    """DCP says that there is no process group, and goes on without."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def test_dcp_reads_what_we_write(ranks, tmp_path):
    ours = Run(seed=3)

    def save(rank):
        save_checkpoint(
            tmp_path, ours.model, ours.optimizer, None, 7, scheduler=ours.scheduler, epoch=3
        )

    ranks(1, save)
    other = Run(seed=1)
    state = {**other.state(), "epoch": 0}
    reader = Reader(tmp_path)
    dcp.load(state, storage_reader=reader)
    assert repr(state) == repr(ours.state())
    assert reader.path == tmp_path / "checkpoint-00000001-step-7"


def test_we_read_what_dcp_writes(ranks, tmp_path):
    theirs = Run(seed=3)
    dcp.save(theirs.state(), storage_writer=Writer(tmp_path, 5))

    def load(rank):
        other = Run(seed=1)
        found = load_latest(
            tmp_path, other.model, other.optimizer, scheduler=other.scheduler, generators=False
        )
        assert found.step == 5
        assert found.values == {"epoch": 3}
        return repr(other.state())

    for size in (1, 2):
        assert ranks(size, load) == [repr(theirs.state())] * size
    state = {**Run(seed=1).state(), "epoch": 0}
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert repr(state) == repr(theirs.state())
    assert not list(tmp_path.glob("*/shard-*"))


def test_dcps_own_reader_needs_nothing_of_ours(ranks, tmp_path):
    hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    model = torch.nn.Linear(2, 3)
    path = ranks(1, lambda rank: save_checkpoint(tmp_path, model, None).path)[0]
    state = {"model": torch.nn.Linear(2, 3).state_dict()}
    dcp.load(state, storage_reader=hf_storage.HuggingFaceStorageReader(str(path)))
    assert torch.equal(state["model"]["weight"], model.weight)


def test_it_passes_over_what_is_damaged(ranks, tmp_path):
    with pytest.raises(CheckpointException, match="is whole: none is there"):
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
    with pytest.raises(CheckpointException, match=r"all-of-1\.json: it is cut short"):
        dcp.load({"epoch": 0}, storage_reader=Reader(tmp_path))


class Shards(DefaultSavePlanner):
    """A planner for a rank that has one shard, as DCP's own makes of a DTensor."""

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


def test_the_shards_of_several_ranks_become_whole(ranks, tmp_path):
    whole, writer = torch.arange(35.0).reshape(7, 5), Writer(tmp_path, 3)
    planners = [Shards(first, whole[first : first + 3], whole.shape) for first in (0, 3, 6)]
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

    assert ranks(2, load) == [whole.tolist()] * 2


@pytest.mark.matrix
def test_a_dtensors_shards_become_whole_and_are_cut_again(torchrun, tmp_path):
    job = torchrun(2, "checkpoint_shards.py", str(tmp_path))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("shards are as they were") == 2


def test_a_step_that_is_no_integer_is_refused(ranks, tmp_path):
    with pytest.raises(TypeError, match=r"step must be an integer, got 5\.0"):
        Writer(tmp_path, 5.0)
    dcp.save(Run(seed=1).state(), storage_writer=Writer(tmp_path, torch.tensor(5)))
    assert ranks(1, lambda rank: load_latest(tmp_path, None).step) == [5]
