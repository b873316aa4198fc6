#!/usr/bin/env python3
"""How contenders are started on a GPU and read, with scripts in their places; and what ctest wrote."""

import json
import os
import pathlib
import tempfile
import unittest

import paths  # noqa: F401
import ranks
from gpu import junit
from gpu.contenders import CONTENDERS, Runner, strategy_file
from gpu.works import quick_works

WORK = quick_works()[0]  # 2 steps of warm-up, 3 timed
METRICS = [{"event": "start"}] + [{"step": step, "seconds": float(step), "loss": 6.0 - step, "bytes_allocated": 96, "bytes_planned": 64,
                                   "communication_seconds": step / 8}
                                  for step in range(1, 6)]
TRAIN = r"""#!/usr/bin/env python3
import json, os, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
ranks = int(os.environ["WORLD_SIZE"])
assert sys.argv[1] == "train" and int(os.environ["LOCAL_RANK"]) < ranks
assert (options["--steps"], int(options["--batch"]) * ranks, options["--data-format"]) == ("5", 2, "llmc")
if os.environ["RANK"] != "0": sys.exit()
assert json.load(open(options["--model"]))["recompute"] is True
print(json.load(open(options["--strategy"]))["strategy"], file=open("{seen}", "w"))
open(options["--metrics"], "w").write({metrics!r})
"""
JUNIT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="(empty)" tests="4" failures="1" disabled="0" skipped="2" time="3">
 <testcase name="good" classname="good" time="1.5" status="run"><properties/><system-out>fine</system-out></testcase>
 <testcase name="bad" classname="bad" time="0.5" status="fail"><failure message="Failed"/>
  <system-out>norm 3, wanted 4</system-out></testcase>
 <testcase name="idle" classname="idle" time="0.1" status="notrun">
  <skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/><system-out>no GPU</system-out></testcase>
 <testcase name="lost" classname="lost" time="0" status="notrun">
  <skipped message="Unable to find executable"/></testcase>
</testsuite>
"""


class Contenders(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def script(self, text):
        path = self.folder / "tessera"
        path.write_text(text)
        os.chmod(path, 0o755)
        return path

    def train(self, name, text, used_bytes=None):
        runner = Runner("python3", self.script(text), "cuda", used_bytes)
        return runner.train(CONTENDERS[name], WORK, self.folder, 60)

    def trainer(self):
        metrics = "".join(json.dumps(line) + "\n" for line in METRICS)
        return TRAIN.replace("{seen}", str(self.folder / "seen")).replace("{metrics!r}", repr(metrics))

    def test_tesseras_timed_steps_come_after_the_warm_up(self):
        run = self.train("tessera_full_shard", self.trainer())
        self.assertEqual(run["samples_s"], [3.0, 4.0, 5.0])
        self.assertEqual(run["losses"], [5.0, 4.0, 3.0, 2.0, 1.0])
        self.assertEqual((run["allocated_bytes"], run["planned_bytes"], run["device_bytes"]), (96, 64, None))
        self.assertEqual(run["exposed_s"], [0.375, 0.5, 0.625])
        self.assertEqual((self.folder / "seen").read_text(), "FULL_SHARD\n")

    def test_ranks_that_share_a_gpu_share_the_batch(self):
        run = self.train("shared_no_shard_2", self.trainer())  # the script checks it
        self.assertEqual(run["samples_s"], [3.0, 4.0, 5.0])

    def test_device_memory_is_the_peak_above_what_was_in_use(self):
        values = [1000]

        def used_bytes():
            values.append(values[-1] + 24)
            return values[-2] if len(values) < 4 else 1048

        run = self.train("tessera_no_shard", self.trainer(), used_bytes)
        self.assertEqual(run["device_bytes"], 48)

    def test_a_failure_says_what_was_said_and_old_metrics_do_not_count(self):
        (self.folder / "metrics.jsonl").write_text(json.dumps(METRICS[1]))
        with self.assertRaisesRegex(ranks.ContenderFailed, "(?s)ended with 69.*no NCCL here"):
            self.train("tessera_full_shard", "#!/bin/sh\necho no NCCL here >&2\nexit 69\n")
        with self.assertRaises(FileNotFoundError):
            self.train("tessera_full_shard", "#!/bin/sh\n")

    def test_strategies_are_those_of_fsdp2_with_masters(self):
        strategy = strategy_file(CONTENDERS["tessera_shard_gradients"], "cuda")
        self.assertEqual(strategy["strategy"], "SHARD_GRADIENTS")
        self.assertEqual(strategy["mixed_precision"], {"param": "bf16", "reduce": "fp32"})
        self.assertEqual(strategy["comm"], {"transport": "nccl"})
        self.assertNotIn("offload", strategy)
        self.assertEqual(strategy_file(CONTENDERS["shared_no_shard_2"], "cuda")["comm"], {"transport": "cuda_host"})
        self.assertEqual(strategy_file(CONTENDERS["tessera_host_cpu"], "cuda")["offload"],
                         {"masters": {"tier": "host"}, "moments": {"tier": "host"}, "step": "cpu"})


class JUnit(unittest.TestCase):
    def test_every_outcome_is_told_apart(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "tests.xml"
            path.write_text(JUNIT)
            tests = junit.read(path)
        self.assertEqual([(test["name"], test["status"]) for test in tests],
                         [("good", "passed"), ("bad", "failed"), ("idle", "skipped"), ("lost", "not run")])
        self.assertEqual([test["message"] for test in tests],
                         ["", "norm 3, wanted 4", "SKIP_REGULAR_EXPRESSION_MATCHED", "Unable to find executable"])
        self.assertEqual(tests[0]["seconds"], 1.5)

    def test_no_file_is_no_tests(self):
        self.assertEqual(junit.read("/nowhere/tests.xml"), [])


if __name__ == "__main__":
    unittest.main()
