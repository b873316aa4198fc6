"""rules_test.py runs this program on one rank and on two. Ranks that do not wait for each other get the same
values as a program in plain PyTorch that makes all their pulls and pushes in the same order on one thread.

Usage: asynchronous_ranks.py FOLDER, for recorded orders.
"""

import collections
import json
import pathlib
import sys
import time

import tessera
import torch
from torch import nn

rank, ranks, folder = tessera.rank(), tessera.world_size(), pathlib.Path(sys.argv[1])
STEPS, BATCHES, WIDTH, LR = 6, 3, 64, 0.5
# A unit is one matrix, so that each of one or two ranks owns an equal part of its elements, without padding.
SHARED = {"strategy": "SHARD_OPTIMIZER", "units": {"classes": ["Linear"]}, "optimizer": {"type": "sgd", "lr": LR, "weight_decay": 0},
          "gradient_sync": "last_microbatch", "comm": {"timeout_s": 60}}
torch.set_num_threads(1)


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


def loss_of(model, step, of):
    """Returns the loss of rank `of` in a step, which is counted from 0. Each rank takes its batches in turn."""
    generator = torch.Generator().manual_seed(100 * (step % BATCHES) + of)
    inputs, wanted = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    return (model(inputs) - wanted).square().mean()


def train(engine, steps=STEPS):
    results = []
    for step in range(steps):
        engine.backward(loss_of(engine.model, step, rank))
        results.append(engine.step())
    return results


def finish(engine):
    """Ends the Engine, and returns the values that all ranks have made."""
    tessera.barrier()
    with engine.gathered():
        values = [parameter.detach().clone() for parameter in engine.model.parameters()]
    tessera.barrier()
    engine.close()
    tessera.barrier()
    return values


def run(sync, steps=STEPS):
    engine = tessera.Engine(net(), {**SHARED, **({"sync": sync} if sync else {})})
    results = train(engine, steps)
    return results, engine.staleness, finish(engine)


def expect_bits(got, wanted, what):
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True)), what


def part_of(tensor, owner):
    return tensor.detach().view(-1).chunk(ranks)[owner]


def play(order):
    """Makes the pulls and pushes of an order in plain PyTorch. Returns losses [rank][step], ages [rank][step] and the
    owners' values."""
    owners, models = net(), [net() for _ in range(ranks)]
    losses, ages = [[] for _ in models], [collections.defaultdict(list) for _ in models]
    pulled = {}
    for line in order:
        of, unit, owner = line["rank"], int(line["unit"]), line["shard"]
        to, here = part_of(owners[unit].weight, owner), part_of(models[of][unit].weight, owner)
        if line["op"] == "pull":
            here.copy_(to)
            pulled[of, unit, owner] = line["version"]
            continue
        if len(losses[of]) < line["step"]:
            models[of].zero_grad()
            loss = loss_of(models[of], line["step"] - 1, of)
            loss.backward()
            losses[of].append(loss.item())
        to.copy_(to - part_of(models[of][unit].weight.grad, owner) * LR)
        ages[of][line["step"]].append(line["version"] - pulled[of, unit, owner])
    return losses, ages, [layer.weight for layer in owners]


def expect_a_recorded_run_that_plain_pytorch_plays():
    file = folder / "order.jsonl"
    sync = {"type": "asynchronous"}
    recorded, staleness, values = run({**sync, "record_order": str(file)})
    order = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    losses, ages, wanted = play(sorted(order, key=lambda line: line["event"]))
    assert [result.loss for result in recorded] == losses[rank]
    expect_bits(values, wanted, "the recorded run")
    total = collections.Counter()
    for step, result in enumerate(recorded, start=1):
        own = ages[rank][step]
        assert result.staleness_max == max(own) and abs(result.staleness_mean - sum(own) / len(own)) < 1e-12, (own, result.staleness_mean)
        # An age is at most 2 ranks * 6 steps.
        assert result.ages == collections.Counter(str(age) for age in own), (own, result.ages)
        total.update(result.ages)
    assert staleness == total, (staleness, total)
    tessera.barrier()
    played, _, again = run({**sync, "play_order": str(file)})
    assert [result.loss for result in played] == losses[rank]
    assert [result.ages for result in played] == [result.ages for result in recorded]
    expect_bits(again, values, "the played run")


def expect_backups():
    together, _, wanted = run(None)
    results, _, values = run({"type": "backups"})
    assert [result.loss for result in results] == [result.loss for result in together]
    expect_bits(values, wanted, "backups of none")
    if ranks == 1:
        return
    engine = tessera.Engine(net(), {**SHARED, "sync": {"type": "backups", "count": 1}})
    step = missed = 0
    while step < 20:
        loss = loss_of(engine.model, step, rank)
        if rank == 1 and step == 0:
            time.sleep(0.5)  # rank 0 makes steps alone meanwhile
        engine.backward(loss)
        result = engine.step()
        step, missed = result.step, missed + result.missed
    assert rank == 0 or (missed > 0 and result.dropped > 0), (missed, result.dropped)
    finish(engine)


def expect_hogwild():
    results, _, values = run({"type": "hogwild"}, steps=3 * STEPS)
    if ranks > 1:
        assert sum(result.loss for result in results[-STEPS:]) < sum(result.loss for result in results[:STEPS])
        return
    model, losses = net(), []
    for step in range(3 * STEPS):
        model.zero_grad()
        loss = loss_of(model, step, 0)
        loss.backward()
        losses.append(loss.item())
        for layer in model:
            layer.weight.data.copy_(layer.weight.data - layer.weight.grad * LR)
    assert [result.loss for result in results] == losses
    expect_bits(values, [layer.weight for layer in model], "hogwild of one rank")


expect_a_recorded_run_that_plain_pytorch_plays()
expect_backups()
expect_hogwild()
print("trained by orders, backups and hogwild like plain PyTorch")
