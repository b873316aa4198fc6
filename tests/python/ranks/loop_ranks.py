"""training_test.py runs this program on every rank. It compares sync_buffers, SyncBatchNorm and DataParallel with plain PyTorch, and
writes a trace.

Usage: loop_ranks.py FOLDER, for scratch files and as the place where PyTorch's ranks find each other.
"""

import copy
import json
import pathlib
import pickle
import sys

import tessera
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, ranks = tessera.rank(), tessera.world_size()
folder = pathlib.Path(sys.argv[1])
SGD = {"optimizer": {"type": "sgd", "lr": 0.1, "weight_decay": 0, "momentum": 0}}


def expect_close(one, other, what, atol=1e-6):
    assert torch.allclose(one.double(), other.double(), rtol=1e-5, atol=atol), f"{what}: wanted {other}, got {one}"


def expect_error(act, *words, code=64):
    try:
        act()
    except tessera.Error as error:
        assert error.exit_code == code and all(word in str(error) for word in words), (error.exit_code, str(error))
        return
    raise AssertionError(f"no Error with {words}")


# sync_buffers

def norms():
    torch.manual_seed(rank)
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(2)))
    net.register_buffer("flags", torch.tensor([rank == 0, True]), persistent=False)
    for norm in (net[0], net[1][0]):
        norm.running_mean.normal_()
        norm.running_var.uniform_()
        norm.num_batches_tracked += 3 + rank
    return net


def synced_buffers():
    for how, options in (("from_rank_zero", {}), ("mean", {"how": "mean"})):
        plain, net = norms(), norms()
        for buffer in plain.buffers():
            if how == "mean" and buffer.is_floating_point():
                torch.distributed.all_reduce(buffer)
                buffer /= ranks
            else:
                torch.distributed.broadcast(buffer, 0)
        before = dict(net.named_buffers())
        tessera.sync_buffers(net, **options)
        assert all(before[name] is buffer for name, buffer in net.named_buffers()), "buffers are other tensors now"
        for (name, got), wanted in zip(net.named_buffers(), plain.buffers(), strict=True):
            assert got.dtype == wanted.dtype
            expect_close(got, wanted, f"{how}: {name}")
    expect_error(lambda: tessera.sync_buffers(nn.BatchNorm1d(2 + rank)), "sync_buffers of")
    expect_error(lambda: tessera.sync_buffers(nn.BatchNorm1d(2), how="median"), "median", "from_rank_zero")


# SyncBatchNorm

def convolutions(**options):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 5), nn.BatchNorm1d(5, **options))


def pictures(of):
    """Returns the three batches of rank `of`. Ranks have batches of different sizes."""
    generator = torch.Generator().manual_seed(10 + of)
    return [torch.randn(3 + of, 2, 5, 5, generator=generator) + of for _ in range(3)]


def part_of_loss(found):
    """Returns this rank's loss. The mean of these losses over the ranks is the mean over all outputs."""
    return found.square().sum() * ranks / (sum(3 + of for of in range(ranks)) * found[0].numel())


def train_plain(net):
    """Trains one process on the pictures of all ranks. Returns the outputs for this rank's pictures."""
    optimizer, outputs = torch.optim.SGD(net.parameters(), lr=0.1), []
    for batch in map(torch.cat, zip(*(pictures(of) for of in range(ranks)), strict=True)):
        found = net(batch)
        outputs.append(found.detach()[sum(3 + of for of in range(rank)):][:3 + rank])
        optimizer.zero_grad()
        found.square().mean().backward()
        optimizer.step()
    return outputs


def train_by_engine(net, strategy):
    engine, outputs = tessera.Engine(net, {**SGD, **strategy}), []
    for batch in pictures(rank):
        found = net(batch)
        outputs.append(found.detach().clone())
        engine.backward(found.square().mean(), weight=len(batch))
        engine.step()
    with engine.gathered():
        state = {name: value.clone() for name, value in net.state_dict().items()}
    net.eval()
    with torch.no_grad():
        seen = net(pictures(0)[0])
    engine.close()
    return outputs, state, seen


def train_by_data_parallel(net, _):
    parallel, optimizer, outputs = tessera.DataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1), []
    for batch in pictures(rank):
        found = net(batch)
        outputs.append(found.detach())
        optimizer.zero_grad()
        part_of_loss(found).backward()
        optimizer.step()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.eval()
    with torch.no_grad():
        seen = net(pictures(0)[0])
    parallel.close()
    return outputs, state, seen


def norms_over_ranks():
    for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
        plain = convolutions(**options)
        wanted = train_plain(plain)
        state, seen = plain.state_dict(), plain.eval()(pictures(0)[0]).detach()
        for train, strategy in ((train_by_engine, {"strategy": "FULL_SHARD", "host_sharing": False, "units": {"classes": ["Conv2d", "Linear"]}}),
                                (train_by_engine, {"strategy": "NO_SHARD"}), (train_by_data_parallel, None)):
            net = convolutions(**options)
            parameters = list(net.parameters())
            assert tessera.convert_sync_batchnorm(net) == ["1", "5"]
            assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True)) and isinstance(net[1], tessera.SyncBatchNorm)
            outputs, own_state, own_seen = train(net, strategy)
            what = f"{train.__name__} {strategy} {options}"
            for got, each in zip(outputs, wanted, strict=True):
                expect_close(got, each, f"{what}: outputs", 1e-5)
            for name, value in state.items():
                expect_close(own_state[name], value, f"{what}: {name}", 1e-5)
            expect_close(own_seen, seen, f"{what}: in eval mode", 1e-5)
    assert tessera.convert_sync_batchnorm(nn.Linear(1, 1)) == []
    alone = nn.BatchNorm1d(3)
    assert tessera.convert_sync_batchnorm(alone) == [""] and tessera.convert_sync_batchnorm(alone) == []
    for copied in (copy.deepcopy(alone), pickle.loads(pickle.dumps(alone))):
        assert type(copied) is tessera.SyncBatchNorm
    expect_error(lambda: alone(torch.ones(2, 4)), "SyncBatchNorm wants", "[2, 4]")
    expect_error(lambda: tessera.SyncBatchNorm(3)(torch.ones(1 - rank, 3)), "more than 1 value a channel")
    expect_error(lambda: tessera.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d())), "module 0 is a LazyBatchNorm1d")
    dealt = {"deal": {"by": "speed"}, "gradient_accumulation": 2, "gradient_sync": "last_microbatch"}
    expect_error(lambda: tessera.Engine(nn.Sequential(nn.Linear(3, 3), alone), dealt), "/deal/by", "module 1 is a SyncBatchNorm", code=78)
    expect_error(lambda: tessera.convert_sync_batchnorm(nn.Sequential(*[nn.BatchNorm1d(1)] * 1, *[nn.BatchNorm1d(2) for _ in range(rank)])),
                 "convert_sync_batchnorm of 0, 1")


# DataParallel

class Branches(nn.Module):
    """`others` is used if `uses` is true, and `never` is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(20 + rank)  # the values of rank 0 replace these values
        self.first, self.others, self.never = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(2, 2)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x, uses):
        x = torch.tanh(self.first(x))
        return self.last(self.norm(self.others(x) if uses else x))


def rows(seed, count=6):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(100 * seed + rank))


def averaged_gradients():
    plain, net = Branches(), Branches()
    wrapped = DistributedDataParallel(plain, find_unused_parameters=True, broadcast_buffers=False)
    parallel = tessera.DataParallel(net, bucket_mb=1e-4)  # a bucket holds 26 floats, so there are several
    assert parallel.num_buckets > 2
    optimizers = [torch.optim.AdamW(each.parameters(), 0.05) for each in (plain, net)]
    for step in range(4):
        uses = step % 2 == 0 or rank == 1
        for optimizer, model in zip(optimizers, (wrapped, net), strict=True):
            optimizer.zero_grad()
            model(rows(step), uses).square().mean().backward()
        for (name, got), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert (got.grad is None) == (wanted.grad is None), name
            if got.grad is not None:
                expect_close(got.grad, wanted.grad, f"step {step}: gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
    for (name, got), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
        expect_close(got, wanted, name, 1e-5)
    assert len({bytes(each.numpy().tobytes()) for each in tessera.all_gather(net.first.weight.detach())}) == 1
    accumulated(wrapped, plain, parallel, net)
    parallel.broadcast_buffers()
    means = tessera.all_gather(net.norm.running_mean)
    assert all(torch.equal(each, means[0]) for each in means)
    expect_error(lambda: tessera.DataParallel(net), "belongs to an Engine or to another DataParallel", "call close() of that one")
    with parallel.no_sync():
        expect_error(parallel.backward_nothing, "under no_sync()")
    parallel.close()
    with tessera.deferred_init():
        deferred = nn.Linear(2, 2)
    expect_error(lambda: tessera.DataParallel(deferred), "weight is deferred", "outside of tessera.deferred_init()")
    expect_error(parallel.backward_nothing, "was closed")
    expect_error(lambda: tessera.DataParallel(nn.Linear(1 + rank, 1)), "weight")
    net.zero_grad()
    net(rows(9), True).square().mean().backward()  # gradients are not averaged from here on
    if rank == 0:
        net(rows(9), True).square().mean().backward()


def accumulated(wrapped, plain, parallel, net):
    """Runs two backwards, and gradients are averaged after the second. Then runs one backward in which the ranks have
    different weights, and one backward in which only rank 0 has a batch."""
    for model, owner, root in ((wrapped, wrapped, plain), (net, parallel, net)):
        root.zero_grad()
        with owner.no_sync():
            model(rows(7), True).square().mean().backward()
        model(rows(8), True).square().mean().backward()
    for (name, got), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
        if got.grad is not None:
            expect_close(got.grad, wanted.grad, f"accumulated: {name}")
    line, whole = nn.Linear(4, 1), nn.Linear(4, 1)
    lines = tessera.DataParallel(line)
    whole.load_state_dict(line.state_dict())
    parts = [torch.randn(3 + of, 4, generator=torch.Generator().manual_seed(of)) for of in range(ranks)]
    torch.cat(parts).matmul(whole.weight.T).square().mean().backward()
    lines.set_weight(torch.tensor(3 + rank))
    parts[rank].matmul(line.weight.T).square().mean().backward()
    expect_close(line.weight.grad, whole.weight.grad, "by weights")
    line.zero_grad(), whole.zero_grad()
    some = torch.ones(2, 4)
    some.matmul(whole.weight.T).square().mean().backward()
    if rank == 0:
        some.matmul(line.weight.T).square().mean().backward()
    else:
        lines.backward_nothing()
    expect_close(line.weight.grad, whole.weight.grad, "of rank 0 alone")
    expect_error(lambda: lines.set_weight(-1.0), "not negative")


# Traces

def traced():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine = tessera.Engine(net, {**SGD, "strategy": "FULL_SHARD", "host_sharing": False, "units": {"classes": ["Linear"]}})
    file = folder / "trace.json"
    for step in range(3):
        if step == 1:
            tessera.start_trace()  # the first step is not in the trace
        with tessera.span("load rows"):
            x = rows(step)
        engine.backward(net(x).square().mean())
        engine.step()
    tessera.write_trace(file)
    with tessera.span("after the end"):
        engine.close()
    tessera.barrier()
    events = json.loads(file.read_text())["traceEvents"]
    for of in range(ranks):
        names = [event["name"] for event in events if event["pid"] == of and event["ph"] == "X"]
        assert names.count("load rows") == 2 and names.count("step") == 2 and names.count("backward") == 2, names
        assert "reduce 0" in names and "after the end" not in names, names
    # A span of the program lies inside the span of its step, before the backward. All spans use the same clock.
    mine = {name: [event for event in events if event["pid"] == rank and event["name"] == name] for name in ("load rows", "step", "backward")}
    for load, backward, step in zip(mine["load rows"], mine["backward"], mine["step"], strict=True):
        assert load["ts"] + load["dur"] <= backward["ts"] and step["ts"] <= load["ts"] <= step["ts"] + step["dur"], (load, backward, step)
    expect_error(lambda: tessera.write_trace(folder / "none" / "trace.json"), "the trace cannot be written", code=73)


torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet_for_loop'}", rank=rank, world_size=ranks)
synced_buffers()
norms_over_ranks()
averaged_gradients()
traced()
print("a loop like plain PyTorch's")
torch.distributed.destroy_process_group()
