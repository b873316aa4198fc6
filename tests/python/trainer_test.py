"""Tests that TesseraTrainer trains, evaluates, saves and resumes as the Trainer of transformers does."""

import importlib.util
import tempfile
import unittest

from launched import main, run_forked_files


@unittest.skipUnless(importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"),
                     "no transformers and accelerate: scripts/setup --tests")
class TrainerTest(unittest.TestCase):
    def test_two_ranks_train_like_the_plain_trainer(self):
        with tempfile.TemporaryDirectory() as folder:
            code, output = run_forked_files(["tessera.integrations.transformers"], (0, "trainer_ranks.py", "plain", folder),
                                            (2, "trainer_ranks.py", folder), at_rest=500, TESSERA_LOG_LEVEL="error")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like the plain Trainer"), 2, output)


if __name__ == "__main__":
    main()
