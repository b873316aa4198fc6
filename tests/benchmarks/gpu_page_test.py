#!/usr/bin/env python3
"""Tests the tables and the page of a made-up GPU run. Every number below can be computed from it by hand."""

import copy
import unittest

import paths  # noqa: F401
import page as pages
from gpu import page, tables

GPU = {"name": "GPU X", "uuid": "GPU-1", "memory_bytes": 80 * 2**30, "driver": "580", "compute_capability": "9.0",
       "power_limit_w": "700"}
CONTENDERS = ("torch_eager", "tessera_full_shard", "torch_fsdp2")
# A step has 1000 tokens with 6 * 4000 operations each. A matrix product makes 6e9 operations per second, and a copy
# moves 1e12 bytes per second.
WORK = {"name": "gpt_1b5", "title": "GPT of 1.5 B", "model": {"seq_len": 500, "layers": 0, "width": 10, "vocab_size": 400}, "dtype": "bf16",
        "parameters": 10, "batch": 2, "steps": 1, "warm_up": 1, "contenders": list(CONTENDERS)}
DATA = {
    "schema": 3, "where": "gpu", "quick": False,
    "runs": [{"command": "benchmarks/run_gpu", "sections": ["limits", "gpt_1b5"], "started": "2000-01-01T00:00:00+00:00", "seconds": 100.0,
              "rounds": 3, "budget_s": 380.0, "commit": {"hash": "abc", "dirty": False}, "machine": None}],
    "gpu": GPU, "versions": {"torch": "2.11.0"}, "contenders": [{"name": name, "label": name} for name in CONTENDERS], "works": [WORK],
    "limits": [{"limit": "copy", "amount": 2 * 10**12, "unit": "B", "rounds_s": [[2.0], [2.0, 2.0]]},
               {"limit": "gemm", "amount": 6 * 10**12, "unit": "FLOP", "rounds_s": [[1000.0]]}],
    "optimizer": [{"contender": "fused_fp32", "numel": 10**9, "bytes": 28 * 10**9, "rounds_s": [[0.056]]},
                  {"contender": "fp32", "numel": 10**9, "bytes": 28 * 10**9, "rounds_s": [[0.03], [0.05]],
                   "limits_s": [0.036, 0.038]}],
    "codecs": [{"contender": "int8_encode", "numel": 10**9, "bytes": 5 * 10**9, "rounds_s": [[0.01], [0.03]], "limits_s": [0.009, 0.011]}],
    "steps": [{"work": "gpt_1b5", "contender": "torch_eager", "rounds_s": [[0.01, 0.02], [0.03]], "losses": [],
               "device_bytes": 3 * 2**30, "allocated_peak_bytes": 2 * 2**30},
              {"work": "gpt_1b5", "contender": "tessera_full_shard", "rounds_s": [[0.016]], "losses": [],
               "device_bytes": None, "allocated_bytes": 2**30, "planned_bytes": 2**30,
               "exposed_s": [0.001, 0.004, 0.002]}],
    "launches": [{"contender": "plain module", "rounds_s": [[0.001], [0.003]], "over_plain_unit_s": []},
                 {"contender": "FULL_SHARD", "rounds_s": [[0.004], [0.006]], "over_plain_unit_s": [1e-5, 3e-5]}],
    "checks": [{"work": "gpt_1b5", "result": "PyTorch: alike"}], "tests": [],
    "failed": [{"key": "gpt_1b5/torch_fsdp2", "what": "GPT of 1.5 B, torch_fsdp2", "round": 1,
                "why": "ContenderFailed: rank 0 of a | b ended with 1:\ntrace\nOutOfMemoryError: 90 GiB"}],
    "not_run": [{"key": "optimizer/chain_bf16", "what": "optimizer, PyTorch chain_bf16", "round": 1,
                 "why": "3 s of 380 were left, and it takes about 10"}]}


def made_up(**changes):
    return copy.deepcopy(DATA) | changes


def rows(table):
    """Returns {first cell of a row: {column: cell}}."""
    return {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}


class Tables(unittest.TestCase):
    def setUp(self):
        self.results = tables.GpuResults(made_up())

    def test_limit_is_the_median_over_all_rounds(self):
        row = rows(tables.limits(self.results))[tables.LIMITS["copy"]]
        self.assertEqual((row["samples"], row["median, ms"], row["rate"], row["unit"]), (3, 2000.0, 1000.0, "GB/s"))
        row = rows(tables.limits(self.results))[tables.LIMITS["gemm"]]
        self.assertEqual((row["rate"], row["unit"]), (0.006, "TFLOP/s"))
        row = rows(tables.limits(self.results))[tables.LIMITS["h2d"]]
        self.assertEqual((row["rate"], row["note"]), (None, "not run: it was not asked for"))

    def test_optimizer_rates_are_compared_with_the_copy_limit(self):
        table = rows(tables.optimizer(self.results))
        row = table["PyTorch fused_fp32"]  # 28 GB at 1000 GB/s take 28 ms
        self.assertEqual((row["parameters"], row["GB/s"], row["of the copy limit"]), (10**9, 500.0, 0.5))
        row = table["Tessera fp32"]  # the median is 40 ms, and the median of its copies is 37 ms
        self.assertAlmostEqual(row["of the copy limit"], 0.925)
        self.assertIn("3 s of 380 were left", table["PyTorch chain_bf16"]["note"])

    def test_codecs_are_compared_with_copies_of_as_many_bytes(self):
        # the median is 20 ms, and the median of its copies is 10 ms
        row = rows(tables.codecs(self.results))["int8_encode"]
        self.assertEqual((row["elements"], row["of the copy limit"]), (10**9, 0.5))
        self.assertAlmostEqual(row["GB/s"], 250.0)
        row, = (row for row in tables.ratios(self.results)["rows"] if row[0] == "codec of the wire")
        self.assertEqual(row[1:6], ["limit", "int8_encode", 0.6, 0.5, "no"])
        self.assertIn("Kernels of the codecs of the wire", page.text(made_up()))
        self.assertNotIn("codecs", page.text(made_up(codecs=[])))

    def test_shares_are_empty_without_a_limit(self):
        results = tables.GpuResults(made_up(limits=[]))
        self.assertIsNone(rows(tables.optimizer(results))["PyTorch fused_fp32"]["of the copy limit"])
        row = rows(tables.steps(results, WORK))["torch_eager"]
        self.assertIsNone(row["model FLOP/s of the matrix product's"])

    def test_steps_are_compared_with_plain_module_and_matrix_product(self):
        table = rows(tables.steps(self.results, WORK))
        row = table["tessera_full_shard"]
        self.assertEqual((row["samples"], row["tokens/s"]), (1, 62500.0))
        self.assertEqual(row["times as fast as PyTorch's plain module"], 1.25)
        self.assertAlmostEqual(row["model FLOP/s of the matrix product's"], 0.25)  # 62500 tokens * 24000 operations are a quarter of 6e9
        self.assertEqual((row["GPU memory, GiB"], row["of it tensors, GiB"]), (None, 1.0))
        self.assertEqual(row["exposed communication, ms"], 2.0)
        row = table["torch_eager"]
        self.assertEqual((row["GPU memory, GiB"], row["of it tensors, GiB"]), (3.0, 2.0))
        self.assertIsNone(row["exposed communication, ms"])
        row = table["torch_fsdp2"]
        self.assertEqual((row["median, ms"], row["note"]), (None, "failed: OutOfMemoryError: 90 GiB"))

    def test_targets_are_judged_or_say_why_not(self):
        table = {(row[1], row[2]): row[3:] for row in tables.ratios(self.results)["rows"]}
        target, measured, reached, note = table["limit", "fp32"]
        self.assertAlmostEqual(measured, 0.925)
        self.assertEqual((target, reached, note), (0.93, "no", ""))
        target, measured, reached, _ = table["PyTorch fused_fp32", "fp32"]
        self.assertAlmostEqual(measured, 1.4)
        self.assertEqual((target, reached), (1.05, "yes"))
        self.assertEqual(table["PyTorch chain_bf16", "mixed"],
                         [1.7, None, None, "not run: it was not asked for"])  # Tessera's time is missing too
        _, measured, reached, _ = table["torch_eager", "tessera_full_shard"]
        self.assertEqual((measured, reached), (1.25, "yes"))
        self.assertEqual(table["torch_fsdp2", "tessera_full_shard"],
                         [1.03, None, None, "failed: OutOfMemoryError: 90 GiB"])
        self.assertNotIn(("torch_eager", "tessera_no_shard"), table)  # this workload does not time that pair


    def test_unit_cost_on_the_host_is_over_the_plain_module(self):
        table = rows(tables.launches(self.results))
        self.assertEqual((table["plain module"]["step, ms"], table["plain module"]["over the plain module, us a unit"]),
                         (2.0, None))
        self.assertAlmostEqual(table["FULL_SHARD"]["over the plain module, us a unit"], 20.0)
        row, = (row for row in tables.ratios(self.results)["rows"] if row[1] == "plain module")
        self.assertEqual(row[2:4] + row[5:], ["FULL_SHARD", 1.0, "yes", "20.0 us"])
        self.assertAlmostEqual(row[4], 1.0)


class Page(unittest.TestCase):
    def test_every_table_row_has_as_many_cells_as_its_head(self):
        for block in page.text(made_up()).split("\n\n"):
            lines = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
            self.assertEqual(len({line.count("|") for line in lines} or {0}), 1, block)

    def test_page_names_gpu_commit_and_missing_parts(self):
        text = page.text(made_up())
        for wanted in ("# Tessera on GPU X", "| run 1 | limits, gpt_1b5: commit abc, 2000", "80.0 GiB, driver 580", "- gpt_1b5: PyTorch: alike",
                       "No test was run", "## Failed", "  trace\n  OutOfMemoryError: 90 GiB", "## Not run",
                       "optimizer, PyTorch chain_bf16, from round 1 on: 3 s of 380"):
            self.assertIn(wanted, text)
        self.assertNotIn("smoke test", text)
        self.assertNotIn("None", text)

    def test_notes_have_a_column_only_where_there_are_some(self):
        table = {"title": "T", "columns": ["a", "note"], "rows": [[1, ""], [2, ""]]}
        self.assertEqual(pages.markdown_table(table), "## T\n\n| a |\n| ---: |\n| 1 |\n| 2 |\n")
        table["rows"][1][1] = "why"
        self.assertEqual(pages.markdown_table(table), "## T\n\n| a | note |\n| ---: | --- |\n| 1 |  |\n| 2 | why |\n")

    def test_page_of_a_smoke_test_says_so(self):
        for changes in ({"quick": True}, {"gpu": None}):
            self.assertIn("its figures mean nothing", page.text(made_up(**changes)))

    def test_page_lists_the_tests(self):
        tests = [{"name": "device_kernels_test", "status": "passed", "seconds": 2.5, "message": ""}]
        self.assertIn("| device_kernels_test | passed | 2.5 |", page.text(made_up(tests=tests)))

    def test_a_tree_without_git_is_not_called_clean(self):
        run, = DATA["runs"]
        for dirty, wanted in ((True, "commit abc with uncommitted changes,"), (None, "commit abc,")):
            runs = [run | {"commit": {"hash": "abc", "dirty": dirty}}]
            self.assertIn(wanted, page.text(made_up(runs=runs)))

    def test_cells_are_rounded_and_escaped(self):
        self.assertEqual([pages.markdown_cell(value) for value in (None, 0.12345678, 123456.7, 1 << 20, "a|b\nc")],
                         ["", "0.1235", "123,457", "1,048,576", "a\\|b c"])


if __name__ == "__main__":
    unittest.main()
