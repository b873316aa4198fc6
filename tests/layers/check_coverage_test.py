"""Tests that check_coverage.py finds a name that does not exist any more, and a row that lacks something, and accepts
everything else."""

import json
import pathlib
import tempfile
import unittest

import check_coverage

SCHEMA = {"properties": {"prefetch": {"type": "integer"},
                         "sync": {"properties": {"type": {"enum": ["each_step", "diloco"]}, "every": {"type": "integer"}}}}}
FILES = {"docs/strategy.schema.json": json.dumps(SCHEMA),
         "include/tessera/run.h": "int run();\n",
         "benchmarks/results/steps.csv": "",
         "tests/base/log_test.cc": "TEST(Log, Lines) {}\n",
         "tests/python/log_test.py": "class Log:\n    def test_lines(self): pass\n",
         "workshop/app/main.cc": 'app.add_subcommand("launch"); app.add_option("-n,--ranks");\n',
         "workshop/app/bench/bench_main.cc": 'add("bench"); add("step"); add("--csv", "file");\n'}
TABLE = "| technique | there | what shows it, and what is missing |\n|---|---|---|\n"
GOOD = "| All-reduce (DDP) | yes | `sync.type: diloco` |\n"


def complaints_about(text):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, content in (FILES | {check_coverage.PAGE: text}).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        return list(check_coverage.complaints(root))


class CheckCoverageTest(unittest.TestCase):
    def test_existing_names_are_no_complaint(self):
        for name in ("tests/base/log_test.cc: Log.Lines", "tests/python/log_test.py: test_lines", "benchmarks/results/steps.csv",
                     "benchmarks/results/", "tessera/run.h", "tessera bench step --csv", "tessera bench --csv gone.csv",
                     "tessera launch --ranks 2", "tessera launch -n 2", "prefetch", "sync", "sync.every", "sync.type",
                     "sync.type: diloco"):
            with self.subTest(name):
                self.assertEqual(complaints_about(f"`{name}`\n{TABLE}{GOOD}"), [])

    def test_names_that_are_gone_are_found(self):
        for name in ("tests/base/log_test.cc: Log.Line", "tests/base/gone_test.cc: Log.Lines", "tests/python/log_test.py: lines",
                     "benchmarks/results/gone.csv", "tessera/gone.h", "tessera gone", "tessera bench gone --csv", "tessera bench --gone",
                     "tessera bench --csv a.csv --gone", "gone", "sync.gone", "type", "sync.type: gone", "prefetch: 1", "Some Words"):
            with self.subTest(name):
                wanted = [f"names `{name}`, which is no test, path, command or key of the strategy that there is"]
                self.assertEqual(complaints_about(f"`{name}`\n{TABLE}{GOOD}"), wanted)
                self.assertEqual(complaints_about(f"{TABLE}{GOOD}| Ring | yes | `{name}` |\n"), wanted)

    def test_complete_rows_are_no_complaint(self):
        self.assertEqual(complaints_about(TABLE + GOOD + "| Ring | in part | `prefetch` has no tree |\n| Tree | no | it is not built |\n"
                                          "| TPUs | out of scope |  |\n\n| other | table |\n|---|---|\n| of | words | alone |\n"), [])

    def test_rows_that_say_too_little_are_found(self):
        for row, wanted in (("| Ring | maybe | `prefetch` |", 'the row "Ring" says "maybe", and one of yes, in part, no, out of scope is wanted'),
                            ("| Ring | yes | it works |", 'the row "Ring" says "yes", and names nothing that shows it'),
                            ("| Ring | in part | `prefetch`, `sync` |", 'the row "Ring" says "in part", and not what is missing'),
                            ("| Ring | no |  |", 'the row "Ring" says "no", and not what is missing'),
                            ("| Ring | no |", 'the row "Ring" has 2 cells, and 3 are wanted'),
                            ("| All-reduce (DDP) | no | not built |", 'the technique "All-reduce (DDP)" has two rows')):
            with self.subTest(row):
                self.assertEqual(complaints_about(TABLE + GOOD + row + "\n"), [wanted])

    def test_a_page_without_rows_is_found(self):
        self.assertEqual(complaints_about("Words.\n"), ["has no row under | technique | there | what shows it, and what is missing |"])


if __name__ == "__main__":
    unittest.main()
