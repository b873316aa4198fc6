"""Trains runs of asynchronous.py, one after the other. Each rank runs this program, and rank 0 writes the results.

    asynchronous_ranks.py DATA RUNS OUT

DATA is a JSON file: study, training, held_out (paths). RUNS is a JSON list of runs: name, strategy, seed, batch,
tickets ([rank][step], or null for backups, whose ranks skip some), steps (of a rank without tickets), clock (a
push_orders.Clock, or null for a run whose ranks do not sleep). OUT gets a JSON line for each run that has ended: its
name, and the result of `trained`.
"""

import json
import pathlib
import statistics
import sys
import time

import large_batch_digits
import torch
from torch import nn
from torch.nn import functional

import tessera
from push_orders import Clock, meeting_s

WIDTH, HEADS, BLOCKS, SEQ_LEN, BYTES = 64, 4, 2, 64, 256
HELD_OUT_SEQUENCES = 256


def rows_of(seed, ticket, count, batch):
    """Returns `batch` numbers below `count`: the samples of a ticket."""
    return torch.randint(count, (batch,), generator=torch.Generator().manual_seed(1_000_003 * seed + ticket))


class Digits:
    """scikit-learn's digits and a perceptron."""

    def __init__(self, training, _):
        (self.pictures, self.classes), self.held_out = large_batch_digits.split(training)

    def model(self):
        return large_batch_digits.perceptron()

    def loss(self, model, seed, ticket, batch):
        rows = rows_of(seed, ticket, len(self.classes), batch)
        return functional.cross_entropy(model(self.pictures[rows]), self.classes[rows])

    def judged(self, model):
        """Returns the held-out loss."""
        return large_batch_digits.judged(model, *self.held_out)[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.attend(self.before(x)).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))


class Language(nn.Module):
    """A small GPT over bytes."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class Text:
    """The demo's text, and a small GPT that guesses the next byte."""

    def __init__(self, training, held_out):
        headers = sorted(pathlib.Path(training).rglob("*.h"), key=str)
        self.training, self.held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (
            b"".join(path.read_bytes() for path in headers), pathlib.Path(held_out).read_bytes()))

    def model(self):
        return Language()

    @staticmethod
    def loss_of(model, text, begins):
        sequences = text[begins.unsqueeze(1) + torch.arange(SEQ_LEN + 1)].long()
        return functional.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())

    def loss(self, model, seed, ticket, batch):
        return self.loss_of(model, self.training, rows_of(seed, ticket, len(self.training) - SEQ_LEN, batch))

    @torch.no_grad()
    def judged(self, model):
        """Returns the held-out loss."""
        begins = torch.linspace(0, len(self.held_out) - SEQ_LEN - 1, HELD_OUT_SEQUENCES).long()
        return self.loss_of(model, self.held_out, begins).item()


STUDIES = {"digits": Digits, "text": Text}


@torch.no_grad()
def pull_all(model):
    """Reads each parameter, so that waits and pulls come before the step's compute, which the clock times."""
    for parameter in model.parameters():
        parameter.sum()


def made_steps(run, data, model, engine):
    """Trains, and returns this rank's numbers: lists with an entry for each step whose gradient counted, and the
    numbers "oldest" and "dropped"."""
    rank, ranks = tessera.rank(), tessera.world_size()
    tickets = run["tickets"] and run["tickets"][rank]
    clock = run["clock"] and Clock(*run["clock"])
    own = {"tickets": [], "losses": [], "ends": [], "pull_s": [], "step_s": [], "ages": [], "oldest": 0, "dropped": 0}
    goal = len(tickets) if tickets is not None else run["steps"]
    tessera.barrier()
    start, done, attempt = time.perf_counter(), 0, 0
    while done < goal:
        attempt += 1
        ticket = tickets[done] if tickets is not None else ranks * done + rank
        before = time.perf_counter()
        pull_all(model)
        begin = time.perf_counter()
        loss = data.loss(model, run["seed"], ticket, run["batch"])
        engine.backward(loss, samples=run["batch"])
        if clock:
            time.sleep(max(0.0, begin + clock.seconds(run["seed"], rank, attempt) - time.perf_counter()))
        computed = time.perf_counter()
        result = engine.step()
        end = time.perf_counter()
        done = result.step
        own["dropped"] = result.dropped
        if result.missed:
            continue
        own["tickets"].append(ticket)
        own["losses"].append(round(loss.item(), 5))
        own["ends"].append(round(end - start, 5))
        own["pull_s"].append(begin - before)
        own["step_s"].append(end - computed)
        own["ages"].append(result.staleness_mean)
        own["oldest"] = max(own["oldest"], result.staleness_max)
    return own


def trained(run, data):
    """Returns the outcome on rank 0, and None on the other ranks.

    "ranks" has the tickets, losses and ends of each rank. An end is the seconds from the start of the run to the end of
    a step. `pull_s` is the median time of a pull, `push_s` the median time of a call of step(). `meet_s`: see
    meeting_s."""
    torch.manual_seed(run["seed"])
    model = data.model()
    engine = tessera.Engine(model, run["strategy"])
    own = made_steps(run, data, model, engine)
    tessera.barrier()  # close() takes the newest values, so no Engine is closed before all ranks have pushed
    engine.close()
    ranks = [json.loads(text) for text in tessera.all_gather(json.dumps(own))]
    if tessera.rank() != 0:
        return None
    ages = [age for each in ranks for age in each["ages"]]
    return {"ranks": [{name: each[name] for name in ("tickets", "losses", "ends")} for each in ranks],
            "seconds": max(end for each in ranks for end in each["ends"]),
            "staleness_mean": statistics.fmean(ages), "staleness_max": max(each["oldest"] for each in ranks),
            "dropped": max(each["dropped"] for each in ranks), "held_out_loss": data.judged(model),
            "pull_s": statistics.median(each for of in ranks for each in of["pull_s"]),
            "push_s": statistics.median(each for of in ranks for each in of["step_s"]),
            "meet_s": meeting_s([each["step_s"] for each in ranks])}


def main():
    about, runs, out = sys.argv[1:]
    about = json.loads(pathlib.Path(about).read_text())
    data = STUDIES[about["study"]](about["training"], about["held_out"])
    torch.set_num_threads(1)
    for run in json.loads(pathlib.Path(runs).read_text()):
        outcome = trained(run, data)
        if outcome is not None:
            with open(out, "a", encoding="utf-8") as lines:
                lines.write(json.dumps({"name": run["name"]} | outcome) + "\n")


if __name__ == "__main__":
    main()
