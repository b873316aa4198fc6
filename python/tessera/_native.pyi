"""The extension module. Programs use the package's own names, which have their own docstrings and are built on these
functions.

Every function raises tessera.Error. Calls of one Engine come from one thread at a time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch

torch_version: str

class Strategy:
    """A resolved strategy. Both functions that make one raise Error (78) with everything that is wrong in it."""

    @staticmethod
    def from_file(path: str) -> Strategy: ...
    @staticmethod
    def from_json(text: str, name: str) -> Strategy: ...
    def to_json(self) -> str: ...

class Mirror:
    """A C++ module that only has names, around a Python module's tensors."""

    def __init__(self, class_name: str) -> None: ...
    def add_parameter(self, name: str, tensor: torch.Tensor) -> None: ...
    def add_buffer(self, name: str, tensor: torch.Tensor) -> None: ...
    def add_child(self, name: str, child: Mirror) -> None: ...
    def set_buffers(self, buffers: Sequence[tuple[str, torch.Tensor]]) -> None: ...

class MirroredNorm(Mirror):
    """The C++ module of a batch norm. Its running statistics can be kept in the order of microbatches."""

    def __init__(self, class_name: str, is_cumulative: bool) -> None: ...

class StepResult:
    """The result of one optimizer step. All ranks have the same values, except for seconds.

    Between outer steps ("sync"), "ranks" means the ranks of this rank's replica. A step does not wait for a GPU. Fields
    that only the device can tell are NaN, False or 0 until `wait` is called.
    """

    @property
    def step(self) -> int:
        """Number of the step, counted from 1. Skipped steps count too."""

    @property
    def loss(self) -> float:
        """Weighted mean over ranks and microbatches of the losses given to backward; NaN if all weights are 0."""

    @property
    def grad_norm(self) -> float:
        """Global 2-norm of the averaged gradient, before clipping."""

    @property
    def lr(self) -> float:
        """Learning rate of the step."""

    @property
    def overflow(self) -> bool:
        """True if a gradient was infinite or NaN. All ranks then skipped the step."""

    @property
    def spike(self) -> bool:
        """True if the loss was far above the losses before it (the strategy's "on_spike"). All ranks then skipped the
        step."""

    @property
    def loss_scale(self) -> float:
        """Loss scale that this step's backward used."""

    @property
    def staleness_mean(self) -> float:
        """Mean age of the step's gradients over all shards ("sync" asynchronous). The age is the number of updates by
        other ranks since the pull.

        With "sync" hogwild, it is the number of steps of other ranks since this rank's last step."""

    @property
    def staleness_max(self) -> int:
        """The largest of these ages."""

    @property
    def ages(self) -> dict[str, int]:
        """Returns how many gradients of the step had each of these ages, as `Engine.staleness` does."""

    @property
    def missed(self) -> int:
        """With "sync" backups: not 0 if this rank's gradients were too late and were dropped.

        It is then the number of steps that other ranks have made since this rank's last step, up to `step`."""

    @property
    def dropped(self) -> int:
        """Number of gradients that all ranks have dropped so far ("sync" backups)."""

    @property
    def made_again(self) -> int:
        """Number of microbatches of this step that other ranks computed before the ranks to which they belong
        ("deal.backups")."""

    @property
    def noise_scale(self) -> float:
        """The gradient noise scale ("noise_scale"), which is about the critical batch. It counts samples if backward
        was told their number, and otherwise the items that weights count. 0: not known."""

    @property
    def noise_batch(self) -> float:
        """The batch of the latest step that was measured, in the same unit as noise_scale. 0: no step was measured."""

    @property
    def noise_square(self) -> float:
        """The estimate of the squared norm of the gradient without noise, smoothed; it may be below 0."""

    @property
    def noise_variance(self) -> float:
        """The estimate of the variance of one sample's gradient, smoothed; it may be below 0."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all ranks and microbatches, as given to backward."""

    @property
    def seconds(self) -> float:
        """Seconds on this rank since the previous step ended."""

    @property
    def communication_seconds(self) -> float:
        """Part of `seconds` that was spent in collectives, including waits for other ranks.

        On a GPU it is the time in which compute waited for collectives, and 0 until `wait` is called.
        """

    @property
    def communication_share(self) -> float:
        """communication_seconds / seconds. tessera.scaled_speedup computes a speed-up from it."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks divided by `seconds`."""

    @property
    def waited_for_rank(self) -> int | None:
        """The rank for which the other ranks waited. This rank was busy longest, from the end of the step before to the
        agreement on this step.

        If replicas train apart ("sync" local_sgd or diloco), it is a rank of this rank's replica. It is None with one
        rank, on a GPU, and with "sync" asynchronous or hogwild, where no rank waits.
        """

    @property
    def waited_for_seconds(self) -> float:
        """Seconds for which the other ranks waited: how much less than that rank they were busy, on average."""

    @property
    def data_seconds(self) -> float | None:
        """Part of `seconds` without data. It begins at the end of a step, or of the backward of a microbatch that is
        not the last one. It ends at the next operator that reads a parameter.

        On a GPU it is the host's time, in which the device may still work. It is None if the strategy does not watch
        operators and Engine.time_data was not called.
        """

    @property
    def batch_seconds(self) -> float:
        """Part of `seconds` that this thread spent in TokenBatches, wherever the program called it."""

    @property
    def upload_seconds(self) -> float:
        """Part of `seconds` that this thread spent in uploads to a GPU, wherever the program called them."""

    @property
    def flop(self) -> int:
        """Floating-point operations of this rank's operators in a step, as torch.utils.flop_counter counts them.

        They are counted once, in the first step of an Engine, or after set_trainable. Computations that are repeated
        (recompute) count again.
        """

    @property
    def tflops(self) -> float:
        """TFLOP/s of this rank: flop / seconds / 10^12."""

    @property
    def mfu(self) -> float | None:
        """tflops / the device's peak (Engine.set_peak_tflops). It is None if the peak is not known."""

    @property
    def planned(self) -> dict[str, int]:
        """Planned bytes of this rank by category."""

    @property
    def allocated(self) -> dict[str, int]:
        """Largest bytes of this rank by category since the last step."""

    def asdict(self) -> dict[str, Any]:
        """Returns a dict of all fields, which can be copied and pickled."""

    def is_known(self) -> bool:
        """Returns False while some of the fields are still missing because a GPU has not finished."""

    def wait(self) -> None:
        """Waits for the device and fills in the missing fields. It returns at once on the CPU.

        Raises Error if a GPU finds it only then: 70 if ranks gathered units in different orders; 65 if a gradient was
        not finite, with optimizer.in_backward.
        """

class PlannedMemory:
    """The exact memory plan of one rank. The plans of all ranks are equal. All numbers are bytes."""

    @property
    def use(self) -> dict[str, int]:
        """Planned bytes by category."""

    @property
    def total(self) -> int:
        """Sum of all categories."""

    @property
    def limited(self) -> int:
        """Sum without the host's memory that holds a GPU's state. "memory.limit" limits this sum."""

    @property
    def streamed_bytes(self) -> int:
        """Bytes of records in host memory that a step copies to its GPU. It copies equally many back."""

    @property
    def uploaded_bytes(self) -> int:
        """Bytes of parameters on the tiers host and nvme that a step copies to the GPU for gathers."""

    @property
    def gradient_bytes_to_host(self) -> int:
        """Bytes of gradient sums that a step copies to the host."""

    @property
    def gradient_bytes_to_gpu(self) -> int:
        """Bytes of gradient sums that a step copies to the GPU."""

    @property
    def bytes_to_host(self) -> int:
        """Bytes that a step copies to the host if the host's CPU updates."""

    @property
    def bytes_to_gpu(self) -> int:
        """Bytes that a step copies to the GPU if the host's CPU updates."""

    @property
    def disk_bytes(self) -> int:
        """Size of the rank's files, in bytes."""

    @property
    def table(self) -> str:
        """The plan as text, with one row for each category."""

class LoadedCheckpoint:
    """The result of load_checkpoint and resume_durable; `json` has texts."""

    @property
    def path(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def inexact(self) -> list[str]: ...
    @property
    def tensors(self) -> dict[str, torch.Tensor]: ...
    @property
    def json(self) -> dict[str, str]: ...
    @property
    def data(self) -> tuple[int, int, int, int, bool] | None: ...

class CheckpointItems:
    """The content of a checkpoint that is not state of an Engine. `json` has texts, `data` has the fields of a
    SamplerCursor."""

    def __init__(self, tensors: dict[str, torch.Tensor], json: dict[str, str], data: tuple[int, int, int, int, bool] | None) -> None: ...

class OwnRules:
    """A program's rules, each behind an object of tessera._rules, or None."""

    def __init__(self, elements: Any, matrices: Any, comm_hook: Any) -> None: ...

class Ranks:
    """The ranks whose gradients a `CommHook` sums. It is valid during the call of `sum` that gets it.

    Every rank makes the same calls in the same order, with tensors of the same sizes. Tensors are dense, on the CPU,
    and of any dtype unless the call says otherwise. A call raises Error if it fails (64 if a tensor is wrong), which
    ends training on all ranks.
    """

    def rank(self) -> int:
        """Index of this rank in the group, from 0 to size() - 1."""

    def size(self) -> int:
        """Number of ranks in the group."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces `tensor`, contiguous and fp32, by the sum over ranks, and returns it.

        Sums are made in fp32 in pairwise order, so every rank has the same bits.
        """

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensor of each rank, in rank order: size() tensors of the shape of `tensor`."""

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends row q of `tensor` [size(), ...] to rank q. Returns the rows that this rank has received, in
        rank order, in the same shape.
        """

class Gathered:
    """A guard of Engine.gathered. `close` ends it; `drop` ends it after an exception, without writing back."""

    def close(self) -> None: ...
    def drop(self) -> None: ...

class EmaWeights:
    """A guard of Engine.ema_weights. `close` ends it; `drop` ends it after an exception."""

    def close(self) -> None: ...
    def drop(self) -> None: ...

class Deferring:
    """While this object exists, operators record a tape instead of running. `end` ends the recording."""

    def end(self) -> None: ...

class Engine:
    """The C++ Engine. tessera.Engine documents its calls."""

    def __init__(self, mirror: Mirror, strategy: Strategy, own: OwnRules) -> None: ...
    def step(self, partial: bool) -> StepResult: ...
    def backward_nothing(self) -> None: ...
    def evaluate(self, loader: Iterable[Any],
                 loss_of: Callable[[Any], tuple[torch.Tensor, float]]) -> tuple[float, int, float]: ...
    def zero_grad(self) -> None: ...
    def set_trainable(self, patterns: Sequence[str], trainable: bool) -> None: ...
    def add_group(self, group: str) -> None: ...
    def set_lr(self, lr: float, group: str = ...) -> None: ...
    @overload
    def set_option(self, name: str, value: float | tuple[float, float]) -> None: ...
    @overload
    def set_option(self, group: str, name: str, value: float | tuple[float, float]) -> None: ...
    def options(self, group: str = ...) -> dict[str, list[float]]: ...
    def lr(self, group: str = ...) -> float: ...
    def step_is_due(self) -> bool: ...
    def microbatch(self) -> int: ...
    def take_step(self, steps: int, data_order: int) -> int | None: ...
    def steps_are_over(self) -> bool: ...
    def writes_results(self) -> bool: ...
    def note_results_written(self) -> None: ...
    def microbatches(self) -> tuple[int, int]: ...
    def device(self) -> torch.device: ...
    def strategy(self) -> str: ...
    def plan(self) -> PlannedMemory: ...
    def allocated(self) -> dict[str, int]: ...
    def traffic(self) -> dict[str, float]: ...
    def steps_applied(self) -> int: ...
    def samples_seen(self) -> int: ...
    def set_epoch_samples(self, samples: int) -> None: ...
    def loss_scale(self) -> float: ...
    def unit_names(self) -> list[str]: ...
    def time_data(self) -> None: ...
    def set_peak_tflops(self, tflops: float) -> None: ...
    def time_calls(self) -> None: ...
    def staleness(self) -> dict[str, int]: ...
    def latencies(self) -> list[dict[str, Any]]: ...
    def enter_forked_process(self) -> None: ...
    def gathered(self, mode: str, parameters: Sequence[torch.Tensor] = ...) -> Gathered: ...
    def ema_weights(self) -> EmaWeights: ...

class UnevenLoop:
    """The loop behind tessera.uneven. `next` says whether to train with a batch now."""

    def __init__(self, engine: Engine, on_step: Callable[[StepResult], Any] | None) -> None: ...
    def next(self, has_batch: bool) -> bool: ...

def join(strategy: Strategy, said: Mapping[str, str]) -> None: ...
def is_joined() -> bool: ...
def is_forked() -> bool: ...
def rank(said: Mapping[str, str]) -> int: ...
def world_size(said: Mapping[str, str]) -> int: ...
def local_rank(said: Mapping[str, str]) -> int: ...
def launcher(said: Mapping[str, str]) -> str: ...
def seed_for_rank(seed: int, rank: int) -> int: ...
def fail(code: int, message: str, call_stack: str) -> int: ...
def end(code: int, message: str) -> None: ...
def leave() -> None: ...
def forget() -> None: ...
def note_exits(note: Callable[[Any], Any]) -> None: ...
def set_exit_code(code: int) -> None: ...
def observe_pointers(begins: bool) -> None: ...
def is_lent(tensor: torch.Tensor) -> bool: ...
def waits_long() -> bool: ...
def tell_outside(groups: Sequence[tuple[str, int, int, int, int, Sequence[int], Mapping[int, str]]],
                 waits: Sequence[tuple[str, int, int, str]]) -> None: ...
def backward(loss: torch.Tensor, engines: Sequence[Engine], tokens: int, samples: int, retain_graph: bool,
             weight: float) -> None: ...
def dicts_hold(dicts: list[dict[Any, Any]], objects: list[Any]) -> bool: ...
def scaled_speedup(share: float, ranks: int) -> float: ...
def scaling_efficiency(share: float, ranks: int) -> float: ...
def sync_buffers(buffers: Sequence[torch.Tensor], mean: bool) -> None: ...
def start_trace() -> None: ...
def record_span(name: str, begin: int, end: int) -> None: ...
def write_trace(path: str) -> None: ...
def meet_for_batch_norm(call: str, problem: str) -> None: ...
class BatchNormState:
    def __init__(self, mean: torch.Tensor | None, variance: torch.Tensor | None, momentum: float, eps: float) -> None: ...
def sync_batch_norm(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: BatchNormState) -> torch.Tensor: ...
class Unsynced:
    def end(self) -> None: ...
class DataParallel:
    def __init__(self, mirror: Mirror, bucket_mb: float) -> None: ...
    def set_weight(self, weight: float) -> None: ...
    def backward_nothing(self) -> None: ...
    def broadcast_buffers(self) -> None: ...
    def num_buckets(self) -> int: ...
    def no_sync(self) -> Unsynced: ...
def is_deferred(tensor: torch.Tensor) -> bool: ...
def plan(mirror: Mirror, strategy: Strategy, own: OwnRules, world_size: int, hosts: int) -> PlannedMemory: ...
def save_checkpoint(engine: Engine, folder: str, items: CheckpointItems, keep: int, is_best: bool) -> str: ...
class CheckpointProgress:
    """The progress of this rank's asynchronous save: the path after it is committed, the step, the bytes written, and
    all bytes."""

    @property
    def path(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def bytes(self) -> int: ...
def finish_checkpoint(engine: Engine) -> None: ...
def checkpoint_progress(engine: Engine) -> CheckpointProgress | None: ...
def load_checkpoint(engine: Engine, path: str) -> LoadedCheckpoint: ...
def commit_durable(engine: Engine, items: CheckpointItems) -> bool: ...
def finish_commit(engine: Engine) -> None: ...
def resume_durable(engine: Engine) -> LoadedCheckpoint | None: ...
def save_weights(engine: Engine, path: str, replace: bool, is_archive: bool) -> None: ...
def load_weights(engine: Engine, path: str, part: str, without: Sequence[str], ignored: Sequence[str]) -> None: ...
def load_weights_into(tensors: Sequence[tuple[str, torch.Tensor]], path: str, part: str, without: Sequence[str],
                      ignored: Sequence[str]) -> None: ...
def all_reduce(tensor: torch.Tensor, op: str) -> None: ...
def all_reduce_int(value: int, op: str) -> int: ...
def all_reduce_float(value: float, op: str) -> float: ...
def all_gather(own: torch.Tensor) -> list[torch.Tensor]: ...
def all_gather_bytes(own: bytes) -> list[bytes]: ...
def broadcast(tensor: torch.Tensor, root: int) -> None: ...
def broadcast_bytes(own: bytes, root: int) -> bytes: ...
def barrier() -> None: ...
def mean_over_ranks(mean: float, count: int) -> float: ...

class TokenFormat:
    __members__: dict[str, TokenFormat]

class Tail:
    __members__: dict[str, Tail]

class DatasetOptions:
    format: TokenFormat
    extensions: list[str]

class SamplerOptions:
    num_samples: int
    batch: int
    accumulation: int
    microbatches: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool
    runs: bool
    tail: Tail

class TokenBatches:
    """The C++ TokenBatches. tessera.TokenBatches documents its calls."""

    def __init__(self, data: str, seq_len: int, vocab_size: int, sampling: SamplerOptions, options: DatasetOptions) -> None: ...
    def next(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, float]: ...
    def of(self, microbatch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, float]: ...
    def end_step(self) -> None: ...
    def deal(self, begin: int, end: int) -> None: ...
    def go_to_step(self, step: int) -> None: ...
    def data_order(self) -> int: ...
    def cursor(self) -> tuple[int, int, int, int, bool]: ...
    def resume(self, cursor: tuple[int, int, int, int, bool]) -> None: ...
    def num_tokens(self) -> int: ...
    def epoch(self) -> int: ...
    def steps_per_epoch(self) -> int: ...
    def dropped_samples(self) -> int: ...
    def padded_samples(self) -> int: ...

class RankSampler:
    """The C++ DealtSamples. tessera.RankSampler documents its calls."""

    def __init__(self, sampling: SamplerOptions, epoch: int) -> None: ...
    def begin_epoch(self) -> None: ...
    def next(self) -> list[int] | None: ...
    def of(self, microbatch: int) -> list[int]: ...
    def end_step(self) -> None: ...
    def deal(self, begin: int, end: int) -> None: ...
    def cursor(self) -> tuple[int, int, int, int, bool]: ...
    def resume(self, cursor: tuple[int, int, int, int, bool]) -> None: ...
    def epoch(self) -> int: ...
    def steps_per_epoch(self) -> int: ...
    def microbatches_per_epoch(self) -> int: ...
