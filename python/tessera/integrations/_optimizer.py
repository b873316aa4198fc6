"""An optimizer of torch.optim, said as a strategy says it. It never steps: the Engine does what it stands for."""

from typing import Any

import torch

from tessera._engine import Engine
from tessera._error import Error
from tessera.integrations._bridge import agree

# What the strategy calls a rule, and those of its numbers that the strategy has too.
_RULES = {torch.optim.AdamW: ("adamw", ("betas", "eps", "weight_decay")),
          torch.optim.Adam: ("adam", ("betas", "eps", "weight_decay")),
          torch.optim.SGD: ("sgd", ("momentum", "dampening", "nesterov", "weight_decay"))}
_OF_A_GROUP = ("betas", "eps", "weight_decay")
_WITHOUT_EFFECT = ("params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable")  # on what is computed


def add_optimizer(strategy: dict[str, Any], optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Sets the strategy's "optimizer". The first group's numbers are everybody's; others are groups "1", "2", ..."""
    kind = type(optimizer)
    if kind not in _RULES:
        raise Error("TesseraStrategy trains with AdamW, Adam or SGD of torch.optim, but configure_optimizers made "
                    f"{kind.__name__}")
    rule, numbers = _RULES[kind]
    options, who = strategy.setdefault("optimizer", {}), "configure_optimizers"
    agree(options, "type", rule, who)
    names = {value: name for name, value in module.named_parameters()}
    groups = [{key: list(value) if key == "betas" else value for key, value in group.items()}
              for group in optimizer.param_groups]
    for key in ("lr", *numbers):
        agree(options, key, groups[0][key], who)
    for index, group in enumerate(groups):
        _expect_sayable(group, groups[0], kind, numbers)
        matched = [names.pop(value) for value in group["params"]]
        if index > 0:
            own = {key: group[key] for key in _OF_A_GROUP if key in numbers}
            options.setdefault("groups", []).append({"name": str(index), "match": matched, **own})
    left_out = [name for value, name in names.items() if value.requires_grad]
    if left_out:
        raise Error(f"configure_optimizers leaves {left_out[0]} out, which the Engine would train. hint: freeze it "
                    "with requires_grad_(False)")


def _expect_sayable(group: dict[str, Any], first: dict[str, Any], kind: type, numbers: tuple[str, ...]) -> None:
    usual = kind([torch.zeros(())]).defaults
    for key in set(group) - {*numbers, *_WITHOUT_EFFECT}:
        if group[key] != usual.get(key):
            raise Error(f"TesseraStrategy cannot train with {key}={group[key]} of {kind.__name__}")
    for key in set(numbers) - {*_OF_A_GROUP}:
        if group[key] != first[key]:
            raise Error(f"TesseraStrategy cannot train groups of parameters with a {key} of their own")


def set_rates(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Gives the Engine the rates that the optimizer's schedulers have set."""
    for index, group in enumerate(optimizer.param_groups):
        engine.set_lr(float(group["lr"]), str(index) if index > 0 else None)
