"""Provides a strategy of Lightning, with an Engine that trains the LightningModule.

    trainer = Trainer(accelerator="cpu", devices=2, strategy=TesseraStrategy({"units": {"classes": ["Block"]}}))
    trainer.fit(module, loader)

`tessera launch` or torchrun starts the ranks, `devices` on each host. The module need not change: configure_optimizers
determines how AdamW, Adam or SGD updates. Schedulers, callbacks and the module may write into the optimizer's groups
during training (lr, weight_decay, betas, momentum ...). The next step uses the new values, as without Tessera. If the
Engine cannot follow a change, the line that makes the change raises an Error. Parameters may be frozen and unfrozen,
with groups of their own (BackboneFinetuning). Lightning's callbacks that average weights may write weights. The Trainer
decides how many microbatches a step has and how gradients are clipped. The strategy, a file or a dict, decides
everything else. If the Trainer and the strategy both give a value, the two values must be equal.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from tessera._engine import Engine, Strategy
from tessera._error import Error
from tessera._job import world_size
from tessera.integrations._bridge import (agree, copy_of, expect_device, samples_of, take_step,
                                          use_manual_schedule)
from tessera.integrations._optimizer import FollowedOptimizer


class TesseraStrategy(DDPStrategy):
    """Lightning's strategy with an Engine.

    `engine` is the Engine, from the first fit, validate, test or predict on; `result` is the result of the last step.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self._given = copy_of(strategy)
        self._checkpoint = ""
        self._samples = 0  # samples of the latest batch
        self._followed: FollowedOptimizer | None = None
        self.engine: Engine | None = None
        self.result: Any = None

    def _configure_launcher(self) -> None:
        ranks = self.num_processes
        if ranks > 1 and not self.cluster_environment.creates_processes_externally:
            raise Error(f"TesseraStrategy does not start the ranks of Trainer(devices={ranks}). [T0724] hint: start the "
                        f"program with `tessera launch -n {ranks} -- python ...` or torchrun")

    def setup(self, trainer: Any) -> None:
        self._expect_possible(trainer)
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for each in (self.lightning_module, *self.optimizers):
                each.zero_grad = MethodType(_zero_grad, each)
            self._make_engine(self._completed(trainer))
        elif self.engine is None or self.engine.model is not self.lightning_module:
            self._make_engine({**self._given, "optimizer": {"type": "sgd", "weight_decay": 0.0}})  # a rule without state
        for callback in trainer.callbacks:
            self._let_write(callback)
        self.setup_precision_plugin()

    def _let_write(self, callback: Any) -> None:
        """Lets Lightning's callbacks write weights, under Engine.gathered(write=True)."""
        for name in _WRITERS:
            method = getattr(callback, name, None)
            if method is not None and not isinstance(method, _Writing):
                setattr(callback, name, _Writing(self, method))

    def _make_engine(self, strategy: dict[str, Any]) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = Engine(self.lightning_module, strategy)
        expect_device(self.engine, self.root_device, "Trainer(accelerator)")

    def _expect_possible(self, trainer: Any) -> None:
        module, precision = self.lightning_module, self.precision_plugin
        if self.world_size != world_size():
            raise Error(f"Trainer(devices, num_nodes) say {self.world_size} ranks, but the job has {world_size()}. "
                        "[T0725] hint: devices is how many ranks start on each host")
        if not module.automatic_optimization:
            raise Error("TesseraStrategy cannot train with automatic_optimization = False. [T0726] hint: write the loop with "
                        "tessera.Engine, one for each optimizer")
        for hook in ("backward", "configure_gradient_clipping"):
            if is_overridden(hook, module):
                raise Error(f"TesseraStrategy cannot call {type(module).__name__}.{hook}: the Engine does that work. "
                            "[T0727] hint: remove the method; clip with Trainer(gradient_clip_val)")
        if type(precision) is not Precision and not (type(precision) is MixedPrecision and precision.scaler is None):
            raise Error(f'TesseraStrategy does not take Trainer(precision="{precision.precision}"). [T0728] hint: leave it out '
                        'and set "mixed_precision": {"param": "bf16"} in the strategy; "bf16-mixed" is possible too')
        if self._layer_sync is not None:
            raise Error("TesseraStrategy does not take Trainer(sync_batchnorm=True). [T0729] hint: leave it out, and call "
                        "tessera.convert_sync_batchnorm(model) before fit")

    def _completed(self, trainer: Any) -> dict[str, Any]:
        """Returns the strategy, completed with the values of the Trainer and of the module's optimizer."""
        strategy = copy_of(self._given)
        agree(strategy, "gradient_accumulation", trainer.accumulate_grad_batches, "Trainer(accumulate_grad_batches)")
        if trainer.gradient_clip_val is not None:
            key = "gradient_clip_value" if trainer.gradient_clip_algorithm == "value" else "gradient_clipping"
            agree(strategy, key, float(trainer.gradient_clip_val), "Trainer(gradient_clip_val)")
        use_manual_schedule(strategy, "the optimizer of configure_optimizers, with its schedulers,")
        self._followed = FollowedOptimizer(self.optimizers[0], self.lightning_module, "TesseraStrategy",
                                          "configure_optimizers")  # Lightning itself refuses several optimizers
        self._followed.add_to(strategy)
        return strategy

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._followed.follow(self.engine)
        self._samples = samples_of(args)
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
        """Runs the Engine's backward. Lightning has divided the loss by accumulate_grad_batches; the Engine itself
        takes the mean over microbatches.
        """
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        accumulation = self.lightning_module.trainer.accumulate_grad_batches
        if accumulation != self.engine.strategy["gradient_accumulation"]:
            raise Error("accumulate_grad_batches has changed since fit began, which TesseraStrategy cannot follow. "
                        "[T0730] hint: remove GradientAccumulationScheduler")
        with _in_lightning():
            self.engine.backward(loss * accumulation, samples=self._samples)
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None) -> Any:
        loss, trainer = closure(), self.lightning_module.trainer
        for call_hooks in (call._call_callback_hooks, call._call_lightning_module_hook):
            call_hooks(trainer, "on_before_optimizer_step", optimizer)
        self._followed.hand_on(self.engine)
        with _in_lightning():
            self.result = take_step(self.engine)
        optimizer._opt_called = True  # schedulers expect this
        return loss

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.engine.state_dict()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves Lightning's file, which has whole weights, and a folder beside the file with everything that is needed
        to continue training.
        """
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:
            self.engine.save_checkpoint(_folder_beside(filepath), keep=1)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._checkpoint = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self.engine.gathered(write=True):
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module = self.lightning_module
        for callback in module.trainer.callbacks:
            if isinstance(callback, BaseFinetuning):
                # The callback adds its groups again, since it did not have these groups when the fit started.
                callback.on_fit_start(module.trainer, module)
        super().load_optimizer_state_dict(checkpoint)  # loads rates and other numbers of the rule
        self._followed.follow(self.engine)
        self.engine.load_checkpoint(_folder_beside(self._checkpoint))
        self._followed.forget_sent()

    def model_to_device(self) -> None:
        """Does nothing: the Engine brings each rank's shards to its device."""

    def teardown(self) -> None:
        """Ends a fit or test. The module stays sharded, and on its device, for the next fit or test."""
        for part in (self.precision_plugin, self.accelerator, self.checkpoint_io, self.cluster_environment):
            part.teardown()


# These are methods of StochasticWeightAveraging, and of WeightAveraging and classes derived from it.
_WRITERS = ("transfer_weights", "_swap_models", "_copy_average_to_current")


class _Writing:
    """A method that writes parameters. It is called under Engine.gathered(write=True)."""

    def __init__(self, strategy: TesseraStrategy, method: Callable[..., Any]) -> None:
        self._strategy, self._method = strategy, method

    def __call__(self, *args: Any) -> Any:
        with self._strategy.engine.gathered(write=True):
            return self._method(*args)


def _zero_grad(owner: Any, set_to_none: bool = True) -> None:
    """Replaces zero_grad of the module and of its optimizer. The Engine has the gradients, so .grad has no memory to
    which zeros could be written. Each .grad becomes None.
    """
    type(owner).zero_grad(owner)


@contextmanager
def _in_lightning() -> Iterator[None]:
    """Explains how a Lightning program gets the Engine, in each Error that leaves the block and mentions the Engine."""
    try:
        yield
    except Error as error:
        if "engine" not in str(error):
            raise
        raise Error(f"{error}. In Lightning the Engine is trainer.strategy.engine; hooks that freeze, unfreeze or write "
                    "come before training_step, such as on_train_batch_start", error.exit_code) from error


def _folder_beside(file: Any) -> str:
    return os.path.realpath(file) + ".tessera"
