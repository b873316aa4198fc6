"""Tests that check_docs.py reports a name of a file or a test that is gone, in pages and comments, and a README or page
that is too long, and nothing else."""

import pathlib
import tempfile
import unittest

import check_docs

FILES = {"README.md": "`runtime/base/log.h`, [the design](docs/design.md), `log.{h,cc}`, `<absl/log/log.h>`, log_gone.h\n",
         "docs/design.md": "[The log](../runtime/base/log.h)\n",
         "docs/faults.md": "- `tests/base/log_test.cc: Log.Lines`, `tests/base/log_test.cc: Logs.AreWhole`: said of them\n"
                           "- `tests/python/log_test.py: test_lines`, `tests/app/odd_inputs/rows.py: log: a pipe`\n",
         "runtime/base/log.h": "/// See include's tessera/run.h and log.cc. The path is FOLDER/page.md.\n",
         "runtime/base/log.cc": '#include "gone.h"\n// the same\n',
         "include/tessera/run.h": "int run();\n",
         "tests/base/log_test.cc": "TEST(Log, Lines) {}\nTEST_P(Logs,\n       AreWhole) {}\n",
         "tests/python/log_test.py": "class Log:\n    def test_lines(self): pass\n",
         "tests/app/odd_inputs/rows.py": "import types\neverything = False\n"
                                         "def all_rows(): return [types.SimpleNamespace(name='log: a pipe')] if everything else []\n",
         "tests/layers/trees.py": "# made/up.h\n"}


def found_in(changed):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in (FILES | changed).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        files = set(check_docs.ours(root))
        return [f"{source}: {text}" for source in sorted(files) if not source.startswith(tuple(check_docs.EXCEPT))
                for text in check_docs.complaints(root, files, source)]


class Docs(unittest.TestCase):
    def test_existing_names_are_no_complaint(self):
        self.assertEqual(found_in({}), [])

    def test_names_that_are_gone_are_found(self):
        for source, text, name in (("README.md", "`runtime/log.h`", "runtime/log.h"),
                                   ("README.md", "`runtime/base/`, `scripts/gone --all`", "scripts/gone"),
                                   ("README.md", "`runtime/gone/`", "runtime/gone/"),
                                   ("README.md", "[here](docs/gone.md)", "docs/gone.md"),
                                   ("docs/design.md", "[there](../runtime/base/gone.h)", "../runtime/base/gone.h"),
                                   ("README.md", "`log.{h,cu}`", "log.cu"),
                                   ("runtime/base/log.cc", "int a;  // as in gone.h\n", "gone.h"),
                                   ("optim/a.py", '"""Of optim/b.py."""\n', "optim/b.py")):
            with self.subTest(text):
                self.assertEqual(found_in({source: text}), [f"{source}: names {name}, which is not there"])

    def test_a_link_is_followed_from_its_page(self):
        pages = {"docs/guide/log.md": "The log\n", "docs/other.md": "[The log](log.md#lines), [the folder](guide/), [far](https://x.y/z.md)\n"
                                                                     "```text\n[no](link.md)\n```\n", "docs/link.md": ""}
        self.assertEqual(found_in(pages), ["docs/other.md: links to log.md, which is not there from this page"])

    def test_tests_that_are_gone_are_found(self):
        for name in ("tests/base/log_test.cc: Log.AreWhole", "tests/base/log_test.cc: Log.Line", "tests/base/log_test.cc: Lines",
                     "tests/base/log_test.cc: Log.Lines.More", "tests/python/log_test.py: lines", "tests/app/odd_inputs/rows.py: log"):
            with self.subTest(name):
                self.assertEqual(found_in({"docs/faults.md": f"`{name}`\n"}), [f"docs/faults.md: names the test {name}, which is not there"])
        self.assertEqual(found_in({"docs/faults.md": "`tests/base/gone_test.cc: Log.Lines`\n"}),
                         ["docs/faults.md: names tests/base/gone_test.cc, which is not there"])

    def test_options_that_a_script_does_not_have_are_found(self):
        script = {"scripts/test": "case $1 in --all | --fast-too) ;; esac\n"}
        self.assertEqual(found_in({**script, "docs/design.md": "`scripts/test --all`, scripts/other --far\n"}), [])
        for text in ("`scripts/test --all --fast`", "scripts/test\n--fast", "`scripts/test --all`, `scripts/test --fast`"):
            self.assertEqual(found_in({**script, "docs/design.md": text}), ["docs/design.md: names scripts/test --fast, which is no option"])

    def test_a_readme_that_is_too_long_is_found(self):
        self.assertEqual(found_in({"README.md": "a" * 8192, "docs/design.md": "a" * 25600}), [])
        self.assertEqual(found_in({"README.md": "a" * 8193}), ["README.md: has 8193 bytes, and 8192 are the most"])
        self.assertEqual(found_in({"README.md": "\u00e4" * 4097}), ["README.md: has 8194 bytes, and 8192 are the most"])

    def test_a_page_of_docs_that_is_too_long_is_found_but_for_pages_that_a_program_makes(self):
        for page in ("docs/design.md", "docs/design/gather.md"):
            self.assertEqual(found_in({page: "a" * 25601}), [f"{page}: has 25601 bytes, and 25600 are the most"])
        self.assertEqual(found_in({"docs/strategy.md": "<!-- Made by a program. -->" + "a" * 25601}), [])

    def test_a_name_below_docs_is_found_from_docs(self):
        self.assertEqual(found_in({"docs/guide/log.md": "", "optim/a.py": '"""[Logs](guide/log.md)."""\n'}), [])
        self.assertEqual(found_in({"optim/a.py": '"""[Logs](guide/log.md)."""\n'}),
                         ["optim/a.py: names guide/log.md, which is not there"])


if __name__ == "__main__":
    unittest.main()
