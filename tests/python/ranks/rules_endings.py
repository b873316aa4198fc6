"""rules_test.py runs this program. If a function of a program's rule raises an exception or makes a mistake, each of
two ranks ends with a message that has the function's name and place."""

import functools
import re

import torch
from forked import run_forked
from models import BATCH, CLASSES, WIDTH, Classifier

import tessera

STRATEGY = {"units": {"classes": ["Block"]}, "comm": {"timeout_s": 60}}
OWN, OWN_MATRIX, HOOK = {"optimizer": {"type": "own"}}, {"optimizer": {"type": "own_matrix"}}, {"compression": {"method": {"type": "hook"}}}


def is_at(step):
    return tessera.rank() == 1 and step == 2


class Elements(tessera.ElementwiseOptimizer):
    def __init__(self, wrong):
        self.wrong = wrong

    def states(self):
        return ["momentum"]

    def update(self, e):
        if is_at(e.step):
            return self.wrong(e)
        e.parameters.sub_(e.lr * e.gradient)


class NoStates(Elements):
    def states(self):
        tessera.barrier()  # rank 0 serves the store, which the other rank needs until this point
        raise LookupError("no such table")


class Matrices(tessera.MatrixOptimizer):
    def __init__(self, wrong):
        self.wrong = wrong

    def states(self, rows, columns):
        return [("rows", (rows, 1))]

    def update(self, m):
        if is_at(m.step):
            return self.wrong(m)
        m.parameter.sub_(m.lr * m.gradient)


class Sums(tessera.CommHook):
    def __init__(self, wrong):
        self.wrong = wrong

    def sum(self, bucket, ranks):
        if is_at(bucket.step):
            return self.wrong(bucket, ranks)
        ranks.all_reduce(bucket.gradients)


def fail(*_):
    raise ValueError("the codec is out of codes")


def give_back(given, *_):
    return getattr(given, "gradients", None) if hasattr(given, "gradients") else given.gradient


def replace_state(given):
    given.states[0] = given.states[0] + 1


def lose_states(given):
    given.states = None


def lose_result(given, *_):
    given.gradients = None


def ask_wrongly(bucket, ranks):
    ranks.all_reduce(bucket.gradients.double())


def interrupt(*_):
    raise KeyboardInterrupt("of the program")


def train(strategy, rule):
    torch.manual_seed(1)
    model = Classifier()
    engine = tessera.Engine(model, {**STRATEGY, **strategy}, rule)
    for _ in range(3):
        engine.backward(model(torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))))
        engine.step()


RAISED = r"on rank 1/2 raised ValueError: the codec is out of codes\. \[T\d+\] hint: mend what its traceback shows:\n(?:.*\n){1,4}.*in fail"
# [name] = strategy, rule, exit code, and the text that both ranks print.
ENDINGS = {
    "elements, sharded": ({**OWN, "strategy": "FULL_SHARD", "host_sharing": False}, Elements(fail), 70, r"unit .*: Elements\.update " + RAISED),
    "elements, whole": ({**OWN, "strategy": "NO_SHARD"}, Elements(fail), 70, r"unit .*: Elements\.update " + RAISED),
    "elements, in backward": ({"optimizer": {"type": "own", "in_backward": True}}, Elements(fail), 70, r"unit .*: Elements\.update " + RAISED),
    "matrices": (OWN_MATRIX, Matrices(fail), 70, r"parameter \S*weight: Matrices\.update " + RAISED),
    "sums": ({**HOOK, "strategy": "NO_SHARD"}, Sums(fail), 70, r"bucket .*: Sums\.sum " + RAISED),
    "sums over a network": ({**HOOK, "strategy": "SHARD_GRADIENTS", "comm": {"transport": "gloo", "timeout_s": 60}}, Sums(fail), 70,
                            r"bucket .*: Sums\.sum " + RAISED),
    "states": (OWN, NoStates(fail), 70, r"NoStates\.states on rank \d/2 raised LookupError: no such table"),
    "result that is returned": (OWN, Elements(give_back), 64, r"unit .*: Elements\.update returned a Tensor, .*hint: write the result into e\.parameters"),
    "other state": (OWN, Elements(replace_state), 64, r"unit .*: .*state \"momentum\" is another tensor now"),
    "no states": (OWN, Elements(lose_states), 64, r"unit .*: Elements\.update left a NoneType in e\.states\. \[T\d+\] hint: leave there"),
    "sum that is returned": ({**HOOK, "strategy": "NO_SHARD"}, Sums(give_back), 64, r"bucket .*: Sums\.sum returned a Tensor, .*bucket\.gradients"),
    "no sum": ({**HOOK, "strategy": "NO_SHARD"}, Sums(lose_result), 64, r"bucket .*: Sums\.sum left a NoneType in bucket\.gradients"),
    "interrupt in a sum": ({**HOOK, "strategy": "NO_SHARD"}, Sums(interrupt), 70, r"CommHook, bucket .*: KeyboardInterrupt: of the program"),
    "wrong exchange": ({**HOOK, "strategy": "NO_SHARD"}, Sums(ask_wrongly), 64, r"all_reduce was given CPUDoubleType"),
}

torch.set_num_threads(1)
for name, (strategy, rule, code, text) in ENDINGS.items():
    codes, output = run_forked(2, functools.partial(train, strategy, rule))
    # The other rank's operator waits for this rank's shard, and ends with LibTorch's RuntimeError (1). The other rank
    # may first notice over Gloo that its peer has ended (75).
    assert codes[1] == code and codes[0] in (code, 1, 75), f"{name} ended with {codes}:\n{output}"
    assert len(re.findall(text, output)) >= 2, f"{name} does not say {text} on both ranks:\n{output}"
    print(name, flush=True)
codes, output = run_forked(2, functools.partial(train, {**OWN, "strategy": "NO_SHARD"}, Elements(interrupt)))
assert codes[1] == 1 and "KeyboardInterrupt: of the program" in output and codes[0] not in (0, 1), f"an interrupt ended with {codes}:\n{output}"
print("all endings were right")
