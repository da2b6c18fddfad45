"""Run under torchrun on 4 ranks, two nodes of two: DDP in a node, LocalSGD between the nodes.

Also LocalSGD of all ranks, in fragments.
"""

import torch
from checks import check_close, run_tests, same_bits_everywhere, weights
from torch.nn.parallel import DistributedDataParallel

import gtopk
import gtopk.torch as hvd
from gtopk.local_sgd import averaging

torch.distributed.init_process_group("gloo")
RANK = torch.distributed.get_rank()
NODES = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
COUNTERPARTS = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
hvd.init(process_sets=COUNTERPARTS)


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + RANK)
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def test_outer_step_between_node_counterparts_makes_all_ranks_equal() -> None:
    for compression in (hvd.Compression.none, hvd.Compression.gtopk(density=0.2)):
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = gtopk.LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            None,
            averaging,
            compression,
            process_set=COUNTERPARTS[RANK % 2],
        )
        inside = DistributedDataParallel(model, process_group=NODES[RANK // 2])
        for turn in range(3):
            train(inside, optimizer, range(4 * turn, 4 * turn + 4))
            before = weights(model)
            gathered = hvd.allgather(before[None])
            assert torch.equal(gathered[0], gathered[1])
            assert torch.equal(gathered[2], gathered[3])
            assert not torch.equal(gathered[0], gathered[2])
            assert optimizer.outer_step()
            assert same_bits_everywhere(weights(model))
            if compression is hvd.Compression.none:
                check_close(weights(model), gathered.mean(0))


def test_fragments_exchanged_in_turn_make_all_ranks_equal() -> None:
    # Exchanges end after steps 2, 3, 4, 6, 7, 8, 10 and 11, or as many steps later as they overlap.
    for overlap, ended, compression in (
        (0, 8, hvd.Compression.none),
        (3, 6, hvd.Compression.gtopk(density=0.2)),
        (1, 7, hvd.Compression.shards(period=1, bits=4)),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = gtopk.LocalSGD(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            4,
            averaging,
            compression,
            overlap_steps=overlap,
            fragments=3,
        )
        train(model, optimizer, range(11))
        assert optimizer.outer_steps == ended
        first, second = model[0].parameters()  # the second is exchanged after step 11
        assert not same_bits_everywhere(first)
        assert same_bits_everywhere(second) == (overlap == 0)
        assert (second in {*optimizer.diverging_parameters}) == (overlap > 0)
        optimizer.outer_step()
        assert same_bits_everywhere(weights(model))


if __name__ == "__main__":
    run_tests(globals())
    print("DDP inside, local steps between\n", end="", flush=True)
    hvd.shutdown()
    torch.distributed.destroy_process_group()
