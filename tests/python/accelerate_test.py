"""Tests that tessera.integrations.accelerate.Accelerator trains, evaluates, saves and resumes as accelerate's own
Accelerator does with DDP."""

import importlib.util
import sys
import tempfile
import unittest

from launched import RANKS, main, run, run_forked_files


@unittest.skipUnless(importlib.util.find_spec("accelerate"), "no accelerate: scripts/setup --tests")
class AccelerateTest(unittest.TestCase):
    def test_two_ranks_train_like_ddp(self):
        with tempfile.TemporaryDirectory() as folder:
            code, output = run_forked_files(["tessera.integrations.accelerate"], (2, "accelerate_ranks.py", folder), at_rest=500,
                                            TESSERA_LOG_LEVEL="error")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like DDP, and refused what it cannot do"), 2, output)

    def test_accelerate_launch_trains_on_two_processes(self):
        """The option `--multi_gpu` makes accelerate start processes by itself, even without GPUs. If there are only
        CPUs, accelerate needs MPI without this option."""
        with tempfile.TemporaryDirectory() as folder:
            code, output = run([sys.executable, "-B", "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu",
                                "--num_machines", "1", "--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no",
                                "--dynamo_backend", "no", RANKS / "accelerate_ranks.py", folder, "once"],
                               TESSERA_LOG_LEVEL="error", HF_HOME=folder)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like DDP"), 2, output)


if __name__ == "__main__":
    main()
