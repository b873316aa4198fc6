"""Simulates when ranks with clocks of their own pull, compute, push and meet, and writes the order of pushes and pulls in the form
of sync.record_order (docs/design/asynchronous.md, "Orders"). It uses the standard library only.

This program computes only times, by the model of `tessera simulate` (planner/modes/mode_clock.h).
tests/planner/mode_cases.json has runs for which both give the same times. `tessera simulate --order` writes orders of
models that have a model file, with the costs of a measured profile. The study's models are Python programs, and some
runs keep the simulated clock (Clock.seconds) themselves, so it makes its orders here. Work is dealt as tickets, one for
each gradient, so all ways to train have the same samples.
"""

import collections
import heapq
import itertools
import json
import random
import statistics
import typing

HEADER = {"tessera_order": 1}
OWNERS = "ranks"


class Clock(typing.NamedTuple):
    """The time that each rank takes for the forward and backward of a step."""

    step_s: float
    slowness: tuple               # [rank]: the seconds of the rank's steps, divided by step_s
    stall_share: float = 0.0      # the share of steps in which a rank stands still
    stall_s: float = 0.0

    def seconds(self, seed, rank, step):
        """Returns the seconds of a rank's step (from 1). The same arguments always give the same seconds."""
        stalls = random.Random(f"{seed} {rank} {step}").random() < self.stall_share
        return self.step_s * self.slowness[rank] + (self.stall_s if stalls else 0.0)


class Costs(typing.NamedTuple):
    """The seconds that a step takes in addition to its compute."""

    pull_s: float = 0.0
    push_s: float = 0.0
    meet_s: float = 0.0  # the sum of gradients in a meeting, from the moment at which the last rank has come


def meeting_s(step_s):
    """Returns the median over steps of the shortest time that a rank spent in step(). That rank came last, and waited
    for nobody. `step_s`: [rank][step]. Returns None if ranks made different numbers of steps that counted, since then
    no step belongs to all ranks. (A late rank of `backups` makes no step that counts.)"""
    shortest = [min(of_ranks) for of_ranks in zip(*step_s)]
    return statistics.median(shortest) if shortest and len(set(map(len, step_s))) == 1 else None


class Step(typing.NamedTuple):
    """A step of a rank whose gradient counts. Times are seconds from the start of the run."""

    rank: int
    step: int        # number among the rank's own steps, from 1
    ticket: int      # index of its ticket, from 0; the ticket stands for its samples
    begin: float     # waits are over, and the pull begins
    pulled: float
    computed: float
    pushing: float   # the push begins
    pushed: float    # the rank continues

    def spans(self):
        """Returns (whether it is the push, begin, end) of the pull and of the push."""
        return (False, self.begin, self.pulled), (True, self.pushing, self.pushed)


class Timeline(typing.NamedTuple):
    steps: list      # sorted by the end of their push
    dropped: int     # gradients that came too late to count

    def seconds(self):
        return max(step.pushed for step in self.steps)

    def tickets(self, ranks):
        """Returns [rank][step]: the ticket."""
        found = [[] for _ in range(ranks)]
        for step in sorted(self.steps, key=lambda step: step.step):
            found[step.rank].append(step.ticket)
        return found

    def ages(self):
        """Returns the ages of the gradients of asynchronous ranks, in the order of pushes. The age is the number of
        other ranks' pushes between the gradient's pull and its push. A pull or push counts at the middle of its
        time."""
        events = []
        for step in self.steps:
            for is_push, first, last in step.spans():
                events.append(((first + last) / 2, step.step, step.rank, is_push))
        found, pushes, seen = [], 0, {}
        for _, _, rank, is_push in sorted(events):
            if is_push:
                found.append(pushes - seen[rank])
                pushes += 1
            else:
                seen[rank] = pushes
        return found


def _by_end(steps, dropped=0):
    return Timeline(sorted(steps, key=lambda step: (step.pushed, step.rank)), dropped)


def asynchronous(clock, costs, work, seed, max_staleness=None):
    """Returns the Timeline of ranks that push `work` gradients together. A rank pushes a gradient as soon as it has
    one. If `max_staleness` is given, a rank that has made k steps begins the next step once all ranks have made
    k - max_staleness steps. If `max_staleness` is 0, the gradients of a round are pushed in rank order, and `work` must
    be the same for each rank."""
    ranks = len(clock.slowness)
    if max_staleness == 0:
        return _rounds(clock, costs, work, seed)
    made, waiting, under_way, steps = [0] * ranks, list(range(ranks)), [], []
    now, tickets = 0.0, itertools.count()
    left = work
    while True:
        for rank in list(waiting):
            if left == 0 or (max_staleness is not None and made[rank] - max_staleness > min(made)):
                continue
            waiting.remove(rank)
            left -= 1
            number = made[rank] + 1
            pulled = now + costs.pull_s
            computed = pulled + clock.seconds(seed, rank, number)
            step = Step(rank, number, next(tickets), now, pulled, computed, computed, computed + costs.push_s)
            heapq.heappush(under_way, (step.pushed, rank, step))
        if not under_way:
            return _by_end(steps)
        now, rank, step = heapq.heappop(under_way)
        steps.append(step)
        made[rank] += 1
        waiting = sorted([*waiting, rank])


def _rounds(clock, costs, work, seed):
    ranks = len(clock.slowness)
    if work % ranks:
        raise ValueError(f"{work} gradients are not the same number for each of {ranks} ranks, which max_staleness 0 wants")
    steps, now = [], 0.0
    for number in range(1, work // ranks + 1):
        pulled = now + costs.pull_s
        computed = [pulled + clock.seconds(seed, rank, number) for rank in range(ranks)]
        begin, now = now, max(computed)
        for rank in range(ranks):
            pushing, now = now, now + costs.push_s
            steps.append(Step(rank, number, ranks * (number - 1) + rank, begin, pulled, computed[rank], pushing, now))
    return _by_end(steps)


def meeting(clock, costs, count, seed, every=1):
    """Returns the Timeline of ranks that make `count` steps each and meet in every `every`-th of them. Synchronous
    ranks meet in each step. A step without a meeting ends with the rank's own update, which takes push_s."""
    ranks = len(clock.slowness)
    at, steps = [0.0] * ranks, []
    for number in range(1, count + 1):
        computed = [at[rank] + clock.seconds(seed, rank, number) for rank in range(ranks)]
        meets = number % every == 0
        end = [max(computed) + costs.meet_s] * ranks if meets else [each + costs.push_s for each in computed]
        for rank in range(ranks):
            pushing = max(computed) if meets else computed[rank]
            steps.append(Step(rank, number, ranks * (number - 1) + rank, at[rank], at[rank], computed[rank], pushing, end[rank]))
        at = end
    return _by_end(steps)


def backups(clock, costs, count, seed, spare):
    """Returns the Timeline of `count` steps. A step sums the gradients that come first, and does not wait for the last
    `spare` gradients. A rank that comes later drops its gradient and continues with the newest step. A ticket belongs
    to a rank's part of a step, so late ranks skip some tickets."""
    ranks = len(clock.slowness)
    attempts, under_way, steps = [0] * ranks, [], []

    def begin(rank, over, now):
        attempts[rank] += 1
        pulled = now + costs.pull_s
        computed = pulled + clock.seconds(seed, rank, attempts[rank])
        heapq.heappush(under_way, (computed, rank, over, Step(rank, attempts[rank], ranks * over + rank, now, pulled, computed, computed, 0.0)))

    for rank in range(ranks):
        begin(rank, 0, 0.0)
    over, opened, dropped, arrived = 0, 0.0, 0, []
    while over < count:
        now, rank, of, step = heapq.heappop(under_way)
        if of < over:
            dropped += 1
            begin(rank, over, max(now, opened))
            continue
        arrived.append(step)
        if len(arrived) == ranks - spare:
            over, opened = over + 1, now + costs.meet_s
            steps += [each._replace(pushing=now, pushed=opened) for each in arrived]
            if over < count:
                for each in arrived:
                    begin(each.rank, over, opened)
            arrived = []
    return _by_end(steps, dropped + len(under_way))


def templates_of(text, ranks, step=2):
    """Returns [rank][event]: (op, unit, group, shard) of the rank's step `step`, in order. `text`: an order that an
    Engine recorded."""
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    found = [[] for _ in range(ranks)]
    for line in sorted(lines, key=lambda line: line["event"]):
        if line["step"] == step:
            found[line["rank"]].append((line["op"], line["unit"], line["group"], line["shard"]))
    for rank, template in enumerate(found):
        if {op for op, *_ in template} != {"pull", "push"}:
            raise ValueError(f"rank {rank} has no pulls and pushes in step {step} of the recorded order")
    return found


def order(timeline, templates):
    """Yields the objects of an order file's lines. A step's pulls are spread evenly over the time of its pull, and its
    pushes over the time of its push."""
    events = []
    for step in timeline.steps:
        for is_push, first, last in step.spans():
            op = "push" if is_push else "pull"
            shards = [rest for of, *rest in templates[step.rank] if of == op]
            for place, shard in enumerate(shards):
                at = first + (place + 0.5) / len(shards) * (last - first)
                # A rank may begin a step at the moment at which another rank has pushed an earlier step.
                events.append((at, step.step, step.rank, is_push, place, op, shard))
    events.sort(key=lambda event: event[:5])
    ranks = len(templates)
    yield HEADER | {"ranks": ranks, "owners": OWNERS, "owner_count": ranks}
    versions = collections.Counter()
    for number, (_, step, rank, is_push, _, op, (unit, group, shard)) in enumerate(events):
        yield {"event": number, "rank": rank, "step": step, "op": op, "unit": unit, "group": group, "shard": shard,
               "version": versions[unit, group, shard]}
        versions[unit, group, shard] += is_push


def write_order(path, timeline, templates):
    with open(path, "w", encoding="utf-8") as lines:
        for line in order(timeline, templates):
            lines.write(json.dumps(line) + "\n")
