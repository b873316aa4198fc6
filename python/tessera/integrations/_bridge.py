"""Has the functions that the integrations share."""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from tessera import _native
from tessera._engine import Engine, Strategy
from tessera._error import Error
from tessera._job import plain_values, read_strategy


def copy_of(strategy: Strategy) -> dict[str, Any]:
    """Returns the keys that a strategy names, so that other keys can be added. Raises Error with everything that is
    wrong with the keys. Raises Error for "deal" by speed too, since ranks would need different numbers of batches.
    """
    read_strategy(strategy)
    if isinstance(strategy, (str, os.PathLike)):
        with open(strategy, encoding="utf-8") as file:
            keys = json.load(file)
    else:
        keys = plain_values(strategy)
    if keys.get("deal", {}).get("by") == "speed":
        raise Error('the strategy says "deal": {"by": "speed"}, but each rank\'s DataLoader gives it equally many batches a step here. '
                    '[T0939] hint: leave "deal" out, or write the loop with tessera.Engine, its microbatches() and tessera.RankSampler')
    return keys


def agree(keys: dict[str, Any], key: str, value: Any, who: str) -> None:
    """Sets `key`. Raises Error if the strategy names another value. `who` names the source of `value`."""
    if keys.setdefault(key, value) != value:
        raise Error(f'the strategy says "{key}": {json.dumps(keys[key])}, but {who} says {json.dumps(value)}. '
                    "[T0714] hint: leave the key out of the strategy, or make them equal")


def use_manual_schedule(strategy: dict[str, Any], who: str) -> None:
    if strategy.setdefault("lr_schedule", {"type": "manual"}) != {"type": "manual"}:
        raise Error(f'the strategy has an "lr_schedule", but {who} sets the learning rate. [T0715] hint: leave lr_schedule out '
                    "of the strategy; that scheduler warms up, and a factor of base_batch_size belongs to the rate that it begins with")


def samples_of(batch: Any) -> int:
    """Returns the number of samples in a batch: the first dimension of the first tensor in it, or 0 if it is not known.
    The Engine counts samples (samples_seen), and measures "noise_scale" in samples.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next(filter(None, map(samples_of, parts)), 0)


def name_units(strategy: dict[str, Any], model: torch.nn.Module) -> None:
    """If the strategy has no units, sets them to the blocks that a model of transformers names in `_no_split_modules`.
    """
    if "units" not in strategy:
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        strategy["units"] = {"classes": sorted(blocks & {type(module).__name__ for module in model.modules()})}


def take_step(engine: Engine) -> _native.StepResult:
    """Makes a step from the microbatches so far, and returns its result.

    The last step of an epoch may have fewer microbatches, and a step whose batches were skipped has none. The missing
    microbatches count as zero, as in Lightning and accelerate, which divide each loss by the number of microbatches of
    a whole step. The loss of a missing microbatch depends on no parameter, so a parameter that no microbatch used stays
    as it is.
    """
    while not engine.step_is_due():
        engine.backward(torch.zeros((), device=engine.device, requires_grad=True))
    return engine.step()


def expect_device(engine: Engine, device: torch.device, who: str) -> None:
    if engine.device.type != device.type:
        raise Error(f"the strategy puts parameters on {engine.device}, but {who} puts inputs on {device}. [T0716] hint: choose "
                    'the same on both sides: "comm": {"transport": "nccl"} in the strategy is for GPUs, "auto", "host" and "gloo" are for the CPU')
