"""Defines the rows of DeepSpeed's "optimizer" and "scheduler".

DeepSpeed's scheduler takes its first step after the first update. Update k, counted from 0, therefore has the rate of
iteration k - 1, and the first two updates have the same rate. Tessera's schedules (optim/lr_schedule.h) count updates.
The table uses DeepSpeed's W = warmup_num_steps and T = total_num_steps. It shows factors of the peak, for a warm-up
that rises linearly from 0:

  scheduler       DeepSpeed, iteration i = k - 1               Tessera, update k                       equal from
  WarmupLR        i / W, then 1                                constant, warmup_steps W + 1            k = W + 1
  WarmupDecayLR   i / W, then (T - i) / (T - W)                linear, W + 1 and total_steps T + 1     k = W + 1
  WarmupCosineLR  i / W, then a cosine of (i - W + 1)/(T - W)  cosine, W and T                         k = W + 1

Before k = W + 1, Tessera's rate is (k + 1) / (warmup_steps + 1) of the peak. It is a little higher than DeepSpeed's,
and never 0.
"""

from typing import Any

from tessera.import_config._rows import Row, Rule, below, expects, flag, guarded, ignores, refuses, rule, sets
from tessera.import_config._session import Key, Session
from tessera.import_config._values import boolean, did_you_mean, integer, number, word

_PARAMS, _SCHEDULE = "optimizer.params.", "scheduler.params."
# Optimizers of DeepSpeed, or of torch.optim, for which Tessera has a rule. Each is listed with those of its defaults
# that differ from the defaults of torch.optim or of Tessera 0.1. The strategy gets all listed defaults.
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"weight_decay": 0.0}, "adamw": {"weight_decay": 0.0}, "sgd": {"weight_decay": 0.0},
    "lion": {"betas": [0.9, 0.99], "lr": 0.001, "weight_decay": 0.0}, "adagrad": {"eps": 1e-10, "lr": 0.01, "weight_decay": 0.0},
    "rmsprop": {"lr": 0.01, "weight_decay": 0.0}}
_ONE_BIT = ('it compresses momentum. Use "AdamW"; in the strategy, NO_SHARD on CPUs with compression {"method": {"type": "one_bit", "momentum": betas[0]}, '
            '"start_step": N} and optimizer {"freeze_step": N} is close to OneBitAdam')
_MUP = 'muP gives each parameter a rate by its width. Use "AdamW" or "SGD" with optimizer.groups, which have an lr_ratio'
_REFUSED_OPTIMIZERS = {
    "onebitadam": _ONE_BIT, "zerooneadam": _ONE_BIT, "onebitlamb": _ONE_BIT, "muadam": _MUP, "muadamw": _MUP, "musgd": _MUP,
    "lamb": "DeepSpeed keeps LAMB's ratio of norms between min_coeff and max_coeff (0.01 and 10), and Tessera does not. If that is fine, set "
            'optimizer {"type": "lamb"} in the strategy',
    "muon": "DeepSpeed's Muon updates the parameters that the program marks with use_muon, and Tessera's all matrices but those of embeddings. If "
            'that is fine, set optimizer {"type": "muon", "muon": {"adjust_lr": "original"}} in the strategy'}
_REFUSED_SCHEDULERS = {
    "onecycle": "DeepSpeed's OneCycle rises and falls linearly, moves the momentum against the rate and decays afterwards; Tessera's one_cycle "
                'follows cosines and leaves the momentum. Set lr_schedule {"type": "one_cycle"}, or {"type": "manual"} and call Engine::set_lr',
    "lrrangetest": 'Tessera has no range test. Set lr_schedule {"type": "manual"} and call Engine::set_lr before each step'}
# Tessera's type of schedule, and the number of updates that are added to DeepSpeed's numbers of steps (table above).
_SCHEDULERS = {"warmuplr": ("constant", 1), "warmupdecaylr": ("linear", 1), "warmupcosinelr": ("cosine", 0)}
_LOGARITHM = ("the warm-up of DeepSpeed rises with the logarithm of the step, which is its default, and Tessera's rises linearly. Say "
              '"warmup_type": "linear" if that is fine')


def _of(section: str, types: str, *parts: list[Row]) -> list[Row]:
    """Makes rows for parameters that only some types of optimizers or schedulers have."""
    def guard(key: Key, apply: Rule) -> None:
        name = word(key.session.find(f"{section}.type"))
        is_known = name in (_OPTIMIZERS if section == "optimizer" else _SCHEDULERS)
        if is_known and name not in types.split():
            key.refused(f"{section}.type {name} has no such parameter")
        elif not is_known or section == "scheduler" and not _taken_scheduler(key.session):
            key.ignored(f"follows {section}.type, which is not taken over")
        else:
            apply(key)
    rows = guarded(guard, below(f"{section}.params.", *parts))
    return [row._replace(doc=f"{row.doc} ({', '.join(types.split())})") for row in rows]


# ------------------------------------------------------------------------------------------------------------ scheduler


def _is_left_to_program(session: Session, name: str) -> bool:
    """Returns whether the file leaves the scheduler's numbers of steps to the training program ("auto")."""
    return session.is_auto(_SCHEDULE + "warmup_num_steps") or name != "warmuplr" and session.is_auto(_SCHEDULE + "total_num_steps")


def _schedule_problem(session: Session, name: str) -> str:
    """Returns why the schedule as a whole cannot be expressed; "" if it can."""
    if name != "warmuplr" and session.find(_SCHEDULE + "total_num_steps") is None:
        return "total_num_steps is missing. Give it, or set lr_schedule in the strategy"
    return _LOGARITHM if session.find(_SCHEDULE + "warmup_type") is None else ""


def _taken_scheduler(session: Session) -> str:
    """Returns the scheduler's type in lower case; "" if the schedule is not translated."""
    name = word(session.find("scheduler.type"))
    return "" if name not in _SCHEDULERS or _is_left_to_program(session, name) or _schedule_problem(session, name) else name


def _peak_of(session: Session) -> float | None:
    """Returns the peak of the learning rate if the scheduler sets it; None if the optimizer's rate is the peak.
    """
    name, given = _taken_scheduler(session), session.find(_SCHEDULE + "warmup_max_lr")
    if name in ("", "warmupcosinelr") or word(given) == "auto":
        return None
    return number(given) if given is not None else 0.001 if name == "warmupdecaylr" else None


def _scheduler_type(key: Key) -> None:
    name = word(key.value)
    if name not in _SCHEDULERS:
        near = did_you_mean(name, ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
        key.refused(_REFUSED_SCHEDULERS.get(name) or f"Tessera does not know this scheduler{near}; or set lr_schedule in the strategy; with "
                    '{"type": "manual"} the program calls Engine::set_lr')
    elif _is_left_to_program(key.session, name):
        key.ignored('its numbers are "auto", so the schedule is the program\'s. TesseraTrainer takes it from TrainingArguments; elsewhere set '
                    f'lr_schedule {{"type": "{_SCHEDULERS[name][0]}"}} in the strategy')
    elif problem := _schedule_problem(key.session, name):
        key.refused(problem)
    else:
        key.put("/lr_schedule/type", _SCHEDULERS[name][0])


def _warmup_steps(key: Key) -> None:
    steps = integer(key.value)
    if steps is None or steps < 0:
        return key.refused("must be an integer of at least 0")
    late = _SCHEDULERS[_taken_scheduler(key.session)][1]
    key.put("/lr_schedule/warmup_steps", max(steps, 2) + late,  # DeepSpeed's minimum is 2
            "From the end of the warm-up on every rate is that of DeepSpeed. Difference: in the warm-up Tessera's is up to two updates ahead, as its "
            "first is not 0")


def _total_steps(key: Key) -> None:
    steps = integer(key.value)
    if steps is None or steps < 1:
        return key.refused("must be an integer of at least 1")
    late = _SCHEDULERS[_taken_scheduler(key.session)][1]
    key.put("/lr_schedule/total_steps", steps + late,
            "DeepSpeed's scheduler takes its first step after the first update, so it ends one update later than it says" if late else "")


def _warmup_type(key: Key) -> None:
    key.ignored("Tessera's warm-up rises linearly too") if word(key.value) == "linear" else key.refused(_LOGARITHM)


_ALL, _BUT_COSINE, _BUT_CONSTANT = " ".join(_SCHEDULERS), "warmuplr warmupdecaylr", "warmupdecaylr warmupcosinelr"
_FROM_ZERO = ("Tessera's warm-up begins near 0 too",
              'Tessera\'s warm-up begins near 0. Set it to 0, or set lr_schedule {"type": "manual"} and call Engine::set_lr')
SCHEDULER = [
    *rule("scheduler.type", 'WarmupLR, WarmupDecayLR, WarmupCosineLR with a linear warm-up: `lr_schedule.type` "constant", "linear", "cosine". '
          'Ignored where its numbers are "auto". Refused: a logarithmic warm-up, which is DeepSpeed\'s default; OneCycle; LRRangeTest; all others',
          _scheduler_type),
    *_of("scheduler", _ALL, rule("warmup_num_steps", "`lr_schedule.warmup_steps`, one more for WarmupLR and WarmupDecayLR, whose schedule begins an "
                                 "update late", _warmup_steps)),
    *_of("scheduler", _BUT_CONSTANT, rule("total_num_steps", "`lr_schedule.total_steps`, one more for WarmupDecayLR", _total_steps)),
    *_of("scheduler", _ALL, rule("warmup_type", '"linear": ignored, as Tessera\'s is linear; else refused', _warmup_type)),
    *_of("scheduler", _BUT_COSINE, sets("warmup_max_lr", "/optimizer/lr"), expects("warmup_min_lr", 0.0, *_FROM_ZERO)),
    *_of("scheduler", "warmupcosinelr", expects("warmup_min_ratio", 0.0, *_FROM_ZERO), sets("cos_min_ratio", "/lr_schedule/min_ratio")),
    *_of("scheduler", _ALL, expects("last_batch_iteration", -1.0, "the schedule begins at the beginning",
                                    "a checkpoint says at which step training goes on")),
    *rule("scheduler.params.*", "refused, but ignored where `scheduler.type` is not taken over", lambda key: (
        key.refused("unknown parameter of the scheduler") if _taken_scheduler(key.session)
        else key.ignored("follows scheduler.type, which is not taken over"))),
]


def finish_scheduler(session: Session) -> None:
    name = _taken_scheduler(session)
    if name and session.find(_SCHEDULE + "warmup_num_steps") is None:
        session.imply("/lr_schedule/warmup_steps", 1000 + _SCHEDULERS[name][1], "DeepSpeed's default")
    if name == "warmupcosinelr" and session.find(_SCHEDULE + "cos_min_ratio") is None:
        session.imply("/lr_schedule/min_ratio", 0.0001, "DeepSpeed's default")


# ------------------------------------------------------------------------------------------------------------ optimizer


def _tessera_type(session: Session) -> str:
    """Returns Tessera's type of optimizer. DeepSpeed's Adam is AdamW, unless adam_w_mode is false."""
    name = word(session.find("optimizer.type"))
    return "adamw" if name == "adam" and boolean(session.find(_PARAMS + "adam_w_mode")) is not False else name


def _optimizer_type(key: Key) -> None:
    name, kind = word(key.value), _tessera_type(key.session)
    if name in _OPTIMIZERS:
        renamed = 'DeepSpeed\'s "Adam" decouples weight decay as AdamW does, unless adam_w_mode is false'
        key.put("/optimizer/type", kind, renamed if name != kind else "")
    else:
        near = did_you_mean(name, _OPTIMIZERS)
        key.refused(_REFUSED_OPTIMIZERS.get(name) or f"Tessera has no such optimizer{near}; it has adamw, adam, sgd, lion, adagrad, rmsprop, muon, "
                    "lamb and lars, adafactor without its parameters taken over, and rules of the program's own (optimizer.type \"own\" and "
                    '"own_matrix")')


def _learning_rate(key: Key) -> None:
    peak = _peak_of(key.session)
    if peak is not None and peak != number(key.value):
        return key.ignored("the scheduler's warmup_max_lr is the rate after warm-up, in place of this one")
    key.put_number("/optimizer/lr")


def _unknown_parameter(key: Key) -> None:
    name = word(key.session.find("optimizer.type"))
    if name in _OPTIMIZERS:
        return key.refused(f"unknown parameter of optimizer.type {name}")
    key.ignored("follows optimizer.type, which is not taken over")


_EVERY, _ADAM = " ".join(_OPTIMIZERS), "adam adamw"
_NO_MATTER = "it does not change the update"
OPTIMIZER = [
    *rule("optimizer.type", 'AdamW, and Adam unless adam_w_mode is false: `optimizer.type` "adamw"; Adam with adam_w_mode false: "adam"; SGD, Lion, '
          "Adagrad, RMSprop: the same. Refused: Lamb (bounds of its ratio), Muon (which parameters it updates), 1-bit and muP optimizers, and all "
          "others", _optimizer_type),
    *ignores("optimizer.legacy_fusion", "it chooses between two implementations"),
    *_of("optimizer", _EVERY, rule("lr", "`optimizer.lr`, unless the scheduler has a warmup_max_lr", _learning_rate),
         sets("weight_decay", "/optimizer/weight_decay")),
    *_of("optimizer", "adam adamw lion", sets("betas", "/optimizer/betas")),
    *_of("optimizer", "adam adamw adagrad rmsprop", sets("eps", "/optimizer/eps")),
    *_of("optimizer", "sgd rmsprop", sets("momentum", "/optimizer/momentum")),
    *_of("optimizer", "sgd", sets("dampening", "/optimizer/dampening"), flag("nesterov", "/optimizer/nesterov")),
    *_of("optimizer", "rmsprop", sets("alpha", "/optimizer/alpha"), flag("centered", "/optimizer/centered")),
    *_of("optimizer", "adagrad", sets("lr_decay", "/optimizer/lr_decay")),
    *_of("optimizer", _ADAM,
         rule("adam_w_mode", "part of `optimizer.type`", lambda key: key.ignored(
             "AdamW is AdamW, whatever this says" if word(key.session.find("optimizer.type")) == "adamw"
             else "optimizer.type says which of the two it is")),
         expects("bias_correction", True, "Tessera corrects the bias too", "Tessera always corrects the bias of the moments")),
    *_of("optimizer", "adam adamw adagrad",
         expects("amsgrad", False, "off", "Tessera has no AMSGrad. Use AdamW, or optimizer.type \"own\" with a rule of the program's")),
    *_of("optimizer", _ADAM, expects("fp32_optimizer_states", True, "optimizer states are fp32", 'set optimizer.state_dtype "bf16" instead: Tessera '
                                     "rounds such states stochastically, DeepSpeed to nearest")),
    *_of("optimizer", "adagrad", expects("initial_accumulator_value", 0.0, "Tessera's sums begin at 0 too", "Tessera's sums begin at 0")),
    *_of("optimizer", _EVERY, expects("maximize", False, "off", "Tessera only minimizes: give backward the loss with the other sign")),
    *_of("optimizer", _ADAM, ignores("torch_adam", _NO_MATTER)),
    *_of("optimizer", "adam adamw lion", ignores("set_grad_none", _NO_MATTER)),
    *_of("optimizer", _EVERY, ignores("fused foreach capturable differentiable", _NO_MATTER)),
    *refuses("optimizer.params.max_grad_norm", "the optimizer does not clip. Use gradient_clipping"),
    *rule("optimizer.params.*", "refused, but ignored where `optimizer.type` is refused", _unknown_parameter),
]


def finish_optimizer(session: Session) -> None:
    if session.find("optimizer.type") is None:
        session.notes.append('The file names no optimizer, so the program makes one. Say in the strategy\'s "optimizer" which it is; the default is '
                             "adamw with a learning rate of 0.001 and a weight decay of 0.01.")
        return
    peak, name = _peak_of(session), word(session.find("optimizer.type"))
    if peak is not None:
        session.imply("/optimizer/lr", peak, "the scheduler's warmup_max_lr; DeepSpeed's default is 0.001")
    of_torch = session.is_on(_PARAMS + "torch_adam") and _tessera_type(session) == "adamw"
    for param, value in _OPTIMIZERS.get(name, {}).items():
        if param == "weight_decay" and of_torch and not session.is_auto(_PARAMS + param):
            session.imply("/optimizer/weight_decay", 0.01, "the default of torch.optim.AdamW")
        elif not session.is_auto(_PARAMS + param):
            session.imply(f"/optimizer/{param}", value, f"the default of {name} in DeepSpeed")
