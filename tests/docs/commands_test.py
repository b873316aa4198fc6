"""Runs the commands in bash blocks of pages, on tiny models. Each block has a folder of its own, with the files that its
commands name. NOT_RUN lists the commands that this machine cannot run, and the reason of each."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import blocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/support"))
from patience import patient  # noqa: E402

NOT_RUN = {  # how a command begins, and why it is not run
    "#!": "a batch script for Slurm",
    "srun ": "there is no Slurm",
    "[ $? ": "there is no Slurm",
    "mpirun ": "it needs hosts with an MPI; tests/comm/mpi starts ranks under mpirun",
    "sudo ": "it installs packages",
    "pip install dist/": "it needs a wheel; tests/python/wheel_test.py installs one",
    "scripts/demo": "it builds everything",
    "scripts/setup": "it downloads packages",
    "cmake ": "it builds everything",
    "torchrun ": "it needs two hosts; tests/launch starts ranks under torchrun's variables",
    "TESSERA_HOSTS=2,3 torchrun ": "it needs two hosts",
    "export ": "it is for the torchrun behind it",
    "tessera launch --workers ": "it needs the address of another machine; tests/app/train_test.cc starts workers",
    ".venv/bin/python benchmarks/large_batch.py ": "it reads runs that take hours; tests/benchmarks/large_batch_test.py reads small ones",
    "examples/finetune_language_model/run ": "tests/huggingface/finetune_test.py runs it",
    "python examples/images/digits.py ": "it needs scikit-learn",
    "tessera launch -n 2 -- images ": "tests/examples/images_test.cc runs it",
    "images ": "tests/examples/images_test.cc runs it",
}
CHANGED = {  # what a page says, and what is run here
    "PYTHONPATH=build/release/python ": "",
    "--hosts host0:4,host1:4 ": "-n 2 --pretend-hosts 2 ",
    "--hosts host0:2,host1:3 ": "-n 3 --pretend-hosts 1,2 ",
    "--hosts a:2,b:2 ": "-n 2 --pretend-hosts 2 ",
    "-n 4 ": "-n 2 ",
    "--links links.json": "--links L.json",
    "--step 107 ": "--step 3 ",
    "... --out runs/a": "--data text --batch 1 --steps 4 --checkpoint-dir runs/a/checkpoints --every-steps 1 --out runs/a",
}
MEASURED = re.compile(r"^tessera .*--(?:profile|links) (\S+)$")  # takes time, and writes a file that later commands read

MODEL = json.dumps({"model": "gpt", "vocab_size": 256, "seq_len": 16, "layers": 2, "width": 32, "heads": 2})
STRATEGY = {"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "optimizer": {"lr": 0.01}}
TRAIN_CPP = """#!/bin/sh
exec tessera train --model model.json --strategy "$1" --data text --batch 1 --steps 2
"""
TRAIN_PYTHON = """
import tessera
import torch

model = torch.nn.Linear(2, 1)
engine = tessera.Engine(model, {"strategy": "NO_SHARD"})
engine.backward(model(torch.ones(4, 2)).mean())
assert engine.step().step == 1 and tessera.world_size() == 2
"""
FILES = {
    "M.json": MODEL, "model.json": MODEL, "m.json": MODEL,
    "S.json": json.dumps(STRATEGY), "strategy.json": json.dumps(STRATEGY),
    "s.json": json.dumps(STRATEGY | {"reproducible": True, "record_hashes": {"every": 1}}),
    "text": "".join(f"a shard of unit {unit} waits; " for unit in range(300)),
    "train": TRAIN_CPP, "my_training": '#!/bin/sh\nexec ./train strategy.json\n', "train.py": TRAIN_PYTHON,
    "ds_config.json": (ROOT / "tests/python/import_configs/deepspeed/ds_zero3_bf16.json").read_text(encoding="utf-8"),
    "accelerate.yaml": (ROOT / "tests/python/import_configs/accelerate/accelerate_fsdp1.yaml").read_text(encoding="utf-8"),
}


def commands_in(block):
    """Returns the commands of a block. A script is one command."""
    if block.text.startswith("#!"):
        return [block.text]
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]


def reason_against(command):
    return next((begin for begin in NOT_RUN if command.startswith(begin)), None)


def changed(command):
    for said, here in CHANGED.items():
        command = command.replace(said, here)
    # A page tells the reader to start this command with the launcher of the training.
    return f"tessera launch -n 2 -- {command}" if command.startswith("tessera doctor --links ") else command


def before(command):
    """Returns the command that must run before `command`, or None. A replay needs the run that it repeats."""
    return changed(command).partition(" -- ")[2] if command.startswith("tessera replay ") else None


class Commands(unittest.TestCase):
    FOUND = [block for block in blocks.all_blocks(ROOT) if block.language == "bash" and not block.note.startswith("not run: ")]

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        programs = self.folder / "programs"
        programs.mkdir()
        for name, program in {"tessera": os.environ["TESSERA_BIN"], "python": sys.executable, "python3": sys.executable}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def new_place(self, name):
        place = self.folder / name
        place.mkdir()
        for file, text in FILES.items():
            (place / file).write_text(text, encoding="utf-8")
        for program in ("train", "my_training"):
            (place / program).chmod(0o755)
        return place

    def run_in(self, place, command):
        done = subprocess.run(["bash", "-c", command], cwd=place, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=patient(60))
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}")

    def test_every_command_runs_or_says_why_not(self):
        made = {}  # by the command: the file that it measured, or None
        for block in self.FOUND:
            place = self.new_place(block.place.replace("/", "-"))
            for command in commands_in(block):
                if reason_against(command) or ("accelerate.yaml" in command and importlib.util.find_spec("yaml") is None):
                    continue
                here = changed(command)
                measured = MEASURED.search(here)
                with self.subTest(block.place, command=here):
                    self.assertRegex(command, r"^(tessera|PYTHONPATH=\S+ python3|python -m tessera\.\w+)( |$)", "NOT_RUN gives no reason for it")
                    for written in re.findall(r"--out (\S+\.json)", here):
                        (place / written).unlink(missing_ok=True)  # nothing is written over a file that exists
                    if here not in made:
                        if before(command):
                            self.run_in(place, before(command))
                        self.run_in(place, here)
                        made[here] = (place / measured[1]).read_bytes() if measured else None
                    elif measured:
                        (place / measured[1]).write_bytes(made[here])
        self.assertGreater(len(made), 12)

    def test_every_reason_and_every_change_is_about_a_command(self):
        commands = [command for block in self.FOUND for command in commands_in(block)]
        for begin in NOT_RUN:
            self.assertTrue(any(reason_against(command) == begin for command in commands), f"no block begins a command with {begin!r}")
        for said in CHANGED:
            self.assertTrue(any(said in command and not reason_against(command) for command in commands), f"no command that is run has {said!r}")


if __name__ == "__main__":
    unittest.main()
