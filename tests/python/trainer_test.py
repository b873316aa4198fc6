"""TesseraTrainer trains, evaluates, saves and resumes as the Trainer of transformers does."""

import importlib.util
import sys
import tempfile
import unittest

from launched import FOLDER, launch, run


@unittest.skipUnless(importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"),
                     "no transformers and accelerate: scripts/setup --tests")
class TrainerTest(unittest.TestCase):
    def test_two_ranks_beside_one_process(self):
        with tempfile.TemporaryDirectory() as folder:
            code, output = run([sys.executable, "-B", FOLDER / "trainer_ranks.py", "plain", folder])
            self.assertEqual(code, 0, output)
            code, output = launch(2, "trainer_ranks.py", folder, timeout=500, TESSERA_LOG_LEVEL="error")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like the plain Trainer"), 2, output)

    def test_torch_distributed_before_and_after_the_engine(self):
        for order in ("distributed.init_process_group('gloo'); tessera.init()",
                      "tessera.init(); distributed.init_process_group('gloo')"):
            code, output = launch(2, f"""
                import torch, tessera
                from torch import distributed
                {order}
                ranks = torch.ones(())
                distributed.all_reduce(ranks)
                distributed.destroy_process_group()
                model = torch.nn.Linear(2, 2)
                engine = tessera.Engine(model, {{}})
                print(f"both have {{int(ranks)}} and {{int(tessera.all_reduce(1))}} ranks", flush=True)
            """)
            self.assertEqual(code, 0, output)
            self.assertEqual(output.count("both have 2 and 2 ranks"), 2, output)


if __name__ == "__main__":
    unittest.main()
