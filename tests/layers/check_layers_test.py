"""check_layers.py finds an upward include, and LibTorch where it must not be."""

import pathlib
import subprocess
import sys
import tempfile

CHECK = pathlib.Path(__file__).with_name("check_layers.py")


def run(files):
    with tempfile.TemporaryDirectory() as folder:
        for i in range(60):  # enough files for the check to believe that it looked at a tree
            files.setdefault(f"runtime/base/filler{i}.h", "#pragma once\n")
        for name, text in files.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return subprocess.run([sys.executable, CHECK, folder], capture_output=True, text=True)


good = run({"sharding/unit.h": '#include "runtime/base/filler1.h"\n'})
assert good.returncode == 0, good.stdout
upward = run({"sharding/unit.h": "", "runtime/base/bad.h": '#include "sharding/unit.h"\n'})
assert upward.returncode == 1 and "bad.h" in upward.stdout, upward.stdout
torch = run({"optim/bad.cc": "#include <ATen/core/Tensor.h>\n"})
assert torch.returncode == 1 and "free of LibTorch" in torch.stdout, torch.stdout
print("ok")
