"""Trains PyTorch modules, as they are, with parameters, gradients and optimizer state sharded over ranks.

    engine = tessera.Engine(model, "strategy.json")   # or a dict
    engine.backward(loss)                             # in place of loss.backward()
    result = engine.step()                            # in place of clipping, optimizer.step() and scheduler.step()

`tessera launch -n 2 -- python train.py`, torchrun, srun and mpirun start a program on many ranks. A program that is
started alone is one rank. The runtime is the C++ library of the same name. docs/strategy.md lists every key of a
strategy.
"""

import torch  # noqa: F401  loads LibTorch, which the extension needs

from tessera._same_torch import expect_one_torch, expect_same_torch

expect_same_torch()

from tessera import _native  # noqa: E402
from tessera._built_with import VERSION as __version__  # noqa: E402
from tessera._collectives import all_gather, all_reduce, barrier, broadcast, mean_over_ranks  # noqa: E402
from tessera._data import RankSampler, SamplerCursor, StepSampler, TokenBatch, TokenBatches  # noqa: E402
from tessera._engine import Engine, Evaluation, LoadedCheckpoint, backward, deferred_init, load_weights, plan, uneven  # noqa: E402
from tessera._error import Error  # noqa: E402
from tessera._job import init, local_rank, rank, seed_for_rank, world_size  # noqa: E402
from tessera._loop import DataParallel, SyncBatchNorm, convert_sync_batchnorm, span, start_trace, sync_buffers, write_trace  # noqa: E402
from tessera._observers import answer_profilers  # noqa: E402
from tessera._rules import Bucket, CommHook, Elements, ElementwiseOptimizer, Matrix, MatrixOptimizer  # noqa: E402
from tessera._scaling import scaled_speedup, scaling_efficiency  # noqa: E402

expect_one_torch()
answer_profilers()

StepResult = _native.StepResult
PlannedMemory = _native.PlannedMemory
Ranks = _native.Ranks

__all__ = ["Bucket", "CommHook", "DataParallel", "Elements", "ElementwiseOptimizer", "Engine", "Error", "Evaluation", "LoadedCheckpoint",
           "Matrix", "MatrixOptimizer", "PlannedMemory", "RankSampler", "Ranks", "SamplerCursor", "StepResult", "StepSampler", "SyncBatchNorm",
           "TokenBatch", "TokenBatches", "__version__", "all_gather", "all_reduce", "backward", "barrier", "broadcast", "convert_sync_batchnorm",
           "deferred_init", "init", "load_weights", "local_rank", "mean_over_ranks", "plan", "rank", "scaled_speedup",
           "scaling_efficiency", "seed_for_rank", "span", "start_trace", "sync_buffers", "uneven", "world_size", "write_trace"]
