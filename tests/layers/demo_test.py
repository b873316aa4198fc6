"""Tests scripts/demo with stand-ins for the programs that it builds and runs: how many steps the script chooses, and
which loss shows that the model has learnt."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# This script replaces `tessera`. It notes its arguments, writes the seconds of 8 steps (the first is slow), and prints
# the loss.
TESSERA = """#!/usr/bin/env bash
tr '\\n' ' ' <<<"$*" >>"$DEMO_CALLS"
echo >>"$DEMO_CALLS"
while [ "$1" != --out ]; do shift; done
mkdir -p "$2"
echo '{"event": "start"}' >"$2/metrics.jsonl"
for step in 1 2 3 4 5 6 7 8; do
  echo "{\\"step\\": $step, \\"seconds\\": $([ $step = 1 ] && echo 99 || echo "$DEMO_STEP")}" >>"$2/metrics.jsonl"
done
echo "final loss $DEMO_LOSS (mean of the last 10 steps); unigram entropy 3.0"
"""
PYTHON = f"""#!/usr/bin/env bash
[ "$1" = -c ] && {{ echo /headers/torch; exit; }}
exec {sys.executable} "$@"
"""
NOTHING = "#!/usr/bin/env bash\n"


class Demo(unittest.TestCase):
    def run_demo(self, step, loss, **variables):
        """Returns the exit code, the number of steps of each run, the last run's strategy and the output."""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for file in ("scripts/demo", "examples/strategies/full_shard_bf16.json"):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, folder / file)
            for file, text in {"scripts/early_build": NOTHING, ".venv/bin/cmake": NOTHING, ".venv/bin/python": PYTHON,
                               "build/demo/app/tessera": TESSERA}.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text)
                (folder / file).chmod(0o755)
            clean = {key: value for key, value in os.environ.items() if key not in ("STEPS", "BATCH", "PARAM")}
            done = subprocess.run(["scripts/demo"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env={
                **clean, "DEMO_CALLS": str(folder / "calls"), "DEMO_STEP": str(step), "DEMO_LOSS": str(loss), "PARAM": "fp32", **variables})
            calls = (folder / "calls").read_text().splitlines()
            for call in calls:
                self.assertIn("launch -n 2 --no-prefix -- build/demo/app/tessera train", call)
                self.assertIn("--data /headers/torch/include", call)
            strategy = json.loads((folder / "runs/demo/strategy.json").read_text())
            return done.returncode, [int(call.split("--steps ")[1].split()[0]) for call in calls], strategy, done.stdout

    def test_it_makes_as_many_steps_as_take_three_minutes(self):
        for seconds, steps in ((0.45, 400), (10, 100), (0.01, 1000)):
            code, runs, strategy, output = self.run_demo(seconds, 1.0)
            self.assertEqual((code, runs), (0, [8, steps]), output)
            self.assertEqual((strategy["lr_schedule"]["total_steps"], strategy["mixed_precision"]["param"]), (steps, "fp32"))
            self.assertIn(f"{steps} of them are about 3 minutes", output)

    def test_a_given_number_of_steps_is_made_without_a_measurement(self):
        code, runs, strategy, output = self.run_demo(1, 1.0, STEPS="30")
        self.assertEqual((code, runs, strategy["lr_schedule"]["warmup_steps"]), (0, [30], 15), output)

    def test_a_loss_near_the_entropy_of_bytes_is_a_failure_and_the_more_steps_the_less_near(self):
        for steps, most in ((100, 0.98), (150, 0.9), (300, 0.8)):
            self.assertEqual(self.run_demo(1, 3 * most - 0.01, STEPS=str(steps))[0], 0)
            code, _, _, output = self.run_demo(1, 3 * most + 0.01, STEPS=str(steps))
            self.assertEqual(code, 1)
            self.assertIn("nothing was learnt", output)


if __name__ == "__main__":
    unittest.main()
