"""trainer_test.py runs this program, which tests TesseraTrainer on every rank. One process has run the plain Trainer
before.

Usage: trainer_ranks.py plain FOLDER   the plain Trainer, on one process; writes the results
       trainer_ranks.py FOLDER         on every rank
"""

import pathlib
import sys

import torch
import transformers
from launched import LONG
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH, SAMPLES, WIDTH, CLASSES, BATCH = 61, 12, 20, 6, 4, 4
STRATEGIES = {"FULL_SHARD": {}, "private copies": {"host_sharing": False}, "NO_SHARD": {"strategy": "NO_SHARD"}}


class Classifier(nn.Module):
    """A model that is not from transformers, so the Trainer divides its losses by the number of microbatches."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def language_model():
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, max_position_embeddings=32, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def texts():
    """Returns samples in which some tokens have no label, so ranks and microbatches have different numbers of labels."""
    found = []
    for _ in range(SAMPLES):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,))
        labels = tokens.clone()
        labels[:int(torch.randint(0, LENGTH - 2, ()))] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def points():
    return [{"x": torch.randn(WIDTH), "labels": torch.randint(0, CLASSES, ())} for _ in range(SAMPLES)]


CASES = {"language model": (language_model, texts), "classifier": (Classifier, points)}


def made(case):
    model, data = CASES[case]
    torch.manual_seed(5)
    return model(), data()


def arguments(folder, ranks, **changed):
    """Returns the arguments. An epoch has five batches and a step has two, so the last step of each epoch has one
    batch."""
    usual = {"per_device_train_batch_size": BATCH // ranks, "per_device_eval_batch_size": BATCH // ranks,
             "gradient_accumulation_steps": 2, "num_train_epochs": 2, "learning_rate": 1e-2,
             "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "adam_epsilon": 1e-5,
             "max_grad_norm": 0.5, "logging_steps": 1, "save_steps": 2, "seed": 3}
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
                             **{**usual, **changed})


def results(trainer, data):
    """Returns the values that a trained Trainer logged, and its evaluation of the data."""
    logs = [log for log in trainer.state.log_history if "loss" in log]
    steps = [(log["loss"], float(log["grad_norm"]), log["learning_rate"]) for log in logs]
    predicted = trainer.predict(data)
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    return {"steps": steps, "loss": trainer.evaluate(data)["eval_loss"], "logits": torch.as_tensor(logits)}


class Numbers(TrainerCallback):
    """Changes the numbers of the update rule before each step."""

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        for index, group in enumerate(optimizer.param_groups):
            group["weight_decay"] = 0.5 * state.global_step + index
            group["betas"] = (0.9 - 0.1 * state.global_step, 0.99)
            group["note"] = "of the program"


def plain(folder, name, case, callbacks=(), **changed):
    model, data = made(case)
    trainer = Trainer(model, arguments(folder / "plain", 1, save_strategy="no", **changed), train_dataset=data,
                      callbacks=[*callbacks])
    trainer.train()
    torch.save({**results(trainer, data), "weights": model.state_dict()}, folder / f"{name}.pt")


def run_plain(folder):
    for case in CASES:
        plain(folder, case, case)
    plain(folder, "autocast", "language model", bf16=True)
    plain(folder, "numbers", "classifier", [Numbers()])
    plain(folder, "recomputation", "language model", activation_checkpointing=True, max_steps=4)


def run_ranks(folder):
    import tessera
    from tessera.integrations.transformers import TesseraTrainer
    rank, ranks = tessera.rank(), tessera.world_size()

    def sharded(case, strategy, output, callbacks=(), **changed):
        model, data = made(case)
        trainer = TesseraTrainer(model, arguments(output, ranks, **changed), strategy=strategy, train_dataset=data,
                                 eval_dataset=data, callbacks=[*callbacks])
        return trainer, data

    def expect_close(name, wanted, got, tolerance):
        assert len(wanted["steps"]) == len(got["steps"]), f"{name}: {len(got['steps'])} steps"
        for step, (x, y) in enumerate(zip(wanted["steps"], got["steps"])):
            assert all(abs(a - b) <= tolerance * abs(a) for a, b in zip(x, y)), f"{name}: step {step}: {x}, got {y}"
        assert abs(wanted["loss"] - got["loss"]) <= tolerance * wanted["loss"], f"{name}: loss {got['loss']}"
        assert wanted["logits"].shape == got["logits"].shape, f"{name}: {got['logits'].shape}"
        assert torch.allclose(wanted["logits"], got["logits"], rtol=100 * tolerance, atol=100 * tolerance), name

    def expect_weights(name, wanted, got, tolerance):
        if rank == 0:
            assert list(wanted) == list(got), f"{name}: names {list(got)}"
            for key, value in wanted.items():
                assert torch.allclose(value, got[key], rtol=tolerance, atol=tolerance), f"{name}: {key}"

    def like_plain(case, title, strategy):
        name, output = f"{case}, {title}", folder / f"{case}, {title}"
        trainer, data = sharded(case, strategy, output)
        trainer.train()
        assert trainer.engine.samples_seen == 2 * SAMPLES, f"{name}: {trainer.engine.samples_seen} samples"
        wanted, got, state = torch.load(folder / f"{case}.pt"), results(trainer, data), trainer.engine.state_dict()
        expect_close(name, wanted, got, 1e-5)
        expect_weights(name, wanted["weights"], state, 1e-5)
        trainer.save_model(output / "saved")
        if rank == 0:
            names = load_file(output / "saved" / "model.safetensors")
            assert names and all(torch.equal(state[key], value) for key, value in names.items()), name
        if rank == 0 and case == "language model":
            loaded = LlamaForCausalLM.from_pretrained(output / "saved").state_dict()
            assert all(torch.equal(state[key], value) for key, value in loaded.items()), name
        trainer.engine.close()
        for step in (2, 4) if LONG or title == "FULL_SHARD" else (4,):  # one step in each epoch
            resumed, _ = sharded(case, strategy, output / "resumed", save_strategy="no")
            resumed.train(resume_from_checkpoint=str(output / f"checkpoint-{step}"))
            again = results(resumed, data)
            assert again["steps"] == got["steps"] and again["loss"] == got["loss"], f"{name}: resumed at {step}"
            for key, value in resumed.engine.state_dict().items():
                assert torch.equal(state[key], value), f"{name}: resumed at {step}: {key}"
            resumed.engine.close()

    def numbers_that_change():
        """Numbers that a callback writes into the optimizer's groups take effect from the next step on, or are an
        error."""
        trainer, data = sharded("classifier", {}, folder / "numbers", [Numbers()], save_strategy="no")
        trainer.train()
        wanted = torch.load(folder / "numbers.pt")
        expect_close("numbers", wanted, results(trainer, data), 1e-5)
        expect_weights("numbers", wanted["weights"], trainer.engine.state_dict(), 1e-5)
        try:
            trainer.optimizer.param_groups[1]["amsgrad"] = True
        except tessera.Error as error:
            assert "sets amsgrad=True in a group of the Engine's optimizer" in str(error), error
        else:
            raise AssertionError("amsgrad was not refused")
        trainer.engine.close()

    def other_modes():
        """Autocast and recomputation are those of the Trainer. Sums of bf16 differ with the number of rows."""
        for name, tolerance, changed in (("autocast", 3e-2, {"bf16": True}),
                                         ("recomputation", 1e-5, {"activation_checkpointing": True, "max_steps": 4})):
            trainer, data = sharded("language model", {}, folder / name, save_strategy="no", **changed)
            trainer.train()
            expect_close(name, torch.load(folder / f"{name}.pt"), results(trainer, data), tolerance)
            trainer.engine.close()

    def tokens_of_each_rank():
        """Even if the Trainer divides by the labels of one rank, the step uses the mean over the labels of all
        ranks."""
        trainer, data = sharded("language model", {}, folder / "own labels", save_strategy="no", average_tokens_across_devices=False)
        trainer.train()
        wanted, got = torch.load(folder / "language model.pt"), results(trainer, data)
        for (_, norm, _), (_, found, _) in zip(wanted["steps"], got["steps"], strict=True):
            assert abs(norm - found) <= 1e-5 * norm, f"wanted a norm of {norm}, got {found}"
        expect_weights("labels of each rank", wanted["weights"], trainer.engine.state_dict(), 1e-5)
        trainer.engine.close()

    def adapters():
        """A model of peft that is made without memory. A checkpoint contains its adapters, and training resumes from
        the checkpoint."""
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        data, output, runs = made("language model")[1], folder / "adapters", []
        for resume_from in (None, str(output / "checkpoint-2")):
            with tessera.deferred_init():
                model = get_peft_model(made("language model")[0], adapter)
            args = arguments(output, ranks, save_strategy="no" if resume_from else "steps")
            trainer = TesseraTrainer(model, args, strategy={}, train_dataset=data, eval_dataset=data)
            before = trainer.evaluate()["eval_loss"]
            trainer.train(resume_from_checkpoint=resume_from)
            assert trainer.evaluate()["eval_loss"] < before
            runs.append(trainer.engine.state_dict())
            trainer.engine.close()
        assert all(torch.equal(value, runs[1][key]) for key, value in runs[0].items())
        if rank == 0:
            saved = load_file(output / "checkpoint-6" / "adapter_model.safetensors")
            assert saved and all("lora" in name for name in saved), list(saved)

    def best_model():
        """The rate is so high that the loss becomes worse, so the weights of the best checkpoint are restored."""
        output = folder / "best"
        trainer, _ = sharded("classifier", {"optimizer": {"type": "sgd"}}, output, learning_rate=20.0, weight_decay=0.0,
                             adam_epsilon=1e-8, lr_scheduler_type="constant", eval_strategy="steps", eval_steps=2,
                             load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=1)
        trainer.train()
        best, state = trainer.state.best_model_checkpoint, trainer.engine.state_dict()
        assert not best.endswith("-6"), "the last checkpoint is the best"
        if rank == 0:
            saved = load_file(f"{best}/model.safetensors")
            assert saved and all(torch.equal(state[key], value) for key, value in saved.items()), best
        assert abs(trainer.evaluate()["eval_loss"] - trainer.state.best_metric) < 1e-6
        trainer.engine.close()

    def stopped_and_trained_again():
        """If a callback ends a training between two microbatches of a step, the next training does not use the
        gradients of this step."""

        class Stop(transformers.TrainerCallback):
            def on_substep_end(self, args, state, control, **_):
                control.should_training_stop = True

        trainer, data = sharded("classifier", {}, folder / "stopped", save_strategy="no")
        trainer.add_callback(Stop())
        trainer.train()
        assert trainer.engine.steps_applied == 0
        trainer.remove_callback(Stop)
        trainer.train()
        expect_close("stopped", torch.load(folder / "classifier.pt"), results(trainer, data), 1e-5)
        trainer.engine.close()

    def refusals():
        bad = [
            ({}, {"strategy": "FULL"}, {}, "strategy"),
            ({}, {"gradient_accumulation": 3}, {}, "gradient_accumulation_steps says 2"),
            ({}, {"gradient_clipping": 2.0}, {}, "max_grad_norm says 0.5"),
            ({}, {"lr_schedule": {"type": "cosine", "total_steps": 9}}, {}, "leave lr_schedule out"),
            ({}, {"optimizer": {"lr": 0.5}}, {}, "learning_rate says 0.01"),
            ({}, {"optimizer": {"eps": 0.5}}, {}, "adam_epsilon says 1e-05"),
            ({}, {"optimizer": {"type": "lion"}}, {}, "TrainingArguments.adam_epsilon=1e-05 has no effect"),
            ({"optim": "adafactor"}, {}, {}, 'optim="adafactor"'),
            ({"bf16": True}, {"mixed_precision": {"param": "fp16"}}, {}, "bf16 disagrees"),
            ({"bf16_full_eval": True}, {}, {}, "bf16_full_eval=True"),
            ({"torch_compile": True}, {}, {}, "torch_compile=True"),
            ({"auto_find_batch_size": True}, {}, {}, "auto_find_batch_size=True"),
            ({"ddp_bucket_cap_mb": 25}, {}, {}, "ddp_bucket_cap_mb=25"),
            ({}, {}, {"model_init": Classifier}, "does not take model_init"),
            ({}, {}, {"optimizers": (torch.optim.SGD(Classifier().parameters()), None)}, "does not take optimizers"),
        ]
        for changed, strategy, more, text in bad:
            args = arguments(folder / "refused", ranks, **changed)
            try:
                TesseraTrainer(Classifier(), args, strategy=strategy, **more)
            except tessera.Error as error:
                assert text in str(error), f"wanted {text}, got {error}"
            else:
                raise AssertionError(f"not refused: {changed} {strategy} {list(more)}")
        class OwnOptimizer(TesseraTrainer):
            def create_optimizer(self, *_):
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
                return self.optimizer

        model, data = made("classifier")
        trainer = OwnOptimizer(model, arguments(folder / "refused", ranks, save_strategy="no"), strategy={}, train_dataset=data)
        try:
            trainer.train()
        except tessera.Error as error:
            assert "OwnOptimizer.create_optimizer made SGD" in str(error), error
        else:
            raise AssertionError("not refused: an optimizer of create_optimizer")
        trainer.engine.close()
        trainer, _ = sharded("classifier", {}, folder / "refused", save_strategy="no")
        try:
            trainer.train(resume_from_checkpoint=str(folder))
        except tessera.Error as error:
            assert "has no folder tessera" in str(error), error
        trainer.engine.close()

    refusals()
    for case in CASES:
        for title, strategy in STRATEGIES.items():
            if not LONG and (title == "private copies") != (case == "classifier"):
                continue
            print(case, title, flush=True)
            like_plain(case, title, strategy)
    for extra in (numbers_that_change, other_modes, tokens_of_each_rank, adapters, best_model, stopped_and_trained_again):
        print(extra.__name__, flush=True)
        extra()
    print("trained like the plain Trainer")


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
if sys.argv[1] == "plain":
    run_plain(pathlib.Path(sys.argv[2]))
else:
    run_ranks(pathlib.Path(sys.argv[1]))
