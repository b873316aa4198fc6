"""Run on every rank by training_test.py: models under strategies, beside plain PyTorch. With "gloo" a few over that.

Each model is trained under FULL_SHARD and one other strategy, the next one with each model; with scripts/test --long under all of them.
"""

import sys

import torch
from beside_plain import STRATEGIES, Training, expect_like_plain
from launched import LONG
from models import BATCH, CLASSES, MODELS, WIDTH, Classifier, Hooked, Tied, Transformer, units_of

STEPS = 4 if LONG else 3


def batches(count):
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator))
            for _ in range(count)]


def loss_of(model, batch):
    return model(*batch)


def made(kind):
    def make():
        torch.manual_seed(3)
        return kind()

    return make


def some(strategies, turn):
    """The first strategy, and one of the others in turn."""
    first, *others = strategies.items()
    return strategies if LONG or not others else dict([first, others[turn % len(others)]])


def train_all(models, accumulating, strategies):
    for turn, kind in enumerate(models):
        expect_like_plain(kind.__name__, made(kind), batches(STEPS), loss_of, units_of(kind), strategies=some(strategies, turn))
    for turn, kind in enumerate(accumulating):
        expect_like_plain(f"{kind.__name__}, accumulation", made(kind), batches(4 if not LONG else 2 * STEPS), loss_of, units_of(kind),
                          Training(accumulation=2), some(strategies, turn))


if "gloo" in sys.argv:
    train_all([Classifier, Tied, Transformer] if LONG else [Tied, Transformer], [Classifier, Hooked] if LONG else [Hooked], {"gloo": {"comm": {"transport": "gloo", "timeout_s": 60}}})
else:
    train_all(MODELS, [Classifier, Hooked], STRATEGIES)
print("trained like plain PyTorch")
