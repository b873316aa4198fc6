"""Cases of lightning_ranks.py. Schedulers, callbacks and modules change an optimizer or a model while Lightning trains.

Lightning trains each case on one process, and TesseraStrategy trains it on every rank. Losses and weights are the same.
"""

import contextlib
import importlib.util
import inspect

import lightning
import torch
from lightning.pytorch.callbacks import (BackboneFinetuning, BaseFinetuning, Callback, EMAWeightAveraging,
                                         GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging)
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

WIDTH, CLASSES = 6, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def adamw(module):
    """Returns AdamW with three groups, each with different numbers."""
    first, second = module.backbone
    return torch.optim.AdamW([{"params": first.parameters()},
                              {"params": second.parameters(), "weight_decay": 0.3, "lr": 0.02, "lr_scale": 0.5},
                              {"params": module.head.parameters(), "betas": (0.8, 0.98)}], lr=0.01, eps=1e-3)


def sgd(module):
    """Returns SGD with groups of different momentum. One of the groups has no momentum at first."""
    return torch.optim.SGD([{"params": module.backbone.parameters(), "momentum": 0.0},
                            {"params": module.head.parameters(), "momentum": 0.5, "nesterov": True}],
                           lr=0.05, momentum=0.9, weight_decay=0.01)


def what_trains(module):
    return torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=0.01, eps=1e-3)


def everything(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3)


class Model(lightning.LightningModule):
    def __init__(self, optimizer=adamw, scheduler=None, write=None, skipped=(), leaves_out_a_block=False, **_):
        super().__init__()
        torch.manual_seed(5)
        self.backbone, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, CLASSES)
        self.make_optimizer, self.make_scheduler, self.write, self.losses = optimizer, scheduler, write, []
        self.skipped, self.leaves_out_a_block = skipped, leaves_out_a_block

    def loss(self, batch):
        body = self.backbone[1] if self.leaves_out_a_block else self.backbone
        return nn.functional.cross_entropy(self.head(body(batch[0])), batch[1])

    def training_step(self, batch, index):
        if index in self.skipped:
            return None
        if self.write:
            self.write(self, self.optimizers().param_groups, self.global_step)
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, index):
        self.losses.append(float(self.trainer.callback_metrics.get("loss", 0)))

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self)
        if self.make_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_scheduler(optimizer), "interval": "step", "monitor": "loss"}]

    def lr_scheduler_step(self, scheduler, metric):
        measure = self.global_step % 3  # it has the same bits in either run
        if hasattr(scheduler, "lr_scheduler"):  # timm's PlateauLRScheduler
            scheduler.step(self.global_step, measure)
        elif hasattr(scheduler, "step_update"):  # timm's other schedulers
            scheduler.step_update(self.global_step, metric)
        elif "metrics" in inspect.signature(scheduler.step).parameters:
            scheduler.step(measure)
        else:
            scheduler.step()


# ---- Schedulers ---------------------------------------------------------------------------------------------------

TORCH = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.7),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.8)], [3]),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.8)], o),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.05, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, 12),
    "SWALR": lambda o: SWALR(o, 0.005, anneal_epochs=4),
}


def timms():
    if not importlib.util.find_spec("timm"):
        return {}
    from timm import scheduler
    by_update = {"t_in_epochs": False}
    tried = {
        "timm CosineLRScheduler": lambda o: scheduler.CosineLRScheduler(o, 8, warmup_t=2, lr_min=1e-4, **by_update),
        "timm MultiStepLRScheduler": lambda o: scheduler.MultiStepLRScheduler(o, [2, 5], 0.5, **by_update),
        "timm PolyLRScheduler": lambda o: scheduler.PolyLRScheduler(o, 8, **by_update),
        "timm StepLRScheduler": lambda o: scheduler.StepLRScheduler(o, 2, 0.5, **by_update),
        "timm TanhLRScheduler": lambda o: scheduler.TanhLRScheduler(o, 8, **by_update),
        "timm WSDLRScheduler": lambda o: scheduler.WSDLRScheduler(o, 8, 3, warmup_t=2, **by_update),
        "timm PlateauLRScheduler": lambda o: scheduler.PlateauLRScheduler(o, decay_rate=0.5, patience_t=0),
    }
    known = {f"timm {name}" for name in vars(scheduler) if name.endswith("LRScheduler")}
    assert known <= set(tried), f"not tried: {known - set(tried)}"
    return tried


def transformers_schedulers():
    if not importlib.util.find_spec("transformers"):
        return {}
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType
    more = {"cosine_with_min_lr": {"min_lr": 1e-3}, "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
            "warmup_stable_decay": {"num_decay_steps": 3, "num_stable_steps": 3},
            "reduce_lr_on_plateau": {"patience": 0, "factor": 0.7}, "greedy": {"patience": 0, "factor": 0.7}}

    def made(name):
        return lambda o: get_scheduler(name, o, 2, 10, scheduler_specific_kwargs=more.get(name, {}))
    return {f"transformers {each.value}": made(each.value) for each in SchedulerType}


def all_schedulers():
    known = {name for name, each in vars(lr_scheduler).items() if inspect.isclass(each) and not name.startswith("_")
             and issubclass(each, lr_scheduler.LRScheduler) and each is not lr_scheduler.LRScheduler}
    assert known <= set(TORCH), f"not tried: {known - set(TORCH)}"
    schedulers = {**TORCH, **timms(), **transformers_schedulers()}
    cases = {}
    for index, (name, scheduler) in enumerate(schedulers.items()):
        sgds = name in ("CyclicLR", "SWALR") or index % 3 == 2
        cases[name] = {"scheduler": scheduler, "optimizer": sgd if sgds else adamw}
    cases["OneCycleLR of sgd"] = {"scheduler": TORCH["OneCycleLR"], "optimizer": sgd}
    cases["OneCycleLR without momentum"] = {
        "scheduler": lambda o: lr_scheduler.OneCycleLR(o, 0.05, 12, cycle_momentum=False)}
    cases["CyclicLR of adamw"] = {"scheduler": TORCH["CyclicLR"]}
    return cases


# ---- Values that a module or a callback writes -----------------------------------------------------------------------

def decay_grows(module, groups, step):
    for group in groups:
        group["weight_decay"] = 2.0 * (step + 1)


def numbers_move(module, groups, step):
    groups[0]["betas"] = (0.9 - 0.05 * step, 0.99)
    groups[1].update(eps=1e-2 / (1 + step), betas=[0.5, 0.9], note="of the program")
    groups[2]["weight_decay"] = torch.tensor(0.25 * step)


def momenta_move(module, groups, step):
    for index, group in enumerate(groups):
        group["momentum"] = 0.0 if step in (2, 3) else 0.9 - 0.1 * index - 0.02 * step
        group["nesterov"] = step % 2 == index
        group["dampening"] = 0.1 * index if step > 4 and not group["nesterov"] else 0.0
        group["weight_decay"] = 0.02 * step


class Freezing(Callback):
    """Freezes the first block in the first and third epochs, and the second block in the second epoch."""

    def setup(self, trainer, module, stage):
        module.backbone[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer, module):
        module.backbone[0].requires_grad_(trainer.current_epoch in (1, 3))
        module.backbone[1].requires_grad_(trainer.current_epoch != 1)


class ByBlocks(BaseFinetuning):
    """Unfreezes blocks one after the other, each with its own numbers."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone)

    def finetune_function(self, module, epoch, optimizer):
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(module.backbone[2 - epoch], optimizer, lr=0.02 / epoch)
            optimizer.param_groups[-1]["weight_decay"] = 0.5 * epoch


def backbone_finetuning():
    return BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.002, train_bn=True)


class Clamping(Callback):
    """Writes parameters as a callback of a user does."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        engine = getattr(trainer.strategy, "engine", None)
        with engine.gathered(write=True) if engine else contextlib.nullcontext(), torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.2, 0.2)


class AveragingOfEpochs(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx > 0


CASES = {
    **all_schedulers(),
    "weight_decay by the module": {"write": decay_grows},
    "numbers by the module": {"write": numbers_move},
    "momenta by the module": {"write": momenta_move, "optimizer": sgd},
    "a block that no microbatch of a short window uses": {"leaves_out_a_block": True, "optimizer": everything, "accumulation": 3},
    "freezing": {"optimizer": everything, "callbacks": lambda: [Freezing()], "epochs": 4},
    "BackboneFinetuning": {"optimizer": what_trains, "callbacks": lambda: [backbone_finetuning()], "epochs": 3},
    "BaseFinetuning": {"optimizer": what_trains, "callbacks": lambda: [ByBlocks()], "epochs": 3},
    "StochasticWeightAveraging": {"callbacks": lambda: [StochasticWeightAveraging(0.02, 1)], "epochs": 4},
    "StochasticWeightAveraging by a line": {
        "callbacks": lambda: [StochasticWeightAveraging([0.02, 0.01, 0.03], 0.5, annealing_epochs=2, annealing_strategy="linear")], "epochs": 4},
    "EMAWeightAveraging": {"callbacks": lambda: [EMAWeightAveraging(decay=0.8)], "validates": True},
    "EMAWeightAveraging of some steps": {
        "callbacks": lambda: [EMAWeightAveraging(decay=0.6, update_every_n_steps=2, update_starting_at_step=2)], "validates": True},
    "WeightAveraging": {"callbacks": lambda: [WeightAveraging()], "validates": True},
    "WeightAveraging of epochs": {"callbacks": lambda: [AveragingOfEpochs()], "validates": True, "epochs": 4},
    "a callback that clamps": {"callbacks": lambda: [Clamping()]},
}
WITHOUT_EFFECT = {"transformers constant"}

# Cases that Lightning allows on one rank only.
ALONE = {
    "batches that are skipped": {"skipped": (1, 3)},
    "batches of sgd that are skipped": {"skipped": (0, 1, 4), "optimizer": sgd},
}


def fit(case, folder, loader, **more):
    """Returns the module, and the Trainer that has trained it."""
    module = Model(**case)
    trainer = lightning.Trainer(max_epochs=case.get("epochs", 2), accelerator="cpu", logger=False, enable_progress_bar=False,
                                enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
                                callbacks=case.get("callbacks", list)(), accumulate_grad_batches=case.get("accumulation", 1), **more)
    trainer.fit(module, loader(), loader() if case.get("validates") else None)
    return module, trainer


def found_of(module, weights, trainer):
    return {"losses": module.losses, "val": float(trainer.callback_metrics.get("val", 0)), "weights": weights}


def run_plain(folder, loader):
    found = {}
    for name, case in {**CASES, **ALONE}.items():
        module, trainer = fit(case, folder, loader)
        found[name] = found_of(module, module.state_dict(), trainer)
    expect_effects(found, folder, loader)
    torch.save(found, folder / "handed_on.pt")


def expect_effects(found, folder, loader):
    """Expects that each scheduler, write and callback changes the weights by far more than expect_same allows. A run
    that leaves one of them out thus fails."""
    weights = {}
    for name, case in CASES.items():
        rest = {key: value for key, value in case.items() if key not in ("scheduler", "write", "callbacks")}
        if len(rest) == len(case) or name in WITHOUT_EFFECT:
            continue
        key = tuple(sorted(rest.items(), key=str))
        if key not in weights:
            weights[key] = fit(rest, folder, loader)[0].state_dict()
        far = max(float((value - weights[key][each]).abs().max()) for each, value in found[name]["weights"].items())
        assert far > 1e-3, f"{name}: the weights are {far} off those without it"


def expect_same(name, wanted, got, rank):
    numbers = [*zip(wanted["losses"], got["losses"], strict=True), (wanted["val"], got["val"])]
    for x, y in numbers:
        assert abs(x - y) <= 2e-6 * max(1, abs(x)), f"{name}: wanted {wanted['losses']} {wanted['val']}, got {got['losses']} {got['val']}"
    for key, value in wanted["weights"].items() if rank == 0 else ():
        far = float((value - got["weights"][key]).abs().max())
        assert far <= 5e-6, f"{name}: {key} is {far} off"


# ---- Changes that cannot be handed on --------------------------------------------------------------------------------

def turns_round(module, groups, step):
    groups[1]["maximize"] = step == 1


def drops_a_group(module, groups, step):
    if step == 1:
        module.trainer.optimizers[0].param_groups.pop()


def begins_momentum(module, groups, step):
    groups[0]["momentum"] = 0.9


def unfreezes_alone(module, groups, step):
    module.backbone.requires_grad_(True)


class Setting(Callback):
    def __init__(self, write):
        self.write = write

    def on_train_batch_start(self, trainer, module, batch, index):
        self.write(module, trainer.optimizers[0].param_groups, trainer.global_step)


def of_the_head(module):
    module.backbone.requires_grad_(False)
    return what_trains(module)


def momentless(module):
    return torch.optim.SGD(module.parameters(), lr=0.05)


REFUSED = [
    ({"write": turns_round}, "turns_round sets maximize=True in a group of AdamW"),
    ({"callbacks": lambda: [Setting(turns_round)]}, "sets maximize=True"),
    ({"callbacks": lambda: [Setting(drops_a_group)]}, "group 2 of AdamW has other parameters"),
    ({"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]}, "accumulate_grad_batches has changed since fit began"),
    ({"optimizer": momentless, "write": begins_momentum}, "group 0 of SGD has momentum=0.9 now"),
    ({"optimizer": of_the_head, "callbacks": lambda: [Setting(unfreezes_alone)]}, "no group of AdamW has it"),
]


def run_ranks(folder, loader, ranks, rank, strategy_of):
    """`strategy_of(n)` returns a TesseraStrategy for case n."""
    import tessera
    wanted = torch.load(folder / "handed_on.pt", weights_only=False)
    for index, (name, case) in enumerate((CASES if ranks > 1 else ALONE).items()):
        module, trainer = fit(case, folder, loader, devices=ranks, strategy=strategy_of(index))
        engine = trainer.strategy.engine
        expect_same(name, wanted[name], found_of(module, engine.state_dict(), trainer), rank)
        engine.close()
    for index, (case, text) in enumerate(REFUSED if ranks > 1 else ()):
        try:
            fit(case, folder, loader, devices=ranks, strategy=strategy_of(index))
        except tessera.Error as error:
            assert text in str(error), f"wanted {text}, got {error}"
        else:
            raise AssertionError(f"not refused: {text}")
