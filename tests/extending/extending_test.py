"""The patches of docs/extending.md fit the tree, and what they add builds and passes its tests.

With TESSERA_LONG_TESTS, each patch is applied to a copy of the tree. The targets without LibTorch that it concerns are built and run there.
Sources with LibTorch are compiled, and not linked: a struct of the strategy is in nearly every one, so that would be a whole build. At last,
one table after the other lacks the new row, which the compiler must refuse.

Usage: extending_test.py ROOT BUILD
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
LONG = bool(os.environ.get("TESSERA_LONG_TESTS"))
PATCH = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEW_OR_CHANGED = re.compile(r"^\+\+\+ b/(.*)$", re.MULTILINE)
LEFT_OUT = shutil.ignore_patterns(".*", "build", "results", "pictures", "__pycache__")
# Tables of docs/extending.md that have a row for each method of compression.
TABLES = ["runtime/config/keys/compression_keys.cc", "sharding/layout/method_layout.cc", "sharding/compress/gradient_method.cc"]


def patches():
    return PATCH.findall((ROOT / "docs/extending.md").read_text(encoding="utf-8"))


def run(command, folder, **options):
    """Runs a command and returns its output. Raises an error with the output if the command fails."""
    ended = subprocess.run([str(word) for word in command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if ended.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout[-8000:]}")
    return ended.stdout


def flags_of(target):
    """Returns the compiler's command line for sources of this target, without options that name an output or a precompiled header."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if f"CMakeFiles/{target}.dir/" in entry["command"]:
            words = shlex.split(entry["command"].partition(" -o ")[0])
            return [word for at, word in enumerate(words) if word not in ("-include", "-Winvalid-pch", "-fpch-preprocess") and words[at - 1] != "-include"]
    raise AssertionError(f"{BUILD}/compile_commands.json compiles nothing of {target}")


def compile_in(copy, source):
    """Checks only that the compiler accepts the source."""
    target = "tessera_compress" if source.startswith("sharding/compress/") else "tessera_config"
    flags = [word.replace(f"-I{ROOT}", f"-I{copy}") for word in flags_of(target)]
    return subprocess.run([*flags, "-fsyntax-only", copy / source], capture_output=True, text=True)


class Extending(unittest.TestCase):
    def test_each_patch_fits_the_tree(self):
        self.assertTrue(patches())
        for patch in patches():
            with self.subTest(NEW_OR_CHANGED.search(patch).group(1)):
                run(["git", "apply", "--check", "-"], ROOT, input=patch)

    def test_a_patch_that_does_not_fit_is_noticed(self):
        with self.assertRaises(AssertionError):
            run(["git", "apply", "--check", "-"], ROOT, input=patches()[0].replace("\n ", "\n  ", 3))

    @unittest.skipUnless(LONG, "scripts/test --long")
    def test_patched_tree_builds_and_passes_its_tests(self):
        for patch in patches():
            with tempfile.TemporaryDirectory() as scratch:
                copy = pathlib.Path(scratch) / "tree"
                shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
                run(["git", "apply", "-"], copy, input=patch)
                run(["cmake", "-G", "Ninja", "-S", ".", "-B", "build", "-DTESSERA_TORCH=OFF", "-DCMAKE_BUILD_TYPE=Release"], copy)
                run(["cmake", "--build", "build", "--target", "tessera_strategy_docs", "config_test", "layout_test"], copy)
                run(["build/runtime/config/tessera_strategy_docs", "docs"], copy)
                for test in "config", "layout":
                    run([f"build/tests/{test}/{test}_test"], copy)
                for source in NEW_OR_CHANGED.findall(patch):
                    if source.startswith("sharding/compress/") and source.endswith(".cc"):
                        compiled = compile_in(copy, source)
                        self.assertEqual(compiled.returncode, 0, compiled.stderr)
                for table in set(TABLES) & set(NEW_OR_CHANGED.findall(patch)):
                    shutil.copy(ROOT / table, copy / table)
                    self.assertNotEqual(compile_in(copy, table).returncode, 0, f"{table} compiles without the row")


if __name__ == "__main__":
    del sys.argv[1:3]
    unittest.main()
