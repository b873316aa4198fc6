"""Tests how programs end. An exception, an interrupt or sys.exit on one rank soon ends all ranks, with the message and
the exit code of the cause."""

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

from launched import LONG, TESSERA, environment, launch, main, patient, run

from free_port import free_port

BEGIN = """
    import os, signal, sys, time
    import torch
    import tessera
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    strategy = {"units": {"classes": ["Linear"]}, "host_sharing": False, "comm": {"timeout_s": 600}}
    def train(engine, steps=2):
        for step in range(steps):
            engine.backward(model(torch.ones(2, 4)).square().mean())
            engine.step()
"""
MADE = BEGIN + """
    engine = tessera.Engine(model, strategy)
    train(engine)
"""


def run_by_hand(program, *words, **variables):
    """Runs a program on two ranks without a launcher. The first word is the rank's number. This number also replaces
    "%" in the value of a variable. Returns the exit codes and the outputs."""
    ranks = [subprocess.Popen([sys.executable, "-B", "-c", textwrap.dedent(program), str(rank), *words], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True,
                              env=environment() | {name: value.replace("%", str(rank)) for name, value in variables.items()})
             for rank in range(2)]
    outputs = [rank.communicate(timeout=patient(60))[0] for rank in ranks]
    return [rank.returncode for rank in ranks], outputs


class ExitsTest(unittest.TestCase):
    def expect(self, program, code, *texts, ranks=2):
        # If no other rank reports the error to a rank, this rank waits until the limit of "comm". That limit is longer
        # than the limit of this test.
        got, output = launch(ranks, program, at_rest=300)
        self.assertEqual(got, code, output)
        for text in texts:
            self.assertIn(text, output)
        return output

    def test_ranks_end_together(self):
        # Rank 0 serves the store, and rank 1 ends one second later. A global variable holds an Engine until the
        # interpreter clears the modules.
        output = self.expect(MADE + """
    try:
        engine.step()
    except tessera.Error as error:  # this is a call out of turn, which can be caught
        assert error.exit_code == 64, error.exit_code
        assert "microbatches" in str(error), error
    else:
        raise AssertionError("step without backward")
    train(engine)
    if tessera.rank() == 1: time.sleep(1)
    print("last line")
        """, 0)
        self.assertEqual(output.count("last line"), 2, output)
        self.assertNotIn("error", output)

    def test_rank_that_ends_before_the_others_is_named(self):
        # A rank may end early because it has less data or because it calls sys.exit. Its Engine may hold the copy of
        # the parameters that all ranks share.
        for sharing, transport in (True, "host"), (False, "gloo"), *([(False, "host")] if LONG else []):
            with self.subTest(sharing=sharing, transport=transport):
                self.expect(BEGIN + f"""
    strategy["host_sharing"] = {sharing}
    strategy["comm"]["transport"] = "{transport}"
    engine = tessera.Engine(model, strategy)
    train(engine, 2 if tessera.rank() == 1 else 4)
    if tessera.rank() == 1: sys.exit(0)
                """, 75, "rank 1", "every rank takes as many steps")

    def test_sys_exit_code_of_one_rank_is_the_jobs(self):
        # Exit code 65 has a special meaning if Tessera chooses it. An exit that the program catches does not count. The
        # builtins exit and quit do not call sys.exit.
        for call, code in ("sys.exit", 65), ("quit", 3), ("raise SystemExit", 4), ("raise Derived", 5), ("raise Early", 6):
            with self.subTest(call=call):
                output = self.expect("""
    class Early(SystemExit): pass
                """ + MADE + f"""
    class Derived(SystemExit): pass
    try:
        sys.exit(9)
    except SystemExit:
        pass
    train(engine)
    if tessera.rank() == 1: {call}({code})
    train(engine, 50)
                """, code, f"the program ended itself by SystemExit({code})", "first cause: rank 1")
                self.assertIn(f"exit code {code}\n", output)
        self.expect(MADE + """
    try:
        raise SystemExit(9)
    except SystemExit:
        pass
        """, 0)
        self.expect(MADE + "    raise SystemExit(0)\n", 0)

    def test_exception_of_one_rank_is_the_first_cause(self):
        self.expect(MADE + """
    if tessera.rank() == 1: raise ValueError("a loss that is a pumpkin")
    train(engine, 50)
        """, 70, "ValueError: a loss that is a pumpkin", "Traceback", "first cause: rank 1")

    def test_rank_that_fails_before_its_engine_is_named_without_a_launcher(self):
        # Launchers other than `tessera launch` may let the other ranks go on. Rank 0 would then wait for
        # comm.init_timeout_s.
        codes, outputs = run_by_hand(BEGIN + """
    tessera.init(strategy)
    if tessera.rank() == 1: raise ValueError("there are no data")
    tessera.Engine(model, strategy)
        """, RANK="%", LOCAL_RANK="%", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        self.assertEqual(codes[1], 70, outputs)
        self.assertIn(codes[0], (70, 75), outputs)
        self.assertIn("rank 1/2 gave up: ValueError: there are no data", outputs[0])

    def test_rank_that_ends_before_its_engine_is_waited_for_at_a_store_in_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            codes, outputs = run_by_hand(BEGIN + """
    rank = int(sys.argv[1])
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meet", rank=rank, world_size=2)
    if rank == 1: os._exit(0)
    tessera.init({"comm": {"init_timeout_s": 1}})
            """, folder)
        self.assertEqual(codes, [75, 0], outputs)
        self.assertIn("at a store in a file, which does not tell that a rank has ended", outputs[0])

    def test_exception_under_another_excepthook_is_the_first_cause(self):
        self.expect(MADE + """
    sys.excepthook = lambda kind, value, trace: print("pretty:", value)
    if tessera.rank() == 1: raise ValueError("a loss that is a pumpkin")
    train(engine, 50)
        """, 70, "ValueError: a loss that is a pumpkin", "pretty: a loss", "first cause: rank 1")

    def test_exception_in_a_backward_hook_is_reported(self):
        self.expect(BEGIN + """
    def hook(gradient):
        if tessera.rank() == 1: raise KeyError("a hook with a toothache")
    model[0].weight.register_hook(hook)
    engine = tessera.Engine(model, strategy)
    train(engine, 50)
        """, 70, "KeyError: 'a hook with a toothache'", "rank 1 (pid")

    def test_an_error_of_tessera_keeps_its_code(self):
        output = self.expect(BEGIN + """
    tessera.Engine(model, {"strategy": "FULL_SHRAD"})
        """, 78, "FULL_SHARD", ranks=1)
        self.assertIn("tessera._error.Error", output)
        output = self.expect(MADE + "    engine.step()\n", 64, "hint: call backward first", ranks=1)
        self.assertNotIn("--help", output)  # --help would be the remedy of another error with this code

    def test_interrupt_of_one_rank_exits_with_130(self):
        self.expect(MADE + """
    if tessera.rank() == 1: os.kill(os.getpid(), signal.SIGINT)
    train(engine, 200)
        """, 130, "KeyboardInterrupt")

    def test_killed_rank_exits_with_137(self):
        self.expect(MADE + """
    if tessera.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
    train(engine, 200)
        """, 137, "signal 9")

    def test_interrupt_of_all_ranks_ends_the_job(self):
        program = MADE + """
    print("is training", flush=True)
    while True: train(engine)
        """
        job = subprocess.Popen([TESSERA, "launch", "-n", "2", "--", sys.executable, "-c", textwrap.dedent(program)],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
        before = ""
        while before.count("is training") < 2 and (line := job.stdout.readline()):
            before += line
        job.send_signal(signal.SIGINT)
        output = before + job.communicate(timeout=patient(300))[0]
        self.assertEqual(before.count("is training"), 2, output)
        self.assertNotEqual(job.returncode, 0, output)

    # Other tests cover torchrun and the error file, each of them separately.
    @unittest.skipUnless(LONG, "scripts/test --long")
    def test_torchrun_reads_the_error_file_of_a_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "train.py"
            lines = [line[4:] for line in (MADE + """
    if tessera.rank() == 1: raise ValueError("a loss that is a pumpkin")
    train(engine, 50)
""").splitlines()]
            script.write_text("\n".join(lines))
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            code, output = run([*torchrun, script], at_rest=300)
            self.assertNotEqual(code, 0, output)
            self.assertIn("a loss that is a pumpkin", output)
            script.write_text("\n".join(lines[:-2] + ['sys.stdout.write(f"trained on {tessera.world_size()}\\n")']))
            code, output = run([*torchrun, script], at_rest=300)
            self.assertEqual(code, 0, output)
            self.assertEqual(output.count("trained on 2"), 2, output)

    def test_restarted_ranks_resume_from_the_checkpoint(self):
        # A rank is killed after the second checkpoint. Both launchers start all ranks again, and the program continues
        # from this checkpoint.
        program = BEGIN + """
    folder = sys.argv[1]
    engine = tessera.Engine(model, strategy)
    done = engine.load_checkpoint(folder).step if os.path.exists(folder + "/latest") else 0
    sys.stdout.write(f"begins after step {done}\\n")
    for step in range(done, 4):
        train(engine, 1)
        engine.save_checkpoint(folder)
        if step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and tessera.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
    weights = engine.state_dict()
    engine.close()
    torch.manual_seed(1)  # the whole training is made once more, without a restart
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    engine = tessera.Engine(model, strategy)
    train(engine, 4)
    undisturbed = engine.state_dict()
    if tessera.rank() == 0:
        assert weights and all(torch.equal(weights[name], undisturbed[name]) for name in weights), (weights, undisturbed)
    sys.stdout.write(f"{tessera.world_size()} ranks end as if undisturbed\\n")
"""
        launched, torchrun = [TESSERA, "launch", "-n", "2"], [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        for command in [*launched, "--max-restarts", "1", "--", sys.executable], [*torchrun, "--max-restarts", "1"]:
            with self.subTest(command=command), tempfile.TemporaryDirectory() as folder:
                script = pathlib.Path(folder) / "train.py"
                script.write_text(textwrap.dedent(program))
                code, output = run([*command, script, folder + "/saved"], at_rest=300)
                self.assertEqual(code, 0, output)
                self.assertEqual(output.count("begins after step 0"), 2, output)
                self.assertEqual(output.count("begins after step 2"), 2, output)
                self.assertEqual(output.count("2 ranks end as if undisturbed"), 2, output)

    def test_exception_is_written_to_the_error_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "error.json"
            code, _ = run([sys.executable, "-c", "import tessera; tessera.init(); raise ValueError('one rank')"], TORCHELASTIC_ERROR_FILE=str(path))
            self.assertEqual(code, 70)
            words = json.loads(path.read_text())["message"]
            self.assertIn("ValueError: one rank", words["message"])
            self.assertIn("line 1", words["extraInfo"]["py_callstack"])


if __name__ == "__main__":
    main()
