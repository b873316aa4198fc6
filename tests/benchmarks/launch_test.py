#!/usr/bin/env python3
"""Tests how contenders are started and how their output is read. Scripts replace the contenders. Also tests how ctest's
output is read."""

import json
import math
import os
import pathlib
import tempfile
import unittest

import paths  # noqa: F401
import launch
import ranks
from contenders import CONTENDERS, strategy_file
from gpu import junit, measure
from launch import Launcher
from works import of_gpu

WORK, = of_gpu(quick=True)  # 2 steps of warm-up, and 3 timed steps
METRICS = [{"event": "start", "parameters": WORK.parameters()}]
METRICS += [{"step": step, "seconds": float(step), "loss": 6.0 - step, "bytes_allocated": 96, "bytes_planned": 64,
             "communication_seconds": step / 8} for step in range(1, 6)]
TESSERA = r"""#!/usr/bin/env python3
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
PEER = r"""#!/usr/bin/env python3
import json, os, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1].endswith("step.py") and (options["--contender"], options["--dtype"], options["--reduce"]) == ("eager", "bf16", "fp32")
assert (options["--warm-up"], options["--steps"], options["--cool-down"], options["--batch"]) == ("2", "3", "0", "2")
rank = int(os.environ["RANK"])
lines = [json.loads(line) for line in {metrics!r}.splitlines()] + [{"event": "end", "peak_bytes": 100 * rank, "allocated_peak_bytes": 7}]
for line in lines[1:-1]: line["loss"] += rank
file = open(options["--metrics"], "w")
file.write("".join(json.dumps({k: v for k, v in line.items() if not k.startswith(("bytes", "comm"))}) + "\n" for line in lines))
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


class Launching(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def script(self, text):
        path = self.folder / "program"
        metrics = "".join(json.dumps(line) + "\n" for line in METRICS)
        path.write_text(text.replace("{seen}", str(self.folder / "seen")).replace("{metrics!r}", repr(metrics)))
        os.chmod(path, 0o755)
        return path

    def train(self, name, text, used_bytes=None):
        program = self.script(text)
        return measure.train(Launcher(program, {"torch": program}, "cuda"), CONTENDERS[name], WORK, self.folder, 60, used_bytes)

    def test_tesseras_timed_steps_come_after_the_warm_up(self):
        run = self.train("tessera_full_shard", TESSERA)
        self.assertEqual(run.samples_s, [[3.0, 4.0, 5.0]])
        self.assertEqual(run.losses, [[5.0, 4.0, 3.0, 2.0, 1.0]])
        self.assertEqual(run.facts, {"allocated_bytes": 96, "planned_bytes": 64, "exposed_s": [0.375, 0.5, 0.625], "device_bytes": None})
        self.assertEqual((self.folder / "seen").read_text(), "FULL_SHARD\n")

    def test_ranks_that_share_a_gpu_share_the_batch(self):
        self.assertEqual(self.train("shared_no_shard_2", TESSERA).samples_s, [[3.0, 4.0, 5.0]])  # the script checks it

    def test_every_rank_of_a_peer_reports(self):
        program = self.script(PEER)
        run = Launcher(program, {"torch": program}).train(CONTENDERS["torch_eager"], WORK, self.folder, count=2)
        self.assertEqual(run.all_samples_s(), [3.0, 4.0, 5.0] * 2)
        self.assertEqual(run.losses, [[5.0, 4.0, 3.0, 2.0, 1.0], [6.0, 5.0, 4.0, 3.0, 2.0]])
        self.assertEqual((run.peak_bytes, run.facts), (50.0, {"allocated_peak_bytes": 7}))

    def test_run_for_checks_times_no_steps(self):
        program = self.script(TESSERA)
        run = Launcher(program, {}).train(CONTENDERS["tessera_full_shard"], WORK, self.folder, steps=5)
        self.assertEqual((run.samples_s, run.losses), ([[]], [[5.0, 4.0, 3.0, 2.0, 1.0]]))

    def test_device_memory_is_the_peak_above_what_was_in_use(self):
        values = [1000]

        def used_bytes():
            values.append(values[-1] + 24)
            return values[-2] if len(values) < 4 else 1048

        self.assertEqual(self.train("tessera_no_shard", TESSERA, used_bytes).facts["device_bytes"], 48)

    def test_failure_quotes_the_output_and_ignores_old_metrics(self):
        (self.folder / "metrics.0.jsonl").write_text(json.dumps(METRICS[1]) + "\n")
        with self.assertRaisesRegex(ranks.ContenderFailed, "(?s)ended with 69.*no NCCL here"):
            self.train("tessera_full_shard", "#!/bin/sh\necho no NCCL here >&2\nexit 69\n")
        with self.assertRaisesRegex(ranks.ContenderFailed, "it left no metrics"):
            self.train("tessera_full_shard", "#!/bin/sh\n")

    def test_run_that_trained_something_else_has_failed(self):
        start, *steps = METRICS
        for found, lines in (("7 parameters instead of", [{"parameters": 7}, *steps]), ("0 parameters instead of", steps),
                             ("4 steps instead of 5", METRICS[:-1]), (r"losses are \[nan, 4.0", [start, steps[0] | {"loss": math.nan}, *steps[1:]])):
            (self.folder / "metrics.0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            with self.subTest(found), self.assertRaisesRegex(ranks.ContenderFailed, found):
                launch.read(self.folder, WORK)

    def test_strategy_files_match_fsdp2_with_fp32_masters(self):
        strategy = strategy_file(CONTENDERS["tessera_shard_gradients"], WORK, "cuda")
        self.assertEqual(strategy["strategy"], "SHARD_GRADIENTS")
        self.assertEqual(strategy["mixed_precision"], {"param": "bf16", "reduce": "fp32"})
        self.assertEqual(strategy["comm"], {"transport": "nccl"})
        self.assertNotIn("offload", strategy)
        self.assertEqual(strategy_file(CONTENDERS["shared_no_shard_2"], WORK, "cuda")["comm"], {"transport": "cuda_host"})
        self.assertNotIn("comm", strategy_file(CONTENDERS["shared_no_shard_2"], WORK))
        self.assertEqual(strategy_file(CONTENDERS["tessera_host_cpu"], WORK, "cuda")["offload"],
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

    def test_missing_file_gives_no_tests(self):
        self.assertEqual(junit.read("/nowhere/tests.xml"), [])


if __name__ == "__main__":
    unittest.main()
