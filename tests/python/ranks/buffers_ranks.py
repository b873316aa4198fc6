"""training_test.py runs this program on every rank. It checks that running statistics under "broadcast_buffers" equal those of DDP's
broadcast_buffers.

Usage: buffers_ranks.py FILE, through which the ranks of DDP find each other.
"""

import sys

import tessera
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS = 3, 6
rank, ranks = tessera.rank(), tessera.world_size()


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def statistics(wrap, train):
    """Returns the statistics of this rank's batch norm after each forward on the rank's own rows."""
    net = model()
    forward, step = wrap(net)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        loss = forward(torch.randn(ROWS, 5, generator=generator)).square().mean()
        found += [buffer.clone() for buffer in net[1].buffers()]
        train(step, loss)
    return found


def with_ddp(broadcast):
    def wrap(net):
        wrapped = DistributedDataParallel(net, broadcast_buffers=broadcast)
        return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)

    def train(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return statistics(wrap, train)


def with_engine(strategy):
    def wrap(net):
        return net, tessera.Engine(net, {"optimizer": {"type": "sgd", "lr": 0.1, "weight_decay": 0, "momentum": 0}, **strategy})

    def train(engine, loss):
        engine.backward(loss)
        engine.step()

    return statistics(wrap, train)


def are_close(one, other):
    return all(torch.allclose(a.double(), b.double(), atol=1e-6) for a, b in zip(one, other, strict=True))


torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=ranks)
broadcast, own = with_ddp(True), with_ddp(False)
assert are_close(broadcast, own) == (rank == 0), "ranks see rows of their own"
for placement in ("NO_SHARD", "FULL_SHARD"):
    assert are_close(with_engine({"strategy": placement, "broadcast_buffers": "from_rank_zero"}), broadcast), placement
    assert are_close(with_engine({"strategy": placement}), own), placement
print("statistics like DDP's")
torch.distributed.destroy_process_group()
