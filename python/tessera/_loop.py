"""Helps a loop of plain PyTorch on many ranks, with or without an Engine: equal buffers, batch norms over all ranks,
averaged gradients, and traces. It has the functions of sync_buffers.h, sync_batch_norm.h, data_parallel.h and trace.h
in include/tessera.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from tessera import _native
from tessera._collectives import join_if_needed
from tessera._error import Error
from tessera._job import closing
from tessera._mirror import Mirror

_SYNCS = ("from_rank_zero", "mean")
_CONVERTED = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def sync_buffers(model: torch.nn.Module, how: str = "from_rank_zero") -> None:
    """Makes the buffers of a module equal on all ranks. The buffers get rank 0's values, or with `how="mean"` the mean
    over ranks. Integers and flags, such as num_batches_tracked, always get rank 0's values.

    An Engine makes buffers equal once, when it is made. Each rank's forward then writes the rank's own buffers. Call
    this function before an evaluation, or before a save, which writes the buffers of rank 0. "broadcast_buffers" in
    the strategy makes the buffers equal in each step, and `convert_sync_batchnorm` keeps running statistics equal all
    the time. The call is collective. Raises Error (64) on all ranks if their buffers have different shapes or dtypes.
    """
    if how not in _SYNCS:
        raise Error(f"sync_buffers: how is one of {', '.join(_SYNCS)}, got {how!r}. [T0762] hint: leave it out for rank 0's values")
    join_if_needed()
    _native.sync_buffers(list(model.buffers()), how == "mean")


def start_trace() -> None:
    """Forgets everything that was recorded, and records spans of time on this rank from now on, for `write_trace`."""
    _native.start_trace()


def write_trace(path: str | os.PathLike) -> None:
    """Ends the recording on all ranks, and writes their spans into one file on rank 0, for Perfetto (ui.perfetto.dev)
    or chrome://tracing.

    An Engine records "backward", "step", "all_gather UNIT", "reduce UNIT", "agree", "update" and "publish". `span` adds
    spans that the program names. The call is collective. Raises Error (73) on all ranks if the file cannot be written.
    """
    join_if_needed()
    _native.write_trace(os.fspath(path))


@contextmanager
def span(name: str) -> Iterator[None]:
    """Records a span of time in the trace, under a name that the program chooses: `with tessera.span("load"):`."""
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        _native.record_span(name, begin, time.monotonic_ns())


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the samples of all ranks. Inputs are [B, C], [B, C, L], [B, C, H, W] or [B, C, D, H, W].
    B may differ between ranks, and may be 0. The module works on the CPU too, which torch.nn.SyncBatchNorm does not.

    Mean and variance in training are those of the batches of all ranks together, in forward and in backward. The result
    is that of one process that has the concatenated batch. Running statistics are equal on all ranks. In eval mode it
    computes the same as BatchNorm, and ranks do not communicate. Each forward and backward while training is
    collective. The backward cannot be differentiated again. `torch.utils.checkpoint` counts a batch twice in the
    running statistics, as it does with BatchNorm. Raises Error (64) on all ranks if all ranks together have only one
    value per channel.
    """

    class_for_strategies = "BatchNorm"  # "mixed_precision.keep_fp32" means this class too if it names BatchNorm

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if not (2 <= input.dim() <= 5 and input.size(1) == self.num_features and input.is_floating_point()):
            raise Error(f"SyncBatchNorm wants a floating point input of 2 to 5 dimensions [B, {self.num_features}, ...], got {input.dtype} "
                        f"{list(input.shape)}. [T0763] hint: its second dimension is that of channels")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        join_if_needed()
        momentum, mean, variance = self.momentum or 0.0, None, None
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            mean, variance = self.running_mean, self.running_var
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        norm = _native.BatchNormState(mean, variance, momentum, self.eps)
        return _native.sync_batch_norm(input, self.weight, self.bias, norm)


def convert_sync_batchnorm(model: torch.nn.Module) -> list[str]:
    """Makes each BatchNorm1d, 2d and 3d in `model` a `SyncBatchNorm`, also `model` itself if it is a BatchNorm. Returns
    the paths of these modules. The modules stay the same objects, with their parameters, buffers and hooks. Call this
    function before the Engine is made, or later. The call is collective.

    Raises Error (64) on all ranks if a BatchNorm has its own forward, or if its sizes are not known yet.
    """
    join_if_needed()
    found = {name: module for name, module in model.named_modules()
             if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)}
    others = [f"module {name or '(root)'} is a {type(module).__name__}, which convert_sync_batchnorm cannot make a SyncBatchNorm of. [T0764] hint: run "
              "one forward where it is lazy; where it has a forward of its own, write it as one that calls tessera.SyncBatchNorm"
              for name, module in found.items() if type(module) not in _CONVERTED]
    _native.meet_for_batch_norm(f"convert_sync_batchnorm of {', '.join(found)}", others[0] if others else "")
    for module in found.values():
        module.__class__ = SyncBatchNorm
    return list(found)


class DataParallel:
    """Averages gradients over the ranks, and nothing else: each rank has the whole module, and any optimizer of
    torch.optim trains it.

        parallel = tessera.DataParallel(model)
        optimizer = torch.optim.LBFGS(model.parameters())
        loss.backward()      # when it returns, every .grad is the mean over the ranks
        optimizer.step()

    Use it if you need something that an Engine lacks: your own optimizer, or second-order methods. DataParallel costs
    the memory of NO_SHARD and does not overlap communication with backward. An Engine can train with less memory, and
    faster. Call the model itself; it is not wrapped in another module.

    The constructor is collective. It compares the modules of all ranks, and gives every rank the values of rank 0. Each
    backward that reaches a parameter is collective at its end. If some ranks did not use a parameter, their gradients
    count as zero in the parameter's mean. If no rank used a parameter, the parameter gets no `.grad`. Gradients have
    the same bits on all ranks. A backward that fails raises a RuntimeError with the text of an Error. `bucket_mb`: the
    MiB of fp32 gradients that are sent together.
    """

    def __init__(self, model: torch.nn.Module, *, bucket_mb: float = 25.0) -> None:
        mirror = Mirror(model)
        join_if_needed()
        self.module = model
        self._mirror: Mirror | None = mirror
        self._native: _native.DataParallel | None = _native.DataParallel(mirror.native, bucket_mb)
        closing.add(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside `with parallel.no_sync():` backward leaves gradients as this rank made them. These gradients add up;
        the next backward outside of the block averages the sum.
        """
        scope = self._live().no_sync()
        try:
            yield
        finally:
            scope.end()

    def set_weight(self, weight: float | torch.Tensor) -> None:
        """Sets the number of items (samples, tokens) over which the next loss is a mean. The number is for the next
        backward that averages gradients. The gradients are then means over the items of all ranks.

        A SyncBatchNorm adds up ranks' gradients inside backward, before these weights are applied. If the module has a
        SyncBatchNorm, use an Engine with weights, or multiply the loss.
        """
        self._live().set_weight(float(weight))

    def backward_nothing(self) -> None:
        """Replaces a backward on a rank without a batch, while other ranks run a backward that averages. The rank adds
        nothing to the mean, and gets it in every `.grad`.
        """
        self._live().backward_nothing()

    def broadcast_buffers(self) -> None:
        """Gives every rank rank 0's buffers. The call is collective."""
        parallel = self._live()
        self._mirror.refresh()
        parallel.broadcast_buffers()

    @property
    def num_buckets(self) -> int:
        """Returns the number of calls that each averaging makes, in addition to one small call."""
        return self._live().num_buckets()

    def close(self) -> None:
        """Ends the averaging of gradients in backward."""
        self._native = self._mirror = None

    def _live(self) -> _native.DataParallel:
        if self._native is None:
            raise Error("this DataParallel was closed. [T0765] hint: make another one of the module")
        return self._native
