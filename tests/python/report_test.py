"""Tests tessera.report: which files it reads, what its page shows of runs, and how it treats other files."""

import contextlib
import html.parser
import importlib.util
import io
import json
import math
import os
import pathlib
import re
import subprocess
import tempfile
import unittest
from unittest import mock

from tessera import cmake_path
from tessera.report import page, read_run
from tessera.report.__main__ import main
from tessera.report._page import latency_bars

TREE = pathlib.Path(__file__).resolve().parents[2]
DRAWS = importlib.util.find_spec("matplotlib") is not None
needs_matplotlib = unittest.skipUnless(DRAWS, "no matplotlib: scripts/setup --tests")
HEADER = {"run": "r", "event": "start", "started": "2026-01-02T03:04:05Z", "tessera": "9.9", "steps": 9, "ranks": 2, "strategy": "FULL_SHARD",
          "model": "m.json", "parameters": 10, "seed": 1, "restart": 0}


def step(number, **values):
    return {"run": "r", "step": number, "loss": 5.0 - number / 10, "seconds": 0.5, "overflow": False, "spike": False} | values


def latency(after, unit, call="gather", **values):
    return {"run": "r", "event": "latency", "after_step": after, "call": call, "unit": unit, "count": 4, "p50_seconds": 0.001,
            "p95_seconds": 0.002, "p99_seconds": 0.003, "max_seconds": 0.0042} | values


class Cells(html.parser.HTMLParser):
    """Collects the rows of a page's tables, and checks whether each tag is closed in the right order."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open, self.in_order, self.tags = [], [], True, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.in_order = self.in_order and bool(self.open) and self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


class ReportTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tessera-report-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_of(self, *lines, name="a", end="\n"):
        """Makes a run directory with these lines."""
        (self.folder / name).mkdir(exist_ok=True)
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (self.folder / name / "metrics.jsonl").write_text("\n".join(texts) + end)
        return str(self.folder / name)

    def command(self, *words):
        said, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            try:
                code = main(list(map(str, words)))
            except SystemExit as ended:
                code = ended.code
        return code, said.getvalue() + errors.getvalue()

    def test_repeated_steps_count_once_as_made_last(self):
        run = read_run(self.run_of(HEADER, step(1), step(2, loss=7.0), step(3), HEADER | {"restart": 1}, step(2, loss=4.0), step(3, loss=3.0)))
        self.assertEqual(run.column("loss"), [(1, 4.9), (2, 4.0), (3, 3.0)])
        self.assertEqual((run.starts, run.header["restart"]), (2, 0))

    def test_latencies_are_read_from_the_last_step_with_any(self):
        run = read_run(self.run_of(HEADER, step(1), latency(1, "a"), latency(1, "b"), step(2), latency(2, "a", count=8)))
        self.assertEqual([(each.unit, each.count) for each in run.latencies], [("a", 8)])

    def test_cut_last_line_is_skipped_and_an_earlier_one_is_an_error(self):
        run = read_run(self.run_of(HEADER, step(1), '{"run":"r","step":2,"lo', end=""))
        self.assertEqual((list(run.steps), run.is_cut), ([1], True))
        code, said = self.command(self.run_of(HEADER, '{"run":"r","step":2,"lo', step(3)))
        self.assertEqual(code, 65)
        self.assertIn("metrics.jsonl:2:", said)

    @needs_matplotlib
    def test_leftover_of_a_killed_report_is_replaced_and_full_output_is_an_error(self):
        run, errors = self.run_of(HEADER, step(1)), io.StringIO()
        (self.folder / "page.html.partial").write_text("half of a page")
        code, said = self.command(run, "--out", self.folder / "page.html")
        self.assertEqual(code, 0, said)
        self.assertFalse((self.folder / "page.html.partial").exists())
        with open("/dev/full", "w") as full, contextlib.redirect_stdout(full), contextlib.redirect_stderr(errors):
            code = main([run, "--out", str(self.folder / "other.html")])
        self.assertEqual(code, 74, errors.getvalue())

    def test_file_without_a_run_is_named(self):
        (self.folder / "binary").write_bytes(b"\xff\xfe\x00")
        (self.folder / "list").write_text("[1, 2]\n")
        (self.folder / "half.jsonl").write_text(json.dumps(HEADER | {"event": "evaluation"}) + "\n" + json.dumps(step(1)) + "\n")
        (self.folder / "deep").write_text("[" * 100_000 + "\n")
        os.mkfifo(self.folder / "pipe")
        for path, code, text in (("nowhere", 66, "No such file"), ("binary", 65, "UTF-8"), ("list", 65, "list:1:"), ("deep", 65, "deep:1:"),
                                 ("pipe", 65, "want a regular file"), ("/dev/zero", 65, "want a regular file"),
                                 ("half.jsonl", 65, "after_step"),
                                 (self.run_of(HEADER), 65, "no step"), (self.run_of(name="b"), 65, "b/metrics.jsonl:1:")):
            with self.subTest(path):
                got, said = self.command(self.folder / path)
                self.assertEqual(got, code, said)
                self.assertIn(text, said)
                self.assertIn("hint: ", said)
                self.assertEqual(said.count("\n"), 1)

    @needs_matplotlib
    def test_table_has_a_column_per_run_and_only_rows_with_values(self):
        lines = [step(number, tokens_per_second=100.0 * number, bytes_allocated=2**21, bytes_planned=2**22, mfu=None) for number in range(1, 21)]
        a = read_run(self.run_of(HEADER, *lines, {"event": "evaluation", "after_step": 10, "eval_loss": 3.25}))
        b = read_run(self.run_of(HEADER | {"ranks": 4}, step(1, overflow=True), step(2, spike=True, loss=math.nan), name="b"))
        cells = Cells(page([a, b]))
        rows = {row[0]: row[1:] for row in cells.rows}
        self.assertTrue(cells.in_order)
        self.assertEqual(cells.open, [])
        self.assertEqual(rows[""], [a.name, b.name])
        self.assertEqual(rows["ranks"], ["2", "4"])
        self.assertEqual(rows["steps"], ["20 of 9", "2 of 9"])
        self.assertEqual(rows["loss, mean of the last 10"], ["3.45", ""])  # one value is NaN, so there is no mean
        self.assertEqual(rows["loss on held-out data, last"], ["3.25", ""])
        self.assertEqual(rows["tokens a second, median"], ["1,050", ""])
        self.assertEqual(rows["steps with an overflow or a spike"], ["0", "2"])
        self.assertEqual(rows["memory of rank 0 at most, MiB"], ["2", ""])
        self.assertNotIn("MFU, median, %", rows)

    @needs_matplotlib
    def test_page_charts_only_numbers_of_the_run_and_lists_latencies(self):
        run = read_run(self.run_of(HEADER, step(1, lr=1e-3, communication_share=0.25), step(2, lr=1e-3, communication_share=0.5, disk_wait_seconds=0.0),
                                   latency(2, "blocks.0"), latency(2, "blocks.0", "reduce", max_seconds=1.5)))
        text = page([run])
        self.assertEqual(re.findall("<h2>([^<]*)</h2>", text),
                         ["Loss", "Learning rate", "Seconds a step", "Share of communication", f"Latencies: {run.name}"])
        self.assertEqual(text.count("<svg"), 5)
        self.assertIn(["reduce", "blocks.0", "4", "1.000", "2.000", "3.000", "1500.000"], Cells(text).rows)

    @needs_matplotlib
    def test_bars_of_latencies_reach_from_percentile_to_percentile_the_slowest_call_first(self):
        from matplotlib.figure import Figure
        run = read_run(self.run_of(HEADER, step(1), latency(1, "a"),
                                   latency(1, "b", "reduce", p50_seconds=0.0, p95_seconds=0.5, p99_seconds=0.5, max_seconds=1.0)))
        [axes] = latency_bars(Figure, run.latencies).axes
        self.assertEqual([label.get_text() for label in axes.get_yticklabels()], ["reduce b", "gather a"])
        ends = [[round(end, 6) for end in (bar.get_x(), bar.get_x() + bar.get_width())] for bar in axes.patches]
        self.assertEqual(ends, [[0.001, 500], [1, 2], [500, 500], [2, 3], [500, 1000], [3, 4.2]])
        self.assertEqual(len(latency_bars(Figure, [run.latencies[0]] * 99).axes[0].patches), 3 * 60)

    @needs_matplotlib
    def test_numbers_that_no_chart_can_have_are_left_out(self):
        evaluations = [{"event": "evaluation", "after_step": number, "eval_loss": loss} for number, loss in ((1, 2.5), (2, None))]
        run = read_run(self.run_of(HEADER, step(1, loss=1e308, waited_for_rank=math.nan, waited_for_seconds=1.0), step(2, lr=10**400), *evaluations))
        self.assertEqual(run.held_out(), [(1, 2.5)])
        text = page([run])
        self.assertEqual(re.findall("<h2>([^<]*)</h2>", text), ["Loss", "Seconds a step", "Seconds waited for the slowest rank"])
        self.assertNotIn("loss on held-out data, last", {row[0] for row in Cells(text).rows})

    @needs_matplotlib
    def test_stragglers_are_listed_by_the_seconds_that_others_waited(self):
        waits = [(1, 0.25), (0, 0.5), (1, 1.0), (None, None)]
        run = read_run(self.run_of(HEADER, *(step(number, waited_for_rank=rank, waited_for_seconds=seconds)
                                             for number, (rank, seconds) in enumerate(waits, 1))))
        text = page([run])
        rows = Cells(text).rows
        self.assertEqual(re.findall("<h2>([^<]*)</h2>", text),
                         ["Loss", "Seconds a step", "Seconds waited for the slowest rank", f"Stragglers: {run.name}"])
        at = rows.index(["1", "2", "66.7", "1.250", "1000.000"])
        self.assertEqual(rows[at + 1], ["0", "1", "33.3", "0.500", "500.000"])
        self.assertIn(["waited for the slowest rank, median, s", "0.5"], rows)
        self.assertNotIn("Stragglers", page([read_run(self.run_of(HEADER, step(1, waited_for_rank=None, waited_for_seconds=None), name="b"))]))

    @needs_matplotlib
    def test_names_cannot_bring_markup_and_the_page_asks_for_nothing(self):
        run = read_run(self.run_of(HEADER | {"model": "<script>x</script>$\\frac"}, step(1), latency(1, "<b>&"), name="<i>$a_b"))
        cells = Cells(page([run]))
        self.assertFalse({"script", "i", "b", "img", "link", "iframe"} & {tag for tag, _ in cells.tags})
        for tag, attributes in cells.tags:
            for name, value in attributes.items():
                self.assertFalse(name in ("src", "href") and value.startswith("http"), (tag, name, value))

    @needs_matplotlib
    def test_a_long_run_keeps_its_ends_and_its_means(self):
        lines = [step(number, loss=1.0 if number <= 5000 else 3.0) for number in range(1, 10001)]
        text = page([read_run(self.run_of(HEADER, *lines))])
        self.assertIn("means of neighbouring steps", text)
        self.assertLess(len(text), 400_000)

    @needs_matplotlib
    def test_a_page_that_exists_is_kept_and_nothing_half_written_stays(self):
        run = self.run_of(HEADER, step(1))
        self.assertEqual(self.command(run)[0], 0)
        first = (self.folder / "a/report.html").read_text()
        self.assertEqual(first, page([read_run(run)]))
        self.assertEqual(self.command(run)[0], 73)
        self.assertEqual(self.command(run, "--overwrite")[0], 0)
        metrics = self.folder / "a/metrics.jsonl"
        self.assertEqual(self.command(metrics, "--out", metrics, "--overwrite")[0], 64)
        with mock.patch("os.fsync", side_effect=OSError(28, "No space left on device")):
            code, said = self.command(run, "--out", self.folder / "new.html")
        self.assertEqual(code, 74, said)
        self.assertEqual(sorted(os.listdir(self.folder)), ["a"])

    def test_without_matplotlib_the_remedy_is_named(self):
        with mock.patch.dict("sys.modules", {"matplotlib": None, "matplotlib.figure": None}):
            code, said = self.command(self.run_of(HEADER, step(1)))
        self.assertEqual(code, 69)
        self.assertIn("pip install", said)
        self.assertEqual(os.listdir(self.folder / "a"), ["metrics.jsonl"])

    @needs_matplotlib
    def test_a_run_of_the_command_is_drawn(self):
        (self.folder / "m.json").write_text('{"model": "gpt", "vocab_size": 256, "seq_len": 32, "layers": 1, "width": 32, "heads": 2}')
        (self.folder / "s.json").write_text("{}")
        words = ["train", "--model", "m.json", "--strategy", "s.json", "--data", str(TREE / "docs/testing.md"), "--steps", "4", "--batch", "2", "--out", "runs/a"]
        subprocess.run([os.environ["TESSERA_BIN"], *words], cwd=self.folder, check=True, capture_output=True)
        code, said = self.command(self.folder / "runs/a")
        self.assertEqual(code, 0, said)
        text = (self.folder / "runs/a/report.html").read_text()
        rows = {row[0]: row[1:] for row in Cells(text).rows}
        self.assertEqual(rows["steps"], ["4 of 4"])
        self.assertEqual(rows["memory of rank 0 at most, MiB"], rows["its plan, MiB"])
        self.assertIn("<h2>Norm of the gradients</h2>", text)


class CmakePath(unittest.TestCase):
    def test_prefix_is_printed_whole_or_an_error_says_why_not(self):
        with tempfile.TemporaryDirectory() as prefix, mock.patch.object(cmake_path, "cmake_path", return_value=prefix):
            said, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stderr(errors):
                self.assertEqual(cmake_path.main(), 66)
                self.assertIn("cmake --install", errors.getvalue())
                package = pathlib.Path(prefix) / "lib/cmake/Tessera"
                package.mkdir(parents=True)
                (package / "TesseraConfig.cmake").touch()
                with contextlib.redirect_stdout(said):
                    self.assertEqual((cmake_path.main(), said.getvalue()), (0, prefix + "\n"))
                with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
                    self.assertEqual(cmake_path.main(), 74)
            self.assertNotIn("--out", errors.getvalue())


if __name__ == "__main__":
    unittest.main()
