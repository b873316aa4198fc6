#!/usr/bin/env python3
"""Tests simulated orders of pushes and pulls: who may be ahead, in which order rounds are applied, and that no work is lost."""

import collections
import itertools
import json
import unittest

import paths
import push_orders
from push_orders import Clock, Costs

RANKS = 4
CLOCKS = {"alike": Clock(0.1, (1, 1, 1, 1)), "slow": Clock(0.1, (1, 1, 1, 2)), "stalls": Clock(0.1, (1, 1, 1, 1), 0.1, 1.0)}
COSTS = Costs(0.01, 0.02, 0.03)
TEMPLATE = [("pull", "root", 0, 0), ("pull", "root", 0, 1), ("pull", "block", 1, 0),
            ("push", "block", 1, 0), ("push", "root", 0, 0), ("push", "root", 0, 1)]


def lines_of(timeline):
    return list(push_orders.order(timeline, [TEMPLATE] * RANKS))


class Clocks(unittest.TestCase):
    def test_stalls_are_as_frequent_as_asked_and_differ_by_seed_and_rank(self):
        clock = Clock(0.1, (1, 1), 0.2, 1.0)
        stalls = {(seed, rank): [clock.seconds(seed, rank, step) > 1 for step in range(1, 2001)] for seed in (1, 2) for rank in (0, 1)}
        for each in stalls.values():
            self.assertAlmostEqual(sum(each) / 2000, 0.2, delta=0.04)
        self.assertEqual(len(set(map(tuple, stalls.values()))), 4)
        self.assertEqual(CLOCKS["slow"].seconds(1, 3, 5), 2 * CLOCKS["slow"].seconds(1, 0, 5))


    def test_cost_of_a_meeting_is_that_of_the_rank_that_came_last(self):
        self.assertEqual(push_orders.meeting_s([[0.5, 0.1, 0.3], [0.2, 0.4, 0.6]]), 0.2)
        for unlike in ([[], [0.1]], [[0.1], [0.1, 0.2]], [[], []]):
            self.assertIsNone(push_orders.meeting_s(unlike))


class Asynchronous(unittest.TestCase):
    def test_work_is_conserved(self):
        for clock, most in itertools.product(CLOCKS.values(), (None, 0, 1, 4)):
            timeline = push_orders.asynchronous(clock, COSTS, 120, 7, most)
            self.assertEqual(sorted(step.ticket for step in timeline.steps), list(range(120)))
            self.assertEqual(timeline.dropped, 0)
            for rank, tickets in enumerate(timeline.tickets(RANKS)):
                own = sorted(step.step for step in timeline.steps if step.rank == rank)
                self.assertEqual(own, list(range(1, len(own) + 1)))
                self.assertEqual(len(tickets), len(own))

    def test_a_rank_does_one_thing_after_the_other(self):
        for clock, most in itertools.product(CLOCKS.values(), (None, 0, 2)):
            free = [0.0] * RANKS
            for step in push_orders.asynchronous(clock, COSTS, 80, 7, most).steps:
                self.assertGreaterEqual(step.begin, free[step.rank])
                self.assertAlmostEqual(step.computed - step.pulled, clock.seconds(7, step.rank, step.step))
                self.assertTrue(step.begin < step.pulled < step.computed <= step.pushing < step.pushed)
                free[step.rank] = step.pushed

    def test_nobody_is_further_ahead_than_max_staleness(self):
        for clock, most in itertools.product(CLOCKS.values(), (0, 1, 4)):
            made, furthest = [0] * RANKS, 0
            for line in lines_of(push_orders.asynchronous(clock, COSTS, 200, 3, most))[1:]:
                if line["op"] == "push":
                    made[line["rank"]] = line["step"]
                else:
                    furthest = max(furthest, line["step"] - 1 - min(made))
            self.assertLessEqual(furthest, most)
            if clock is CLOCKS["slow"]:
                self.assertEqual(furthest, most, "the bound is reached")

    def test_rounds_without_staleness_are_in_rank_order(self):
        for clock in CLOCKS.values():
            for costs in (COSTS, Costs()):
                lines = lines_of(push_orders.asynchronous(clock, costs, 40, 3, 0))[1:]
                pushes = [(line["step"], line["rank"]) for line in lines if line["op"] == "push"]
                self.assertEqual(pushes, sorted(pushes))
                for line in lines:
                    if line["op"] == "pull":
                        self.assertEqual(line["version"], RANKS * (line["step"] - 1))

    def test_ages_are_the_pushes_of_others_between_pull_and_push(self):
        rounds = push_orders.asynchronous(CLOCKS["alike"], COSTS, 12, 1, 0)
        self.assertEqual(rounds.ages(), [0, 1, 2, 3] * 3)
        # Two pushes come at 1.0 s. The push of the earlier step comes first.
        steps = push_orders.asynchronous(Clock(0.5, (1, 2)), Costs(), 6, 1)
        self.assertEqual([step.rank for step in steps.steps], [0, 0, 1, 0, 0, 1])
        self.assertEqual(steps.ages(), [0, 1, 1, 0, 1, 1])

    def test_rounds_of_unequal_ranks_are_refused(self):
        with self.assertRaisesRegex(ValueError, "41 gradients are not the same number for each of 4 ranks"):
            push_orders.asynchronous(CLOCKS["alike"], COSTS, 41, 3, 0)

    def test_a_rank_at_half_speed_makes_half_of_the_steps_and_delays_nobody(self):
        counts = [len(each) for each in push_orders.asynchronous(CLOCKS["slow"], Costs(), 700, 1).tickets(RANKS)]
        self.assertEqual(counts[:3], [200, 200, 200])
        self.assertEqual(counts[3], 100)

    def test_the_same_seed_gives_the_same_order_and_another_one_another(self):
        orders = [lines_of(push_orders.asynchronous(CLOCKS["stalls"], COSTS, 120, seed)) for seed in (5, 5, 6)]
        self.assertEqual(orders[0], orders[1])
        self.assertNotEqual(orders[0], orders[2])


class Meetings(unittest.TestCase):
    def test_synchronous_steps_take_as_long_as_their_slowest_rank(self):
        timeline = push_orders.meeting(CLOCKS["slow"], Costs(meet_s=0.03), 10, 1)
        self.assertAlmostEqual(timeline.seconds(), 10 * 0.23)
        self.assertEqual(sorted(step.ticket for step in timeline.steps), list(range(40)))

    def test_rarer_meetings_wait_less_for_stalls(self):
        each, eighth = (push_orders.meeting(CLOCKS["stalls"], Costs(), 400, 1, every) for every in (1, 8))
        self.assertLess(eighth.seconds(), each.seconds())
        self.assertEqual(len(each.steps), len(eighth.steps))


class Backups(unittest.TestCase):
    def test_each_step_has_all_ranks_but_the_spare_ones(self):
        for clock, spare in itertools.product(CLOCKS.values(), (0, 1, 3)):
            timeline = push_orders.backups(clock, COSTS, 50, 9, spare)
            of_step = collections.Counter(step.ticket // RANKS for step in timeline.steps)
            self.assertEqual(of_step, {number: RANKS - spare for number in range(50)})
            self.assertEqual(len({step.ticket for step in timeline.steps}), len(timeline.steps))

    def test_without_spare_ranks_it_is_a_synchronous_run(self):
        for clock in CLOCKS.values():
            synchronous = push_orders.meeting(clock, Costs(meet_s=0.03), 30, 2)
            timeline = push_orders.backups(clock, Costs(meet_s=0.03), 30, 2, 0)
            self.assertEqual(timeline.dropped, 0)
            self.assertAlmostEqual(timeline.seconds(), synchronous.seconds())

    def test_gradients_are_applied_or_dropped(self):
        clock = CLOCKS["slow"]
        timeline = push_orders.backups(clock, Costs(), 30, 2, 1)
        self.assertAlmostEqual(timeline.seconds(), 30 * 0.1)  # nobody waits for the slow rank
        self.assertEqual(len(timeline.steps), 90)
        self.assertGreater(timeline.dropped, 0)


class Listed:
    """A clock whose seconds are in a table [rank, step]. Steps beyond the table take its seconds again, from the first
    on."""

    def __init__(self, table):
        self.table, self.slowness = table, (1.0,) * len(table)

    def seconds(self, _, rank, step):
        return self.table[rank][(step - 1) % len(self.table[rank])]


class Cases(unittest.TestCase):
    def test_runs_are_those_of_tessera_simulate(self):
        for case in json.loads((paths.ROOT / "tests/planner/mode_cases.json").read_text()):
            clock, costs, steps = Listed(case["compute_s"]), Costs(*case["costs"]), case["steps"]
            if case["kind"] == "meeting":
                timeline = push_orders.meeting(clock, costs, steps, 0, case["every"])
            elif case["kind"] == "backups":
                timeline = push_orders.backups(clock, costs, steps, 0, case["spare"])
            else:
                timeline = push_orders.asynchronous(clock, costs, steps * len(clock.table), 0, case["max_staleness"])
                self.assertEqual(timeline.ages(), case["ages"], case["name"])
            ends = [[] for _ in clock.table]
            for step in sorted(timeline.steps, key=lambda step: step.step):
                ends[step.rank].append(step.pushed)
            self.assertEqual(ends, case["ends_s"], case["name"])
            self.assertEqual(timeline.dropped, case["dropped"], case["name"])


class Files(unittest.TestCase):
    def test_order_has_the_form_of_a_recorded_one(self):
        lines = lines_of(push_orders.asynchronous(CLOCKS["stalls"], COSTS, 30, 1))
        self.assertEqual(lines[0], {"tessera_order": 1, "ranks": RANKS, "owners": "ranks", "owner_count": RANKS})
        self.assertEqual([line["event"] for line in lines[1:]], list(range(30 * len(TEMPLATE))))
        versions = collections.Counter()
        for line in lines[1:]:
            key = line["unit"], line["group"], line["shard"]
            self.assertEqual(line["version"], versions[key])
            versions[key] += line["op"] == "push"
        self.assertEqual(set(versions.values()), {30})

    def test_each_rank_keeps_the_order_of_its_template(self):
        for costs in (COSTS, Costs()):
            by_rank = collections.defaultdict(list)
            for line in list(push_orders.order(push_orders.asynchronous(CLOCKS["slow"], costs, 30, 1), [TEMPLATE] * RANKS))[1:]:
                by_rank[line["rank"]].append((line["op"], line["unit"], line["group"], line["shard"]))
            for found in by_rank.values():
                self.assertEqual(found, TEMPLATE * (len(found) // len(TEMPLATE)))

    def test_templates_are_those_of_a_step_of_a_recorded_order(self):
        lines = lines_of(push_orders.asynchronous(CLOCKS["alike"], COSTS, 12, 1))
        head, *rest = map(json.dumps, lines)
        text = "\n".join([head, *reversed(rest)]) + "\n"  # ranks append their lines by turns
        self.assertEqual(push_orders.templates_of(text, RANKS), [TEMPLATE] * RANKS)
        with self.assertRaisesRegex(ValueError, "rank 0 has no pulls and pushes in step 9"):
            push_orders.templates_of(text, RANKS, step=9)


if __name__ == "__main__":
    unittest.main()
