#!/usr/bin/env python3
"""Tests the start of ranks: each rank gets its number and one thread, and no rank outlives a failure or the time
limit."""

import os
import signal
import subprocess
import sys
import time
import unittest

import paths
import ranks
from patience import in_time, patient


def python(script, *arguments):
    return [sys.executable, "-c", script, *arguments]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Watch:
    """Records the processes, and whether they ran while the watch was open."""

    def __call__(self, pids):
        self.pids = pids
        return self

    def __enter__(self):
        self.were_alive = [alive(pid) for pid in self.pids]

    def __exit__(self, *_):
        pass


class Ranks(unittest.TestCase):
    def test_each_rank_gets_its_environment(self):
        script = ("import os, sys\n"
                  "print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')), sys.argv[1])")
        watch = Watch()
        got = ranks.run_ranks(python(script, "file.{rank}"), ranks.rank_environments(3), patient(60), watch)
        self.assertEqual(got, [f"{rank} 3 1 file.{rank}\n" for rank in range(3)])
        self.assertEqual(watch.were_alive, [True] * 3)

    def test_ranks_share_one_port(self):
        self.assertEqual(len({environment["MASTER_PORT"] for environment in ranks.rank_environments(4)}), 1)

    def test_failure_ends_all_ranks_and_quotes_the_output(self):
        script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no luck')\ntime.sleep(600)"
        watch, start = Watch(), time.monotonic()
        with self.assertRaisesRegex(ranks.ContenderFailed, "(?s)rank 1 .*ended with 1.*no luck"):
            ranks.run_ranks(python(script), ranks.rank_environments(2), patient(60), watch)
        self.assertTrue(in_time(time.monotonic() - start, 30))
        self.assertEqual([alive(pid) for pid in watch.pids], [False, False])

    def test_time_limit_ends_all_ranks(self):
        watch = Watch()
        with self.assertRaisesRegex(ranks.ContenderFailed, "was not done after 0.5 s"):
            ranks.run_ranks(python("import time; time.sleep(600)"), ranks.rank_environments(2), 0.5, watch)
        self.assertEqual([alive(pid) for pid in watch.pids], [False, False])

    def test_signal_to_the_program_ends_all_ranks(self):
        program = ("import contextlib, ranks, sys\n"
                   "@contextlib.contextmanager\n"
                   "def watch(pids):\n"
                   "    print(*pids, flush=True)\n"
                   "    yield\n"
                   "ranks.let_signals_end_ranks()\n"
                   "ranks.run_ranks([sys.executable, '-c', 'import time; time.sleep(600)'], [{}, {}], 600, watch)\n")
        environment = os.environ | {"PYTHONPATH": str(paths.ROOT / "benchmarks")}
        with subprocess.Popen(python(program), stdout=subprocess.PIPE, text=True, env=environment) as benchmark:
            pids = [int(pid) for pid in benchmark.stdout.readline().split()]
            benchmark.terminate()
            self.assertEqual(benchmark.wait(patient(60)), 128 + signal.SIGTERM)
        self.assertEqual([alive(pid) for pid in pids], [False, False])


if __name__ == "__main__":
    unittest.main()
