"""accelerate_test.py runs this program on every rank. It compares tessera's Accelerator with accelerate's own under
DistributedDataParallel.

Usage: accelerate_ranks.py FOLDER        all cases
       accelerate_ranks.py FOLDER once   one training
"""

import functools
import importlib
import os
import pathlib
import sys
import warnings

import accelerate
import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, ProjectConfiguration
from accelerate.utils.deepspeed import DummyOptim
from launched import LONG
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import tessera
from tessera.integrations.accelerate import Accelerator

WIDTH, CLASSES, SAMPLES, BATCH, CLIP, TOLERANCE = 6, 4, 19, 2, 0.5, 1e-6
STRATEGIES = {"FULL_SHARD": {}, "private copies": {"host_sharing": False}, "NO_SHARD": {"strategy": "NO_SHARD"}}
UNITS = {"units": {"classes": ["Block"]}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(x))


def adamw(model):
    decaying = [value for name, value in model.named_parameters() if not name.endswith("bias")]
    biases = [value for name, value in model.named_parameters() if name.endswith("bias")]
    return torch.optim.AdamW([{"params": decaying, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}],
                             lr=0.01, eps=1e-5)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def head_first(model):
    model.blocks.requires_grad_(False)
    return torch.optim.AdamW(model.head.parameters(), lr=0.01, eps=1e-5)


def warm_up(optimizer):
    return LambdaLR(optimizer, lambda step: min(1, step / 4))


def stairs(optimizer):
    return StepLR(optimizer, 6, 0.5)


class Loop:
    """The loop of accelerate's examples, with the changes that the arguments name. An epoch has five batches per rank,
    and the last batch is filled up.

    optimizer: makes the optimizer. accumulation: microbatches of a step, counted by `accumulate`, or by the loop if `by_itself`.
    clip: called with the loop's Accelerator and model. apart: the model and the optimizer are prepared by two calls.
    drop: numbers of the batches after which the loop makes no step.
    """

    def __init__(self, accelerator, optimizer=adamw, scheduler=warm_up, accumulation=2, by_itself=False, clip=None, apart=False,
                 before_epoch=None, drop=()):
        torch.manual_seed(5)
        data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(0, CLASSES, (SAMPLES,)))
        model = Classifier()
        self.accelerator, self.accumulation, self.by_itself, self.clip = accelerator, accumulation, by_itself, clip
        self.before_epoch, self.drop = before_epoch, drop
        optimizer = optimizer(model)
        scheduler = scheduler(optimizer)
        if before_epoch is not None and not isinstance(accelerator, Accelerator):
            model.requires_grad_(True)  # DDP never averages gradients of parameters that are frozen when it is made
        loaders = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)), DataLoader(data, 3)
        if apart:
            self.model = accelerator.prepare_model(model)
            self.optimizer = accelerator.prepare_optimizer(optimizer)
            self.scheduler, self.training, self.evaluation = accelerator.prepare(scheduler, *loaders)
        else:
            self.model, self.optimizer, self.training, self.evaluation, self.scheduler = accelerator.prepare(
                model, optimizer, *loaders, scheduler)
        self.losses, self.norms, self.rates, self.scores = [], [], [], []

    def step(self, index):
        if self.clip is not None and self.accelerator.sync_gradients:
            self.norms.append(self.clip(self.accelerator, self.model))
        if index not in self.drop:
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()

    def batch(self, x, y, index):
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        if self.by_itself:
            self.accelerator.backward(loss / self.accumulation)
            if (index + 1) % self.accumulation == 0 or index + 1 == len(self.training):
                self.step(index)
        else:
            told = {"samples": len(x)} if isinstance(self.accelerator, Accelerator) else {}
            self.accelerator.backward(loss, **told)
            self.step(index)

    def epoch(self, number):
        if self.before_epoch is not None:
            self.before_epoch(self.accelerator.unwrap_model(self.model), self.optimizer, number)
        self.model.train()
        for index, (x, y) in enumerate(self.training):
            with self.accelerator.accumulate(self.model):
                self.batch(x, y, index)
            self.rates.append(self.optimizer.param_groups[-1]["lr"])
        self.model.eval()
        found = []
        for x, y in self.evaluation:
            with torch.no_grad():
                found.append(self.accelerator.gather_for_metrics(self.model(x)))
        self.scores.append(torch.cat(found))

    def run(self, epochs=2):
        for number in range(epochs):
            self.epoch(number)
        return self

    def state(self):
        """Returns the state. All ranks of DDP have it. Only rank 0 of an Engine has it, as under FSDP."""
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def by_norm(accelerator, model):
    return accelerator.clip_grad_norm_(model.parameters(), CLIP)


def by_value(accelerator, model):
    accelerator.clip_grad_value_(model.parameters(), 0.05)
    return torch.zeros(())


def unfreeze(model, optimizer, number):
    """Unfreezes blocks as in transfer learning. The blocks train from the second epoch on, in a separate group."""
    model.blocks.requires_grad_(number == 1)
    if number == 1:
        optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.005})


# This is {name: (options of the loop, keys of the strategy, arguments of both Accelerators, tolerance)}
CASES = {
    "adamw": ({"clip": by_norm}, {"gradient_clipping": CLIP}, {"gradient_accumulation_steps": 2}, TOLERANCE),
    "sgd": ({"optimizer": sgd, "accumulation": 1, "clip": by_value, "apart": True}, {"gradient_clip_value": 0.05, "optimizer": {"lr": 0.1}}, {},
            TOLERANCE),
    "counted by the loop": ({"by_itself": True, "clip": by_norm}, {"gradient_clipping": CLIP, "gradient_accumulation": 2}, {}, TOLERANCE),
    "a window dropped": ({"drop": (1, 3)}, {}, {"gradient_accumulation_steps": 2}, TOLERANCE),
    "unfrozen": ({"optimizer": head_first, "scheduler": stairs, "accumulation": 1, "before_epoch": unfreeze}, {}, {}, TOLERANCE),
    "autocast": ({}, {}, {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}, 1e-2),
}


def fresh(kind, **arguments):
    """Makes an Accelerator with a new configuration."""
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()
    return kind(**arguments)


def made(kind, case, **more):
    loop, strategy, arguments, _ = CASES[case]
    return Loop(fresh(kind, **arguments, **more), **loop)


def sharded(case, title, **more):
    return made(Accelerator, case, strategy={**UNITS, **CASES[case][1], **STRATEGIES[title]}, **more)


@functools.cache
def by_ddp(case):
    unused = DistributedDataParallelKwargs(find_unused_parameters="before_epoch" in CASES[case][0])
    loop = made(accelerate.Accelerator, case, cpu=True, kwargs_handlers=[unused]).run()
    assert type(loop.model) is nn.parallel.DistributedDataParallel, "nothing to compare with"
    return loop, loop.state()


def expect_close(name, wanted, got, tolerance):
    wanted, got = torch.as_tensor(wanted, dtype=torch.float64), torch.as_tensor(got, dtype=torch.float64)
    assert wanted.shape == got.shape and torch.allclose(wanted, got, rtol=tolerance, atol=tolerance), f"{name}: wanted {wanted}, got {got}"


def like_ddp(case, title):
    name, tolerance = f"{case}, {title}", CASES[case][3]
    wanted, state = by_ddp(case)
    got = sharded(case, title).run()
    assert type(got.model) is Classifier, name
    assert wanted.rates == got.rates, f"{name}: rates {got.rates}, wanted {wanted.rates}"
    for what in ("losses", "norms"):
        expect_close(f"{name}: {what}", getattr(wanted, what), getattr(got, what), tolerance)
    for epoch, scores in enumerate(got.scores):
        assert len(scores) == SAMPLES, f"{name}: {len(scores)} scores"
        expect_close(f"{name}: scores of epoch {epoch}", wanted.scores[epoch], scores, tolerance)
    if not got.by_itself and not got.drop:
        batches = len(got.training) * BATCH * tessera.world_size()
        assert got.accelerator.engine.samples_seen == 2 * batches, f"{name}: {got.accelerator.engine.samples_seen} samples"
    found = got.state()
    if tessera.rank() != 0:
        assert found == {}, name
    else:
        assert list(found) == list(state), f"{name}: {list(found)}"
        for key, value in state.items():
            expect_close(f"{name}: {key}", value, found[key], tolerance)
    got.accelerator.free_memory()


def like_the_run_before(folder, title):
    """save_state saves files after one epoch. A run that loads these files gives the same bits as the run that was not
    interrupted."""
    whole = sharded("adamw", title)
    whole.epoch(0)
    whole.accelerator.save_state(str(folder / title))
    whole.epoch(1)
    whole.accelerator.save_model(whole.model, folder / f"{title} weights")
    whole.accelerator.wait_for_everyone()
    state = whole.state()
    if tessera.rank() == 0:
        saved = load_file(folder / f"{title} weights/model.safetensors")
        assert list(sorted(saved)) == list(sorted(state)) and all(torch.equal(saved[key], state[key]) for key in saved), title
    whole.accelerator.free_memory()

    again = sharded("adamw", title)
    again.epoch(0)  # the program sets the generators of the loaders
    for index in range(2):  # after these steps, weights, states and rates differ from the saved values
        with again.accelerator.accumulate(again.model):
            again.batch(torch.ones(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.long), index)
    again.accelerator.load_state(str(folder / title))
    for each in (again.losses, again.norms):
        each.clear()
    again.epoch(1)
    assert again.losses == whole.losses[5:], f"{title}: {again.losses}, wanted {whole.losses[5:]}"
    assert [*map(float, again.norms)] == [*map(float, whole.norms[3:])], f"{title}: {again.norms}, wanted {whole.norms[3:]}"
    found = again.state()
    assert all(torch.equal(state[key], found[key]) for key in state), f"{title}: resumed weights"
    again.accelerator.free_memory()


def numbered_checkpoints(folder):
    """automatic_checkpoint_naming keeps the last checkpoints. They contain the Engine's folders."""
    project = ProjectConfiguration(str(folder / "project"), automatic_checkpoint_naming=True, total_limit=2)
    loop = sharded("adamw", "FULL_SHARD", project_config=project)
    for _ in range(3):
        loop.accelerator.save_state()
        loop.accelerator.wait_for_everyone()
    kept = sorted(path.parent.name for path in (folder / "project/checkpoints").glob("*/tessera"))
    assert kept == ["checkpoint_1", "checkpoint_2"], kept
    loop.accelerator.load_state()
    loop.accelerator.free_memory()


def expect_refused(text, call):
    try:
        call()
    except tessera.Error as error:
        assert text in str(error) and "hint: " in str(error), f"wanted {text}, got {error}"
    else:
        raise AssertionError(f"not refused: {text}")


def arguments_that_are_refused():
    for text, arguments in (
            ("deepspeed_plugin='x'", {"deepspeed_plugin": "x"}), ("fsdp_plugin='x'", {"fsdp_plugin": "x"}),
            ("megatron_lm_plugin='x'", {"megatron_lm_plugin": "x"}), ("parallelism_config='x'", {"parallelism_config": "x"}),
            ("dynamo_backend='inductor'", {"dynamo_backend": "inductor"}), ('mixed_precision="fp16"', {"mixed_precision": "fp16"}),
            ('"param": "fp16"', {"mixed_precision": "bf16", "strategy": {"mixed_precision": {"param": "fp16"}}}),
            ("DistributedDataParallelKwargs", {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}),
            ("save_on_each_node", {"project_config": ProjectConfiguration(save_on_each_node=True)}),
            ("equally many batches", {"strategy": {"gradient_sync": "last_microbatch", "deal": {"by": "speed"}}}),
            ("unknown key", {"strategy": {"optimiser": {}}})):
        expect_refused(text, lambda: fresh(Accelerator, **arguments))
    for name, text in (("ACCELERATE_USE_FSDP", "ACCELERATE_USE_FSDP=true"), ("ACCELERATE_MIXED_PRECISION", 'mixed_precision="fp16"'),
                       ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_BACKEND=INDUCTOR")):
        os.environ[name] = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp16"}.get(name, "INDUCTOR")
        expect_refused(text, lambda: fresh(Accelerator))
        del os.environ[name]


def jobs_that_are_refused():
    accelerator = fresh(Accelerator)
    for name, value, text in (("distributed_type", DistributedType.XLA, "a job of kind XLA"), ("num_processes", 3, "sees 3 processes")):
        known = getattr(accelerator.state, name)
        setattr(accelerator.state, name, value)
        expect_refused(text, accelerator._expect_state)
        setattr(accelerator.state, name, known)


def preparations_that_are_refused():
    def prepare(text, make, **arguments):
        model = Classifier()
        accelerator = fresh(Accelerator, **arguments)
        expect_refused(text, lambda: accelerator.prepare(*make(model)))
        assert accelerator.engine is None, text

    prepare("more than one model (Classifier, Classifier)", lambda model: (model, Classifier(), adamw(model)))
    prepare("more than one optimizer (AdamW, SGD)", lambda model: (model, adamw(model), sgd(model)))
    prepare("AdamW before the model", lambda model: (adamw(model),))
    prepare("DummyOptim", lambda model: (model, DummyOptim(model.parameters())))
    prepare("what DistributedDataParallel made", lambda model: (nn.parallel.DistributedDataParallel(model), adamw(model)))
    prepare("torch.compile", lambda model: (torch.compile(model), adamw(model)))
    prepare("made Adagrad", lambda model: (model, torch.optim.Adagrad(model.parameters())))
    prepare("amsgrad=True", lambda model: (model, torch.optim.AdamW(model.parameters(), amsgrad=True)))
    prepare("leaves blocks.0.norm.weight out", lambda model: (model, torch.optim.AdamW(model.head.parameters())))
    prepare("that is not the module's", lambda model: (model, adamw(Classifier())))
    prepare("gradient_accumulation_steps) says 2", lambda model: (model, adamw(model)), gradient_accumulation_steps=2,
            strategy={"gradient_accumulation": 3})
    prepare("the program says 0.01", lambda model: (model, adamw(model)), strategy={"optimizer": {"lr": 1.0}})
    prepare("leave lr_schedule out", lambda model: (model, adamw(model)), strategy={"lr_schedule": {"type": "linear", "total_steps": 3}})
    def trained(model):
        optimizer = adamw(model)
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def hooked(model):
        optimizer = adamw(model)
        optimizer.register_step_post_hook(lambda *_: None)
        return model, optimizer

    prepare("has states of an earlier training", trained)
    prepare("has a hook of its step", hooked)
    prepare('says "adamw"', lambda model: (model, adamw(model)), strategy={"optimizer": {"type": "lamb"}})


def calls_that_are_refused(folder):
    loop = sharded("adamw", "FULL_SHARD")
    accelerator, model, x = loop.accelerator, loop.model, torch.ones(2, WIDTH)
    assert accelerator.prepare(model, loop.optimizer) == (model, loop.optimizer), "prepared again: the same"
    engine = accelerator.engine
    expect_refused("more than one model", lambda: accelerator.prepare(Classifier()))
    expect_refused("more than one optimizer", lambda: accelerator.prepare(sgd(model)))
    expect_refused("another Accelerator has sharded", lambda: Accelerator(gradient_accumulation_steps=2).prepare(model, adamw(model)))
    expect_refused("AdamW that another Accelerator has prepared",
                   lambda: Accelerator(gradient_accumulation_steps=2).prepare(Classifier(), loop.optimizer))
    expect_refused("backward got create_graph", lambda: accelerator.backward(model(x).sum(), create_graph=True))
    expect_refused("join_uneven_inputs", lambda: accelerator.join_uneven_inputs([model]))
    expect_refused("norm_type=1", lambda: accelerator.clip_grad_norm_(model.parameters(), CLIP, norm_type=1))
    expect_refused('"gradient_clipping": 0.5, but clip_grad_norm_ says 2.0', lambda: accelerator.clip_grad_norm_(model.parameters(), 2))
    expect_refused('"gradient_clip_value": 0.0, but', lambda: accelerator.clip_grad_value_(model.parameters(), 2))
    expect_refused("leaves blocks.0.norm.weight out", lambda: accelerator.clip_grad_norm_(model.head.parameters(), CLIP))
    expect_refused("a closure", lambda: loop.optimizer.step(lambda: None))
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        expect_refused("between microbatches", lambda: accelerator.clip_grad_norm_(model.parameters(), CLIP))
        loop.optimizer.step()
    expect_refused("between backward and step", lambda: accelerator.save_state(str(folder / "out of turn")))
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        expect_refused("more than 2 times", lambda: accelerator.backward(model(x).sum()))
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        assert norm.isnan(), "the norm before the step"
        loop.optimizer.step()
        assert norm > 0 and accelerator.result.step == 1, "the norm after the step"
    expect_refused("without zero_grad", lambda: accelerator.backward(model(x).sum()))
    expect_refused("without zero_grad", loop.optimizer.step)
    for each in (model, loop.optimizer):
        each.zero_grad()
        loop.optimizer.step()  # without gradients this has no effect, as in plain PyTorch
        accelerator.backward(model(x).sum())
    loop.optimizer.zero_grad()
    assert engine.steps_applied == 1 and accelerator.engine is engine
    model(x).sum().backward()
    expect_refused("of a backward that was not accelerator.backward", loop.optimizer.step)
    (folder / "foreign").mkdir(exist_ok=True)
    expect_refused("has no folder tessera", lambda: accelerator._load_engine(engine, str(folder / "foreign")))
    teacher = accelerator.prepare_model(Classifier(), evaluation_mode=True)
    assert accelerator._models == [model] and accelerator.get_state_dict(teacher).keys() == teacher.state_dict().keys()
    accelerator.free_memory()
    evaluated = fresh(Accelerator, strategy=UNITS)
    model = evaluated.prepare(Classifier())
    expect_refused("prepare got no optimizer", lambda: evaluated.backward(model(x).sum()))
    evaluated.free_memory()


# Tests of accelerate that check what an Accelerator does, except tests that read gradients or need DDP
OF_ACCELERATE = {
    "test_script": ["main"],
    "test_ops": ["main"],
    "test_sync": ["test_dataloader_break"],
    "test_distributed_data_loop": ["test_default_ensures_even_batch_sizes", "test_can_disable_even_batches", "test_pickle_accelerator",
                                   "test_data_loader"],
}


def accelerates_own_tests(folder):
    os.chdir(folder)
    os.environ["ACCELERATE_USE_CPU"] = "true"  # Accelerate's AcceleratorState reads this variable
    accelerate.state.PartialState.destroy_process_group = lambda *_: None  # the group is used afterwards
    for name, functions in OF_ACCELERATE.items():
        module = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
        module.Accelerator = Accelerator
        module.is_fp16_available = lambda: False  # our Accelerator refuses mixed_precision="fp16"
        for function in functions:
            accelerator = fresh(Accelerator)
            print(name, function, flush=True)
            arguments = (DataLoader(module.DummyDataset(), BATCH), accelerator) if function == "test_data_loader" else ()
            getattr(module, function)(*arguments)


def main(folder, once):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if once:
        like_ddp("adamw", "FULL_SHARD")
        fresh(Accelerator).end_training()
        print("trained like DDP")
        return
    arguments_that_are_refused()
    jobs_that_are_refused()
    preparations_that_are_refused()
    calls_that_are_refused(folder)
    for index, case in enumerate(CASES):
        for title in STRATEGIES if LONG or case == "adamw" else [[*STRATEGIES][index % len(STRATEGIES)]]:
            print(case, title, flush=True)
            like_ddp(case, title)
    for title in STRATEGIES:
        like_the_run_before(folder, title)
    numbered_checkpoints(folder)
    accelerates_own_tests(folder)
    print("trained like DDP, and refused what it cannot do")


main(pathlib.Path(sys.argv[1]), "once" in sys.argv[2:])
