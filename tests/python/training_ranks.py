"""Run on every rank by training_test.py: each model under each strategy, beside plain PyTorch. With "gloo" a few over that."""

import sys

import torch
from beside_plain import STRATEGIES, Training, expect_like_plain
from models import BATCH, CLASSES, MODELS, WIDTH, Classifier, Hooked, Tied, Transformer, units_of

STEPS = 4


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


def train_all(models, strategies):
    for kind in models:
        expect_like_plain(kind.__name__, made(kind), batches(STEPS), loss_of, units_of(kind), strategies=strategies)
    for kind in (Classifier, Hooked):
        expect_like_plain(f"{kind.__name__}, accumulation", made(kind), batches(2 * STEPS), loss_of, units_of(kind),
                          Training(accumulation=2), strategies)


if "gloo" in sys.argv:
    train_all([Classifier, Tied, Transformer], {"gloo": {"comm": {"transport": "gloo", "timeout_s": 60}}})
else:
    train_all(MODELS, STRATEGIES)
print("trained like plain PyTorch")
