"""training_test.py runs this program on every rank. It trains models under strategies, and compares them with plain
PyTorch. It also runs a few of the models with the transport "gloo".

Each model is trained under FULL_SHARD and one other strategy, which changes from model to model. Long tests
(scripts/test --long) train each model under all strategies.
"""

import sys

import tessera
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
    """Returns the first strategy, and one of the other strategies in turn."""
    first, *others = strategies.items()
    return strategies if LONG or not others else dict([first, others[turn % len(others)]])


def train_all(models, accumulating, strategies):
    for turn, kind in enumerate(models):
        expect_like_plain(kind.__name__, made(kind), batches(STEPS), loss_of, units_of(kind), strategies=some(strategies, turn))
    for turn, kind in enumerate(accumulating):
        expect_like_plain(f"{kind.__name__}, accumulation", made(kind), batches(4 if not LONG else 2 * STEPS), loss_of, units_of(kind),
                          Training(accumulation=2), some(strategies, turn))


def train_unevenly(strategies, lengths=(5, 3, 1)):
    """Rank r has lengths[r] batches in each of two epochs. A batch has r + 1 samples, and one more whose label is
    padding. Two microbatches make a step. Plain PyTorch gets the samples of all ranks at once."""
    ranks, rank = tessera.world_size(), tessera.rank()

    def samples_of(place, of):
        generator = torch.Generator().manual_seed(100 * place + of)
        labels = torch.randint(0, CLASSES, (of + 2,), generator=generator)
        labels[0] = -100
        return torch.randn(of + 2, WIDTH, generator=generator), labels

    def loss_on(model, x, y):
        return torch.nn.functional.cross_entropy(model(x), y)

    def net():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))

    windows = [[samples_of(place, of) for place in places for of in range(ranks) if place < lengths[of]] for places in ((0, 1), (2, 3), (4,))]
    windows = [window for window in windows if window]
    plain, losses = net(), []
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01, eps=1e-5, weight_decay=0.01)
    for window in 2 * windows:
        optimizer.zero_grad()
        loss = loss_on(plain, *map(torch.cat, zip(*window)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held_out = [samples_of(99, of) for of in range(ranks)]
    with torch.no_grad():
        wanted = loss_on(plain, *map(torch.cat, zip(*held_out))).item()

    for name, strategy in strategies.items():
        model, told = net(), []
        engine = tessera.Engine(model, {"gradient_accumulation": 2, "optimizer": {"lr": 0.01, "eps": 1e-5, "weight_decay": 0.01},
                                        "units": {"classes": ["Linear"]}, "comm": {"timeout_s": 60}, **strategy})
        loader = [samples_of(place, rank) for place in range(lengths[rank])]
        for _ in range(2):
            for x, y in tessera.uneven(loader, engine, told.append):
                engine.backward(loss_on(model, x, y), weight=(y != -100).sum())
                if engine.step_is_due():
                    told.append(engine.step())
        for step, (a, b) in enumerate(zip(losses, told, strict=True)):
            assert abs(a - b.loss) <= 1e-6 * a, f"{name}: loss of step {step}: wanted {a}, got {b.loss}"
        found = engine.evaluate([held_out[rank]], lambda batch: (loss_on(model, *batch), (batch[1] != -100).sum()))
        assert abs(found.loss - wanted) <= 2e-6 * wanted and found.weight == sum(of + 1 for of in range(ranks)), f"{name}: {found}, wanted {wanted}"
        state = engine.state_dict()
        engine.close()
        for key, value in (plain.state_dict() if rank == 0 else {}).items():
            assert torch.allclose(value, state[key], rtol=1e-5, atol=1e-6), f"{name}: {key}"


if "gloo" in sys.argv:
    for lengths in ((5, 3, 1), (0, 4, 3)):  # the first rank may have no batch at all
        train_unevenly({"gloo": {"comm": {"transport": "gloo", "timeout_s": 60}}}, lengths)
    train_all([Classifier, Tied, Transformer] if LONG else [Tied, Transformer], [Classifier, Hooked] if LONG else [Hooked], {"gloo": {"comm": {"transport": "gloo", "timeout_s": 60}}})
else:
    for lengths in ((5, 3, 1), (0, 4, 3)):
        train_unevenly(STRATEGIES, lengths)
    train_all(MODELS, [Classifier, Hooked], STRATEGIES)
print("trained like plain PyTorch")
