#!/usr/bin/env python3
"""Tests tasks within a budget: a task that fails or does not fit is recorded, and the other tasks run."""

import subprocess
import unittest

import paths  # noqa: F401
from ranks import ContenderFailed
from schedule import Budget, Schedule, Task


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Budgets(unittest.TestCase):
    def test_time_left_never_falls_below_zero(self):
        clock = Clock()
        budget = Budget(60, clock)
        self.assertEqual((budget.spent(), budget.left()), (0, 60))
        clock.now += 45
        self.assertEqual((budget.spent(), budget.left()), (45, 15))
        clock.now += 45
        self.assertEqual((budget.spent(), budget.left()), (90, 0))

    def test_task_that_fits_exactly_is_allowed(self):
        budget = Budget(60, Clock())
        self.assertIsNone(budget.refusal(60))
        self.assertEqual(budget.refusal(61), "60 s of 60 were left, and it takes about 61")


class Schedules(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()
        self.said, self.ran, self.limits = [], [], []

    def schedule(self, seconds, **more):
        return Schedule(self.said.append, Budget(seconds, self.clock), **more)

    def task(self, key, takes, estimate=1.0, limit=100.0, error=None):
        def run(limit_s):
            self.ran.append(key)
            self.limits.append(limit_s)
            self.clock.now += takes
            if error:
                raise error

        return Task(key, f"task {key}", run, estimate, limit)

    def test_rounds_are_interleaved(self):
        schedule = self.schedule(100)
        saved = []
        schedule.run([self.task("a", 1), self.task("b", 2)], rounds=2, after_each=lambda: saved.append(len(self.ran)))
        self.assertEqual(self.ran, ["a", "b", "a", "b"])
        self.assertEqual(saved, [1, 2, 3, 4])
        self.assertEqual((schedule.failed, schedule.not_run), ([], []))

    def test_a_failure_is_noted_and_not_repeated_and_loses_nothing(self):
        schedule = self.schedule(100)
        schedule.run([self.task("a", 1, error=ValueError("no luck")), self.task("b", 1)], rounds=2)
        self.assertEqual(self.ran, ["a", "b", "b"])
        self.assertEqual(schedule.failed, [{"key": "a", "what": "task a", "round": 1, "why": "ValueError: no luck"}])
        self.assertEqual(self.said, ["failed: task a, round 1: ValueError: no luck"])

    def test_task_is_given_up_after_the_allowed_failures(self):
        schedule = self.schedule(100, most_failures=2)
        schedule.run([self.task("a", 1, error=ContenderFailed("no luck"))], rounds=3)
        self.assertEqual(self.ran, ["a", "a"])
        self.assertEqual([(entry["round"], entry["why"]) for entry in schedule.failed], [(1, "no luck"), (2, "no luck")])

    def test_all_of_a_long_reason_is_kept_and_its_end_is_said(self):
        schedule = self.schedule(100)
        schedule.run([self.task("a", 1, error=ValueError("it ended:\ntrace\nno luck\n"))], rounds=1)
        self.assertEqual(self.said, ["failed: task a, round 1: no luck"])
        self.assertIn("trace", schedule.failed[0]["why"])

    def test_task_ended_by_the_budget_counts_as_not_run(self):
        late = subprocess.TimeoutExpired("tessera", 20)
        schedule = self.schedule(30)
        schedule.run([self.task("a", 10, limit=10, error=late), self.task("b", 20, limit=100, error=late)], rounds=1)
        self.assertEqual([entry["key"] for entry in schedule.failed], ["a"])
        self.assertEqual(self.said[1:], ["not run: task b, round 1: it did not end in the 20 s that were left"])

    def test_task_that_does_not_fit_is_listed_and_smaller_ones_run(self):
        schedule = self.schedule(10)
        schedule.run([self.task("a", 4), self.task("large", 0, estimate=20), self.task("b", 1)], rounds=1)
        self.assertEqual(self.ran, ["a", "b"])
        self.assertEqual(schedule.not_run, [{"key": "large", "what": "task large", "round": 1,
                                             "why": "6 s of 10 were left, and it takes about 20"}])

    def test_second_round_uses_the_measured_duration(self):
        schedule = self.schedule(10)
        schedule.run([self.task("a", 6, estimate=1)], rounds=3)
        self.assertEqual(self.ran, ["a"])
        self.assertEqual([entry["round"] for entry in schedule.not_run], [2])  # the round that failed and later ones were not run

    def test_task_gets_no_more_time_than_is_left(self):
        schedule = self.schedule(10)
        schedule.run([self.task("a", 4, limit=5), self.task("b", 1, limit=100)], rounds=1)
        self.assertEqual(self.limits, [5, 6])


if __name__ == "__main__":
    unittest.main()
