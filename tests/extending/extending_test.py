"""Tests that the patches of docs/extending*.md fit the tree and touch few files, and that the code that they add builds
and passes its tests.

If TESSERA_LONG_TESTS is set, each patch is applied to a copy of the tree. The targets without LibTorch that the patch
concerns are built and run there. Sources with LibTorch are compiled, and not linked. A patch changes a header that
nearly every source includes, so linking would need a whole build. The last check removes the new row from the table of
transports, which the compiler must refuse.

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
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
NEW_OR_CHANGED = re.compile(r"^\+\+\+ b/(.*)$", re.MULTILINE)
LEFT_OUT = shutil.ignore_patterns(".*", "build", "results", "pictures", "__pycache__")
# The file with the table to which a patch must add a row for its transport. The compiler refuses a transport without a
# row.
TABLE = "runtime/comm/job/process_mesh.cc"
# The largest number of files in each section's patch, not counting tests. A header and its source count as one.
MOST_FILES = {"A method of compression": 3, "An update rule": 3, "An update rule with norms": 3,
              "An update rule of matrices": 4, "A transport": 4}
# Folders whose sources include LibTorch, and a target that has the flags for them.
TARGETS = {"runtime/comm/c10d/": "tessera_comm_c10d", "runtime/comm/job/": "tessera_comm_torch", "engine/step/rules/": "tessera_step_rules"}


def sections():
    """Returns the patches of the pages, by the headings of their sections."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/extending*.md")))
    parts = SECTION.split(text)[1:]
    return {name: patch for name, body in zip(parts[::2], parts[1::2]) for patch in PATCH.findall(body)}


def patches():
    return list(sections().values())


def counted_files(patch):
    """Returns the files that a patch touches, without tests and without suffixes."""
    return {str(pathlib.PurePosixPath(path).with_suffix("")) for path in NEW_OR_CHANGED.findall(patch) if not path.startswith("tests/")}


def run(command, folder, **options):
    """Runs a command and returns its output. Raises an error with the output if the command fails."""
    ended = subprocess.run([str(word) for word in command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if ended.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout[-8000:]}")
    return ended.stdout


def flags_of(target):
    """Returns the compiler's command line for sources of this target. Options that name an output or a precompiled
    header are left out."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if f"CMakeFiles/{target}.dir/" in entry["command"]:
            words = shlex.split(entry["command"].partition(" -o ")[0])
            return [word for at, word in enumerate(words) if word not in ("-include", "-Winvalid-pch", "-fpch-preprocess") and words[at - 1] != "-include"]
    raise AssertionError(f"{BUILD}/compile_commands.json compiles nothing of {target}")


def compile_in(copy, source):
    """Compiles the source without an object file, and returns how the compiler ended."""
    target = next((target for folder, target in TARGETS.items() if source.startswith(folder)), "tessera_config")
    flags = [word.replace(f"-I{ROOT}", f"-I{copy}") for word in flags_of(target)]
    return subprocess.run([*flags, "-fsyntax-only", copy / source], capture_output=True, text=True)


class Extending(unittest.TestCase):
    def test_each_patch_fits_the_tree(self):
        self.assertTrue(patches())
        for patch in patches():
            with self.subTest(NEW_OR_CHANGED.search(patch).group(1)):
                run(["git", "apply", "--check", "-"], ROOT, input=patch)

    def test_each_patch_touches_few_files(self):
        self.assertEqual(sections().keys(), MOST_FILES.keys())
        for name, patch in sections().items():
            self.assertLessEqual(len(counted_files(patch)), MOST_FILES[name], f"{name}: {sorted(counted_files(patch))}")

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
                tests = ["config", "optim" if "+++ b/optim/" in patch else "layout"]
                run(["cmake", "--build", "build", "--target", "tessera_strategy_docs", *(f"{test}_test" for test in tests)], copy)
                run(["build/runtime/config/tessera_strategy_docs", "docs"], copy)
                for test in tests:
                    run([f"build/tests/{test}/{test}_test"], copy)
                for source in NEW_OR_CHANGED.findall(patch):
                    if source.startswith(tuple(TARGETS)) and source.endswith(".cc"):
                        compiled = compile_in(copy, source)
                        self.assertEqual(compiled.returncode, 0, compiled.stderr)
                if TABLE in NEW_OR_CHANGED.findall(patch):
                    shutil.copy(ROOT / TABLE, copy / TABLE)
                    self.assertNotEqual(compile_in(copy, TABLE).returncode, 0, f"{TABLE} compiles without the row")


if __name__ == "__main__":
    del sys.argv[1:3]
    unittest.main()
