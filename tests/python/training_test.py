"""Python models train as plain PyTorch trains them, on several ranks and under each strategy."""

import pathlib
import tempfile
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

    def test_adafactor_beside_torchs(self):
        code, output = launch(2, "adafactor_ranks.py")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like torch's Adafactor"), 2, output)

    def test_activations_on_disk(self):
        with tempfile.TemporaryDirectory() as folder:
            code, output = launch(2, "activations_ranks.py", folder)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("activations lay on disk"), 2, output)

    def test_buffers_beside_ddp(self):
        with tempfile.TemporaryDirectory() as folder:
            code, output = launch(2, "buffers_ranks.py", pathlib.Path(folder) / "meet")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("statistics like DDP's"), 2, output)


if __name__ == "__main__":
    unittest.main()
