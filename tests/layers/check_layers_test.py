"""Tests that check_layers.py finds an upward include, LibTorch where it must not be used, and two classes with one
name."""

import pathlib
import subprocess
import sys
import tempfile

CHECK = pathlib.Path(__file__).with_name("check_layers.py")


def run(files):
    with tempfile.TemporaryDirectory() as folder:
        for i in range(60):  # the check refuses a tree with too few files
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
for name in ("optim/cuda/bad.cuh", "optim/bad.h"):
    angle = run({"engine/engine.h": "", name: "#include <engine/engine.h>\n"})
    assert angle.returncode == 1 and "may not see engine" in angle.stdout, angle.stdout
room = run({"runtime/comm/shared/peers.h": "", "runtime/comm/sum/bad.h": '#include "runtime/comm/shared/peers.h"\n'})
assert room.returncode == 1 and "runtime/comm/sum may not see runtime/comm/shared" in room.stdout, room.stdout
gone = run({"sharding/bad.h": '#include "sharding/gone.h"\n'})
assert gone.returncode == 1 and "no file of this project" in gone.stdout, gone.stdout
for name in ("absl/status/status.h", "runtime/base/filler1.h", "workshop/models/gpt.h"):
    for text in (f"#include <{name}>\n", f'#include "{name}"\n'):
        private = run({"workshop/models/gpt.h": "", "include/tessera/bad.h": text})
        assert private.returncode == 1 and "public headers, LibTorch and the standard library" in private.stdout, private.stdout
public = run({"include/tessera/good.h": '#include <vector>\n#include <ATen/core/Tensor.h>\n#include "tessera/dtype.h"\n',
              "include/tessera/dtype.h": "#include <cstdint>\n"})
assert public.returncode == 0, public.stdout
for text in ("#include <ATen/core/Tensor.h>\n", '#include "tessera/good.h"\n'):
    heavy = run({"include/tessera/strategy.h": text, "include/tessera/good.h": "#include <ATen/core/Tensor.h>\n"})
    assert heavy.returncode == 1 and "strategy.h" in heavy.stdout, heavy.stdout
other = run({"include/tessera/engine.h": "", "runtime/config/bad.h": '#include "tessera/engine.h"\n'})
assert other.returncode == 1 and "runtime/config may not see include/tessera" in other.stdout, other.stdout
twice = "namespace tessera {\nclass Twice final : public Other {\n};\n}\n"
for name, text, code in (("planner/other.h", twice, 1), ("planner/other.h", twice.replace("tessera", "elsewhere"), 0),
                         ("planner/other.h", "namespace tessera {\nclass Twice;\n}\n", 0), ("planner/other.cc", twice, 0)):
    named = run({"engine/replay/twice.h": twice, name: text})
    assert named.returncode == code, named.stdout
    assert code == 0 or "defines Twice, which" in named.stdout, named.stdout
print("ok")
