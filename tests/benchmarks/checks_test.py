#!/usr/bin/env python3
"""Tests the checks that run before the timing: equal values pass, and the smallest difference is named."""

import math
import unittest

import paths  # noqa: F401
import checks


class Checks(unittest.TestCase):
    def test_equal_losses_pass(self):
        self.assertIn("2 strategies, 3 steps", checks.same_losses({"A": [3.0, 2.0, 1.0], "B": [3.0, 2.0, 1.0]}))

    def test_one_bit_of_a_loss_is_found_and_named(self):
        with self.assertRaisesRegex(checks.CheckFailed, "step 2.*A.*C"):
            checks.same_losses({"A": [3.0, 2.0], "B": [3.0, 2.0], "C": [3.0, math.nextafter(2.0, 3.0)]})

    def test_a_missing_step_is_found(self):
        with self.assertRaisesRegex(checks.CheckFailed, "B ran 1 steps, A 2"):
            checks.same_losses({"A": [3.0, 2.0], "B": [3.0]})

    def test_nan_is_no_loss(self):
        with self.assertRaises(checks.CheckFailed):
            checks.same_losses({"A": [math.nan], "B": [math.nan]})

    def test_one_byte_beyond_the_plan_is_found(self):
        planned = {"A": {"allocated_bytes": 64, "planned_bytes": 64}}
        self.assertIn("1 strategies", checks.memory_as_planned(planned))
        with self.assertRaisesRegex(checks.CheckFailed, "B allocated 65 bytes, its plan says 64"):
            checks.memory_as_planned(planned | {"B": {"allocated_bytes": 65, "planned_bytes": 64}})

    def test_peers_start_equal_and_may_drift(self):
        wanted = {"A": [[4.0, 3.0], [4.1, 3.1]]}
        checks.peers_train_alike(wanted | {"B": [[4.0, 3.02], [4.1, 3.1]]}, first=1e-5, later=1e-2)
        with self.assertRaisesRegex(checks.CheckFailed, "rank 1, step 1.*A 4.1, B 4.11"):
            checks.peers_train_alike(wanted | {"B": [[4.0, 3.0], [4.11, 3.1]]}, first=1e-5, later=1e-2)
        with self.assertRaisesRegex(checks.CheckFailed, "rank 0, step 2"):
            checks.peers_train_alike(wanted | {"B": [[4.0, math.nan], [4.1, 3.1]]}, first=1e-5, later=1e-2)


if __name__ == "__main__":
    unittest.main()
