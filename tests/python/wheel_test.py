"""`pip install ./python`: the wheel of a built tree trains; beside another torch it says what to do."""

import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import unittest
import zipfile

from launched import FOLDER, run

PROGRAM = """
import sys
import tessera, torch
import tessera.integrations
assert not {"transformers", "accelerate", "lightning"} & set(sys.modules)
model = torch.nn.Linear(3, 1)
engine = tessera.Engine(model, {"optimizer": {"type": "sgd", "lr": 0.1}})
losses = []
for _ in range(20):
    engine.backward((model(torch.ones(2, 3)) - 1).square().mean())
    losses.append(engine.step().loss)
assert losses[-1] < 1e-3, losses
print("version", tessera.__version__, "from", tessera.__file__)
"""


@unittest.skipUnless(importlib.util.find_spec("scikit_build_core"), "no scikit-build-core: scripts/setup --tests")
class WheelTest(unittest.TestCase):
    def test_the_wheel_of_a_built_tree(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            site = folder / "site"
            code, output = run([sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation",
                                "-C", f"build-dir={folder / 'build'}", "-C", f"cmake.define.TESSERA_BUILT_TREE={os.environ['TESSERA_BUILD']}",
                                "-w", folder, FOLDER.parent.parent / "python"], timeout=800)  # beside other builds and tests
            self.assertEqual(code, 0, output)
            [wheel] = folder.glob("tessera-*.whl")
            zipfile.ZipFile(wheel).extractall(site)
            code, output = run([sys.executable, "-c", PROGRAM], PYTHONPATH=str(site))
            self.assertEqual(code, 0, output)
            self.assertIn(f"version {wheel.name.split('-')[1]} from {site}", output)
            built_with = site / "tessera" / "_built_with.py"
            built_with.write_text(re.sub(r'"2\..*"', '"2.10.0"', built_with.read_text()))
            code, output = run([sys.executable, "-c", "import tessera"], PYTHONPATH=str(site))
            self.assertEqual(code, 1, output)
            self.assertIn("tessera was built with torch 2.10.0, but this Python has torch 2.11", output)


if __name__ == "__main__":
    unittest.main()
