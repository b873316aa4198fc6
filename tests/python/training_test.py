"""Python models train as plain PyTorch trains them, on several ranks and under each strategy."""

import unittest

from launched import launch


class TrainingTest(unittest.TestCase):
    def test_two_ranks(self):
        code, output = launch(2, "training_ranks.py", timeout=500)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like plain PyTorch"), 2, output)

    def test_three_ranks_over_gloo(self):
        code, output = launch(3, "training_ranks.py", "gloo", timeout=500)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like plain PyTorch"), 3, output)


if __name__ == "__main__":
    unittest.main()
