"""Gives each rank batches of the tokens of a data set on disk, or the samples of any data set.

The module has the functions of include/tessera/token_batches.h, and those of include/tessera/rank_sampler.h for dealt
microbatches.
"""

import operator
import os
import zlib
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from tessera import _job, _native
from tessera._error import Error


class TokenBatch(NamedTuple):
    """One microbatch: `target[b][t]` is the token that follows `input[b][t]`.

    With `tail="pad"` the last step of an epoch is smaller: its microbatches have only the remaining samples, and
    `weight` is lower accordingly. A rank for which no samples remain gets samples a second time, with weight 0.
    """

    input: torch.Tensor
    """[batch, seq_len], int64"""
    target: torch.Tensor
    """[batch, seq_len], int64"""
    weight: float
    """for `Engine.backward(weight=)`: share of a full microbatch's tokens that count"""


class SamplerCursor(NamedTuple):
    """A position in the data, for a checkpoint. It does not depend on the number of ranks, so any number of ranks can
    continue from it."""

    epoch: int
    """the current epoch, counted from 0"""
    consumed: int
    """samples of this epoch that all ranks together have taken"""
    num_samples: int
    """samples in an epoch; those of the reader that resumes must be as many"""
    seed: int
    """seed of the shuffle, likewise"""
    shuffle: bool
    """whether samples are shuffled, likewise"""


class TokenBatches:
    """Gives this rank the tokens of a data set on disk, epoch after epoch. Each epoch has its own order.

        batches = tessera.TokenBatches("data/train.bin", 128, batch=8, accumulation=2, seed=1)
        batch = batches.next(engine.device)
        engine.backward(loss_of(model(batch.input), batch.target), weight=batch.weight)

    Sample i is the window of tokens [i * seq_len, i * seq_len + seq_len + 1). A step takes `batch` * `accumulation`
    samples on each rank, where `accumulation` is the strategy's gradient_accumulation. Ranks do not communicate: each
    of them makes this object with the same arguments. One thread at a time uses it.

    `data` is a file of llm.c, a pair of files of Megatron, or a file or directory of text, whose bytes are the tokens.
    `format` is "auto", "text", "llmc" or "megatron"; `extensions` selects files of a directory, such as [".txt"].
    Tokens must be below `vocab_size`; 0 allows any. `tail` decides about samples that do not fill the last step of an
    epoch: "drop" leaves them out, and "pad" makes a smaller step of them (TokenBatch). `runs` gives each rank
    neighbouring microbatches in a step, as "reproducible" requires with gradient_sync "last_microbatch". `microbatches`
    is the strategy's deal.microbatches, and replaces `accumulation` times the number of ranks. `rank` and `world_size`
    are those of the job by default.

    Raises Error: 66 if the data is missing, 77 if it may not be read, 65 if its content is wrong or does not fill one
    step, 78 if a number makes no sense, 64 if the word for `format` or `tail` is unknown.
    """

    def __init__(self, data: str | os.PathLike, seq_len: int, *, batch: int = 1, accumulation: int = 1, vocab_size: int = 0, seed: int = 0,
                 shuffle: bool = True, tail: str = "drop", runs: bool = False, microbatches: int = 0, format: str = "auto", extensions: Sequence[str] = (),
                 rank: int | None = None, world_size: int | None = None) -> None:
        options, sampling = _native.DatasetOptions(), _sampling("TokenBatches", seed, shuffle, tail, rank, world_size)
        options.format, options.extensions = _of("TokenBatches", _native.TokenFormat, "format", format), list(extensions)
        sampling.batch, sampling.accumulation, sampling.microbatches, sampling.runs = batch, accumulation, microbatches, runs
        self._native = _native.TokenBatches(os.fspath(data), seq_len, vocab_size, sampling, options)

    def next(self, device: torch.device | str = "cpu") -> TokenBatch:
        """Returns the next microbatch of this rank on `device` (`Engine.device`).

        A copy to a GPU runs on the current stream. Raises Error (65) if a token is not in the vocabulary.
        """
        return TokenBatch(*self._native.next(torch.device(device)))

    def of(self, microbatch: int, device: torch.device | str = "cpu") -> TokenBatch:
        """Returns one microbatch of the current step, on `device`.

        `microbatch` is its number among the microbatches of all ranks. Use the number from `Engine.microbatch` if ranks
        may compute each other's microbatches ("deal.backups"). The step lasts until `end_step`. Raises Error (78) if
        the step has no microbatch of this number, or if `next` has already begun the step.
        """
        return TokenBatch(*self._native.of(microbatch, torch.device(device)))

    def end_step(self) -> None:
        """Continues with the next step. All ranks call it after `Engine.step`, if `of` gave them the step's batches."""
        self._native.end_step()

    def deal(self, run: range) -> None:
        """Gives this rank the microbatches `run` of each step from now on.

        With "deal" by speed, `run` is the result of `Engine.microbatches`. All ranks call this with their own `run`,
        between the same two steps. Raises Error: 78 if no step has such a run, or if the call is made within a step; 64
        if `run` is no range of neighbours.
        """
        self._native.deal(*_run("TokenBatches", run))

    def go_to_step(self, step: int) -> None:
        """Moves to the first microbatch of a step, counted from 0 over all epochs (`Engine.take_step`).

        Each step has its own samples, whichever worker computes it. Raises Error (78) if the number is below 0.
        """
        self._native.go_to_step(step)

    @property
    def data_order(self) -> int:
        """Returns a number that identifies the data of all steps, for `Engine.take_step`.

        Two objects return the same number if the steps of both have the same samples. No tokens are read for it.
        """
        return self._native.data_order()

    def cursor(self) -> SamplerCursor:
        """Returns the position of the next microbatch, for `Engine.save_checkpoint(data=)` or `Engine.commit_durable`.

        A cursor that is taken between two steps is valid for any number of ranks.
        """
        return SamplerCursor(*self._native.cursor())

    def resume(self, cursor: Sequence[Any]) -> None:
        """Continues at `cursor`: the `data` of a LoadedCheckpoint, which any number of ranks may have written.

        Raises Error: 78 if the number of samples, the seed or shuffling differs; 65 if the cursor's numbers make no
        sense; 64 if `cursor` is no cursor.
        """
        self._native.resume(_row("TokenBatches", cursor))

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens in the data set."""
        return self._native.num_tokens()

    @property
    def epoch(self) -> int:
        """Returns the current epoch, counted from 0."""
        return self._native.epoch()

    @property
    def steps_per_epoch(self) -> int:
        """Returns the number of optimizer steps in an epoch."""
        return self._native.steps_per_epoch()

    @property
    def dropped_samples(self) -> int:
        """Returns the number of samples that an epoch leaves out with `tail="drop"`, or 0 with "pad"."""
        return self._native.dropped_samples()

    @property
    def padded_samples(self) -> int:
        """Returns the number of samples that are missing in the last step of an epoch with `tail="pad"`, or 0 with
        "drop"."""
        return self._native.padded_samples()


class RankSampler(Sampler[list[int]]):
    """Divides the samples of a data set among the ranks in whole microbatches, as the `batch_sampler` of a DataLoader.

        sampler = tessera.RankSampler(data, batch=8, microbatches=24, seed=1)
        loader = DataLoader(data, batch_sampler=sampler)
        for epoch in range(epochs):
            for batch in loader:
                engine.backward(loss_of(batch))
                if engine.step_is_due():
                    engine.step()
                    sampler.deal(engine.microbatches())

    It is for "reproducible" and "deal" by speed: the samples of a microbatch depend neither on the number of ranks nor
    on the rank that computes it. `microbatches` is the number of microbatches in a step on all ranks:
    gradient_accumulation times ranks, or deal.microbatches. Microbatch m of an epoch's step k has the `batch` samples
    that begin at place (k * microbatches + m) * batch of the epoch's order. A rank takes neighbouring microbatches. At
    first all ranks take equally many microbatches (some ranks take one more, if the number of ranks does not divide
    `microbatches`). After a call of `deal` a rank takes the microbatches that the call names. The order of an epoch is
    that of C++'s RankSampler. Each iteration over the sampler is another epoch, and the first one is epoch number
    `epoch`. With `tail` "pad", the first samples of an epoch also fill its last step. With "drop", samples that do not
    fill a step are left out. `rank` and `world_size` are those of the job by default.

    The DataLoader needs `num_workers=0`: workers would take samples before a step begins, when it is not yet known
    which rank gets them. Ranks do not communicate: each of them makes this object with the same arguments.
    `Engine.evaluate` gets no sample twice, and leaves the sampler where it was.

    Raises Error: 65 if the samples do not fill a step, 78 if numbers make no sense, 64 if a word is unknown.
    """

    def __init__(self, samples: int | Sized, *, batch: int, microbatches: int, seed: int = 0, shuffle: bool = True, tail: str = "pad", epoch: int = 0,
                 rank: int | None = None, world_size: int | None = None) -> None:
        sampling = _sampling("RankSampler", seed, shuffle, tail, rank, world_size)
        sampling.num_samples = len(samples) if isinstance(samples, Sized) else samples
        sampling.batch, sampling.microbatches = batch, microbatches
        self._sampling, self.gives_once = sampling, False
        self._native = _native.RankSampler(sampling, epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """Begins the next epoch, or continues the current one right after `resume`, and gives this rank's
        microbatches."""
        if self.gives_once:
            return self._once()
        self._native.begin_epoch()
        return iter(self._native.next, None)

    def _once(self) -> Iterator[list[int]]:
        """Gives this rank's share of an epoch in which no sample comes twice. `Engine.evaluate` sets `gives_once` when it
        begins to iterate."""
        sampling, epoch = self._sampling, _native.RankSampler(self._sampling, self.epoch)
        for step in range(epoch.steps_per_epoch()):
            for microbatch in range(sampling.rank, sampling.microbatches, sampling.world_size):
                first = (step * sampling.microbatches + microbatch) * sampling.batch
                samples = epoch.of(microbatch)[:max(0, sampling.num_samples - first)]
                if samples:
                    yield samples
            epoch.end_step()

    def __len__(self) -> int:
        """Returns the number of this rank's microbatches in a whole epoch, if `deal` does not change it."""
        return self._native.microbatches_per_epoch()

    def deal(self, run: range) -> None:
        """Gives this rank the microbatches `run` of each step from now on.

        With "deal" by speed, `run` is the result of `Engine.microbatches`. All ranks call this with their own `run`,
        after each step. Raises Error: 78 if no step has such a run, or if the call is made within a step; 64 if samples
        of a later step were given already, or if `run` is no range of neighbours.
        """
        self._native.deal(*_run("RankSampler", run))

    def of(self, microbatch: int) -> list[int]:
        """Returns the samples of one microbatch of the current step, by its number among the microbatches of all ranks.

        Use the number from `Engine.microbatch` with "deal.backups", or if the ranks take a step's microbatches in turn.
        The step lasts until `end_step`. If the epoch is then over, the next epoch begins by itself. Raises Error (78)
        if the step has no microbatch of this number, or if an iteration over the sampler is within a step.
        """
        return self._native.of(microbatch)

    def end_step(self) -> None:
        """Continues with the next step. All ranks call it after `Engine.step`, if `of` gave them the step's samples."""
        self._native.end_step()

    def cursor(self) -> SamplerCursor:
        """Returns the position of the current step, for `Engine.save_checkpoint(data=)` or `Engine.commit_durable`.

        A cursor that is taken between two steps is valid for any number of ranks.
        """
        return SamplerCursor(*self._native.cursor())

    def resume(self, cursor: Sequence[Any]) -> None:
        """Continues at `cursor`: the `data` of a LoadedCheckpoint, which any number of ranks may have written.

        Raises Error: 78 if the number of samples, the seed or shuffling differs; 65 if the cursor's numbers make no
        sense; 64 if `cursor` is no cursor.
        """
        self._native.resume(_row("RankSampler", cursor))

    @property
    def epoch(self) -> int:
        """Returns the current epoch, counted from 0."""
        return self._native.epoch()

    @property
    def steps_per_epoch(self) -> int:
        """Returns the number of optimizer steps in an epoch."""
        return self._native.steps_per_epoch()


class StepSampler(Sampler[list[int]]):
    """Gives a DataLoader the batches of the steps that this worker takes, if workers may join and leave
    ("sync.elastic").

        sampler = tessera.StepSampler(engine, len(data), steps=1000, batch_size=32, seed=1)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=2)
        while not engine.steps_are_over():
            for inputs, targets in loader:
                engine.backward(loss_of(model(inputs), targets))
                if engine.step_is_due():
                    engine.step()

    All workers together make `steps` steps. Each step has its own gradient_accumulation times `batch_size` samples. The
    order of samples follows from `seed` and the epoch. The loop around the loader is needed, since a loader with
    workers takes steps in advance. An iteration ends when no steps remain except those that this worker has already
    taken in advance. A program must compute all batches of a loader, or end. If the samples do not fill the last step
    of an epoch, the step also gets the first samples of the order. With `drop_last`, this step is left out. All workers
    must give the same arguments.

    Raises Error (64) if there are not enough samples for a step. An iteration raises Error (64) if the workers'
    arguments differ.
    """

    def __init__(self, engine: Any, num_samples: int, *, steps: int, batch_size: int, seed: int = 0, shuffle: bool = True,
                 drop_last: bool = False) -> None:
        self.engine, self.steps, self.batch_size = engine, steps, batch_size
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle
        self.batches = engine.strategy["gradient_accumulation"]
        of_step = self.batches * batch_size
        self.steps_per_epoch = 0 if of_step < 1 else num_samples // of_step if drop_last else -(-num_samples // of_step)
        if self.steps_per_epoch < 1:
            raise Error(f"StepSampler: {num_samples} samples do not fill one step of {self.batches} batches of {batch_size}. [T1047] hint: take more "
                        "samples, a smaller batch_size, or drop_last=False")
        self._order: tuple[int, list[int]] | None = None  # an epoch and its order
        self._data_order = zlib.crc32(repr((num_samples, of_step, seed, shuffle, drop_last)).encode())

    def _order_of(self, epoch: int) -> list[int]:
        """Returns the shuffled samples of an epoch. Steps of one epoch come one after the other, so its order is
        stored."""
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = epoch, torch.randperm(self.num_samples, generator=generator).tolist()
        return self._order[1]

    def batches_of(self, step: int) -> Iterator[list[int]]:
        """Returns the samples of each batch of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order: Sequence[int] = self._order_of(epoch) if self.shuffle else range(self.num_samples)
        begin = place * self.batches * self.batch_size
        for first in range(begin, begin + self.batches * self.batch_size, self.batch_size):
            yield [order[position % self.num_samples] for position in range(first, first + self.batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        while (step := self.engine.take_step(self.steps, self._data_order)) is not None:
            yield from self.batches_of(step)


def _sampling(who: str, seed: Any, shuffle: bool, tail: str, rank: int | None, world_size: int | None) -> _native.SamplerOptions:
    """Returns the options that are common to all ways of dealing samples. If the rank and the world size are None, they
    are those of the job."""
    sampling = _native.SamplerOptions()
    sampling.rank = _job.rank() if rank is None else rank
    sampling.world_size = _job.world_size() if world_size is None else world_size
    sampling.seed, sampling.shuffle, sampling.tail = _seed(who, seed), shuffle, _of(who, _native.Tail, "tail", tail)
    return sampling


def _run(who: str, run: Any) -> tuple[int, int]:
    """Returns the begin and end of a run of microbatches."""
    if not isinstance(run, range) or run.step != 1:
        raise Error(f"{who}.deal wants a range of neighbours, got {run!r:.200}. [T0935] hint: give it what Engine.microbatches() returns")
    return run.start, run.stop


def _row(who: str, cursor: Any) -> tuple[Any, ...]:
    """Returns a cursor in the form that C++ takes."""
    if not isinstance(cursor, Sequence) or len(cursor) != len(SamplerCursor._fields) or not all(isinstance(each, int) for each in cursor):
        raise Error(f"{who}.resume wants a SamplerCursor, got {cursor!r:.200}. [T0868] hint: give it what cursor() returned, or the data of a "
                    "checkpoint that was saved with data=")
    return tuple(cursor)


def _seed(who: str, seed: Any) -> int:
    """Returns the seed in the form that C++ takes: 64 bits without a sign."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise Error(f"{who}: seed is an integer from 0 to 2**64 - 1, got {seed!r:.200}. [T0936] hint: any number in that range will do, the same on all ranks")
    return number


def _of(who: str, words: Any, name: str, word: str) -> Any:
    if word not in words.__members__:
        raise Error(f"{who}: {name} is one of {', '.join(words.__members__)}, got {word!r}. [T0869] hint: leave it out for {next(iter(words.__members__))}")
    return words.__members__[word]
