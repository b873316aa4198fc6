"""Tests what Python programs do around training. Each case has the right result, or a clear error on all ranks."""

import sys
import unittest

from launched import FOLDER, RANKS, launch, main, run


class ProgramsTest(unittest.TestCase):
    def test_user_programs_are_right_on_two_ranks(self):
        code, output = launch(2, "programs_ranks.py", at_rest=500, TESSERA_LOG_LEVEL="error")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("all programs were right"), 2, output)

    def test_user_errors_end_all_ranks(self):
        code, output = run([sys.executable, "-B", RANKS / "programs_endings.py"])
        self.assertEqual(code, 0, output)
        self.assertIn("all endings were right", output)

    def test_torch_distributed_works_beside_an_engine(self):
        code, output = run([sys.executable, "-B", FOLDER / "distributed_orders.py"])
        self.assertEqual(code, 0, output)
        self.assertIn("all orders were right", output)

    def test_usage_error_under_the_launcher_exits_with_64(self):
        code, output = launch(2, "import programs_ranks as p; p.unfrozen({**p.STRATEGY, **p.STRATEGIES['private']})", at_rest=120)
        self.assertEqual(code, 64, output)
        self.assertIn("call engine.set_trainable", output)


if __name__ == "__main__":
    main()
