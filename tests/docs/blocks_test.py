"""Tests that check_blocks.py and cpp_blocks.py report each kind of wrong block, and no right block."""

import pathlib
import stat
import tempfile
import unittest

import blocks
import check_blocks
import cpp_blocks

# This script replaces a `tessera` that has the command `plan` and the command `bench steps`.
TESSERA = """#!/bin/sh
case "$1 $2" in
  "--help ") printf 'Options:\\n  -h,--help\\nSubcommands:\\n  plan  memory\\n  launch  ranks\\n  bench  speed\\n' ;;
  "plan --help") printf 'Options:\\n  -h,--help\\n  --model TEXT\\n' ;;
  "launch --help") printf 'Options:\\n  -h,--help\\n  -n,--ranks INT\\n' ;;
  "bench --help") printf 'Options:\\n  -h,--help\\nSubcommands:\\n  steps  steps\\n' ;;
  "bench steps") printf 'Options:\\n  -h,--help\\n  --fast\\n' ;;
  *) exit 64 ;;
esac
"""
PROGRAM = "int main() {\n  return 0;\n}\n"


def block(language, text, note=""):
    return (f"<!-- block: {note} -->\n" if note else "") + f"```{language}\n{text}\n```\n"


class Blocks(unittest.TestCase):
    def found_in(self, page):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {"page.md": page, "main.cc": PROGRAM, "scripts/go": "#!/bin/sh\n# --far\n", "bin/tessera": TESSERA}.items():
                (root / name).parent.mkdir(exist_ok=True)
                (root / name).write_text(text)
            (root / "bin/tessera").chmod(stat.S_IRWXU)
            commands = check_blocks.Commands(root, root / "bin/tessera")
            return [text for each in blocks.all_blocks(root) for text in check_blocks.complaints(root, each, commands)]

    def test_blocks_that_are_right_are_passed(self):
        for page in (block("cpp", PROGRAM.strip(), "from main.cc"), block("json", '{"strategy": "FULL_SHARD"}'), block("python", "a = 1"),
                     block("bash", "tessera plan --model M.json\nscripts/go --far"), block("bash", "tessera launch -n 2 -- tessera bench steps --fast"),
                     block("text", "tessera plan --model M.json    what it needs, as --json says"), block("text", "step 1  loss 2"),
                     block("diff", "@@ main\n int main() {\n-  return 0;\n+  return 1;", "diff of main.cc"),
                     block("diff", "-a = 1\n+a = 2\n b = a", "before and after"), block("diff", "diff --git a/main.cc b/main.cc\n--- a/main.cc\n+++ b/main.cc"),
                     block("diff", "diff --git a/new.cc b/new.cc\n--- /dev/null\n+++ b/new.cc"), block("cmake", "project(A)", "not run: it is short"),
                     "<!-- Made by a program. -->\n" + block("", "anything")):
            with self.subTest(page):
                self.assertEqual(self.found_in(page), [])

    def test_blocks_that_are_wrong_are_found(self):
        for page, word in ((block("", "a"), "no language"), (block("rust", "a"), "language rust"),
                           (block("python", "a", "perhaps"), "perhaps"), (block("cpp", "int main() {}", "from main.cc"), "not stand in main.cc"),
                           (block("cpp", "int a;", "from gone.cc"), "gone.cc"), (block("json", "{a}"), "no JSON"), (block("python", "a ="), "no Python"),
                           (block("cmake", "project(A)"), "where it is tested"), (block("bash", "tessera plan --modle M.json"), "no --modle"),
                           (block("bash", "tessera plant"), "no plant"), (block("bash", "tessera launch -n 2 -- tessera plan --far"), "plan has no --far"),
                           (block("text", "tessera bench steps --slow    slowly"), "bench steps has no --slow"),
                           (block("bash", "scripts/gone"), "no scripts/gone"), (block("bash", "scripts/go --near"), "no --near"),
                           (block("bash", "tessera plan 'a"), "no command"), (block("diff", "-a\n+b"), "a diff is a patch of git, or says"),
                           (block("diff", "diff --git a/g.cc b/g.cc\n--- a/g.cc\n+++ b/g.cc"), "changes g.cc, which is not there"),
                           (block("diff", "@@ main\n int mein() {", "diff of main.cc"), "int mein"),
                           (block("diff", "-a = 1\n+a = ", "before and after"), "cannot be read")):
            with self.subTest(page):
                found = self.found_in(page)
                self.assertEqual(len(found), 1, found)
                self.assertIn(word, found[0])

    def test_a_block_without_an_end_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "page.md:1: the block has no end"):
            list(blocks.blocks_of("page.md", "```cpp\nint a;\n"))

    def test_a_block_of_cpp_is_a_function_with_its_names_and_its_place(self):
        found = list(blocks.blocks_of("README.md", "\n" + block("cpp", "#include <a.h>\nf(engine);\n...", "with engine")))
        text, wrong = cpp_blocks.source_of(cpp_blocks.compiled(found))
        self.assertEqual(wrong, [])
        self.assertIn('void block_0(tessera::Engine& engine) {\n#line 4 "README.md"\n\nf(engine);\n\n}', text)
        self.assertLess(text.index("#include <a.h>"), text.index("namespace {"))

    def test_a_name_that_no_table_has_is_found(self):
        found = list(blocks.blocks_of("page.md", block("cpp", "f(motor);", "with motor")))
        self.assertIn("page.md:2: no block knows the name motor", cpp_blocks.source_of(found)[1][0])

    def test_blocks_compiled_by_other_tests_are_skipped(self):
        found = list(blocks.blocks_of("page.md", block("cpp", "a", "from main.cc") + block("cpp", "a", "not run: short") + block("cpp", "a")))
        self.assertEqual([each.note for each in cpp_blocks.compiled(found)], [""])


if __name__ == "__main__":
    unittest.main()
