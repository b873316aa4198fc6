"""training_test.py runs this program on every rank. It compares an Engine that uses Adafactor with
torch.optim.Adafactor on the global batch."""

import torch
from beside_plain import expect_bits, rows_of_rank
from launched import LONG
from models import BATCH, CLASSES, WIDTH, Classifier, units_of

import tessera

STEPS, LR, DECAY, TOLERANCE = 20 if LONG else 8, 0.01, 0.05, 1e-6
ADAFACTOR = {"beta2_decay": -0.7, "min_rms": 0.002, "clip_threshold": 1.5}
STRATEGIES = [{"strategy": "FULL_SHARD"}, {"strategy": "FULL_SHARD", "host_sharing": False}, {"strategy": "NO_SHARD"}]


def made():
    torch.manual_seed(3)
    return Classifier()


def batches():
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator))
            for _ in range(STEPS)]


def train_plain():
    """Returns the final parameters. Vectors have no weight decay, and half of the rate."""
    model = made()
    groups = [{"params": [p for p in model.parameters() if p.dim() == 1], "lr": LR / 2, "weight_decay": 0.0},
              {"params": [p for p in model.parameters() if p.dim() > 1], "lr": LR, "weight_decay": DECAY}]
    optimizer = torch.optim.Adafactor(groups, beta2_decay=ADAFACTOR["beta2_decay"], eps=(None, ADAFACTOR["min_rms"]),
                                      d=ADAFACTOR["clip_threshold"], foreach=False)
    for batch in batches():
        optimizer.zero_grad()
        for part in zip(*(tensor.chunk(tessera.world_size()) for tensor in batch)):  # this rounds sums as on ranks
            (model(*part) / tessera.world_size()).backward()
        optimizer.step()
    return dict(model.named_parameters())


def train_sharded(strategy):
    model = made()
    optimizer = {"type": "adafactor", "lr": LR, "weight_decay": DECAY, "adafactor": ADAFACTOR,
                 "groups": [{"max_dim": 1, "lr_ratio": 0.5, "weight_decay": 0.0}]}
    engine = tessera.Engine(model, {"optimizer": optimizer, "units": units_of(Classifier), "comm": {"timeout_s": 60}, **strategy})
    losses = []
    for batch in batches():
        engine.backward(model(*map(rows_of_rank, batch)))
        losses.append(engine.step().loss)
    state = engine.state_dict()
    engine.close()
    return losses, [], state


wanted, first = train_plain(), None
for strategy in STRATEGIES:
    got = train_sharded(strategy)
    first = first or got
    expect_bits(str(strategy), first, got)
    if tessera.rank() == 0:
        for name, value in wanted.items():
            distance = (got[2][name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-3)
            assert distance <= TOLERANCE, f"{strategy}: {name} differs by {distance} of its norm"
print("trained like torch's Adafactor")
