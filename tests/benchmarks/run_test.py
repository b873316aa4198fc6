#!/usr/bin/env python3
"""Tests the command line of benchmarks/run: each place has its own options, and no option is accepted and then
ignored."""

import contextlib
import importlib.machinery
import importlib.util
import io
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import paths  # noqa: F401
import gpu_page_test
import harness
import results

RUN = harness.FOLDER / "run"


def module():
    loader = importlib.machinery.SourceFileLoader("benchmarks_run", str(RUN))
    found = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(found)
    return found


def said(*words, program=RUN):
    """Runs the program in this process. A new one would import matplotlib first. Returns (exit code, output)."""
    out = io.StringIO()
    with unittest.mock.patch.object(sys, "argv", [str(program), *map(str, words)]), \
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = module().main()
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue()


class CommandLine(unittest.TestCase):
    def test_a_place_understands_its_own_options_only(self):
        for words, wanted in ((["--where", "net", "--peers", "torch"], "unrecognized arguments: --peers"),
                              (["--rates", "1gbit"], "unrecognized arguments: --rates"),
                              (["--where", "gpu", "--disk", "/"], "unrecognized arguments: --disk"),
                              (["--where", "moon"], "invalid choice: 'moon'"),
                              (["--redraw", "x", "--rounds", "3"], "unrecognized arguments: --rounds"),
                              (["--only", "sleep"], "--only: unknown sleep; there are gpt_69m_fp32"),
                              (["--add"], "--add needs --only with sections"),
                              (["--add", "--only", "gpt_69m_fp32"], "--add needs --only with sections"),
                              (["--rounds", "0"], "--rounds must be 1 or more"),
                              (["--where", "net", "--steps", "0"], "--steps must be 1 or more"),
                              (["--where", "gpu", "--device", "cpu"], "--device cpu is a smoke test: only with --quick")):
            with self.subTest(words):
                code, text = said(*words)
                self.assertEqual(code, 2, text)
                self.assertIn(wanted, text)

    def test_old_program_names_still_select_a_place(self):
        for name, wanted in (("run_net", "--ranks-per-host"), ("run_gpu", "--seconds"), ("run", "--disk")):
            done = subprocess.run([sys.executable, "-B", RUN.with_name(name), "--help"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(wanted, done.stdout)

    def test_redraw_writes_the_page_of_the_place_in_the_file(self):
        with tempfile.TemporaryDirectory() as folder:
            file, out = pathlib.Path(folder) / "gpu-x.json.xz", pathlib.Path(folder) / "out"
            results.write(file, gpu_page_test.DATA)
            self.assertEqual(said("--redraw", file, "--out", out), (0, ""))
            self.assertIn("Tessera on GPU X", (out / "gpu-x.md").read_text())
            self.assertEqual(said("--redraw", file), (0, ""))
            self.assertEqual(*((of / "gpu-x.md").read_text() for of in (file.parent, out)))

    def test_without_matplotlib_nothing_is_measured_and_the_remedy_is_told(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out, \
                unittest.mock.patch("importlib.util.find_spec", return_value=None), \
                unittest.mock.patch.object(harness, "FOLDER", pathlib.Path(folder)):
            with self.assertRaises(SystemExit) as ended:
                run.need_matplotlib()
        self.assertEqual(ended.exception.code, 69)
        self.assertIn("hint: benchmarks/setup installs it", out.getvalue())


run = module()

if __name__ == "__main__":
    unittest.main()
