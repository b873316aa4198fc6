"""Models of transformers train sharded as plain PyTorch trains them; generation, adapters of peft, deferred init."""

import importlib.util
import unittest

from launched import launch


@unittest.skipUnless(importlib.util.find_spec("transformers") and importlib.util.find_spec("peft"), "no transformers and peft: scripts/setup --tests")
class TransformersTest(unittest.TestCase):
    def test_two_ranks(self):
        code, output = launch(2, "transformers_ranks.py", timeout=500, TESSERA_LOG_LEVEL="error", TRANSFORMERS_OFFLINE="1")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("all architectures train like plain PyTorch"), 2, output)


if __name__ == "__main__":
    unittest.main()
