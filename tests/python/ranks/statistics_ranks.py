"""training_test.py runs this program on one rank, then on two ranks and on four ranks. With "broadcast_buffers":
"microbatch_order", parameters and running statistics of a small residual network have the bits of one rank.

Usage: statistics_ranks.py FOLDER. The run on one rank stores its results in FOLDER.
"""

import pathlib
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera

ALL, ROWS, STEPS = 8, 4, 2
ORDER = {"reproducible": True, "broadcast_buffers": "microbatch_order"}
folder, rank, ranks = pathlib.Path(sys.argv[1]), tessera.rank(), tessera.world_size()


class Residual(nn.Module):
    """Two convolutions with batch norms, one of which has no momentum. Backward computes the block again."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.moving, self.mean = nn.BatchNorm2d(width, momentum=0.2), nn.BatchNorm2d(width, momentum=None)

    def body(self, x):
        return self.mean(self.second(torch.relu(self.moving(self.first(x)))))

    def forward(self, x):
        return torch.relu(x + checkpoint(self.body, x, use_reentrant=False))


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), Residual(6), Residual(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def trained(placement, sync):
    """Returns the parameters and buffers after some steps."""
    net = model()
    engine = tessera.Engine(net, {"strategy": placement, "gradient_sync": sync, "gradient_accumulation": ALL // ranks,
                                  "units": {"classes": ["Residual"]}, "optimizer": {"lr": 0.01}, **ORDER})
    for step in range(STEPS):
        while not engine.step_is_due():
            generator = torch.Generator().manual_seed(100 * step + engine.microbatch())
            images = torch.randn(ROWS, 3, 8, 8, generator=generator)
            engine.backward(nn.functional.cross_entropy(net(images), torch.arange(ROWS)))
        engine.step()
    counts = {name: buffer.item() for name, buffer in net.named_buffers() if name.endswith("num_batches_tracked")}
    assert set(counts.values()) == {ALL * STEPS}, counts
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    state = engine.state_dict()  # only rank 0 gets it
    engine.close()
    return buffers, state


def expect_refusal(net, text):
    try:
        tessera.Engine(net, {**ORDER, "gradient_accumulation": ALL // ranks})
    except tessera.Error as error:
        assert error.exit_code == 78 and text in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")


torch.set_num_threads(1)
if ranks == 1:
    torch.save(trained("FULL_SHARD", "each_microbatch"), folder / "one")
wanted = torch.load(folder / "one")
for placement, sync in (("FULL_SHARD", "each_microbatch"), ("NO_SHARD", "last_microbatch")):
    for mine, of_one in zip(trained(placement, sync), wanted, strict=True):
        for name, value in (mine or {}).items():
            assert torch.equal(value, of_one[name]), f"{placement}, {sync}: the bits of {name} differ"
expect_refusal(nn.Sequential(nn.Linear(4, 4), tessera.SyncBatchNorm(4)), "is a SyncBatchNorm, which normalises over")
expect_refusal(nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4, track_running_stats=True)), "knows those of a BatchNorm alone")
print("statistics of one rank")
