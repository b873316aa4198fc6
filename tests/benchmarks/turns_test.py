#!/usr/bin/env python3
"""Tests the comparison of sides that train in turn."""

import pathlib
import sys
import tempfile
import time
import unittest

import paths  # noqa: F401
import launch
import ranks
import turns

# A rank that makes a step every 2 ms, and ends by itself after the given number of steps.
RANK = """import json, sys, time
with open(sys.argv[1], "w", buffering=1) as file:
    for step in range(int(sys.argv[2])):
        begun = time.monotonic()
        time.sleep(0.002)
        file.write(json.dumps({"step": step, "seconds": time.monotonic() - begun}) + "\\n")
"""


def side_with(folder, steps):
    """Returns a side whose only rank makes this number of steps."""
    side = turns.Side("torch_ddp")
    side._scratch, side._metrics = folder, folder / "metrics.0.jsonl"
    side._processes = [ranks.start([sys.executable, "-c", RANK, side._metrics, steps], 0, {}, folder)]
    return side


class Turns(unittest.TestCase):
    def test_side_trains_in_its_turn_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            side = side_with(pathlib.Path(folder), 1_000_000)
            try:
                while not launch.steps_of(side._metrics):
                    time.sleep(0.01)
                side.pause()
                stopped = len(launch.steps_of(side._metrics))
                time.sleep(0.1)
                self.assertEqual(len(launch.steps_of(side._metrics)), stopped)
                side.take_turn(0.3)
                self.assertGreater(len(launch.steps_of(side._metrics)), stopped + 1)
                self.assertLess(max(side.turns[0]), 0.1)  # no step of the turn contains the pause
            finally:
                side.end()

    def test_rank_that_ends_is_an_error(self):
        with tempfile.TemporaryDirectory() as folder:
            side = side_with(pathlib.Path(folder), 1)
            try:
                side._processes[0].wait()
                with self.assertRaisesRegex(ranks.ContenderFailed, "(?s)rank 0 of .* ended with 0"):
                    side.take_turn(0.01)
            finally:
                side.end()

    def test_step_that_was_stopped_does_not_count(self):
        steps = [{"seconds": seconds} for seconds in (1.0, 1.1, 9.0, 1.2, 1.3)]
        self.assertEqual(turns.whole_steps(steps, 2), [1.2, 1.3])
        self.assertEqual(turns.whole_steps(steps[:3], 2), [])

    def test_ratios_compare_turns_of_the_same_round(self):
        self.assertEqual(turns.ratios([[2.0], [], [30.0]], [[1.0], [5.0], [10.0]]), [2.0, 3.0])

    def test_words_of_a_side_are_contender_build_keys_and_arguments(self):
        side = turns.Side('tessera_full_shard@../before noise_scale={"every":50} --histogram-every 10')
        self.assertEqual((side.contender.name, side.folder), ("tessera_full_shard", "../before"))
        self.assertEqual(side.keys, {"noise_scale": {"every": 50}})
        self.assertEqual(side.arguments, ["--histogram-every", "10"])
        with self.assertRaisesRegex(SystemExit, "unknown contender full"):
            turns.Side("full")


if __name__ == "__main__":
    unittest.main()
