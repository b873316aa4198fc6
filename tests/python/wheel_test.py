"""Tests the wheel of scripts/wheel. The wheel trains from Python and from C++ in an environment that has only torch.
The error for another version of torch has a remedy."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from patience import patient  # noqa: E402

TREE = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(sys.executable).parent  # this folder has cmake and ninja
SITE = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0]).parent
TORCH = re.search(r"(\d+)\.(\d+)", (SITE / "torch" / "version.py").read_text()).groups()
TOOLS = ("scikit_build_core", "auditwheel")

PROGRAM = """
import importlib.util, pathlib, sys
import tessera, torch
import tessera.integrations
assert not {"transformers", "accelerate", "lightning"} & set(sys.modules)
assert importlib.util.find_spec("numpy") is None  # torch does not require it
assert tessera.world_size() == 2
model = torch.nn.Linear(3, 1)
engine = tessera.Engine(model, {"optimizer": {"type": "sgd", "lr": 0.1}})
losses = []
for _ in range(20):
    engine.backward((model(torch.ones(2, 3)) - 1).square().mean())
    losses.append(engine.step().loss)
assert losses[-1] < 1e-3, losses
libraries = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "libtessera" in line}
print(f"rank {tessera.rank()} version {tessera.__version__} from {tessera.__file__} with {' '.join(sorted(libraries))}")
"""


SEED_PROGRAM = """
#include <tessera/error.h>
#include <tessera/seed_for_rank.h>
#include <cstdio>

int main() {
  try {
    throw tessera::Error(tessera::ExitCode::kUsage, "caught");
  } catch (const tessera::Error& error) {
    std::printf("%s, %d apart\\n", error.message().c_str(), int(tessera::seed_for_rank(1, 3) - tessera::seed_for_rank(1, 1)));
  }
}
"""


def files_of_torch():
    """Returns the names of the files and folders in site-packages that belong to torch, or to a package that torch
    requires here."""
    names, taken, wanted = set(), set(), ["torch"]
    while wanted:
        name, extras = re.match(r"([\w.-]+)(?:\[([^\]]*)\])?", wanted.pop()).groups(default="")
        for extra in {"", *extras.replace(" ", "").split(",")}:
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # only another Python or system needs this package
            if (distribution.name, extra) in taken:
                continue
            taken.add((distribution.name, extra))
            names |= {file.parts[0] for file in distribution.files or []}
            for line in distribution.requires or []:
                condition = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
                if (condition[1] if condition else "") == extra:
                    wanted.append(line)
    return names - {"..", "__pycache__"}


@unittest.skipUnless(all(map(importlib.util.find_spec, TOOLS)), f"no {' or no '.join(TOOLS)}: scripts/setup --tests")
class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.scratch.cleanup)
        cls.folder = pathlib.Path(cls.scratch.name).resolve()
        cls.bin = cls.folder / "python" / "bin"
        cls.run_ok("wheel", TREE / "scripts" / "wheel", "--python", sys.executable, "--build", os.environ["TESSERA_BUILD"], "--out", cls.folder)
        [cls.wheel] = cls.folder.glob("*.whl")
        cls.version = cls.wheel.name.split("-")[1].partition("+")[0]
        # The new environment has links to torch and to the packages that torch requires, since installing torch takes
        # minutes.
        cls.run_ok("environment", sys.executable, "-m", "venv", "--without-pip", cls.folder / "python")
        cls.site = cls.folder / "python" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        for name in files_of_torch():
            (cls.site / name).symlink_to(SITE / name)
        cls.run_ok("installation", sys.executable, "-m", "pip", "--python", cls.bin / "python", "install", "--quiet",
                   "--disable-pip-version-check", "--no-deps", "--no-index", cls.wheel)

    @classmethod
    def run_one(cls, *command, **variables):
        """Runs a command in the new environment. Returns (exit code, stdout and stderr together)."""
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        path = os.pathsep.join([str(cls.bin), str(BINARIES), clean["PATH"]])
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=patient(800),
                              cwd=cls.folder, env={**clean, "PATH": path, "OMP_NUM_THREADS": "1", "TESSERA_LOG_LEVEL": "warning", **variables})
        return done.returncode, done.stdout

    @classmethod
    def run_ok(cls, what, *command, **variables):
        code, output = cls.run_one(*command, **variables)
        assert code == 0, f"{what}: {output}"
        return output

    def test_it_has_tessera_and_neither_torch_nor_cuda(self):
        name = rf"tessera_train-[\d.]+\+pt{''.join(TORCH)}-cp{sys.version_info[0]}{sys.version_info[1]}-cp\d+-manylinux_2_\d+_x86_64\.whl"
        self.assertRegex(self.wheel.name, name)
        with zipfile.ZipFile(self.wheel) as wheel:
            files = wheel.namelist()
            [metadata] = [file for file in files if file.endswith(".dist-info/METADATA")]
            self.assertIn(f"Requires-Dist: torch<{TORCH[0]}.{int(TORCH[1]) + 1},>={TORCH[0]}.{TORCH[1]}", wheel.read(metadata).decode())
        for wanted in ("bin/tessera", "bin/tessera-train", "bin/tessera-bench", "import_config/__main__.py", "include/tessera/tessera.h"):
            self.assertIn(f"tessera/{wanted}", files)
        self.assertEqual([file for file in files if re.search(r"/lib(torch|c10|cu|nv|nccl)[^/]*\.so", file)], [])
        for file in [*self.site.glob("tessera/bin/*"), *self.site.glob("tessera/lib/*.so*"), *self.site.glob("tessera/*.so")]:
            said = self.run_ok("readelf", "readelf", "-d", file)
            self.assertRegex(said, r"NEEDED.*\[libc\.so", file)
            self.assertNotRegex(said, r"NEEDED.*\[libmpi", "a plug-in alone is linked with MPI")
            if file.parent.name == "lib":
                self.assertIn(f"[libtessera.so.{self.version.rpartition('.')[0]}]", re.search(r"SONAME.*", said)[0])
            for folder in re.findall(r"(?:RPATH|RUNPATH).*\[(.*)\]", said):
                self.assertEqual([part for part in folder.split(":") if not part.startswith("$ORIGIN")], [], file)

    def test_the_extension_has_no_copy_of_the_library(self):
        [extension] = self.site.glob("tessera/_native.*.so")
        defined = self.run_ok("nm", "nm", "-DC", "--defined-only", extension)
        self.assertEqual(re.findall(r" T tessera::Engine::.*", defined), [])

    def test_python_program_runs_on_two_ranks(self):
        (self.folder / "train.py").write_text(PROGRAM)
        output = self.run_ok("train.py", "tessera", "launch", "-n", "2", "--", "python", "train.py")
        for rank in range(2):
            self.assertRegex(output, rf"rank {rank} version {re.escape(self.version)} from {self.site}/tessera/__init__.py "
                                     rf"with {self.site}/tessera/lib/libtessera\.so\.\S+\n")

    def test_cpp_program_builds_and_learns_on_two_ranks(self):
        prefix = self.run_ok("cmake_path", "python", "-m", "tessera.cmake_path").splitlines()[-1]  # behind warnings of torch, without numpy
        self.run_ok("configuration", "cmake", "-G", "Ninja", "-S", TREE / "tests" / "install" / "consumer", "-B", "consumer",
                    f"-DCMAKE_PREFIX_PATH={prefix}")
        self.run_ok("build", "cmake", "--build", "consumer")
        output = self.run_ok("consumer", "tessera", "launch", "-n", "2", "--", "consumer/consumer")
        losses = [float(loss) for loss in re.findall(r"step \d+  loss (\S+)", output)]
        self.assertEqual(len(losses), 20, output)
        self.assertLess(losses[-1], losses[0])

    def test_program_builds_with_the_flags_of_pkg_config(self):
        (self.folder / "seed.cc").write_text(SEED_PROGRAM)
        flags = self.run_ok("flags", "pkg-config", "--cflags", "--libs", "tessera", PKG_CONFIG_PATH=str(self.site / "tessera/lib/pkgconfig"))
        self.run_ok("build", "c++", "-std=c++20", "seed.cc", "-o", "seed", *flags.split())
        self.assertIn("caught, 2 apart", self.run_ok("seed", self.folder / "seed"))

    def test_the_command_finds_its_parts_and_libtorch(self):
        for command in ("plan", "doctor"):
            self.run_ok(command, "tessera", command, "--help")
        for module in ("import-config", "report"):
            self.assertIn(f"python -m tessera.{module.replace('-', '_')}", self.run_ok(module, "tessera", module, "--help"))

    def test_a_run_is_read_and_drawing_it_says_what_to_install(self):
        start = {"run": "r", "event": "start", "started": "2026-01-02T03:04:05Z", "tessera": "0.2", "steps": 1, "ranks": 1, "strategy": "NO_SHARD",
                 "model": "m.json", "parameters": 10, "seed": 1, "restart": 0}
        lines = [start, {"run": "r", "step": 1, "loss": 1.5, "seconds": 0.5}]
        (self.folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, output = self.run_one("tessera", "report", "run.jsonl")
        self.assertEqual(code, 69, output)
        self.assertIn("pip install 'tessera_train[report]'", output)

    def test_another_torch_is_refused_with_the_remedy(self):
        other = self.folder / "other" / "torch"
        other.mkdir(parents=True)
        (other / "__init__.py").write_text("__version__ = '1.2.3+cpu'\n")
        code, output = self.run_one("python", "-c", "import tessera", PYTHONPATH=str(other.parent))
        self.assertEqual(code, 1, output)
        self.assertIn(f"works with every torch {'.'.join(TORCH)}", output)
        self.assertIn("but this Python has torch 1.2.3+cpu", output)
        self.assertIn(f"scripts/wheel --python {self.bin}/python", output)


if __name__ == "__main__":
    unittest.main()
