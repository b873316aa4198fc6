"""Tests that TesseraStrategy trains, validates, saves and resumes as Lightning does without it."""

import importlib.util
import tempfile
import unittest

from launched import run_forked_files


@unittest.skipUnless(importlib.util.find_spec("lightning"), "no lightning: scripts/setup --tests")
class LightningTest(unittest.TestCase):
    def test_two_ranks_train_like_lightning_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            code, output = run_forked_files(["tessera.integrations.lightning"], (0, "lightning_ranks.py", "plain", folder),
                                            (2, "lightning_ranks.py", folder), (1, "lightning_ranks.py", folder), at_rest=500, TESSERA_LOG_LEVEL="error")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like Lightning alone"), 3, output)


if __name__ == "__main__":
    unittest.main()
