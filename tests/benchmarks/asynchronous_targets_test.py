#!/usr/bin/env python3
"""Tests, without training, how the targets of asynchronous ranks are measured: speeds of turns, parts of a core, the
values of a soak, and the page."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import paths
import asynchronous_targets as targets
import large_batch

ABOUT = {"commit": {"hash": "0123456789abcdef", "dirty": False}, "machine": {"cpu": "a processor", "cores": 2}, "quick": False}
CLEAN = {"events": {"kills of workers": 3, "kills of servers": 2, "joins": 1}, "seed": 1, "steps": 56, "workers": 7, "seconds": 9.0, "lost": [],
         "again": [4], "unsaid": [], "wrong": [], "hangs": [], "ends": [], "named": []}


def made_up():
    """Returns results of all sections."""
    speeds = {"synchronous": [2.0, None, 2.0], "asynchronous": [3.4, 3.5, 3.6], "alone": [10.0] * 3, "hogwild": [9.0] * 3, "dealt": [8.0] * 3,
              "even": [5.0] * 3}
    by_turns = {name: ABOUT | {"how": "held by cgroups", "shares": list(compared.shares), "speeds": {side: speeds[side] for side in compared.sides}}
                for name, compared in targets.COMPARED.items()}
    row = {"units": 8, "moved": [0.6], "moved_alone": [0.1], "computed": [1.33], "computed_alone": [1.28],
           "link": {"sent": 1 << 25, "received": 1 << 25}}
    wire = ABOUT | targets.WIRE | {"speed": 1e8, "wire_s": 0.5, "found": [row]}
    return {"sections": by_turns | {"wire": wire, "soak": ABOUT | CLEAN}}


class Soaked:
    """A soak whose run is over, with the values and the logs that the run has left."""

    def __init__(self, units, log=""):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
            soak = targets.Soak(1, 1, pathlib.Path(folder), "tessera")
            if units is not None:
                (soak.folder / "values").write_text(json.dumps(units))
            (soak.folder / "server0.log").write_text(log)
            self.sums = soak.sums()
        self.faults = targets.faults_of(CLEAN | self.sums)


class Turns(unittest.TestCase):
    def test_speed_is_that_between_whole_steps(self):
        self.assertEqual(targets.speed_of([1.0, 1.5, 2.0, 3.0]), 1.5)
        self.assertIsNone(targets.speed_of([1.0]))

    def test_ratios_leave_out_rounds_in_which_a_side_made_too_few_steps(self):
        self.assertEqual(targets.ratios([4.0, None, 9.0], [2.0, 1.0, 3.0]), [2.0, 3.0])

    def test_turns_of_signals_stop_a_process_and_leave_it_at_the_end(self):
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        try:
            with mock.patch.object(targets, "CGROUPS", pathlib.Path("/nowhere")), targets.Quotas({process.pid: 0.25}) as quotas:
                self.assertEqual(quotas.how(), "stopped and continued by signals")
                with quotas.running():
                    time.sleep(0.5)
            stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text().split()
            self.assertLess((int(stat[13]) + int(stat[14])) / os.sysconf("SC_CLK_TCK"), 0.4)
            self.assertIsNone(process.poll())
        finally:
            process.kill()
            process.wait()

    def test_ranks_without_parts_of_a_core_are_left_alone(self):
        with targets.Quotas({}) as quotas, quotas.running():
            self.assertEqual(quotas.how(), "")


class SoakOfAJob(unittest.TestCase):
    def test_steps_that_were_each_applied_once_are_no_fault(self):
        self.assertEqual(Soaked([[1.0] * 4, [1.0] * 4]).faults, [])

    def test_step_applied_again_is_a_fault_unless_the_log_says_so_as_often(self):
        log = "info worker 3 has left 1 of its steps unmade, from number 2 on; they are dealt again\n"
        units = [[1.0, 1.0, 2.0, 1.0], [1.0] * 4]
        self.assertEqual(Soaked(units, log).faults, [])
        self.assertEqual(Soaked(units).sums["unsaid"], [2])
        self.assertIn("more often than the servers said", Soaked(units).faults[0])
        thrice = [[1.0, 1.0, 3.0, 1.0], [1.0] * 4]
        self.assertEqual(Soaked(thrice, log).sums["unsaid"], [2])
        self.assertEqual(Soaked(thrice, log + log).faults, [])

    def test_step_that_one_shard_lacks_is_lost(self):
        self.assertEqual(Soaked([[1.0, 1.0], [1.0, 0.0]]).sums["lost"], [1])
        self.assertIn("steps that were lost", Soaked([[1.0, 1.0], [1.0, 0.0]]).faults[0])

    def test_number_that_is_no_count_is_a_wrong_sum(self):
        self.assertEqual(Soaked([[1.0, 1.5, -1.0], [1.0] * 3]).sums["wrong"], [1, 2])

    def test_soak_without_results_is_a_fault(self):
        self.assertTrue(Soaked(None).faults)


class Page(unittest.TestCase):
    def test_table_has_a_row_for_each_ratio_and_the_page_a_place_for_it(self):
        data = made_up()
        page = (paths.ROOT / "benchmarks/results" / targets.PAGE).read_text()
        filled = large_batch.filled(page, {"targets": data}, {"targets": targets.table})
        self.assertIn("| 4 ranks with 0.5, 0.5, 0.5, 0.25 of a core, held by cgroups: steps/s of all ranks, asynchronous over synchronous ", filled)
        self.assertIn("| 1.750 (1.700 to 1.800) | at least 1.6; ideal 1.75 |", filled)
        self.assertIn("| 0.900 (0.900 to 0.900) | at least 0.95 |", filled)
        self.assertIn("| 1.250 (1.250 to 1.250) | at most 1.15 |", filled)
        self.assertIn("| 1.000 | at most 1.10 |", filled)
        self.assertIn("| 0.100 | at most 0.10 |", filled)
        self.assertIn("no hang, no wrong sum, no step lost. 1 steps were applied again", filled)
        self.assertEqual({line.count("|") for line in targets.table(data) if line.startswith("|")}, {4})

    def test_sections_that_were_not_measured_are_left_out(self):
        lines = targets.table({"sections": {"soak": ABOUT | CLEAN}})
        self.assertEqual(sum(line.startswith("| ") for line in lines), 2)


if __name__ == "__main__":
    unittest.main()
