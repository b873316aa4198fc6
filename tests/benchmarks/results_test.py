#!/usr/bin/env python3
"""Tests the file of a run: samples are read back unchanged, the file stays small, and sections replace those of earlier
runs."""

import pathlib
import random
import tempfile
import unittest

import paths  # noqa: F401
import results

RUN = {"command": "first", "sections": ["optimizer", "disk", "w", "tessera:step"], "commit": {"hash": "abc", "dirty": False}}
WORK = {"name": "w", "contenders": ["a", "b"]}
DATA = {"schema": results.SCHEMA, "where": "host", "quick": False, "runs": [RUN], "versions": {"torch": "2.15"},
        "contenders": [{"name": "a"}], "works": [WORK], "checks": [{"work": "w", "result": "alike"}],
        "failed": [{"key": "w/a"}], "not_run": [{"key": "disk/fio"}], "optimizer": [1], "optimizer_avx2": [2], "disk": [3],
        "steps": [{"work": "w"}], "tessera_bench": {"step": 4, "memory": 5}}


def made_up(**changes):
    return DATA | changes


class File(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "results.json.xz"

    def written(self, samples, **limits):
        returned = results.write(self.path, made_up(optimizer=[{"rounds_s": [samples]}]), **limits)
        self.assertEqual(results.read(self.path), returned)
        return returned["optimizer"][0]["rounds_s"][0]

    def test_samples_have_nine_digits(self):
        self.assertEqual(self.written([0.123456789012, 3.05231111e-6, 2.0]), [0.123456789, 3.05231111e-6, 2.0])

    def test_long_lists_in_order_of_size_have_whole_nanoseconds(self):
        noise = random.Random(1)
        samples = sorted(noise.uniform(1e-6, 1e-3) for _ in range(results.LONG))
        got = self.written(samples)
        self.assertEqual([round(1e9 * sample) for sample in got], [round(1e9 * sample) for sample in samples])
        self.assertEqual(self.written(samples[::-1]), [float(f"{sample:.9g}") for sample in samples[::-1]])

    def test_numbers_that_are_no_samples_stay(self):
        case = {"bytes": 168501248.0, "limit_s": 0.1 + 0.2, "row": ["text", 0.1 + 0.2], "none": None}
        self.assertEqual(results.write(self.path, made_up(disk=[case]))["disk"], [case])

    def test_the_longest_lists_are_thinned_until_the_file_is_small_enough(self):
        noise = random.Random(2)
        samples, few = [noise.random() for _ in range(5000)], [noise.random() for _ in range(10)]
        data = results.write(self.path, made_up(optimizer=[{"rounds_s": [samples, few]}]), most_bytes=8000)
        self.assertLessEqual(self.path.stat().st_size, 8000)
        thinned, short = data["optimizer"][0]["rounds_s"]
        self.assertEqual(len(thinned), data["thinned_to"])
        self.assertGreater(self.path.stat().st_size, 4000)  # the file is thinned no more than necessary
        self.assertEqual(short, [float(f"{sample:.9g}") for sample in few])
        self.assertNotIn("thinned_to", results.write(self.path, made_up()))

    def test_file_too_large_without_samples_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "bytes without samples, more than the 100"):
            results.write(self.path, made_up(), most_bytes=100)

    def test_another_schema_is_refused(self):
        results.write(self.path, made_up(schema=1))
        with self.assertRaisesRegex(ValueError, "schema 1; this is for 3"):
            results.read(self.path)


class Added(unittest.TestCase):
    def added(self, names, **changes):
        empty = {"optimizer": [], "optimizer_avx2": [], "disk": [], "steps": [], "checks": [], "works": [], "contenders": [],
                 "failed": [], "not_run": [], "tessera_bench": {}}
        return results.added(made_up(), made_up(**empty | {"runs": [{"command": "later", "sections": names}]} | changes), names)

    def test_sections_are_replaced_whole_and_others_stay(self):
        merged = self.added(["optimizer", "tessera:step"], optimizer=[6], tessera_bench={"step": 7}, versions={"cuda": "13"})
        self.assertEqual([(run["command"], run["sections"]) for run in merged["runs"]],
                         [("first", ["disk", "w"]), ("later", ["optimizer", "tessera:step"])])
        self.assertEqual((merged["optimizer"], merged["optimizer_avx2"]), ([6], []))
        self.assertEqual(merged["tessera_bench"], {"step": 7, "memory": 5})
        for name in ("disk", "steps", "checks", "works", "contenders", "failed", "not_run"):
            self.assertEqual(merged[name], DATA[name], name)
        self.assertEqual(merged["versions"], {"torch": "2.15", "cuda": "13"})

    def test_new_measurement_clears_the_works_old_failures(self):
        merged = self.added(["w"], steps=[{"work": "w", "rounds_s": []}])
        self.assertEqual(merged["steps"], [{"work": "w", "rounds_s": []}])
        self.assertEqual((merged["failed"], merged["checks"], merged["not_run"]), ([], [], DATA["not_run"]))

    def test_run_with_all_sections_replaced_is_removed(self):
        self.assertEqual([run["command"] for run in self.added(RUN["sections"])["runs"]], ["later"])

    def test_works_that_are_not_measured_keep_their_contenders(self):
        shorter = WORK | {"contenders": ["a"]}
        self.assertEqual(self.added(["optimizer"], works=[shorter])["works"], [WORK])
        self.assertEqual(self.added(["w"], works=[shorter])["works"], [shorter])

    def test_tests_are_replaced_where_there_are_new_ones(self):
        broken = {"key": "tests"}
        earlier = made_up(tests=[{"name": "a"}], failed=[broken])
        self.assertEqual(results.added(earlier, made_up(tests=[], failed=[]), [])["failed"], [broken])
        merged = results.added(earlier, made_up(tests=[{"name": "a"}, {"name": "b"}], failed=[]), [])
        self.assertEqual((len(merged["tests"]), merged["failed"]), (2, []))

    def test_section_is_read_from_a_key(self):
        self.assertEqual([results.section_of(key) for key in ("optimizer/fp32", "gpt_7b/torch_ddp", "tessera:step/bench", "tests", "build")],
                         ["optimizer", "gpt_7b", "tessera:step", None, None])


if __name__ == "__main__":
    unittest.main()
