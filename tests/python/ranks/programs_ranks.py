"""programs_test.py runs this program on every rank. Python programs do many things to a module around its training.
Each of these things has the right result, or ends in an error that says what to do."""

import contextlib
import copy
import gc
import io
import json
import os
import pathlib
import pickle
import sys
import tempfile
import timeit

import numpy as np
import torch
from beside_plain import rows_of_rank, train_plain
from launched import LONG
from models import BATCH, CLASSES, WIDTH, Block, Classifier
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

import tessera
from tessera._job import plain_values

STRATEGIES = {"private": {"host_sharing": False}, "shared": {}, "replicated": {"strategy": "NO_SHARD"}}
STRATEGY = {"units": {"classes": ["Block"]}, "optimizer": {"lr": 0.01, "eps": 1e-5}, "gradient_clipping": 0.5, "comm": {"timeout_s": 60}}


def model():
    torch.manual_seed(3)
    return Classifier()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def part(seed):
    return tuple(map(rows_of_rank, batch(seed)))


def train(engine, net, seeds):
    return [(engine.backward(net(*part(seed))), engine.step())[1].loss for seed in seeds]


@contextlib.contextmanager
def expected(code, *texts, kind=RuntimeError):
    """Expects an exception of `kind` that contains all texts. A tessera.Error must have the exit code `code`, if a code
    is given."""
    try:
        yield
    except kind as error:
        assert code is None or (isinstance(error, tessera.Error) and error.exit_code == code), repr(error)
        for text in texts:
            assert text in str(error), f"{text!r} is not in {error}"
    else:
        raise AssertionError(f"no error with {texts}")


def state_dicts(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    train(engine, net, range(3))
    full = engine.state_dict()
    with engine.gathered():
        by_hand = {name: value.detach().clone() for name, value in net.state_dict().items()}
    if tessera.rank() == 0:
        assert list(full) == list(by_hand)
        assert all(torch.equal(full[name], by_hand[name]) for name in full)
        assert all(full[name].untyped_storage().nbytes() == full[name].nbytes for name in full), "a state holds a whole unit"
    # torch.save and numpy read memory by its address, and do not call operators.
    with engine.gathered():
        stream = io.BytesIO()
        torch.save(net.state_dict(), stream)
        stream.seek(0)
        assert all(torch.equal(value, by_hand[name]) for name, value in torch.load(stream).items())
        net.head.weight.detach().numpy()
        again = pickle.loads(pickle.dumps(net))
        assert torch.equal(again.head.weight, by_hand["head.weight"])
    # The saved values can be loaded under the guard. A new Engine over a copy with these values gives the same loss.
    losses = train(engine, net, [7, 8])
    with engine.gathered(write=True):
        net.load_state_dict(by_hand)
    engine.close()
    other = model()
    other.load_state_dict(by_hand)
    engine = tessera.Engine(other, strategy)
    first = net(*part(7)) if "NO_SHARD" in str(strategy) else None
    loss = train(engine, other, [7])[0]
    assert loss == losses[0], (loss, losses)
    assert first is None or torch.isfinite(first)
    engine.close()


def deep_copies(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    train(engine, net, [1])
    twin = copy.deepcopy(net)
    loss = net(*part(2)).item()
    assert twin(*part(2)).item() == loss
    train(engine, net, [2, 3])
    assert twin(*part(2)).item() == loss, "the copy changed with the original"
    with expected(64, "pickled or copied"):
        copy.deepcopy(engine)
    with expected(64, "pickled or copied"):
        pickle.dumps(engine)
    engine.close()


def left_over_lines(strategy):
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    engine = tessera.Engine(net, strategy)
    engine.backward(net(*part(1)))
    with expected(None, "belongs to the Engine"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with expected(None, "belongs to the Engine"):
        optimizer.step()
    engine.step()
    net(*part(2)).backward()
    with expected(None, "was dropped"):
        optimizer.step()
    train(engine, net, [2])
    net.to("cpu"), net.float()  # the net is on the CPU and in fp32 already
    with expected(None, "belongs to the Engine"):
        net.double()
    engine.close()


def late_hooks_and_parameters(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    seen = []
    handle = net.head.weight.register_hook(lambda gradient: seen.append(1))
    train(engine, net, [1, 2])
    assert len(seen) == 2, seen
    handle.remove()
    train(engine, net, [3])
    engine.close()
    net, spare = model(), Block()
    engine = tessera.Engine(net, strategy)
    train(engine, net, [1])
    net.blocks.insert(0, spare)  # this registers no new module
    with expected(64, "blocks.0.norm.weight", "after the Engine was made"):
        train(engine, net, [2])
    del net.blocks[0]
    weight = net.head._parameters["weight"]
    net.head._parameters["weight"] = torch.nn.Parameter(weight.detach().clone())
    with expected(64, "head.weight", "after the Engine was made"):
        train(engine, net, [2])
    net.head._parameters["weight"] = weight
    net.extra = torch.nn.Linear(3, 3)
    with expected(64, "extra.weight", "after the Engine was made"):
        train(engine, net, [2])
    del net.extra
    net.plain = Block().requires_grad_(False)  # this module has no trainable parameters
    train(engine, net, [2])
    engine.close()
    engine = tessera.Engine(torch.nn.Sequential(*(Block() for _ in range(64))), strategy)
    look, walk = (min(timeit.repeat(call, number=10, repeat=20)) for call in (engine._expect_known_parameters, lambda: list(engine.model.modules())))
    assert look < walk / 8, f"each backward looks at the modules for {look / 10} s, and a walk over them takes {walk / 10} s"
    engine.close()


def training_twice(strategy):
    plain = train_plain(model(), [batch(seed) for seed in (1, 2)], lambda net, each: net(*each))[2]
    for _ in range(2):
        net = model()
        engine = tessera.Engine(net, strategy)
        with expected(64, "another Engine"):
            tessera.Engine(net, strategy)
        train(engine, net, [1, 2])
        state = engine.state_dict()
        engine.close()
        with expected(64, "closed"):
            engine.step()
    assert set(state) in (set(plain), set())
    # An Engine to which no reference is left has closed itself.
    net = model()
    engine = tessera.Engine(net, strategy)
    first = train(engine, net, [1, 2, 3])
    del engine
    gc.collect()
    engine = tessera.Engine(net, strategy)
    assert train(engine, net, [4])[0] < first[0] * 2
    engine.close()


def views_in_a_state_dict(strategy):
    net = model()
    net.register_buffer("count", torch.arange(3))
    net._register_state_dict_hook(lambda module, state, prefix, _: state.update({"turned": state["blocks.1.up.weight"].t()}))
    engine = tessera.Engine(net, {"strategy": "FULL_SHARD", **strategy, "units": {"classes": ["Linear"]}})
    train(engine, net, [1])
    full = engine.state_dict()
    if tessera.rank() == 0:
        assert torch.equal(full["turned"], full["blocks.1.up.weight"].t()) and torch.equal(full["count"], torch.arange(3))
        assert full["blocks.1.up.weight"].abs().sum() > 0
    train(engine, net, [2])
    engine.close()


# Ways to get an array or list of a tensor's values.
ARRAYS = {
    "cpu().numpy()": lambda tensor: tensor.detach().cpu().numpy(),
    "numpy(force)": lambda tensor: tensor.numpy(force=True),
    "asarray": lambda tensor: np.asarray(tensor.detach()),
    "array interface": lambda tensor: np.asarray(tensor.detach().contiguous().view(-1).__array__()),
    "from_dlpack": lambda tensor: torch.from_dlpack(tensor.detach()),
    "numpy's from_dlpack": lambda tensor: np.from_dlpack(tensor.detach()),
    "a view's": lambda tensor: tensor.detach().flatten()[1:].view(-1).numpy(),
    "storage": lambda tensor: tensor.untyped_storage().tolist(),
    "data.numpy()": lambda tensor: tensor.data.numpy(),
    "data_ptr": lambda tensor: tensor.data_ptr(),
    "clone().numpy()": lambda tensor: tensor.detach().clone().numpy(),
    "tolist": lambda tensor: tensor.tolist(),
}


def arrays_of_parameters(strategy):
    """Each of the ways in ARRAYS gives an array of the parameter's values, or an error that names the guard. No way
    gives another parameter's values."""
    net = model()
    engine = tessera.Engine(net, {"strategy": "FULL_SHARD", **strategy})
    train(engine, net, [1, 2])
    with engine.gathered():
        wanted = {name: value.detach().clone() for name, value in net.state_dict().items()}
    arrays, refused = {}, set()
    for name, value in net.state_dict().items():
        for way, array_of in ARRAYS.items():
            try:
                arrays[name, way] = array_of(value)
            except (RuntimeError, BufferError) as error:
                assert "engine.gathered()" in str(error), f"{way}: {error}"
                refused.add(way)
    always = {"clone().numpy()", "tolist"}
    assert "NO_SHARD" in strategy.values() or strategy.get("host_sharing", True) or refused == set(ARRAYS) - always, refused
    assert not refused & always, refused
    net(*part(3))  # after this, the slots hold other units
    for (name, way), array in arrays.items():
        if way not in ("storage", "data_ptr"):
            assert torch.equal(torch.as_tensor(array).flatten(), wanted[name].flatten()[1:] if way == "a view's" else wanted[name].flatten()), (name, way)
    assert str(net.head.bias).startswith("Parameter containing:") and len(net.head.bias.tolist()) == CLASSES
    with engine.gathered():
        assert np.array_equal(net.head.weight.detach().numpy(), wanted["head.weight"].numpy())
    engine.close()


class Scaled(torch.autograd.Function):
    """Computes x * scale with numpy. forward and backward read the parameter's memory, as compiled code does."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return torch.from_numpy(x.detach().numpy() * scale.detach().numpy())

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return torch.from_numpy(gradient.numpy() * scale.detach().numpy()), (gradient * x).sum(0)


class WithScaled(Classifier):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x, target):
        return super().forward(Scaled.apply(x + 0 * self.head.bias.sum(), self.scale), target)


# Ways to get an object that shows a parameter's memory. A function may keep such an object.
KEPT = {
    "numpy": lambda tensor: tensor.numpy()[:],
    "asarray": np.asarray,
    "a tensor over an array": lambda tensor: torch.from_numpy(tensor.numpy()),
    "from_dlpack": torch.from_dlpack,
    "numpy's from_dlpack": np.from_dlpack,
    "a capsule": lambda tensor: torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)),
}
# Places where a function keeps such an object for its backward.
PLACES = ["attribute", "inside another object", "saved for backward", "global"]
GLOBAL: list[object] = []


class Keeping(torch.autograd.Function):
    """Computes x * scale, and keeps the parameter's values for its backward."""

    @staticmethod
    def forward(ctx, x, scale, way, place):
        values = KEPT[way](scale.detach())
        ctx.place = place
        if place == "attribute":
            ctx.scale = values
        elif place == "inside another object":
            ctx.held = {"scales": [x.shape, (values,)]}
        elif place == "saved for backward":
            ctx.save_for_backward(torch.as_tensor(values))
        else:
            ctx.number = len(GLOBAL)
            GLOBAL.append(values)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        if ctx.place == "attribute":
            values = ctx.scale
        elif ctx.place == "inside another object":
            values = ctx.held["scales"][1][0]
        elif ctx.place == "saved for backward":
            values, = ctx.saved_tensors
        else:
            values = GLOBAL[ctx.number]
        return gradient * torch.as_tensor(values), gradient.sum(0), None, None


class WithKeeping(torch.nn.Module):
    """Forward reads more units than backward. So slots hold other units in backward than they held in forward."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.scales = torch.nn.ModuleList(torch.nn.ParameterList([torch.linspace(0.6, 1.1 + 0.1 * i, WIDTH)]) for i in range(6))

    def forward(self, x, target):
        for i in (0, 1, 2, 0, 3, 4, 1, 5, 2, 2, 4):
            x = Keeping.apply(x, self.scales[i][0], *self.keep)
        with torch.no_grad():
            wanted = x * self.scales[3][0] * self.scales[1][0] * self.scales[0][0]
        return (x - wanted).square().mean()


def functions_that_keep_arrays(strategy):
    def losses(sharding, *keep):
        net = WithKeeping(keep)
        engine = tessera.Engine(net, {**strategy, "strategy": sharding, "units": {"classes": ["ParameterList"]}, "prefetch": 2})
        found = train(engine, net, range(3))
        engine.close()
        return found

    wanted = losses("NO_SHARD", "numpy", "attribute")
    for i, way in enumerate(KEPT):
        for place in PLACES if i == 0 or LONG else [PLACES[i % len(PLACES)]]:
            found = losses("FULL_SHARD", way, place)
            assert np.allclose(found, wanted, rtol=1e-6, atol=0), (way, place, found, wanted)
    GLOBAL.clear()


def array_or_none(tensor):
    """Returns the values of a parameter as an array, or None if the Engine refuses that by name, with the remedy."""
    try:
        return tensor.detach().numpy()
    except RuntimeError as error:
        assert "sharded and not gathered" in str(error) and "engine.gathered()" in str(error), error
        return None


@torch.library.custom_op("tessera_tests::keep", mutates_args=())
def keep_in_operator(scale: torch.Tensor) -> torch.Tensor:
    GLOBAL.append(array_or_none(scale))
    return scale * 2


class KeepingMode(TorchDispatchMode):
    """Keeps an array of the first factor of each product."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mul.Tensor:
            GLOBAL.append(array_or_none(args[0]))
        return function(*args, **(kwargs or {}))


def arrays_that_operators_keep(strategy):
    """An operator of the program, and a dispatch mode, run Python code inside an operator. This code gets copies, or an
    error."""
    net = WithKeeping(("numpy", "attribute"))
    engine = tessera.Engine(net, {"strategy": "FULL_SHARD", **strategy, "units": {"classes": ["ParameterList"]}, "prefetch": 2})
    scales = [each[0] for each in net.scales]
    with engine.gathered():
        wanted = [scale.detach().numpy().copy() for scale in scales]
    with torch.no_grad():
        for scale in scales:
            keep_in_operator(scale)
        with KeepingMode():
            for scale in scales:
                torch.mul(scale, 2)
    assert len(GLOBAL) == 2 * len(scales)
    assert all(kept is not None for kept in GLOBAL[len(scales):]), "a dispatch mode gets copies"
    for i, kept in enumerate(GLOBAL):
        assert kept is None or np.array_equal(kept, wanted[i % len(scales)]), i
    GLOBAL.clear()
    engine.close()


def functions_that_read_memory(strategy):
    def made():
        torch.manual_seed(3)
        return WithScaled()

    strategy = {"strategy": "FULL_SHARD", **strategy, "units": {"classes": ["Block", "Linear"]}}
    losses = {}
    for name, each in {"sharded": strategy, "plain": {**strategy, "strategy": "NO_SHARD"}}.items():
        net = made()
        engine = tessera.Engine(net, each)
        losses[name] = train(engine, net, range(4))
        engine.close()
    assert np.allclose(losses["sharded"], losses["plain"], rtol=1e-6, atol=0), losses


def arrays_that_hooks_keep(strategy):
    """Hooks that save tensors for backward run inside an operator. The operator's units are in memory only until it
    returns. The hooks keep the right values, or get the error that names the guard."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    ways = {"none": contextlib.nullcontext(), "on the CPU": torch.autograd.graph.save_on_cpu(),
            "arrays": hooks(lambda tensor: tensor.detach().clone().numpy(), torch.from_numpy)}
    losses = {}
    for name, way in ways.items():
        net = model()
        engine = tessera.Engine(net, {"strategy": "FULL_SHARD", **strategy})
        with way:
            losses[name] = train(engine, net, range(3))
        if name == "arrays":
            kept = hooks(lambda tensor: tensor.detach().numpy(), torch.from_numpy)
            with engine.gathered(), kept:
                net(*part(1))
            with expected(None, "engine.gathered()"), kept:
                net(*part(1))
        engine.close()
    assert all(np.allclose(each, losses["none"], rtol=1e-6, atol=0) for each in losses.values()), losses


def arrays_kept_beyond_a_guard(strategy):
    net = model()
    engine = tessera.Engine(net, {"strategy": "FULL_SHARD", **strategy, "check": {"values": True}})
    train(engine, net, [1])
    with engine.gathered():
        kept = net.blocks[0].up.weight.detach().numpy()
        wanted = kept.copy()
    assert np.isnan(kept).all() if not strategy.get("host_sharing", True) else np.array_equal(kept, wanted)
    train(engine, net, [2])
    engine.close()


def profiled(strategy):
    """Profilers of torch may read any attribute of parameters. A step under a profiler gives the same results, and the
    profile has a range for each gather and each reduction."""
    def losses(observer):
        net = model()
        engine = tessera.Engine(net, {"strategy": "FULL_SHARD", **strategy})
        before = engine.traffic
        with observer:
            found = train(engine, net, [1, 2])
        if isinstance(observer, torch.profiler.profile):
            after, seen = engine.traffic, {event.key: event.count for event in observer.key_averages()}
            for call, key in (("all_gather ", "gathers"), ("reduce ", "reductions")):
                assert sum(count for name, count in seen.items() if name.startswith(call)) == after[key] - before[key] > 0, (call, seen)
            assert seen["reduce blocks.0"] == 2 and seen["backward"] == 2, seen
        with contextlib.nullcontext() if strategy.get("host_sharing", True) else expected(None, "engine.gathered()"):
            net.head.weight.detach().numpy()
        engine.close()
        return found

    wanted = losses(contextlib.nullcontext())
    everything = {"record_shapes": True, "profile_memory": True, "with_stack": True, "with_flops": True, "with_modules": True}
    for options in ({"with_stack": True}, everything):
        assert losses(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)) == wanted
    assert losses(torch.autograd.detect_anomaly(check_nan=True)) == wanted
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        assert losses(execution_trace(path)) == wanted
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        assert losses(profile) == wanted
        seen = sum(event.count for event in profile.key_averages() if event.key == "aten::t")
        found = [node["name"] for node in json.loads(path.read_text())["nodes"]].count("aten::t")
        assert found == seen > 0, f"{found} of {seen} calls are in the trace"


@contextlib.contextmanager
def execution_trace(path):
    """Records calls as ExecutionTraceObserver does without a profiler. The observer leaves out a call if recording it
    raises an exception."""
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    try:
        yield
    finally:
        observer.stop()
        observer.unregister_callback()


class Running(Classifier):
    """A module whose forward replaces buffers by new tensors."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", None)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x, target):
        if self.scale is None:
            self.scale = x.detach().abs().mean()
            self.blocks[0].register_buffer("late", torch.full((2,), 5.0))
            self.blocks[0].register_buffer("cache", torch.ones(2), persistent=False)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0) + 1
        return super().forward(x / self.scale + self.mean, target)


def running():
    torch.manual_seed(3)
    return Running()


def assigned_buffers(strategy):
    with tempfile.TemporaryDirectory() as own:
        folder = pathlib.Path(tessera.broadcast(own))
        net = running()
        engine = tessera.Engine(net, strategy)
        start = engine.save_checkpoint(folder / "start")
        train(engine, net, [1, 2])
        before, mean = net.mean, net.mean.clone()
        assert mean.min() > 1
        net.table = torch.full((3,), 2.0)
        engine.save_weights(folder / "weights.pt")
        path = engine.save_checkpoint(folder / "saved")
        full = engine.state_dict()
        if tessera.rank() == 0:
            weights = torch.load(folder / "weights.pt", weights_only=True)
            assert set(weights) == set(full) and "table" not in weights and "blocks.0.late" in weights, set(weights) ^ set(full)
            assert all(torch.equal(weights[name], full[name]) for name in full)
            other = running()
            other(*batch(1))  # this makes the late buffers
            other.load_state_dict(weights)
        wanted = train(engine, net, [3, 4])
        assert torch.equal(before, mean), "a tensor that the module had before was written"
        # The checkpoint is loaded into the same Engine. Its module has other tensors by now.
        net.table = torch.zeros(3)
        engine.load_checkpoint(path)
        assert torch.equal(net.mean, mean) and torch.equal(net.table, torch.full((3,), 2.0)), (net.mean, mean)
        assert torch.equal(before, mean)
        assert train(engine, net, [3, 4]) == wanted
        # A checkpoint that was saved before the first forward lacks the buffers that this forward makes.
        with expected(None, "scale"):
            engine.load_checkpoint(start)
        engine.close()
        # The checkpoint is loaded into another Engine, before and after that Engine has trained.
        torch.manual_seed(99)
        net = Running()
        engine = tessera.Engine(net, strategy)
        with expected(None, "scale"):
            engine.load_checkpoint(path)
        train(engine, net, [7])
        engine.load_checkpoint(path)
        assert torch.equal(net.mean, mean)
        assert train(engine, net, [3, 4]) == wanted
        net.table = torch.ones(4)
        with expected(None, '"table"', "[4]", "[3]"):
            engine.load_checkpoint(path)
        # A load replaces buffers if it cannot copy into them.
        net.table, net.mean = torch.ones(1).expand(3), torch.ones(WIDTH, requires_grad=True) * 2
        engine.load_checkpoint(path)
        assert torch.equal(net.mean, mean) and torch.equal(net.table, torch.full((3,), 2.0))
        net.mean = None
        net.table = torch.eye(3).to_sparse()
        with expected(64, "buffer table", "layout"):
            engine.save_checkpoint(folder / "saved")
        engine.close()


def assigned_buffers_of_ranks(strategy):
    rank, ranks = tessera.rank(), tessera.world_size()
    for how, wanted in (("none", rank), ("from_rank_zero", 0), ("mean", sum(range(ranks)) / ranks)):
        net = running()
        engine = tessera.Engine(net, {**strategy, "broadcast_buffers": how})
        for seed in range(2):
            engine.backward(net(*part(seed)))
            net.mean = torch.full((WIDTH,), float(rank))
            net.blocks[0].cache = torch.full((2,), float(rank))
            engine.step()
            assert torch.equal(net.mean, torch.full((WIDTH,), float(wanted))), (how, net.mean)
            assert torch.equal(net.blocks[0].cache, torch.full((2,), float(wanted))), (how, net.blocks[0].cache)
        engine.close()


def files_of_weights(strategy):
    """Every kind of file of torch.save loads into a module and into an Engine, and PyTorch loads both forms of
    save_weights."""
    with tempfile.TemporaryDirectory() as own:
        folder = pathlib.Path(tessera.broadcast(own))
        torch.manual_seed(11)
        wanted = {name: torch.randn_like(value) for name, value in model().state_dict().items()}
        optimizer = torch.optim.AdamW(model().parameters())
        if tessera.rank() == 0:
            torch.save(wanted, folder / "plain.pt")
            torch.save({"epoch": 3, "state_dict": wanted, "optimizer": optimizer.state_dict()}, folder / "trainer.pt")
            torch.save({"model": model().state_dict(), "ema": wanted}, folder / "averaged.pt")
            torch.save({f"module.{name}": value for name, value in wanted.items()}, folder / "parallel.pt")
            torch.save({**wanted, "epoch": 3}, folder / "beside.pt")
        tessera.barrier()
        files = {"plain.pt": {}, "trainer.pt": {}, "averaged.pt": {"part": "ema"}, "parallel.pt": {"without": "module."},
                 "beside.pt": {"ignored": ["epoch"]}}
        for file, options in files.items():
            net = model()
            tessera.load_weights(net, folder / file, **options)
            assert all(torch.equal(value, wanted[name]) for name, value in net.state_dict().items()), file
            net = model()
            engine = tessera.Engine(net, strategy)
            train(engine, net, [1])
            engine.load_weights(folder / file, **options)
            full = engine.state_dict()
            assert all(torch.equal(value, wanted[name]) for name, value in full.items()), file
            train(engine, net, [2])
            for form in ["dictionary", "archive"]:
                engine.save_weights(folder / "saved.pt", form=form)
                full = engine.state_dict()
                if tessera.rank() == 0:
                    load = {"dictionary": torch.load, "archive": lambda path: torch.jit.load(path).state_dict()}[form]
                    saved = load(folder / "saved.pt")
                    assert set(saved) == set(full) and all(torch.equal(saved[name], full[name]) for name in full), form
                    other = model()
                    tessera.load_weights(other, folder / "saved.pt")
                    assert all(torch.equal(value, full[name]) for name, value in other.state_dict().items()), form
                tessera.barrier()
            with expected(64, "forms dictionary and archive"):
                engine.save_weights(folder / "saved.pt", form="zip")
            with expected(64, "wants a torch.nn.Module"):
                tessera.load_weights(engine, folder / file)
            with expected(65, "leave \"module.\" out of all names by without=[...]"):
                engine.load_weights(folder / "parallel.pt")
            with expected(65, "\"ema\"", "part=..."):
                tessera.load_weights(model(), folder / "averaged.pt")
            with expected(66, "No such file"):
                engine.load_weights(folder / "none.pt")
            train(engine, net, [3])
            engine.close()
        # The module has the names that torch.compile makes, and the file has none of these names.
        compiled = torch.nn.ModuleDict({"_orig_mod": model()})
        tessera.load_weights(compiled, folder / "plain.pt", without=["_orig_mod."])
        assert torch.equal(compiled["_orig_mod"].head.weight, wanted["head.weight"])
        tessera.barrier()


def pruned_modules(strategy):
    """Buffers that serve as a parameter's mask may be added after the Engine was made, but a buffer may not have the
    name of a parameter."""
    net = model()
    engine = tessera.Engine(net, strategy)
    net.head.register_buffer("weight_mask", torch.ones(2))
    del net.head.bias
    net.head.register_buffer("bias", torch.zeros(CLASSES))
    with tempfile.TemporaryDirectory() as own:
        folder = pathlib.Path(tessera.broadcast(own))
        with expected(64, "head.bias", "parameter"):
            engine.save_weights(folder / "weights.pt")
        del net.head.bias
        engine.save_weights(folder / "weights.pt")
        if tessera.rank() == 0:
            assert "head.weight_mask" in torch.load(folder / "weights.pt", weights_only=True)
        tessera.barrier()
    engine.close()


def results_of_steps(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    engine.backward(net(*part(1)), tokens=7)
    result = engine.step()
    fields = result.asdict()
    assert fields["loss"] == result.loss and fields["tokens"] == 7 * tessera.world_size() and fields["allocated"] == result.allocated
    assert pickle.loads(pickle.dumps(fields)) == fields
    share, ranks = result.communication_share, tessera.world_size()
    assert share == result.communication_seconds / result.seconds and 0 <= share < 1
    assert tessera.scaled_speedup(share) == ranks - share * (ranks - 1) and tessera.scaling_efficiency(share) == tessera.scaled_speedup(share) / ranks
    assert tessera.scaled_speedup(0.25, 8) == 6.25 and tessera.scaling_efficiency(0.25, ranks=8) == 6.25 / 8
    assert repr(result) == f"StepResult({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
    assert set(fields) == {name for name in dir(result) if not name.startswith("_")} - {"asdict", "is_known", "wait"}
    engine.close()


def evaluation_by_numbers(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    mine = [batch(seed) for seed in range(2 + tessera.rank())]
    wanted = engine.evaluate(mine, lambda each: net(*each))
    found = engine.evaluate(iter(mine), lambda each: net(*each).item())
    assert abs(found.loss - wanted.loss) < 1e-6 and found.batches == wanted.batches
    assert engine.evaluate(mine, lambda each: 2) == (2.0, wanted.batches)
    seen = []
    complex_loss = torch.ones((), dtype=torch.complex64)
    for bad, text in (({"loss": 1.0}, "a dict"), (None, "None"), (torch.ones(2), "shape [2]"), (complex_loss, "complex")):
        with expected(64, "evaluate", "the loss of the batch", text):
            engine.evaluate(mine * 5, lambda each: (seen.append(1), net(*each), bad)[2])
    assert len(seen) <= 4 * 2, "goes on with batches that nobody counts"
    # Only one rank has a wrong argument, and it gets its error after the other ranks have finished.
    with expected(64, "a str") if tessera.rank() == 1 else contextlib.nullcontext():
        found = engine.evaluate(mine, lambda each: (net(*each), "loss" if tessera.rank() == 1 else 1.0)[1])
        assert found.loss != found.loss, found
    with expected(64, "int", "iterate"):
        engine.evaluate(7, lambda each: 1.0)
    with expected(64, "rank 1 has no batch"):
        engine.evaluate(mine if tessera.rank() == 0 else [], lambda each: net(*each))
    assert engine.evaluate(mine, lambda each: net(*each)) == wanted  # the job goes on
    train(engine, net, [1])
    engine.close()


def evaluation(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    mine = [batch(seed) for seed in range(2 + tessera.rank())]  # rank 1 has one more batch
    found = engine.evaluate(mine, lambda each: net(*each))
    wanted = [model()(*batch(seed)).item() for ranks in range(tessera.world_size()) for seed in range(2 + ranks)]
    assert found.batches == len(wanted)
    assert abs(found.loss - sum(wanted) / len(wanted)) < 1e-6
    data = TensorDataset(torch.arange(7.0))
    sampler = DistributedSampler(data, tessera.world_size(), tessera.rank(), shuffle=False)  # it gives one sample twice
    for loader in (DataLoader(data, 2, sampler=sampler), DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False))):
        found = engine.evaluate(loader, lambda each: (each[0].mean(), len(each[0])))
        assert abs(found.loss - 3) < 1e-6 and found.weight == 7, found
    sampler = tessera.RankSampler(data, batch=2, microbatches=2, seed=1)  # it gives one sample twice
    before = sampler.cursor()
    for _ in range(2):
        found = engine.evaluate(DataLoader(data, batch_sampler=sampler), lambda each: (each[0].mean(), len(each[0])))
        assert abs(found.loss - 3) < 1e-6 and found.weight == 7 and sampler.cursor() == before, found
    assert len(list(DataLoader(data, batch_sampler=sampler))) == len(sampler)
    with torch.no_grad(), torch.inference_mode():
        net(*batch(1))
    train(engine, net, [1])
    engine.close()


def autocast(strategy):
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01, eps=1e-5)
    net = model()
    engine = tessera.Engine(net, {**strategy, "gradient_clipping": 0})
    for seed in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = sum(plain(*(each.chunk(tessera.world_size())[rank] for each in batch(seed)))
                         for rank in range(tessera.world_size())) / tessera.world_size()
        wanted.backward()
        optimizer.step()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(*part(seed))
        engine.backward(loss)
        got = engine.step().loss
        assert abs(got - wanted.item()) < 2e-3 * wanted.item(), (seed, got, wanted.item())
    engine.close()


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % CLASSES


class Meddling(Numbers):
    """A dataset that computes with the model that is trained."""

    def __init__(self, net):
        self.net = net

    def __getitem__(self, index):
        x, target = super().__getitem__(index)
        return self.net.first(x).detach(), target


def workers(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    for start in ("fork", "spawn") if "NO_SHARD" in str(strategy) else ("fork",):
        loader = DataLoader(Numbers(), 4, num_workers=2, multiprocessing_context=start)
        for _ in range(2):
            for x, target in loader:
                engine.backward(net(x, target))
                engine.step()
    if "NO_SHARD" not in str(strategy):
        with expected(None, "forked"):
            next(iter(DataLoader(Meddling(net), 4, num_workers=1, multiprocessing_context="fork")))
    train(engine, net, [1])
    engine.close()


def durable_steps(strategy):
    with tempfile.TemporaryDirectory() as own:
        folder = tessera.broadcast(own)
        strategy = {**strategy, "durable": {"every": 2, "dir": folder}}
        net = model()
        engine = tessera.Engine(net, strategy)
        assert engine.resume_durable() is None
        for step in range(1, 4):
            train(engine, net, [step])
            assert engine.commit_durable(json={"step": step}, tensors={"counts": torch.arange(step)}) == (step == 2)
        engine.close()
        net = model()
        engine = tessera.Engine(net, strategy)
        resumed = engine.resume_durable()
        assert resumed.step == 2 and resumed.json == {"step": 2} and torch.equal(resumed.tensors["counts"], torch.arange(2))
        got = train(engine, net, [3, 4])
        assert engine.commit_durable()
        engine.finish_commit()
        engine.close()
        net = model()
        engine = tessera.Engine(net, {key: value for key, value in strategy.items() if key != "durable"})
        train(engine, net, [1, 2])
        assert train(engine, net, [3, 4]) == got
        with expected(64, "durable.every"):
            engine.commit_durable()
        engine.close()


def checkpoints_beside_training(strategy):
    checkpoints({**strategy, "checkpoint": {"async": True}})


def checkpoints(strategy):
    with tempfile.TemporaryDirectory() as own:
        folder = pathlib.Path(tessera.broadcast(own))
        net = model()
        engine = tessera.Engine(net, strategy)
        train(engine, net, [1, 2])
        path = engine.save_checkpoint(folder / "saved", json={"epoch": 3, "names": ["a"]}, tensors={"counts": torch.arange(3)}, keep=2,
                                      best=True)
        best = os.path.basename(path)
        assert os.path.basename(os.path.dirname(path)) == "saved", path
        with expected(64, "cannot be written as JSON"):
            engine.save_checkpoint(folder / "saved", json={"epoch": object()})
        if strategy.get("checkpoint", {}).get("async", False):
            progress = engine.checkpoint_progress()
            assert progress.path == path and progress.step == 2 and progress.bytes > 0, progress
            # Worker processes that are forked while a checkpoint is saved hold no lock and remove no file.
            batches = iter(DataLoader(torch.arange(8), 4, num_workers=1, multiprocessing_context="fork"))
            next(batches)
            engine.finish_checkpoint()
            assert engine.checkpoint_progress() is None
            path = engine.save_checkpoint(folder / "saved", json={"epoch": 3, "names": ["a"]}, tensors={"counts": torch.arange(3)}, keep=2)
            del batches
        wanted = train(engine, net, [3, 4])
        engine.close()
        assert os.path.exists(os.path.join(path, "manifest.json"))
        assert (folder / "saved" / "best").read_text().strip() == best
        torch.manual_seed(99)
        other = Classifier()
        engine = tessera.Engine(other, strategy)
        loaded = engine.load_checkpoint(folder / "saved")
        assert loaded.step == 2 and loaded.json == {"epoch": 3, "names": ["a"]} and loaded.inexact == [], vars(loaded)
        assert torch.equal(loaded.tensors["counts"], torch.arange(3))
        assert train(engine, other, [3, 4]) == wanted
        engine.save_weights(folder / "weights.pt")
        tessera.barrier()
        full = engine.state_dict()
        if tessera.rank() == 0:
            weights = torch.load(folder / "weights.pt", weights_only=True)
            assert all(torch.equal(weights[name], full[name]) for name in full)
        with expected(73):
            engine.save_weights(folder / "weights.pt", replace=False)
        with expected(66):
            engine.load_checkpoint(folder / "none")
        engine.close()
        tessera.barrier()


def deferred(strategy):
    def build():
        net = Classifier()
        net.register_buffer("table", torch.tensor([1.0, 2.0, 3.0]))
        net.register_buffer("steps", torch.arange(4).float() ** 2)
        net.register_buffer("joined", torch.cat((torch.ones(2), net.steps)))
        with torch.no_grad():
            net.head.bias.copy_(torch.arange(float(CLASSES), device=net.head.bias.device))
        assert torch.linspace(0, 1, 3).tolist() == [0.0, 0.5, 1.0] and torch.ones(1, 2).tolist() == [[1.0, 1.0]]
        return net

    torch.manual_seed(3)
    eager = build()
    after = torch.rand(1)
    torch.manual_seed(3)
    with tessera.deferred_init():
        net = build()
    assert torch.equal(torch.rand(1), after), "the generator stands elsewhere"
    assert net.head.weight.is_meta
    engine = tessera.Engine(net, strategy)
    with engine.gathered():
        for name, value in eager.state_dict().items():
            assert torch.equal(value, net.state_dict()[name]), name
    train(engine, net, [1])
    engine.close()


def rates_and_groups(strategy):
    net = model()
    engine = tessera.Engine(net, {**strategy, "lr_schedule": {"type": "manual"},
                                  "optimizer": {"lr": 0.01, "groups": [{"name": "head", "match": ["head.*"], "lr_ratio": 0.1}]}})
    engine.set_lr(0.005)
    assert engine.lr() == 0.005 and abs(engine.lr("head") - 0.0005) < 1e-12
    engine.set_lr(0.1, "head")
    assert engine.lr("head") == 0.1
    engine.set_trainable("first.*", False)
    train(engine, net, [1, 2])
    engine.zero_grad()
    assert engine.strategy["lr_schedule"]["type"] == "manual"
    assert engine.steps_applied == 2
    assert engine.plan.total == sum(engine.allocated.values())
    with expected(64, "group"):
        engine.set_lr(0.1, "tail")
    engine.close()


def strategies_of_other_types(strategy):
    """Numbers of numpy and torch are accepted, and so are paths. A value of another type is an error that names the
    key."""
    of_numpy = {**strategy, "optimizer": {"lr": np.float32(0.5), "betas": np.array([0.5, 0.75])},
                "gradient_accumulation": np.int64(2), "gradient_clipping": torch.tensor(0.25)}
    engine = tessera.Engine(model(), of_numpy)
    said = engine.strategy
    assert (said["optimizer"]["lr"], said["optimizer"]["betas"], said["gradient_accumulation"]) == (0.5, [0.5, 0.75], 2), said
    assert said["gradient_clipping"] == 0.25, said
    engine.close()
    assert plain_values({"dir": pathlib.Path("x"), "keep": (1, None, True)}) == {"dir": "x", "keep": [1, None, True]}
    with expected(78, "/mixed_precision/param: a value of type dtype", "hint: "):
        tessera.Engine(model(), {**strategy, "mixed_precision": {"param": torch.bfloat16}})


def arguments_of_other_types(strategy):
    """An argument of another type is an error that names the argument, and training goes on after this error."""
    net = model()
    engine = tessera.Engine(net, strategy)
    for loss, text in ((0.5, "got 0.5"), (None, "got None"), ({"loss": net(*part(1))}, "got a dict")):
        with expected(64, "backward wants the scalar tensor", text):
            engine.backward(loss)
    with expected(64, "backward: tokens is a number of things, got 0.5"):
        engine.backward(net(*part(1)), tokens=0.5)
    engine.backward(net(*part(1)), tokens=torch.tensor(3), samples=np.int64(2))
    assert engine.step().tokens == 3 * tessera.world_size()
    for wrong, text in (([torch.ones(2)], "a tensor of shape [2]"), (["head.weight"], "a str"), (net.head, "a Linear")):
        with expected(64, "gathered: parameters= has", text):
            engine.gathered(parameters=wrong)
    with engine.gathered(parameters=net.head.weight):
        assert net.head.weight.detach().numpy().shape == (CLASSES, WIDTH)
    train(engine, net, [1])
    engine.close()


def rates_over_samples(strategy):
    net = model()
    engine = tessera.Engine(net, {**strategy, "optimizer": {"lr": 0.01}, "lr_schedule": {"warmup_epochs": 2, "base_batch_size": BATCH}})
    with expected(64, "set_epoch_samples"):
        engine.backward(net(*part(0)), samples=1)
    engine.set_epoch_samples(2 * BATCH)
    for seed in range(5):
        engine.backward(net(*part(seed)), samples=BATCH // tessera.world_size())
        assert abs(engine.step().lr - 0.01 * (seed + 1) / 5) < 1e-9, seed
    assert engine.samples_seen == 5 * BATCH
    engine.close()


def ignored_parameters(strategy):
    """An optimizer of the program trains the parameters of units.ignored. The result is that of one Engine that trains
    all parameters."""
    strategy = {key: value for key, value in strategy.items() if key != "gradient_clipping"}
    wanted, net = model(), model()
    engine = tessera.Engine(wanted, strategy)
    train(engine, wanted, range(4))
    wanted_state = engine.state_dict()
    engine.close()
    engine = tessera.Engine(net, {**strategy, "units": {"classes": ["Block"], "ignored": ["head.*"]}})
    own = torch.optim.AdamW(net.head.parameters(), lr=0.01, eps=1e-5, weight_decay=engine.strategy["optimizer"]["weight_decay"])
    for seed in range(4):
        engine.backward(net(*part(seed)))
        for parameter in net.head.parameters():
            tessera.all_reduce(parameter.grad, "mean")
        own.step()
        own.zero_grad()
        engine.step()
    state = engine.state_dict()
    for name, value in wanted_state.items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-6), name
    with tempfile.TemporaryDirectory() as own_folder:
        path = engine.save_checkpoint(tessera.broadcast(own_folder))
        with torch.no_grad():
            net.head.bias.add_(1)
        engine.load_checkpoint(path)
        again = engine.state_dict()
        assert all(torch.equal(again[name], state[name]) for name in state)
        tessera.barrier()
    engine.close()


# The class in torch.optim for each rule, or the class whose defaults the rule has.
RULES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad,
         "rmsprop": torch.optim.RMSprop, "muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor}
TIMMS = {"lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
         "lamb": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.01},
         "lars": {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "trust_coefficient": 1e-3, "eps": 1e-8}}
# Options of torch.optim that change only how an update is computed, and options for which Tessera supports only torch's
# default.
NOT_SAID = {"foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "decoupled_weight_decay",
            "initial_accumulator_value", "ns_coefficients"}


def said_by_torch(rule):
    """Returns {key of "optimizer" in a strategy: torch's default}."""
    kind = RULES[rule]
    wanted = {key: list(value) if isinstance(value, tuple) else value
              for key, value in kind([torch.zeros(1, 1, requires_grad=True)]).defaults.items() if key not in NOT_SAID}
    if rule == "muon":
        del wanted["eps"]  # Muon's eps belongs to matrix norms; the strategy's eps is for parameters that AdamW updates
        own = {key: wanted.pop(key) for key in ("momentum", "nesterov", "ns_steps")}
        wanted["muon"] = {**own, "adjust_lr": wanted.pop("adjust_lr_fn") or "original"}
    if rule == "adafactor":
        wanted["adafactor"] = {"beta2_decay": wanted.pop("beta2_decay"), "min_rms": wanted.pop("eps")[1],
                               "clip_threshold": wanted.pop("d")}
    return wanted


def rules_at_their_defaults(strategy):
    rules = [*RULES, *TIMMS]
    for rule in rules:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 4, bias=False))
        plain = copy.deepcopy(net)
        # Here Muon computes in bf16, as PyTorch does.
        given = {"type": rule, **({"muon": {"ns_dtype": "bf16"}} if rule == "muon" else {})}
        engine = tessera.Engine(net, {**strategy, "units": {}, "gradient_clipping": 0, "optimizer": given})
        resolved = engine.strategy["optimizer"]
        wanted = said_by_torch(rule) if rule in RULES else TIMMS[rule]
        for key, value in wanted.items():
            got = {name: resolved[key][name] for name in value} if isinstance(value, dict) else resolved[key]
            assert got == value, f"{rule}: {key} is {got}, and {value} there"
        optimizer = RULES[rule](plain.parameters()) if rule in RULES else None
        generator = torch.Generator().manual_seed(5)
        for _ in range(5):
            rows, sizes = torch.randn(12, 8, generator=generator), torch.rand(12, 4, generator=generator)
            parts = [(x, y) for x, y in zip(rows.chunk(tessera.world_size()), sizes.chunk(tessera.world_size()))]
            x, y = parts[tessera.rank()]
            engine.backward((net(x) - y).square().mean())
            engine.step()
            if optimizer:
                optimizer.zero_grad()
                for x, y in parts:  # the ranks' parts of the batch, so that sums are rounded as on the ranks
                    ((plain(x) - y).square().mean() / len(parts)).backward()
                optimizer.step()
        with engine.gathered():
            for got, value in zip(net.parameters(), plain.parameters()) if optimizer else ():
                distance = ((got - value).norm() / value.norm()).item()
                # A bf16 direction is off by a hundredth, and five steps change the weights by a hundredth.
                assert distance < (3e-4 if rule == "muon" else 1e-6), f"{rule}: {distance} away from torch.optim"
        engine.close()


class Late(torch.nn.Module):
    """Has two layers. One layer is used only if a flag is set."""

    def __init__(self):
        super().__init__()
        self.first, self.late = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, is_late):
        x = self.first(x)
        return (self.late(x) if is_late else x).square().mean()


def averages_beside_torch(strategy):
    for optimizer in ({"type": "sgd", "lr": 0.1}, {"type": "adamw", "lr": 0.01, "in_backward": True}):
        torch.manual_seed(3)
        net = Late()
        plain = copy.deepcopy(net)
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer["type"]]
        plain_optimizer = kind(plain.parameters(), lr=optimizer["lr"])
        averaged = torch.optim.swa_utils.AveragedModel(plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        engine = tessera.Engine(net, {**strategy, "units": {}, "gradient_clipping": 0, "ema": {"decay": 0.5}, "optimizer": optimizer})
        generator = torch.Generator().manual_seed(5)
        for step in range(6):
            rows = torch.randn(12, 4, generator=generator)
            plain_optimizer.zero_grad()
            plain(rows, step not in (0, 1, 4)).backward()
            plain_optimizer.step()
            averaged.update_parameters(plain)
            engine.backward(net(rows_of_rank(rows), step not in (0, 1, 4)))
            engine.step()
            with engine.gathered(ema=True):
                for (name, got), value in zip(net.named_parameters(), averaged.module.parameters()):
                    assert torch.allclose(got, value, rtol=1e-5, atol=1e-6), f"step {step}, {name}: {got} is not {value}"
        engine.close()


class Rows(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def data_in_the_middle_of_an_epoch(strategy):
    """The loop of docs/guide/resume.md: dropout and the data order continue bit for bit, and each epoch has its own
    order."""
    data, batch, epochs, seen = Rows(), 2, 3, []

    def loop(folder, saves_at, resumes):
        torch.manual_seed(1 + tessera.rank())
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        engine = tessera.Engine(net, {**strategy, "units": {}})
        losses = []
        place = {"epoch": 0, "batches": 0}
        if resumes:
            place = engine.load_checkpoint(folder).json
        sampler = DistributedSampler(data, tessera.world_size(), tessera.rank(), seed=1)
        for epoch in range(place["epoch"], epochs):
            sampler.set_epoch(epoch)
            batches = list(BatchSampler(sampler, batch, drop_last=True))
            seen.append(batches)
            rest = batches[place["batches"]:]
            for each in DataLoader(data, batch_sampler=rest, generator=torch.Generator().manual_seed(epoch)):
                engine.backward(net(each).square().mean())
                losses.append(engine.step().loss)
                place = {"epoch": epoch, "batches": place["batches"] + 1}
                if place == saves_at:
                    engine.save_checkpoint(folder, json=place)
            place = {"epoch": epoch + 1, "batches": 0}
        engine.close()
        return losses

    with tempfile.TemporaryDirectory() as own:
        folder = tessera.broadcast(own)
        wanted = loop(folder, {"epoch": 1, "batches": 2}, resumes=False)
        assert len(seen) == 3 and seen[0] != seen[1] != seen[2], seen
        got = loop(folder, None, resumes=True)
        of_an_epoch = len(seen[0])
        assert got == wanted[of_an_epoch + 2:], (got, wanted)
        tessera.barrier()


def averages(strategy):
    net = model()
    engine = tessera.Engine(net, {**strategy, "ema": {"decay": 0.9}})
    train(engine, net, range(3))
    with torch.no_grad():
        now = net(*part(1)).item()
        with engine.ema_weights():
            average = net(*part(1)).item()
        assert now != average
        assert net(*part(1)).item() == now
    with engine.gathered(ema=True):
        pass
    engine.close()


def under_inference_mode():
    with torch.inference_mode():
        return torch.nn.Linear(2, 3)


def wrapper_of(kind):
    """Returns a wrapper as the Engine sees it. It was made without the process group that its constructor needs."""
    wrapper = kind.__new__(kind)
    torch.nn.Module.__init__(wrapper)
    wrapper.module_inside = wrapper._fsdp_wrapped_module = model()
    return wrapper


def refused_modules(strategy):
    for make, text in (
        (lambda: torch.nn.Embedding(3, 4, max_norm=1.0), "max_norm"),
        (lambda: torch.nn.LazyLinear(4), "no shape yet"),
        (lambda: torch.nn.Linear(2, 3, device="meta"), "parameter weight is on the meta device"),
        (under_inference_mode, "parameter weight was made under torch.inference_mode()"),
        (lambda: torch.nn.DataParallel(model()), "give the Engine the module inside"),
        (lambda: wrapper_of(torch.nn.parallel.DistributedDataParallel), "inside DistributedDataParallel"),
        (lambda: wrapper_of(FullyShardedDataParallel), "inside FullyShardedDataParallel"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(3, 3)))),
         "inside DataParallel, here 1.0"),
        (lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.eye(3).to_sparse())]), "layout"),
    ):
        with expected(64, text):
            tessera.Engine(make(), {**strategy, "units": {}})
    with expected(64, "contains itself"):
        ring = torch.nn.Sequential(torch.nn.Linear(1, 1))
        ring.me = ring
        tessera.Engine(ring, {**strategy, "units": {}})
    with expected(78, "Blcok", "Block"):
        tessera.Engine(model(), {**strategy, "units": {"classes": ["Blcok"]}})
    with expected(64, "torch.nn.Module"):
        tessera.Engine(lambda x: x, strategy)
    with expected(66):
        tessera.Engine(model(), "no_such_strategy.json")


def collectives(strategy):
    rank, size = tessera.rank(), tessera.world_size()
    assert tessera.all_reduce(rank) == sum(range(size)) and tessera.all_reduce(0.5 * rank, "max") == 0.5 * (size - 1)
    assert tessera.all_reduce(rank == 1, "max") is True and tessera.all_reduce(rank == 1, "min") is False
    assert tessera.all_reduce(rank == 1) is True and tessera.all_reduce(rank > size) is False
    tensor = torch.full((3,), float(rank))
    assert tessera.all_reduce(tensor, "mean") is tensor and tensor[0] == (size - 1) / 2
    assert tessera.all_gather("r" * rank) == ["r" * each for each in range(size)]
    assert tessera.all_gather(b"\xff") == [b"\xff"] * size
    assert [int(each) for each in tessera.all_gather(torch.tensor(rank))] == list(range(size))
    assert tessera.broadcast(f"of {rank}", 1) == "of 1"
    assert tessera.mean_over_ranks(float(rank), rank + 1) == sum(r * (r + 1) for r in range(size)) / sum(range(1, size + 1))
    assert len(set(tessera.all_gather(str(tessera.seed_for_rank(1))))) == size
    with expected(64, "all_gather", "barrier"):
        tessera.all_gather("differs") if rank == 0 else tessera.barrier()
    with expected(64, '"sum"'):
        tessera.all_reduce(1.0, "product")
    large = 2**60 + 1
    assert tessera.all_reduce(np.int64(large)) == size * large and tessera.all_reduce(np.float32(0.5)) == 0.5 * size
    assert tessera.all_reduce(np.bool_(rank == 0)) is True and tessera.all_reduce(np.bool_(rank == 0), "min") is (size == 1)
    with expected(64, "all_reduce wants a tensor", "ndarray"):
        tessera.all_reduce(np.ones(2))
    with expected(64, "all_gather wants a tensor, a str or bytes, got a dict"):
        tessera.all_gather({"a": 1})
    with expected(64, "broadcast wants a tensor, a str or bytes, got a int"):
        tessera.broadcast(3)
    tessera.barrier()


def leaks(strategy):
    def round_of_an_engine():
        net = model()
        engine = tessera.Engine(net, strategy)
        train(engine, net, [1, 2])
        with engine.gathered():
            pass
        engine.close()

    def resident():
        gc.collect()
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files():
        return len(os.listdir("/proc/self/fd"))

    for _ in range(5):
        round_of_an_engine()
    before, files = resident(), open_files()
    for _ in range(20):
        round_of_an_engine()
    assert resident() - before < 4 << 20, f"{(resident() - before) / 2**20} MiB more after 20 Engines"
    assert open_files() <= files + 2, (files, open_files())
    net = model()
    engine = tessera.Engine(net, strategy)
    train(engine, net, range(20))
    before = resident()
    train(engine, net, range(300))
    assert resident() - before < 2 << 20, f"{(resident() - before) / 2**20} MiB more after 300 steps"
    engine.close()


def written_outside_a_guard(strategy):
    net = model()
    values = {name: value.clone() for name, value in net.state_dict().items()}
    engine = tessera.Engine(net, strategy)
    net.load_state_dict(values)  # the parameters have these values already, but the Engine cannot notice this
    train(engine, net, [1])


def written_through_data(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    train(engine, net, [1])
    net.head.weight.data.clamp_(-0.01, 0.01)
    train(engine, net, [2])


def written_through_a_tensor_set_over_it(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    train(engine, net, [1])
    torch.empty(0).set_(net.head.weight.detach()).fill_(7)
    train(engine, net, [2])


def written_into_an_array(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    train(engine, net, [1])
    with engine.gathered():
        weight = net.head.weight.detach()
        if tessera.rank() == 0:
            weight.numpy()[:] = 7
        else:
            torch.from_dlpack(weight).fill_(7)
    train(engine, net, [2])


def moved_to_other_memory(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    net.double()
    engine.backward(net(part(1)[0].double(), part(1)[1]))


def turned_in_its_memory(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    net.first.weight.data = net.first.weight.data.t()
    train(engine, net, [1])


def unfrozen(strategy):
    net = model()
    net.first.requires_grad_(False)
    engine = tessera.Engine(net, strategy)
    net.first.requires_grad_(True)
    train(engine, net, [1])


def late_post_accumulate_hook(strategy):
    net = model()
    engine = tessera.Engine(net, strategy)
    train(engine, net, [1])
    net.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    train(engine, net, [1])


def hook_that_clears_gradients(strategy):
    net = model()
    net.head.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    train(tessera.Engine(net, strategy), net, [1])


PROGRAMS = [collectives, state_dicts, arrays_of_parameters, functions_that_read_memory, arrays_kept_beyond_a_guard, profiled, views_in_a_state_dict, deep_copies, left_over_lines, late_hooks_and_parameters, training_twice, evaluation, evaluation_by_numbers, autocast,
            workers, results_of_steps, assigned_buffers, assigned_buffers_of_ranks, pruned_modules, checkpoints, checkpoints_beside_training, durable_steps, deferred, rates_and_groups, ignored_parameters, averages, refused_modules, leaks]
PROGRAMS += [averages_beside_torch, rules_at_their_defaults]
PROGRAMS += [data_in_the_middle_of_an_epoch]
PROGRAMS += [files_of_weights]
PROGRAMS += [arrays_that_hooks_keep, functions_that_keep_arrays, arrays_that_operators_keep]
PROGRAMS += [rates_over_samples, strategies_of_other_types, arguments_of_other_types]
# These programs end with an Error, and no program may continue after it.
ENDINGS = [written_outside_a_guard, written_through_data, written_through_a_tensor_set_over_it, written_into_an_array, moved_to_other_memory, turned_in_its_memory, unfrozen, late_post_accumulate_hook, hook_that_clears_gradients]


def chosen(program):
    """Returns the strategies under which the program runs. Long tests run all strategies. Other tests take the
    strategies in turn from program to program, except for programs that need other strategies."""
    if LONG:
        return STRATEGIES
    turn = PROGRAMS.index(program)
    names = {"shared", "replicated"} if program in (state_dicts, workers) else {list(STRATEGIES)[turn % len(STRATEGIES)]}
    names = {"private"} if program in (arrays_of_parameters, functions_that_read_memory, arrays_kept_beyond_a_guard, arrays_that_hooks_keep, functions_that_keep_arrays,
                                      arrays_that_operators_keep, profiled) else names
    names = {"shared"} if program is leaks else names
    names = {"private", "shared"} if program is files_of_weights else names
    return {name: strategy for name, strategy in STRATEGIES.items() if name in names}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for program in [each for each in PROGRAMS if len(sys.argv) < 2 or each.__name__ in sys.argv[1:]]:
        for name, strategy in chosen(program).items():
            print(f"{program.__name__}, {name}", flush=True)
            program({**STRATEGY, **strategy})
    print("all programs were right")
