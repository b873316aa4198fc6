"""Expresses an optimizer of torch.optim in the form of a strategy. The optimizer never makes a step: the Engine makes
it instead."""

import operator
from typing import Any

import torch

from tessera._engine import Engine
from tessera._error import Error
from tessera.integrations._bridge import agree
from tessera.integrations._groups import WatchedGroup, plain, watch

# Name of each rule in the strategy, and those of its numbers that the Engine supports.
_RULES = {torch.optim.AdamW: ("adamw", ("betas", "eps", "weight_decay")),
          torch.optim.Adam: ("adam", ("betas", "eps", "weight_decay")),
          torch.optim.SGD: ("sgd", ("momentum", "dampening", "nesterov", "weight_decay"))}
_OF_A_GROUP = ("betas", "eps", "weight_decay")  # group keys of the strategy; hand_on gives the Engine all numbers


class FollowedOptimizer:
    """Tells an Engine which numbers schedulers, callbacks and the program write into an optimizer's groups, and which
    parameters train.

    The optimizer's first group has the parameters that are in no group of the strategy. Its other groups are groups
    "1", "2", ... of the strategy. Errors name `who` (the object that trains) and `maker` (the optimizer's maker).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, who: str, maker: str) -> None:
        kind = type(optimizer)
        self._who, self._maker = who, maker
        if kind not in _RULES:
            raise Error(f"{who} trains with AdamW, Adam or SGD of torch.optim, but {maker} made {kind.__name__}. [T0718] hint: make one of those, or write the loop with tessera.Engine, whose strategy has "
                        "other rules too")
        self._optimizer, self._module, self._kind = optimizer, module, kind
        self._rule, self._numbers = _RULES[kind]
        self._usual = kind([torch.zeros(())]).defaults
        self._sent: dict[int, dict[str, Any]] = {}  # the numbers that the Engine has, by group
        self._members: list[list[torch.Tensor]] = []  # the parameters of each group that the Engine has
        self._frozen: list[tuple[str, torch.Tensor]] = []  # parameters that are frozen in the Engine
        self._watch()

    def add_to(self, strategy: dict[str, Any]) -> None:
        """Sets the strategy's "optimizer"."""
        self._expect_nothing_of_its_own()
        options, who = strategy.setdefault("optimizer", {}), self._maker
        agree(options, "type", self._rule, who)
        names = {value: name for name, value in self._module.named_parameters()}
        groups = self._optimizer.param_groups
        first = {"lr": plain(groups[0].get("initial_lr", groups[0]["lr"])),  # a warm-up may have begun at 0
                 **{key: groups[0][key] for key in self._numbers}}
        if "momentum" in first:  # memory is needed if some group has a momentum
            first["momentum"] = first["momentum"] or max(group["momentum"] for group in groups)
        for key, value in first.items():
            agree(options, key, list(value) if key == "betas" else value, who)
        for index, group in enumerate(groups):
            unknown = [value for value in group["params"] if value not in names]
            if unknown:
                raise Error(f"group {index} of {self._kind.__name__}, which {self._maker} made, has a parameter of shape "
                            f"{list(unknown[0].shape)} that is not the module's. [T0766] hint: make the optimizer of the module's "
                            "own parameters(), after the module's last change")
            matched = [names.pop(value) for value in group["params"]]
            if index > 0:
                options.setdefault("groups", []).append(self._said(index, group, matched))
        left_out = [name for value, name in names.items() if value.requires_grad]
        if left_out:
            raise Error(f"{self._maker} leaves {left_out[0]} out, which the Engine would train. [T0719] hint: freeze it "
                        "with requires_grad_(False)")
        self._frozen = [item for item in self._module.named_parameters() if not item[1].requires_grad]
        self._members = [[*group["params"]] for group in groups]
        self._sent.clear()

    def _said(self, index: int, group: dict[str, Any], names: list[str]) -> dict[str, Any]:
        own = {key: group[key] for key in _OF_A_GROUP if key in self._numbers}
        return {"name": str(index), "match": names, **{k: list(v) if k == "betas" else v for k, v in own.items()}}

    def _expect_nothing_of_its_own(self) -> None:
        """Raises Error for anything that only the optimizer's own step would use, since the Engine makes the step."""
        name = self._kind.__name__
        if any(self._optimizer.state.values()):
            raise Error(f"{name}, which {self._maker} made, has states of an earlier training, such as moments, which the Engine would "
                        "leave out. [T0956] hint: load a checkpoint that was saved with Tessera, which has the Engine's; or begin with new "
                        "states: optimizer.state.clear()")
        if any(getattr(self._optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
            raise Error(f"{name}, which {self._maker} made, has a hook of its step, which would never run: the Engine steps in its place. "
                        "[T0957] hint: remove the hook, and call its function around the step")

    def _watch(self) -> None:
        """Watches all groups, and finds the values that were written before the watch began."""
        for group in self._optimizer.param_groups:
            if type(group) is WatchedGroup:
                continue
            for key in set(self._usual) - {"lr", *self._numbers, "foreach", "fused", "capturable"}:
                if group[key] != self._usual[key]:
                    raise Error(f"{self._who} cannot train with {key}={group[key]} of {self._kind.__name__}. "
                                "[T0720] hint: leave it out")
        watch(self._optimizer, self._usual, ("lr", *self._numbers), self._kind.__name__)

    def forget_sent(self) -> None:
        """Forgets which numbers the Engine has, since a checkpoint may have given it other numbers."""
        self._sent.clear()

    def hand_on(self, engine: Engine) -> None:
        """Gives the Engine the rates and numbers that the groups have now, to be used in the next step."""
        self._expect_nothing_of_its_own()
        groups = self._optimizer.param_groups
        for index, group in enumerate(groups):
            name = str(index) if index > 0 else None
            engine.set_lr(float(group["lr"]), name)
            numbers = {key: plain(group[key]) for key in self._numbers}
            if self._sent.get(index) == numbers:
                continue
            for key, value in numbers.items():
                try:
                    engine.set_option(key, value, name)
                except Error as error:
                    raise Error(f"group {index} of {self._kind.__name__} has {key}={group[key]!r} now, by a scheduler, a "
                                f"callback or the module, which the Engine cannot follow: {error}") from error
            self._sent[index] = numbers

    def follow(self, engine: Engine) -> None:
        """Makes the Engine train the parameters that require gradients now. Call it before a forward; it is collective
        if something has changed.
        """
        self._watch()  # also watches groups made by load_state_dict
        groups = self._optimizer.param_groups
        unfrozen = [name for name, value in self._frozen if value.requires_grad]
        is_same = len(groups) == len(self._members) and all(
            len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
            for group, known in zip(groups, self._members))
        if is_same and not unfrozen:
            return
        self._expect_same_members(groups)
        names = {value: name for name, value in self._module.named_parameters()}
        for index in range(len(self._members), len(groups)):
            self._add_group(engine, index, names)
        frozen = {name: value for name, value in self._frozen}
        unfrozen = [name for name in unfrozen if name in frozen]
        members = {id(value) for group in groups for value in group["params"]}
        for name in unfrozen:
            if id(frozen[name]) not in members:
                raise Error(f"{name} requires gradients since training began, but no group of {self._kind.__name__} has it, so that "
                            "plain PyTorch would never update it. [T0721] hint: call optimizer.add_param_group, as "
                            "BaseFinetuning.unfreeze_and_add_param_group does; or requires_grad_(False)")
        if unfrozen:
            engine.set_trainable(unfrozen, True)
        # The Engine has planned again for the parameters that require gradients now. Parameters that a callback has
        # frozen have no memory for gradients.
        self._frozen = [item for item in self._module.named_parameters() if not item[1].requires_grad]

    def _expect_same_members(self, groups: list[dict[str, Any]]) -> None:
        for index, known in enumerate(self._members):
            if index >= len(groups) or [*map(id, groups[index]["params"])] != [*map(id, known)]:
                raise Error(f"group {index} of {self._kind.__name__} has other parameters than when training began, which the Engine "
                            "cannot follow. [T0722] hint: add a group with optimizer.add_param_group, or freeze parameters with "
                            "requires_grad_(False)")

    def _add_group(self, engine: Engine, index: int, names: dict[torch.Tensor, str]) -> None:
        group = self._optimizer.param_groups[index]
        unknown = [value for value in group["params"] if value not in names]
        if unknown:
            raise Error(f"group {index} of {self._kind.__name__} has a parameter of shape {list(unknown[0].shape)} that is not the "
                        "module's. [T0723] hint: register it in the module before training begins")
        still = [names[value] for value in group["params"] if not value.requires_grad]
        added = [names[value] for value in group["params"]]
        engine.add_group(self._said(index, group, added))
        if still:
            engine.set_trainable(still, False)
        self._members.append([*group["params"]])
        self._frozen = [item for item in self._frozen if item[0] not in set(added) - set(still)]
