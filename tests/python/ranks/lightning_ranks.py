"""lightning_test.py runs this program, which tests TesseraStrategy on every rank. One process has run Lightning without
TesseraStrategy before.

Usage: lightning_ranks.py plain FOLDER   on one process; writes the results
       lightning_ranks.py FOLDER         on every rank; if there is only one rank, it runs the cases that need one rank
"""

import logging
import os
import pathlib
import sys
import warnings

import handed_on
import lightning
import torch
from launched import LONG
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric

WIDTH, CLASSES, SAMPLES, BATCH = 6, 4, 20, 4
STRATEGIES = {"FULL_SHARD": {}, "private copies": {"host_sharing": False}, "NO_SHARD": {"strategy": "NO_SHARD"}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Classifier(lightning.LightningModule):
    """A module with groups of parameters, a schedule, metrics, and its own hooks."""

    def __init__(self, rule="adamw"):
        super().__init__()
        torch.manual_seed(5)
        self.save_hyperparameters()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, CLASSES)
        self.mean, self.losses, self.hooks = MeanMetric(), [], 0

    def loss(self, batch):
        return nn.functional.cross_entropy(self.head(self.blocks(batch[0])), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_before_optimizer_step(self, optimizer):
        self.hooks += 1

    def optimizer_zero_grad(self, epoch, index, optimizer):
        (self if self.hparams.rule == "sgd" else optimizer).zero_grad(set_to_none=False)

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        self.mean(loss)
        self.log("metric", self.mean)
        self.log("val", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, index):
        return self.head(self.blocks(batch[0]))

    def configure_optimizers(self):
        if self.hparams.rule == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
        biases = [value for name, value in self.named_parameters() if name.endswith("bias")]
        others = [value for name, value in self.named_parameters() if not name.endswith("bias")]
        optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.1},
                                       {"params": biases, "weight_decay": 0.0, "lr": 0.02}], lr=0.01, eps=1e-5)
        schedules = [lambda step: 1 / (1 + step), lambda step: 1 / (2 + step)]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, schedules), "interval": "step"}]


def loader(ranks, rank=0):
    """Returns a loader with its own sampler, since the sampler that Lightning makes for ranks would shuffle."""
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH, generator=generator),
                         torch.randint(0, CLASSES, (SAMPLES,), generator=generator))
    return DataLoader(data, BATCH // ranks, sampler=DistributedSampler(data, ranks, rank, shuffle=False))


CASES = {"adamw": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
         "sgd": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
         "autocast": {"precision": "bf16-mixed"}}


def trainer_of(folder, case, **more):
    usual = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
             "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder}
    return lightning.Trainer(**{**usual, **CASES[case], **more})


def module_of(case):
    return Classifier("sgd" if case == "sgd" else "adamw")


def results(trainer, module):
    return {"losses": module.losses, "hooks": module.hooks, "val": float(trainer.callback_metrics["val"]),
            "metric": float(trainer.callback_metrics["metric"])}


def run_plain(folder):
    for case in CASES:
        module, trainer = module_of(case), trainer_of(folder, case)
        trainer.fit(module, loader(1), loader(1))
        torch.save({**results(trainer, module), "weights": module.state_dict()}, folder / f"{case}.pt")
    handed_on.run_plain(folder, lambda: loader(1))


def run_ranks(folder):
    import tessera
    from tessera.integrations.lightning import TesseraStrategy
    rank, ranks = tessera.rank(), tessera.world_size()

    def sharded(case, strategy, output, **more):
        given = {"units": {"classes": ["Block"]}, **strategy}
        return module_of(case), trainer_of(output, case, devices=ranks, strategy=TesseraStrategy(given), **more)

    def expect_close(name, wanted, got, tolerance):
        assert wanted["hooks"] == got["hooks"], f"{name}: {got['hooks']} calls of a hook, wanted {wanted['hooks']}"
        pairs = [*zip(wanted["losses"], got["losses"], strict=True), (wanted["val"], got["val"]),
                 (wanted["metric"], got["metric"])]
        for x, y in pairs:
            assert abs(x - y) <= tolerance * abs(x), f"{name}: wanted {wanted['losses']} {wanted['val']}, got {got}"

    def expect_equal(name, wanted, got):
        assert rank != 0 or all(torch.equal(value, got[key]) for key, value in wanted.items()), name

    def like_plain(case, title, strategy, tolerance=1e-5):
        name, output = f"{case}, {title}", folder / f"{case}, {title}"
        keep = ModelCheckpoint(output, "{epoch}", save_top_k=-1)
        module, trainer = sharded(case, strategy, output, enable_checkpointing=True, callbacks=[keep])
        trainer.fit(module, loader(ranks, rank), loader(ranks, rank))
        seen = trainer.strategy.engine.samples_seen
        assert seen == 2 * SAMPLES, f"{name}: {seen} samples"
        wanted, got = torch.load(folder / f"{case}.pt"), results(trainer, module)
        expect_close(name, wanted, got, tolerance)
        state = trainer.strategy.engine.state_dict()
        if rank == 0:
            assert list(state) == list(wanted["weights"]), name
            for key, value in wanted["weights"].items():
                assert torch.allclose(value, state[key], rtol=10 * tolerance, atol=10 * tolerance), f"{name}: {key}"
            loaded = Classifier.load_from_checkpoint(output / "epoch=1.ckpt", weights_only=False)
            expect_equal(name, state, loaded.state_dict())
        assert trainer.test(module, loader(ranks, rank), verbose=False)[0]["val"] == got["val"], name
        trainer.strategy.engine.close()

        again, resumed = sharded(case, strategy, output)
        first, last = output / "epoch=0.ckpt", output / "epoch=1.ckpt"
        resumed.fit(again, loader(ranks, rank), loader(ranks, rank), ckpt_path=first, weights_only=False)
        half = len(module.losses) // 2
        assert again.losses == module.losses[half:], f"{name}: resumed: {again.losses}, {module.losses[half:]}"
        expect_equal(f"{name}: resumed", state, resumed.strategy.engine.state_dict())
        resumed.strategy.engine.close()

        fresh, tester = sharded(case, strategy, output)
        tested = tester.test(fresh, loader(ranks, rank), ckpt_path=last, weights_only=False, verbose=False)
        assert tested[0]["val"] == got["val"], f"{name}: tested {tested}"
        predicted = torch.cat(tester.predict(fresh, loader(ranks, rank)))
        assert predicted.shape == (SAMPLES // ranks, CLASSES), f"{name}: {predicted.shape}"
        tester.strategy.engine.close()

    def best_checkpoint():
        """Checkpoints that are not the best are removed, together with the folders beside them."""
        output = folder / "best"
        module, trainer = sharded("sgd", {}, output, max_epochs=4, enable_checkpointing=True,
                                  callbacks=[ModelCheckpoint(output, monitor="val", save_top_k=1)])
        trainer.fit(module, loader(ranks, rank), loader(ranks, rank))
        best = pathlib.Path(trainer.checkpoint_callback.best_model_path)
        found = sorted(each.name for each in output.iterdir())
        assert rank != 0 or found == [best.name, f"{best.name}.tessera"], found
        trainer.fit(module, loader(ranks, rank), loader(ranks, rank))  # this trains again, with another Engine
        trainer.strategy.engine.close()

    def refusals():
        class Manual(Classifier):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False

        class OwnBackward(Classifier):
            def backward(self, loss):
                loss.backward()

        class NoOptimizer(Classifier):
            def configure_optimizers(self):
                return None

        class Partly(Classifier):
            def configure_optimizers(self):
                return torch.optim.AdamW(self.blocks.parameters())

        class Amsgrad(Classifier):
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), amsgrad=True)

        class Other(Classifier):
            def configure_optimizers(self):
                return torch.optim.Adagrad(self.parameters())

        for make, strategy, more, text in [
                (Manual, {}, {"accumulate_grad_batches": 1, "gradient_clip_val": None}, "automatic_optimization"),
                (OwnBackward, {}, {}, "OwnBackward.backward"),
                (NoOptimizer, {}, {}, "made _MockOptimizer"),
                (Partly, {}, {}, "leaves head.weight out"),
                (Amsgrad, {}, {}, "amsgrad=True"),
                (Other, {}, {}, "made Adagrad"),
                (Classifier, {}, {"precision": "bf16-true"}, 'precision="bf16-true"'),
                (Classifier, {"gradient_accumulation": 3}, {}, "accumulate_grad_batches) says 2"),
                (Classifier, {"gradient_clipping": 3.0}, {}, "gradient_clip_val) says 0.5"),
                (Classifier, {"optimizer": {"lr": 1.0}}, {}, "configure_optimizers says 0.01"),
                (Classifier, {"lr_schedule": {"type": "linear", "total_steps": 3}}, {}, "leave lr_schedule out")]:
            _, trainer = sharded("adamw", strategy, folder / "refused", **more)
            try:
                trainer.fit(make(), loader(ranks, rank))
            except tessera.Error as error:
                assert text in str(error), f"wanted {text}, got {error}"
            else:
                raise AssertionError(f"not refused: {make.__name__} {strategy} {more}")

    if ranks > 1:
        refusals()
    for case in ("adamw", "sgd") if ranks > 1 else ():
        for title, strategy in STRATEGIES.items():
            if not LONG and (title == "private copies") != (case == "sgd"):
                continue
            print(case, title, flush=True)
            like_plain(case, title, strategy)
    if ranks > 1:
        like_plain("autocast", "FULL_SHARD", {}, 3e-2)

    def strategy_of(index):
        return TesseraStrategy({"units": {"classes": ["Block"]}, **[*STRATEGIES.values()][index % len(STRATEGIES)]})
    handed_on.run_ranks(folder, lambda: loader(ranks, rank), ranks, rank, strategy_of)
    if ranks > 1:
        best_checkpoint()
    print("trained like Lightning alone")


rank_zero_only.rank = int(os.environ.get("RANK", 0))  # Lightning may have been imported before the ranks existed
torch.set_num_threads(1)
warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
if sys.argv[1] == "plain":
    run_plain(pathlib.Path(sys.argv[2]))
else:
    run_ranks(pathlib.Path(sys.argv[1]))
