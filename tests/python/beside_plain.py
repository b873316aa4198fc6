"""Trains one model with plain PyTorch on the global batch and with Tessera on each rank's part of the batch, and
compares the results."""

from typing import NamedTuple

import torch

import tessera

# Every strategy computes the same sums in the same order, so the results of all strategies have equal bits. Plain
# PyTorch sums in another order.
STRATEGIES = {
    "FULL_SHARD": {"strategy": "FULL_SHARD"},
    "FULL_SHARD, private copies": {"strategy": "FULL_SHARD", "host_sharing": False},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
}
# eps is far above rounding errors. So parameters whose gradients are zero apart from rounding errors (attention's key
# bias) do not change.
LR, DECAY, EPS, CLIP = 0.01, 0.01, 1e-5, 0.5
TOLERANCE = 1e-6


class Training(NamedTuple):
    accumulation: int = 1
    parts: int = 1
    """number of parts into which plain PyTorch cuts each batch; with one part for each rank it rounds as ranks do"""
    lr: float = LR


def rows_of_rank(tensor):
    """Returns this rank's part of a global batch."""
    return tensor.chunk(tessera.world_size())[tessera.rank()]


def hook_calls(model):
    """Returns the number of calls of the model's own hook."""
    return len(getattr(model, "seen", ()))


def clip(model):
    """Clips as clip_grad_norm_ does, but sums in fp64. The fp32 sum of clip_grad_norm_ is off by 1e-5 over millions of elements."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
    return norm


def train_plain(model, batches, loss_of, training=Training()):
    """Trains with AdamW and clipping on the global batches. Returns losses, gradient norms, the final state, and
    hook_calls."""
    accumulation, parts, lr = training
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, eps=EPS, weight_decay=DECAY)
    losses, norms = [], []
    for first in range(0, len(batches), accumulation):
        optimizer.zero_grad()
        total = 0.0
        for batch in batches[first:first + accumulation]:
            for part in zip(*(tensor.chunk(parts) for tensor in batch)):
                loss = loss_of(model, part) / (accumulation * parts)
                loss.backward()
                total += loss.item()
        norms.append(clip(model))
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}, hook_calls(model)


def train_sharded(model, batches, loss_of, strategy, training=Training()):
    """Trains as train_plain does, but with an Engine. A batch is a tuple of tensors, which are divided by rows. Only
    rank 0 gets the final state."""
    engine = tessera.Engine(model, {"gradient_clipping": CLIP, "gradient_accumulation": training.accumulation,
                                    "optimizer": {"lr": training.lr, "eps": EPS, "weight_decay": DECAY},
                                    "comm": {"timeout_s": 60}, **strategy})
    losses, norms = [], []
    for batch in batches:
        engine.backward(loss_of(model, tuple(map(rows_of_rank, batch))))
        if engine.step_is_due():
            result = engine.step()
            losses.append(result.loss)
            norms.append(result.grad_norm)
    state = engine.state_dict()
    engine.close()
    return losses, norms, state, hook_calls(model)


def expect_close(name, wanted, got):
    for what, a, b in (("losses", wanted[0], got[0]), ("norms", wanted[1], got[1])):
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            assert abs(x - y) <= TOLERANCE * max(abs(x), 1e-3), f"{name}: {what} of step {step}: wanted {x}, got {y}"
    assert wanted[3] == got[3], f"{name}: hooks ran {got[3]} times, wanted {wanted[3]}"
    if tessera.rank() != 0:
        assert got[2] == {}, name
        return
    assert list(wanted[2]) == list(got[2]), f"{name}: names {list(got[2])}"
    for key, value in wanted[2].items():
        assert value.dtype == got[2][key].dtype, f"{name}: {key} is {got[2][key].dtype}"
        assert torch.allclose(value.double(), got[2][key].double(), rtol=1e-5, atol=LR * 1e-2), \
            f"{name}: {key} differs by {(value.double() - got[2][key].double()).abs().max()}"


def expect_bits(name, first, second):
    assert first[:2] == second[:2], f"{name}: losses or norms of two strategies differ: {first[:2]} and {second[:2]}"
    for key, value in first[2].items():
        assert torch.equal(value, second[2][key]), f"{name}: the bits of {key} differ between two strategies"


def expect_like_plain(name, make, batches, loss_of, units, training=Training(), strategies=STRATEGIES):
    """`make()` returns a new model, which has the same values in each call."""
    wanted = train_plain(make(), batches, loss_of, training)
    first = None
    for title, strategy in strategies.items():
        got = train_sharded(make(), batches, loss_of, {"units": units, **strategy}, training)
        expect_close(f"{name}, {title}", wanted, got)
        if first is not None:
            expect_bits(f"{name}, {title}", first, got)
        first = first or got
