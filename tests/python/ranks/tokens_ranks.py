"""rules_test.py runs this program on every rank: TokenBatches deal the same windows as in C++ to any number of ranks,
and continue from checkpoints.

Usage: tokens_ranks.py FOLDER, for the data and the checkpoints, which all ranks share.
"""

import itertools
import pathlib
import sys
import time

import tessera
import torch
from torch import nn
from torch.utils.data import DataLoader

rank, ranks, folder = tessera.rank(), tessera.world_size(), pathlib.Path(sys.argv[1])
SEQ = 3
# tests/data/permutation_test.cc has the order that C++ gives for 10 samples, seed 42 and epoch 0.
ORDER = [9, 8, 7, 5, 2, 3, 4, 1, 6, 0]


def expect_error(act, code, *words):
    try:
        act()
    except tessera.Error as error:
        assert error.exit_code == code and all(word in str(error) for word in words), (error.exit_code, str(error))
        return
    raise AssertionError(f"no Error with {words}")


def written(name, tokens):
    """Writes a file of text whose bytes are the tokens."""
    path = folder / name
    if rank == 0:
        path.write_bytes(bytes(tokens))
    tessera.barrier()
    return path


def samples(batches, microbatches, **options):
    """Returns each window's number, by microbatch. Token t of the data has the value t, so a window begins with its
    number * SEQ."""
    found = []
    for _ in range(microbatches):
        batch = batches.next(**options)
        assert batch.input.dtype == batch.target.dtype == torch.int64 and batch.input.shape == batch.target.shape
        assert torch.equal(batch.input[:, 1:], batch.target[:, :-1]) and torch.equal(batch.target[:, -1], batch.input[:, -1] + 1)
        found.append((batch.input[:, 0] // SEQ).tolist())
    return found


def orders():
    data = written("ten", range(10 * SEQ + 1))
    alone = tessera.TokenBatches(data, SEQ, batch=2, seed=42, rank=0, world_size=1)
    assert (alone.num_tokens, alone.epoch, alone.steps_per_epoch, alone.dropped_samples, alone.padded_samples) == (31, 0, 5, 0, 0)
    assert sum(samples(alone, 5), []) == ORDER
    second = sum(samples(alone, 5, device=torch.device("cpu")), [])
    assert alone.epoch == 1 and sorted(second) == list(range(10)) and second != ORDER
    straight = tessera.TokenBatches(data, SEQ, batch=5, shuffle=False, rank=0, world_size=1)
    assert samples(straight, 2) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    # If `rank` and `world_size` are not given, each rank gets its own part of the samples, as a rank of the job. The
    # microbatches that the ranks take at the same time are neighbours in the order.
    mine = tessera.TokenBatches(data, SEQ, seed=42)
    assert sum(samples(mine, 10 // ranks), []) == ORDER[:10 // ranks * ranks][rank::ranks]
    # The option `tail` determines what happens to the last samples.
    for tail, weights in (("drop", [1, 1]), ("pad", [1, 1, 0.5])):
        batches = tessera.TokenBatches(data, SEQ, batch=4, seed=42, tail=tail, rank=0, world_size=1)
        assert batches.steps_per_epoch == len(weights) and [batches.next().weight for _ in weights] == weights
        assert (batches.dropped_samples, batches.padded_samples) == ((2, 0) if tail == "drop" else (0, 2))


def dealing():
    """Deals a step's four microbatches to 1, 2 and 4 ranks. `runs` deals as gradient_sync "last_microbatch" needs."""
    data = written("sixteen", range(16 * SEQ + 1))
    for runs in (False, True):
        whole = samples(tessera.TokenBatches(data, SEQ, batch=2, accumulation=4, seed=5, runs=runs, rank=0, world_size=1), 8)
        for size in (2, 4):
            each = 4 // size
            parts = [samples(tessera.TokenBatches(data, SEQ, batch=2, accumulation=each, seed=5, runs=runs, rank=r, world_size=size), 2 * each)
                     for r in range(size)]
            for step in range(2):
                of_step = [parts[m // each][step * each + m % each] if runs else parts[m % size][step * each + m // size] for m in range(4)]
                assert of_step == whole[4 * step:4 * step + 4], (runs, size, of_step, whole)
    whole = samples(tessera.TokenBatches(data, SEQ, batch=2, accumulation=4, seed=5, rank=0, world_size=1), 8)
    fast, slow = [tessera.TokenBatches(data, SEQ, batch=2, accumulation=2, seed=5, rank=r, world_size=2) for r in range(2)]
    for step, cut in enumerate((3, 1)):  # the runs have unequal lengths, as "deal" by speed makes them
        fast.deal(range(cut))
        slow.deal(range(cut, 4))
        assert samples(fast, cut) + samples(slow, 4 - cut) == whole[4 * step:4 * step + 4], step
    whole = samples(tessera.TokenBatches(data, SEQ, batch=2, accumulation=4, seed=5, rank=0, world_size=1), 8)
    by_number = tessera.TokenBatches(data, SEQ, batch=2, accumulation=2, seed=5, rank=1, world_size=2)
    for step in range(2):  # rank 1 makes a microbatch of rank 0 again, as with "deal.backups"
        for m in (2, 3, 1):
            assert (by_number.of(m).input[:, 0] // SEQ).tolist() == whole[4 * step + m], (step, m)
        by_number.end_step()
    expect_error(lambda: by_number.of(4), 78, "a step has 0 to 3")
    runs = [tessera.TokenBatches(data, SEQ, batch=2, microbatches=3, seed=5, rank=r, world_size=2) for r in range(2)]
    assert samples(runs[0], 1) + samples(runs[1], 2) + samples(runs[0], 1) == whole[:4], "one and two of three microbatches"
    for wrong in (range(2, 5), range(2, 2)):
        expect_error(lambda run=wrong: fast.deal(run), 78, "a step has 4")
    for wrong in (range(0, 4, 2), (0, 4)):
        expect_error(lambda run=wrong: fast.deal(run), 64, "wants a range of neighbours")


def sampler():
    """RankSampler deals whole microbatches of any data set to a DataLoader."""
    def loader_of(each):
        return DataLoader(range(26), batch_sampler=each, collate_fn=list)

    def made(rank, world_size, samples=26):
        return tessera.RankSampler(samples, batch=2, microbatches=4, seed=5, rank=rank, world_size=world_size)

    whole = made(0, 1)
    wanted = [list(loader_of(whole)) for _ in range(2)]
    assert (len(whole), whole.steps_per_epoch, whole.epoch) == (16, 4, 1) and len(wanted[0]) == 16 and wanted[0] != wanted[1]
    assert sorted(sum(wanted[0][:13], [])) == list(range(26)) and wanted[0][13:] == wanted[0][:3], "the last step is filled up"
    fast, slow = made(0, 2, range(26)), made(1, 2, range(26))
    loaders, place = [iter(loader_of(fast)), iter(loader_of(slow))], None
    for step, cut in enumerate((2, 3, 1, 2)):  # the runs have unequal lengths, as "deal" by speed makes them
        if step:
            fast.deal(range(cut))
            slow.deal(range(cut, 4))
        got = [next(loaders[0]) for _ in range(cut)] + [next(loaders[1]) for _ in range(4 - cut)]
        assert got == wanted[0][4 * step:4 * step + 4], step
        place = slow.cursor() if step == 1 else place
    assert place == (0, 16, 26, 5, True) and slow.cursor() == (1, 0, 26, 5, True), (place, slow.cursor())
    resumed = made(0, 1)
    resumed.resume(place)
    assert list(loader_of(resumed)) == wanted[0][8:] and list(loader_of(resumed)) == wanted[1]
    by_number = made(1, 2)
    for step in range(5):
        for m in (3, 0):
            assert by_number.of(m) == (wanted[0] + wanted[1])[4 * step + m], (step, m)
        by_number.end_step()
    assert made(tessera.rank(), tessera.world_size()).of(1) == tessera.RankSampler(26, batch=2, microbatches=4, seed=5).of(1) == wanted[0][1]
    ahead = made(0, 2)
    assert list(itertools.islice(ahead, 5)) == [wanted[0][m] for m in (0, 1, 4, 5, 8)]
    expect_error(lambda: ahead.deal(range(2)), 64, "without workers")
    expect_error(lambda: fast.deal(range(2, 5)), 78, "a step has 4 (the sampler's microbatches)")
    expect_error(lambda: fast.deal((0, 2)), 64, "RankSampler.deal wants a range of neighbours")
    expect_error(lambda: fast.resume(None), 64, "RankSampler.resume wants a SamplerCursor")
    expect_error(lambda: tessera.RankSampler(26, batch=2, microbatches=0), 78, "was given 0")
    expect_error(lambda: tessera.RankSampler(26, batch=2, microbatches=1, rank=0, world_size=2), 78, "at least one for each of 2 ranks")
    expect_error(lambda: tessera.RankSampler(7, batch=2, microbatches=4, tail="drop", rank=0, world_size=1), 65, "fewer than one step's 8")
    expect_error(lambda: tessera.RankSampler(26, batch=2, microbatches=4, tail="cut"), 64, "RankSampler: tail is one of drop, pad")


class Dealer:
    """Replaces an Engine with "sync.elastic", and deals out steps as the servers do."""

    strategy = {"gradient_accumulation": 2}

    def __init__(self, steps):
        self.steps = list(steps)

    def take_step(self, steps, data_order):
        assert steps == 9
        self.data_order = data_order
        return self.steps.pop(0) if self.steps else None


def steps():
    """Tests TokenBatches.go_to_step, and StepSampler in a DataLoader. Each step has its own samples, whichever worker
    makes the step."""
    data = written("sixteen", range(16 * SEQ + 1))
    whole = samples(tessera.TokenBatches(data, SEQ, batch=2, accumulation=4, seed=5, rank=0, world_size=1), 16)
    batches = tessera.TokenBatches(data, SEQ, batch=2, accumulation=4, seed=5, rank=0, world_size=1)
    for step in (3, 0, 2):
        batches.go_to_step(step)
        assert samples(batches, 4) == whole[4 * step:4 * step + 4], step
    expect_error(lambda: batches.go_to_step(-1), 78, "there is no step -1")
    orders = {tessera.TokenBatches(data, SEQ, rank=0, world_size=1, **{"batch": 2, "accumulation": 4, "seed": 5, **other}).data_order
              for other in ({}, {"seed": 6}, {"batch": 1}, {"shuffle": False}, {"tail": "pad"})}
    assert len(orders) == 5 and batches.data_order in orders, orders
    asked = []
    for seed in (1, 1, 2):
        dealer = Dealer([0])
        list(tessera.StepSampler(dealer, 14, steps=9, batch_size=3, seed=seed))
        asked.append(dealer.data_order)
    assert asked[0] == asked[1] != asked[2], asked

    def loaded(dealt, workers=0, **options):
        sampler = tessera.StepSampler(Dealer(dealt), 14, steps=9, batch_size=3, seed=1, **options)
        return [batch.tolist() for batch in torch.utils.data.DataLoader(range(14), batch_sampler=sampler, num_workers=workers)]

    in_order = loaded(range(9))
    assert len(in_order) == 18 and all(len(batch) == 3 for batch in in_order)
    assert set(sum(in_order[:6], [])) == set(range(14)), "an epoch of three steps has each sample"
    assert loaded([4, 1], workers=1) == in_order[8:10] + in_order[2:4], "a loader that reads ahead"
    assert loaded([0], shuffle=False) == [[0, 1, 2], [3, 4, 5]]
    assert len(set(sum(loaded([0, 1], drop_last=True), []))) == 12
    engine = tessera.Engine(Bigrams(), {})
    expect_error(lambda: engine.take_step(9), 64, "is for workers that come and go")
    assert engine.writes_results() == (rank == 0) and not engine.steps_are_over()
    engine.note_results_written()  # this call does nothing without workers that come and go
    expect_error(lambda: tessera.StepSampler(engine, 1, steps=9, batch_size=2, drop_last=True), 64, "do not fill one step")
    expect_error(lambda: tessera.StepSampler(engine, 9, steps=9, batch_size=0), 64, "do not fill one step")
    engine.close()


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, batch):
        return nn.functional.cross_entropy(self.head(self.table(batch.input)).flatten(0, 1), batch.target.flatten())


def trained(data, runs, steps, folder=None, saves_at=None, accumulation=4 // ranks):
    """Returns the losses of `steps` steps. If `folder` has a checkpoint, these steps come after the checkpoint."""
    net = Bigrams()
    engine = tessera.Engine(net, {"reproducible": True, "gradient_accumulation": accumulation, "strategy": "FULL_SHARD",
                                  "gradient_sync": "last_microbatch" if runs else "each_microbatch", "units": {"classes": ["Linear"]}})
    batches, losses = tessera.TokenBatches(data, SEQ, batch=2, accumulation=accumulation, vocab_size=64, seed=5, runs=runs), []
    if folder and saves_at is None:
        loaded = engine.load_checkpoint(folder)
        assert isinstance(loaded.data, tessera.SamplerCursor), loaded.data
        batches.resume(loaded.data)
    for step in range(steps):
        if runs:
            assert engine.microbatches() == range(rank * accumulation, (rank + 1) * accumulation)
        for place in range(accumulation):
            assert engine.microbatch() == (rank * accumulation + place if runs else place * ranks + rank)
            batch = batches.next(engine.device)
            engine.backward(net(batch), tokens=batch.input.numel(), weight=batch.weight)
        result = engine.step()
        losses.append(result.loss)
        assert result.batch_seconds > 0
        if step + 1 == saves_at:
            engine.save_checkpoint(folder, data=batches.cursor(), json={"done": saves_at})
    engine.close()
    return losses


def training():
    data = written("text", [(7 * t * t + t) % 64 for t in range(16 * SEQ + 1)])
    for runs in (False, True):
        place = folder / f"losses {runs}"
        here = folder / f"checkpoints {runs} {ranks}"
        wanted = trained(data, runs, 5, here, saves_at=3)
        assert trained(data, runs, 2, here) == wanted[3:], "a run that resumes has other losses"
        # One rank has run before, in a job of its own. This job has the same losses as that rank, and can continue from
        # that rank's checkpoint.
        if ranks == 1:
            place.write_text(repr(wanted))
        else:
            assert repr(wanted) == place.read_text(), (wanted, place.read_text())
            assert trained(data, runs, 2, folder / f"checkpoints {runs} 1") == wanted[3:]


def made_by_speed(data, backups):
    """Returns the losses and norms of three steps of eight microbatches, rank 0's parameters, and the number of
    microbatches that were made again. Rank 1 is slow. If there are `backups`, rank 1 waits in each step until rank 0
    has begun the last microbatch that rank 0 may make."""
    net, own = Bigrams(), 8 // ranks
    engine = tessera.Engine(net, {"reproducible": True, "gradient_accumulation": own, "strategy": "SHARD_GRADIENTS",
                                  "gradient_sync": "last_microbatch", "units": {"classes": ["Linear"]},
                                  "deal": {"by": "speed", "window": 100 if backups else 1, "backups": backups}})
    batches, results, again = tessera.TokenBatches(data, SEQ, accumulation=own, vocab_size=64, seed=5), [], 0
    for step in range(3):
        ahead, begun = folder / f"ahead {ranks} {step}", 0
        if not backups:
            batches.deal(engine.microbatches())
        while not engine.step_is_due():
            batch = batches.of(engine.microbatch(), engine.device) if backups else batches.next(engine.device)
            loss = net(batch)
            begun += 1
            if not backups:
                time.sleep(0.01 if rank == 1 else 0.001)
            elif rank == 0 and begun == own + backups:
                ahead.touch()
            elif rank == 1 and begun == 1:
                limit = time.monotonic() + 300
                while not ahead.exists():
                    assert time.monotonic() < limit, "rank 0 does not make this rank's microbatches"
                    time.sleep(0.001)
            engine.backward(loss, tokens=batch.input.numel(), weight=batch.weight)
        if backups:
            batches.end_step()
        result = engine.step()
        results.append((result.loss, result.grad_norm))
        again += result.made_again
    state = engine.state_dict()
    engine.close()
    return results, state, again


def by_speed():
    """An Engine with "deal" by speed, and one with backups, have the bits of one rank, which has run before."""
    data = written("another text", [(7 * t * t + t) % 64 for t in range(16 * SEQ + 1)])
    for backups in (0, 2):
        place, (results, state, again) = folder / f"by speed {backups}", made_by_speed(data, backups)
        if ranks == 1:
            torch.save((results, state), place)
            continue
        wanted = torch.load(place)
        assert results == wanted[0], (backups, results, wanted[0])
        assert rank != 0 or (state.keys() == wanted[1].keys() and all(torch.equal(state[key], wanted[1][key]) for key in state)), backups
        if backups and ranks == 2:
            assert again >= 3, (again, "each step has two such microbatches, of which the last one may be a tie")


def commits():
    """A durable commit stores the position in the data. A later run of the same ranks continues at this position."""
    data, strategy = written("sixteen", range(16 * SEQ + 1)), {"durable": {"every": 2, "dir": str(folder / f"durable {ranks}")}}
    places = []
    for _ in range(2):
        net = Bigrams()
        engine, batches = tessera.Engine(net, strategy), tessera.TokenBatches(data, SEQ, batch=2, seed=5)
        loaded = engine.resume_durable()
        assert (loaded is None) == (not places) and (loaded is None or loaded.data == places[1]), loaded
        if loaded is not None:
            batches.resume(loaded.data)
        for _ in range(3):
            engine.backward(net(batches.next()))
            engine.step()
            places.append(batches.cursor())
            engine.commit_durable(data=places[-1])
        engine.finish_commit()
        engine.close()
    assert places[2] == places[3], places  # the third step was not committed, so it was made again


def cursors():
    data = written("ten", range(10 * SEQ + 1))
    batches = tessera.TokenBatches(data, SEQ, seed=42, rank=0, world_size=1)
    samples(batches, 4)
    place = batches.cursor()
    assert place == (0, 4, 10, 42, True) and place.consumed == 4
    other = tessera.TokenBatches(data, SEQ, batch=2, seed=42, rank=0, world_size=1)
    other.resume(list(place))
    assert sum(samples(other, 3), []) == ORDER[4:]
    expect_error(lambda: other.resume(None), 64, "SamplerCursor")
    expect_error(lambda: other.resume(place._replace(seed=1)), 78, "seed was 1 and is 42 now")
    expect_error(lambda: other.resume(place._replace(consumed=-1)), 65, "makes no sense")
    expect_error(lambda: tessera.TokenBatches(folder / "nothing", SEQ), 66, "nothing")
    expect_error(lambda: tessera.TokenBatches(data, SEQ, batch=0), 78, "batch must be at least 1")
    expect_error(lambda: tessera.TokenBatches(data, SEQ, batch=99), 65, "fewer than one step's")
    for seed in (-1, 1 << 64, 0.5, None):
        expect_error(lambda seed=seed: tessera.TokenBatches(data, SEQ, seed=seed), 64, "seed is an integer from 0 to 2**64 - 1", repr(seed))
    assert tessera.TokenBatches(data, SEQ, seed=(1 << 64) - 1, rank=0, world_size=1).cursor().seed == (1 << 64) - 1
    expect_error(lambda: tessera.TokenBatches(data, SEQ, tail="cut"), 64, "drop, pad", "'cut'")
    expect_error(lambda: tessera.TokenBatches(data, SEQ, format="numpy"), 64, "megatron")
    expect_error(lambda: tessera.TokenBatches(data, SEQ, vocab_size=4, rank=0, world_size=1, shuffle=False, batch=10).next(), 65, "vocab")
    engine = tessera.Engine(Bigrams(), {})
    expect_error(lambda: engine.save_checkpoint(folder / "wrong", data={"epoch": 1}), 64, "save_checkpoint: data is the cursor() of TokenBatches")
    expect_error(lambda: engine.commit_durable(data={"epoch": 1}), 64, "commit_durable: data is the cursor() of TokenBatches")
    expect_error(lambda: engine.commit_durable(json={"epoch": object()}), 64, "commit_durable: json['epoch'] cannot be written")
    assert engine.load_checkpoint(engine.save_checkpoint(folder / "without")).data is None
    engine.close()


torch.set_num_threads(1)
for program in (orders, dealing, sampler, steps, training, by_speed, commits, cursors):
    print(program.__name__, flush=True)
    program()
print("batches like those of C++")
