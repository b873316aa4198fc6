"""rules_test.py runs this program on every rank. A Python program's own rules train as built-in rules and
plain PyTorch do, on one rank and on several ranks.

Usage: rules_ranks.py FOLDER, for checkpoints.
"""

import pathlib
import sys

import tessera
import torch
from beside_plain import rows_of_rank
from models import BATCH, CLASSES, WIDTH, Classifier

rank, ranks, folder = tessera.rank(), tessera.world_size(), pathlib.Path(sys.argv[1])
STEPS = 4
PLACEMENTS = {
    "FULL_SHARD": {"strategy": "FULL_SHARD"},
    "private copies": {"strategy": "FULL_SHARD", "host_sharing": False},
    "SHARD_OPTIMIZER": {"strategy": "SHARD_OPTIMIZER"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
}
# The strategies under which a hook may sum gradients.
WHOLE = {name: {"strategy": name} for name in ("SHARD_GRADIENTS", "SHARD_OPTIMIZER", "NO_SHARD")}
SHARED = {"units": {"classes": ["Block"]}, "gradient_clipping": 0.5, "comm": {"timeout_s": 60}}
HOOK = {"compression": {"method": {"type": "hook"}}}


def model():
    torch.manual_seed(3)
    return Classifier()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def train(engine, steps):
    for seed in steps:
        engine.backward(engine.model(*map(rows_of_rank, batch(seed))))
        engine.step()


def values_of(engine):
    with engine.gathered():
        return {name: value.detach().clone() for name, value in engine.model.named_parameters()}


def trained(strategy, *own, steps=range(STEPS)):
    engine = tessera.Engine(model(), {**SHARED, **strategy}, *own)
    train(engine, steps)
    values = values_of(engine)
    engine.close()
    return values


def farthest(one, other):
    return max((one[name] - other[name]).detach().abs().max().item() for name in one)


def expect_bits(wanted, got, what):
    assert all(torch.equal(value, got[name]) for name, value in wanted.items()), f"{what}: {farthest(wanted, got)} away"


def expect_error(act, *words, kind=tessera.Error):
    try:
        act()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
        return
    raise AssertionError(f"no error with {words}")


# The following rules update elements.

class Momentum(tessera.ElementwiseOptimizer):
    def states(self):
        return ["momentum"]

    def update(self, e):
        e.states[0].mul_(0.9).add_(e.gradient + e.weight_decay * e.parameters)
        e.parameters = e.parameters - e.lr * e.states[0]


MOMENTUM = {"optimizer": {"type": "own", "lr": 0.05, "weight_decay": 0.01, "groups": [{"match": ["head.*"], "lr_ratio": 0.5}]}}


def elements():
    built_in = {"optimizer": {**MOMENTUM["optimizer"], "type": "sgd", "momentum": 0.9}}
    wanted = trained(built_in)
    first = None
    for name, placement in PLACEMENTS.items():
        for in_backward in (False, True) if name == "private copies" else (False,):
            strategy = {**MOMENTUM, **placement}
            strategy["optimizer"] = {**strategy["optimizer"], "in_backward": in_backward}
            if in_backward:
                strategy["gradient_clipping"] = 0
                got, plain = trained(strategy, Momentum()), trained({**built_in, "gradient_clipping": 0})
            else:
                got, plain = trained(strategy, Momentum()), wanted
                first = first or got
                expect_bits(first, got, name)
            assert farthest(plain, got) < 1e-6 and farthest(plain, dict(model().named_parameters())) > 1e-2, (name, farthest(plain, got))


class Seen(Momentum):
    """A rule that records its arguments."""

    def __init__(self):  # this does not call the constructor of the base class
        self.calls, self.kept = [], []

    def update(self, e):
        self.calls.append((e.parameters.shape, e.gradient.dtype, e.states[0].shape, e.lr, e.weight_decay, e.step))
        self.kept.append(e.states[0])
        super().update(e)


def what_rules_get():
    rule = Seen()
    engine = tessera.Engine(model(), {**SHARED, **MOMENTUM, "strategy": "NO_SHARD"}, rule)
    train(engine, range(2))
    lrs = {call[3] for call in rule.calls}
    assert len(lrs) == 2 and abs(max(lrs) - 2 * min(lrs)) < 1e-6 and {call[5] for call in rule.calls} == {1, 2}, rule.calls
    assert all(call[0] == call[2] and call[0][0] % 32 == 0 and call[1] == torch.float32 and call[4] == 0.01 for call in rule.calls)
    # A tensor that was lent for a call has no memory after this call.
    expect_error(lambda: rule.kept[0] + 1, "lent to ElementwiseOptimizer.update", ".clone()", kind=RuntimeError)
    engine.close()
    # A plan contains the states of a rule.
    with_state, without = (tessera.plan(model(), {**SHARED, "optimizer": {"type": type_of}}, *own, world_size=2).use["optimizer"]
                           for type_of, own in (("own", [Momentum()]), ("sgd", [])))
    assert with_state > without, (with_state, without)


def checkpoints():
    for place, (name, placement) in enumerate(PLACEMENTS.items()):
        strategy = {**SHARED, **MOMENTUM, **placement}
        engine = tessera.Engine(model(), strategy, Momentum())
        train(engine, range(STEPS))
        saved = engine.save_checkpoint(folder / f"{place}")
        train(engine, range(STEPS, 2 * STEPS))
        wanted = values_of(engine)
        engine.close()
        for other in (strategy, {**strategy, "strategy": "NO_SHARD"}):
            engine = tessera.Engine(model(), other, Momentum())
            engine.load_checkpoint(saved)
            train(engine, range(STEPS, 2 * STEPS))
            expect_bits(wanted, values_of(engine), f"{name}, loaded")
            engine.close()


# The following rules update matrices.

class RowScaled(tessera.MatrixOptimizer):
    def states(self, rows, columns):
        return [("row_norm", (rows, 1)), ("momentum", (rows, columns))]

    def update(self, m):
        m.states[0].mul_(0.9).add_(m.gradient.norm(dim=1, keepdim=True), alpha=0.1)
        m.states[1].mul_(0.5).add_(m.gradient / (m.states[0] + 1e-2))
        m.parameter.mul_(1 - m.lr * m.weight_decay).sub_(m.lr * m.states[1])


def matrices():
    numbers = {"lr": 0.01, "weight_decay": 0.02}
    plain, states = model(), {}
    vectors = torch.optim.AdamW([p for p in plain.parameters() if p.dim() != 2], eps=1e-5, **numbers)
    for seed in range(STEPS):
        plain.zero_grad()
        plain(*batch(seed)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        vectors.step()
        with torch.no_grad():
            for p in (p for p in plain.parameters() if p.dim() == 2):
                mine = states.setdefault(p, [torch.zeros(len(p), 1), torch.zeros_like(p)])
                m = tessera.Matrix(p, p.grad, mine, numbers["lr"], numbers["weight_decay"], seed + 1)
                RowScaled().update(m)
    wanted, first = dict(plain.named_parameters()), None
    for name, placement in PLACEMENTS.items():
        got = trained({"optimizer": {"type": "own_matrix", "eps": 1e-5, **numbers}, **placement}, RowScaled())
        first = first or got
        expect_bits(first, got, name)
        assert farthest(wanted, got) < 2e-5, (name, farthest(wanted, got))


# The following rules sum gradients.

class Plain(tessera.CommHook):
    def __init__(self):
        self.calls = []

    def sum(self, bucket, ranks):
        self.calls.append((bucket.step, bucket.index, bucket.unit, sorted(bucket.parts)))
        ranks.all_reduce(bucket.gradients)


class InBf16(Plain):
    def sum(self, bucket, ranks):
        own = bucket.gradients.to(torch.bfloat16)
        bucket.gradients.zero_()
        for each in ranks.all_gather(own):
            bucket.gradients.add_(each)


class InBf16ByParts(Plain):
    """Sends gradients in bf16. Each rank sums one part of the bucket. The result is a new tensor."""

    def sum(self, bucket, ranks):
        numel, part = bucket.gradients.numel(), -(-bucket.gradients.numel() // ranks.size())
        padded = torch.zeros(ranks.size(), part, dtype=torch.bfloat16)
        padded.view(-1)[:numel] = bucket.gradients
        total = torch.zeros(part)
        for each in ranks.all_to_all(padded):
            total += each
        assert ranks.rank() == rank and ranks.size() == ranks_of_job
        bucket.gradients = torch.cat(ranks.all_gather(total))[:numel]


class ThroughParts(Plain):
    """Sums 1 for each element of a parameter, so the mean gradient is 1."""

    def sum(self, bucket, ranks):
        for gradient in bucket.parts.values():
            gradient.fill_(1)
        super().sum(bucket, ranks)
        self.kept = bucket.gradients, ranks


ranks_of_job = ranks


def sums():
    sgd = {"optimizer": {"type": "sgd", "lr": 0.1, "weight_decay": 0}}
    exact = trained({**sgd, "strategy": "NO_SHARD"})
    narrow = trained({**sgd, **HOOK, "strategy": "NO_SHARD"}, InBf16())
    assert ranks == 1 or 0 < farthest(narrow, exact) < 1e-2, farthest(narrow, exact)
    for name, placement in WHOLE.items():
        hook = Plain()
        expect_bits(exact, trained({**sgd, **HOOK, **placement}, hook), f"{name}: the plain sum")
        expect_bits(narrow, trained({**sgd, **HOOK, **placement}, InBf16()), f"{name}: bf16")
        expect_bits(narrow, trained({**sgd, **HOOK, **placement}, InBf16ByParts()), f"{name}: bf16 by parts")
        if ranks == 1:
            assert not hook.calls
            continue
        assert sorted({call[0] for call in hook.calls}) == list(range(1, STEPS + 1)), hook.calls
        of_a_step = [call[1:] for call in hook.calls if call[0] == 2]
        assert len({index for index, *_ in of_a_step}) == len(of_a_step)
        assert sorted(name for *_, parts in of_a_step for name in parts) == sorted(name for name, _ in model().named_parameters())
        assert "blocks.1" in {unit for _, unit, _ in of_a_step}, of_a_step
    if ranks > 1:
        hook = ThroughParts()
        before = dict(model().named_parameters())
        after = trained({**sgd, **HOOK, "strategy": "NO_SHARD", "gradient_clipping": 0}, hook, steps=[1])
        assert all(torch.allclose(before[name] - 0.1, value) for name, value in after.items())
        gradients, exchange = hook.kept
        expect_error(lambda: gradients + 1, "lent to CommHook.sum", kind=RuntimeError)
        expect_error(exchange.size, "after the call of CommHook.sum")
    # The hook also works together with a rule for elements.
    both = trained({**MOMENTUM, **HOOK, "strategy": "NO_SHARD"}, Momentum(), Plain())
    expect_bits(trained({**MOMENTUM, "strategy": "NO_SHARD"}, Momentum()), both, "a rule and a hook")


def refusals():
    expect_error(lambda: tessera.Engine(model(), {**SHARED, **MOMENTUM}, Momentum), "the class Momentum", "tessera.CommHook")
    expect_error(lambda: tessera.Engine(model(), {**SHARED, **MOMENTUM}, torch.optim.SGD), "the class SGD")
    expect_error(lambda: tessera.Engine(model(), {**SHARED, **MOMENTUM}, Momentum(), Seen()), "two rules of the kind ElementwiseOptimizer")
    expect_error(lambda: tessera.plan(model(), {**SHARED, **MOMENTUM}), "give the Engine a tessera.ElementwiseOptimizer")
    expect_error(lambda: tessera.plan(model(), {"optimizer": {"type": "own_matrix"}}), "give the Engine a tessera.MatrixOptimizer")
    expect_error(lambda: tessera.plan(model(), {**SHARED, **HOOK, "strategy": "NO_SHARD"}), "give the Engine a tessera.CommHook")
    expect_error(lambda: tessera.plan(model(), SHARED, Momentum()), 'set "optimizer": {"type": "own"}')

    class Misnamed(Momentum):
        def states(self):
            return "momentum"

    class Misshapen(RowScaled):
        def states(self, rows, columns):
            return [("row_norm", rows)]

    expect_error(lambda: tessera.plan(model(), MOMENTUM, Misnamed()), "Misnamed.states returned 'momentum'", "list of names")
    expect_error(lambda: tessera.plan(model(), {"optimizer": {"type": "own_matrix"}}, Misshapen()), "Misshapen.states", "pairs of name and shape")


torch.set_num_threads(1)
for program in (refusals, elements, what_rules_get, checkpoints, matrices, sums):
    print(program.__name__, flush=True)
    program()
print("rules trained like built-in ones")
