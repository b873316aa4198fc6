"""Who is compared over a network: how each is started on the hosts of scripts/net_lab, and how what it says is read.
Standard library only.

All ranks of all contenders are started in the same way: by scripts/net_lab, one process a rank and one thread each.
Each is wrapped by net_rank.py, which keeps what it says and counts what its host's link carries. A contender's steps
are those of the metrics file that its rank 0 writes: `tessera train --metrics`, and the same form from
peers/net_step.py. Their collectives hold the ranks together, so rank 0's steps are as long as everybody's.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import ranks
from contenders import ADAMW, FOLDER, built_package
from works import REPOSITORY, Work, write_tokens

NET_LAB = REPOSITORY / "scripts/net_lab"
SKIPPED, TIMED_OUT = 77, 124
LINES_OF_ERROR = 12
WARM_UP = 3  # DDP's hook for PowerSGD sends the gradients of the first two steps as they are


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    family: str                     # "torch", "deepspeed", "tessera", or "python": Tessera's package on a PyTorch model
    label: str
    argument: str                   # to peers/net_step.py, or Tessera's strategy
    group: str                      # the chart it is in: "replicated", "sharded", "python" or "compressed"; "alone": none
    more: dict = dataclasses.field(default_factory=dict)  # Tessera's: beside the strategy's name
    ranks_per_host: int = 1         # it is left out with fewer

    @property
    def alone(self):
        """One rank that communicates with nobody."""
        return self.group == "alone"

    @property
    def predicted(self):
        """Whether `tessera plan` knows what its steps take: of methods it does not know what ranks compute for them."""
        forms = self.more.get("compression", {}).keys() <= {"gradients", "sums", "gathers"}
        return self.family == "tessera" and not self.alone and forms

    @property
    def compressed(self):
        """Whether it sends less than its gradients, which then are not exact."""
        return self.group == "compressed"


HEAD_UNIT = {"classes": ["Block"], "modules": ["head"]}
CONTENDERS = (
    Contender("torch_alone", "torch", "PyTorch, one rank alone", "alone", "alone"),
    Contender("tessera_alone", "tessera", "Tessera, one rank alone", "NO_SHARD", "alone"),
    Contender("torch_ddp", "torch", "PyTorch DDP", "ddp", "replicated"),
    Contender("tessera_no_shard", "tessera", "Tessera NO_SHARD", "NO_SHARD", "replicated"),
    Contender("tessera_buckets", "tessera", "Tessera NO_SHARD, buckets of 8 MiB", "NO_SHARD", "replicated",
              {"units": {"bucket_cap_mb": 8}}),
    Contender("tessera_lossless", "tessera", "Tessera NO_SHARD, lossless", "NO_SHARD", "replicated",
              {"compression": {"gradients": "lossless", "sums": "lossless"}}),
    Contender("tessera_in_backward", "tessera", "Tessera NO_SHARD, buckets of 8 MiB, updated in backward", "NO_SHARD",
              "replicated", {"units": {"bucket_cap_mb": 8}, "reductions_ahead": 15, "optimizer": ADAMW | {"in_backward": True}}),
    Contender("tessera_shard_gradients", "tessera", "Tessera SHARD_GRADIENTS", "SHARD_GRADIENTS", "replicated"),
    Contender("deepspeed_zero2", "deepspeed", "DeepSpeed ZeRO-2", "zero2", "replicated"),
    Contender("torch_fsdp2", "torch", "PyTorch FSDP2", "fsdp2", "sharded"),
    Contender("tessera_full_shard", "tessera", "Tessera FULL_SHARD", "FULL_SHARD", "sharded"),
    Contender("tessera_full_head", "tessera", "Tessera FULL_SHARD, the head a unit", "FULL_SHARD", "sharded",
              {"units": HEAD_UNIT}),
    Contender("tessera_full_lossless", "tessera", "Tessera FULL_SHARD, the head a unit, lossless", "FULL_SHARD", "sharded",
              {"units": HEAD_UNIT,
               "compression": {"gradients": "lossless", "gathers": "lossless"}}),
    Contender("torch_fsdp2_no_reshard", "torch", "PyTorch FSDP2, no reshard", "fsdp2_no_reshard", "sharded"),
    Contender("tessera_shard_grad_op", "tessera", "Tessera SHARD_GRAD_OP", "SHARD_GRAD_OP", "sharded"),
    Contender("tessera_hybrid_shard", "tessera", "Tessera HYBRID_SHARD", "HYBRID_SHARD", "sharded", ranks_per_host=2),
    Contender("deepspeed_zero3", "deepspeed", "DeepSpeed ZeRO-3", "zero3", "sharded"),
    Contender("python_no_shard", "python", "Tessera in Python, NO_SHARD", "tessera_no_shard", "python"),
    Contender("python_full_shard", "python", "Tessera in Python, FULL_SHARD", "tessera_full_shard", "python"),
    Contender("torch_ddp_fp16", "torch", "PyTorch DDP, fp16 hook", "ddp_fp16", "compressed"),
    Contender("torch_ddp_power_sgd", "torch", "PyTorch DDP, PowerSGD hook", "ddp_power_sgd", "compressed"),
    Contender("tessera_int8", "tessera", "Tessera NO_SHARD, int8", "NO_SHARD", "compressed",
              {"compression": {"gradients": "int8", "sums": "int8"}}),
    Contender("tessera_top_k", "tessera", "Tessera NO_SHARD, top 1 %", "NO_SHARD", "compressed",
              {"compression": {"top_k": 0.01}}),
    Contender("tessera_full_int8", "tessera", "Tessera FULL_SHARD, int8 both ways", "FULL_SHARD", "compressed",
              {"compression": {"gradients": "int8", "gathers": "int8"}}),
    Contender("tessera_power_sgd", "tessera", "Tessera NO_SHARD, PowerSGD", "NO_SHARD", "compressed",
              {"compression": {"power_sgd_rank": 4}}),
)
# Enough for a smoke test of every path.
QUICK = ("torch_alone", "tessera_alone", "torch_ddp", "tessera_no_shard", "torch_fsdp2", "tessera_full_shard",
         "python_full_shard", "torch_ddp_power_sgd", "tessera_int8", "tessera_power_sgd")


def full_work(steps):
    model = {"model": "gpt", "vocab_size": 8192, "seq_len": 256, "layers": 6, "width": 512, "heads": 8}
    return Work("gpt_27m", "GPT of 27 M parameters, fp32", model, "fp32", steps, WARM_UP, cool_down=0)


def quick_work(steps):
    """Small enough for a smoke test of the whole path; its figures mean nothing."""
    model = {"model": "gpt", "vocab_size": 1024, "seq_len": 64, "layers": 2, "width": 128, "heads": 4}
    return Work("quick", "GPT of 0.7 M parameters, fp32 (smoke test)", model, "fp32", steps, WARM_UP, cool_down=0)


def bits_per_s(rate):
    """Of a rate as tc writes it; None for "unlimited"."""
    if rate == "unlimited":
        return None
    number, factor = re.fullmatch(r"([1-9][0-9]*)([kmg]?)bit", rate).groups()
    return int(number) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[factor]


def without_paths(text):
    """Files by their names: results are shown on other machines."""
    return re.sub(r"(?<![\w./:])/(?:[\w.+@-]+/)*([\w.+@-]+)", r"\1", text)


class Failed(Exception):
    """A contender did not train as it should have; the text says how."""


class Skipped(Exception):
    """This machine cannot make hosts; the text says why."""


def lab(hosts, ranks_per_host, rate, timeout_s, command, more=None):
    """Runs `command` once a rank on hosts of its own, which are gone afterwards, with `more` in the environment;
    returns (code, output, errors)."""
    words = [sys.executable, NET_LAB, "run", "--hosts", hosts, "--rate", rate, "--ranks-per-host", ranks_per_host,
             "--timeout", f"{timeout_s:.0f}", "--", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | (more or {})
    process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=environment)
    try:
        # It ends by itself; the minute is for making and removing hosts.
        output, said = process.communicate(timeout=timeout_s + 60)
    except subprocess.TimeoutExpired:
        raise Failed(f"the hosts were not removed {timeout_s + 60:.0f} s after they were asked for") from None
    finally:
        if process.poll() is None:
            process.terminate()  # it then ends its ranks and removes its hosts
            process.wait(60)
    if process.returncode == SKIPPED:
        raise Skipped(said.strip())
    return process.returncode, output, said


def wire_speed(hosts, rate, seconds):
    """{"one_way", "both_ways"}: bytes a second that one TCP connection carries between two hosts."""
    code, output, said = lab(hosts, 1, rate, 60 + 3 * seconds,
                             [sys.executable, FOLDER / "net_wire.py", "--seconds", seconds])
    if code != 0:
        raise Failed(f"the wire's own speed could not be measured, exit code {code}: {without_paths(said.strip())}")
    lines = [json.loads(line) for line in output.splitlines()]
    return {"one_way": next(line["one_way"] for line in lines if line["one_way"]),
            "both_ways": min(line["both_ways"] for line in lines)}


@dataclasses.dataclass
class Run:
    samples_s: list                 # seconds of the timed steps
    losses: list                    # of every step
    link_bytes: dict                # {"sent", "received"}: of the busiest host in a timed step; None alone


class Runner:
    """Runs contenders on a work; `hosts`, `ranks_per_host` are those of all but the contenders that train alone."""

    def __init__(self, binary, pythons, work, hosts, ranks_per_host):
        self.binary = binary
        self.pythons = pythons      # {family: interpreter}
        self.work = work
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host

    def timeout_s(self, rate):
        """Several times what the slowest contender should need, with two cores that others use too."""
        steps = self.work.warm_up + self.work.steps
        busy = self.hosts * self.ranks_per_host / len(os.sched_getaffinity(0))
        wire = 8 * 4 * self.work.parameters() / (bits_per_s(rate) or 1e10)
        return 90 + steps * (5 * max(busy, 1) + 4 * self.ranks_per_host * wire)

    def run(self, contender, rate):
        """Failed where it does not end in time, or not as it should."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            command = self._command(contender, folder)
            if contender.alone:
                self._run_alone(contender, command, rate)
            else:
                self._run_in_lab(command, folder, rate)
            return self._read(contender, folder)

    def _command(self, contender, folder):
        work, metrics = self.work, folder / "metrics.jsonl"
        steps = work.warm_up + work.steps
        write_tokens(folder / "tokens.bin", work.model["vocab_size"])
        (folder / "model.json").write_text(json.dumps(work.model))
        common = ["--model", folder / "model.json", "--steps", steps, "--metrics", metrics]
        if contender.family != "tessera":
            return [self.pythons[contender.family], FOLDER / "peers/net_step.py", "--contender", contender.argument,
                    "--tokens", folder / "tokens.bin", *common]
        (folder / "strategy.json").write_text(json.dumps(self._strategy(contender)))
        return [self.binary, "train", "--strategy", folder / "strategy.json", "--data", folder / "tokens.bin",
                "--data-format", "llmc", "--batch", 1, "--log-every", steps, *common]

    @staticmethod
    def _strategy(contender):
        strategy = {"strategy": contender.argument, "units": {"classes": ["Block"]}, "optimizer": ADAMW}
        return strategy | contender.more

    def links(self, rate):
        """What `tessera doctor --links` measures: {"links": between the hosts}, and "links-inside" one where it has several ranks; as text."""
        with tempfile.TemporaryDirectory() as folder:
            file, inside = pathlib.Path(folder) / "links.json", pathlib.Path(folder) / "inside.json"
            code, _, said = lab(self.hosts, self.ranks_per_host, rate, 180, [self.binary, "doctor", "--links", file])
            if code != 0:
                raise Failed(f"the links could not be measured, exit code {code}: {without_paths(said.strip())}")
            found = {"links": file.read_text()}
            if self.ranks_per_host > 1:
                self._said_by([self.binary, "launch", "-n", self.ranks_per_host, "--", self.binary, "doctor", "--links", inside],
                              "the links of a host could not be measured")
                found["links-inside"] = inside.read_text()
            return found

    @staticmethod
    def _said_by(words, what):
        """What a command writes, which takes a minute at most; `what` is wrong where it fails."""
        try:
            done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60,
                                  env=os.environ | {"OMP_NUM_THREADS": "1"})
        except subprocess.TimeoutExpired:
            raise Failed(f"{what}: not over after 60 s") from None
        if done.returncode != 0:
            raise Failed(f"{what}, exit code {done.returncode}: {without_paths(done.stderr.strip())}")
        return done.stdout

    def profile(self, contender):
        """What `tessera train --profile` measures, as text: of one of as many ranks as the hosts have, each alone, side by side,
        since hosts of one machine share its cores and its memory."""
        alone = dataclasses.replace(contender, more={key: value for key, value in contender.more.items()
                                                     if key in ("units", "optimizer")})
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            command = self._command(alone, folder)
            command[command.index("--metrics") + 1] = folder / "metrics.{rank}"
            ranks_here = self.hosts * self.ranks_per_host
            try:
                ranks.run_ranks(command + ["--profile", folder / "profile.{rank}"], [{}] * ranks_here,
                                self.timeout_s("unlimited"))
            except ranks.ContenderFailed as failure:
                raise Failed(without_paths(str(failure))) from None
            return (folder / "profile.0").read_text()

    def predicted(self, contender, links, profile):
        """Seconds of a step by `tessera plan`. `links`: as the method of that name."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            files = {"model": json.dumps(self.work.model), "strategy": json.dumps(self._strategy(contender)),
                     "profile": profile} | links
            words = [self.binary, "plan", "--json", "--world-size", self.hosts * self.ranks_per_host, "--hosts", self.hosts]
            for name, text in files.items():
                (folder / name).write_text(text)
                words += [f"--{name}", folder / name]
            return json.loads(self._said_by(words, "no prediction"))["step"]["seconds"]

    def _run_alone(self, contender, command, rate):
        environment = {} if contender.family == "tessera" else ranks.rank_environments(1)[0]
        try:
            ranks.run_ranks(command, [environment | {"PYTHONDONTWRITEBYTECODE": "1"}], self.timeout_s(rate))
        except ranks.ContenderFailed as failure:
            raise Failed(without_paths(str(failure))) from None

    def _run_in_lab(self, command, folder, rate):
        timeout_s = self.timeout_s(rate)
        wrapper = [sys.executable, FOLDER / "net_rank.py", "--folder", folder, "--first", self.work.warm_up,
                   "--last", self.work.warm_up + self.work.steps, "--"]
        code, _, said = lab(self.hosts, self.ranks_per_host, rate, timeout_s, wrapper + command,
                            built_package(self.binary))
        trained = f"{len(self._steps(folder))} of {self.work.warm_up + self.work.steps} steps were done"
        if code == TIMED_OUT:
            raise Failed(f"not over after {timeout_s:.0f} s; {trained}")
        if code != 0:
            said = self._said_by_first(folder) or said.strip()
            raise Failed(f"exit code {code}; {trained}\n" + without_paths(said))

    @staticmethod
    def _metrics(folder):
        """The objects of the metrics file; of a run that was ended, without the line that it was writing."""
        file = folder / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def _steps(self, folder):
        return [line for line in self._metrics(folder) if "step" in line]

    @staticmethod
    def _said_by_first(folder):
        """The end of what the rank said that failed first: the others fail because it is gone."""
        ends = [json.loads(file.read_text()) | {"file": file} for file in folder.glob("rank.*.json")]
        failed = sorted((end for end in ends if end["code"] != 0), key=lambda end: end["ended"])
        if not failed:
            return ""
        file = failed[0]["file"].with_suffix(".err")
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()][-LINES_OF_ERROR:]
        return "\n".join([f"rank {file.name.split('.')[1]}:", *lines])

    def _read(self, contender, folder):
        parameters = next((line["parameters"] for line in self._metrics(folder) if "parameters" in line), 0)
        if parameters != self.work.parameters():
            raise Failed(f"it trains {parameters} parameters instead of {self.work.parameters()}")
        steps = self._steps(folder)
        if len(steps) != self.work.warm_up + self.work.steps:
            raise Failed(f"it trained {len(steps)} steps instead of {self.work.warm_up + self.work.steps}")
        losses = [step["loss"] for step in steps]
        if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
            raise Failed(f"its losses are {losses}")
        hosts = [json.loads(file.read_text())["link"] for file in folder.glob("rank.*.json")]
        hosts = [link for link in hosts if link]
        link = {way: max(host[way] for host in hosts) / self.work.steps for way in ("sent", "received") if hosts}
        return Run([step["seconds"] for step in steps[self.work.warm_up:]], losses, link or None)
