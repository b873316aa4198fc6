"""Times saves and loads of one model: those of Tessera, of torch.distributed.checkpoint and of torch.save, on the same
ranks.

    tessera launch -n 2 -- python benchmarks/checkpoints.py --dir /mnt/disk [--rounds 5] [--width 2816] [--json FILE]

Every rank holds a model under FSDP2 with AdamW, and the same model under an Engine. A checkpoint has 12 bytes per
parameter: values and two moments, fp32. Each round makes all saves and loads once, between barriers. The seconds are
those of rank 0. If fio is installed, it also writes and syncs as many bytes as a checkpoint has, once per round. Each
rank has one fio job. fio writes the bytes once through the page cache, and once with direct I/O. fio itself reports
these seconds, without the time of its start. "plain file" is a file that this program itself writes and syncs. The
files of the previous round are removed before each round, outside of the measured time. Tessera removes old checkpoints
itself, while it makes the next checkpoint. Each load is measured twice: with the files in the page cache (warm), and
without (cold).
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import stats
import tessera

LAYERS = 8


def model_of(width):
    torch.manual_seed(1)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(LAYERS)])


class Peers:
    """A model under FSDP2 with AdamW that has made one step."""

    def __init__(self, width):
        self.model = model_of(width)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(1, width)).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Ours:
    def __init__(self, width, beside):
        self.model = model_of(width)
        self.engine = tessera.Engine(self.model, {"units": {"classes": ["Linear"]}, "checkpoint": {"async": beside}})
        self.engine.backward(self.model(torch.ones(1, width)).mean())
        self.engine.step()


def full_state(width):
    model = model_of(width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def write_plain(path, block, count):
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for _ in range(count):
        os.write(file, block)
    os.fsync(file)
    os.close(file)


def fio_seconds(folder, jobs, megabytes, direct):
    """Returns the seconds until the last of `jobs` fio jobs has written and synced its file."""
    command = ["fio", "--name=fio", f"--directory={folder}", "--rw=write", "--bs=1m", f"--size={megabytes}m", f"--numjobs={jobs}",
               f"--direct={int(direct)}", "--end_fsync=1", "--ioengine=psync", "--output-format=json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for path in folder.glob("fio.*"):
        path.unlink()
    return max(job["write"]["runtime"] for job in told["jobs"]) / 1e3


def verdict(median, fio):
    """Compares Tessera's median with the target. The target speed is the smaller of two speeds: 1.5 times DCP's, and
    0.95 times the speed of the faster of fio's two ways to write."""
    ours, dcp_limit = median["Tessera save"], median["DCP save"] / 1.5
    text = f"Tessera save {ours:.3f} s; 1.5 times as fast as DCP would be {dcp_limit:.3f} s"
    if not fio:
        return text + "; fio is not installed"
    fio_limit = min(median[name] for name in fio) / 0.95
    return text + f", 0.95 of the better fio {fio_limit:.3f} s: {'met' if ours <= max(dcp_limit, fio_limit) else 'missed'}"


def prepare(folder, warm):
    """Brings every file into the page cache, or removes it from there."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        with open(path, "rb", buffering=0) as file:
            if warm:
                while file.read(1 << 20):
                    pass
            else:
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=2816)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = pathlib.Path(options.dir) / "checkpoints-bench"
    peers, waiting, beside = Peers(options.width), Ours(options.width, False), Ours(options.width, True)
    whole = full_state(options.width) if rank == 0 else None
    bytes_of_rank = 12 * LAYERS * (options.width * options.width + options.width) // ranks
    block = bytes(1 << 20)
    samples = {}

    fio = {"fio, through the page cache, written and synced": False, "fio, past the page cache, written and synced": True}
    if not shutil.which("fio"):
        fio = {}

    def measure(name, body, counts):
        dist.barrier()
        begin = time.perf_counter()
        body()
        dist.barrier()
        if counts:
            samples.setdefault(name, []).append(time.perf_counter() - begin)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        saves = [("plain file, written and synced", lambda: write_plain(folder / f"plain{rank}", block, bytes_of_rank >> 20)),
                 ("DCP save", lambda: peers.save(folder / "dcp")),
                 ("Tessera save", lambda: waiting.engine.save_checkpoint(folder / "tessera", keep=1)),
                 ("torch.save of all, rank 0", lambda: torch.save(whole, folder / "whole.pt") if rank == 0 else None),
                 ("Tessera save beside training: what it waits for", lambda: beside.engine.save_checkpoint(folder / "beside", keep=1))]
        loads = [("DCP load", lambda: peers.load(folder / "dcp")),
                 ("Tessera load", lambda: waiting.engine.load_checkpoint(folder / "tessera")),
                 ("torch.load of all, rank 0", lambda: torch.load(folder / "whole.pt", weights_only=True) if rank == 0 else None)]
        for number in range(options.rounds + 1):
            turn = number % len(saves)  # the order changes, so that no save always follows the same other save
            for name, body in saves[turn:] + saves[:turn]:
                if rank == 0:  # no save should spend time on freeing the last round's blocks
                    for old in {"DCP save": [folder / "dcp"], "torch.save of all, rank 0": [folder / "whole.pt"],
                                "plain file, written and synced": list(folder.glob("plain*"))}.get(name, []):
                        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
                    os.sync()
                measure(name, body, number > 0)
                beside.engine.finish_checkpoint()
                os.sync()
            for name, direct in fio.items():
                dist.barrier()
                seconds = fio_seconds(folder, ranks, bytes_of_rank >> 20, direct) if rank == 0 else 0
                if number > 0:
                    samples.setdefault(name, []).append(seconds)
                os.sync()
                dist.barrier()
            for warm in (True, False):
                for name, body in loads:
                    if rank == 0:
                        prepare(folder, warm)
                    measure(name + (", warm" if warm else ", cold"), body, number > 0)
        waiting.engine.close()
        beside.engine.close()
        if rank == 0:
            rows = [{"what": name, "median_s": of["median"], "p10_s": of["p10"], "p90_s": of["p90"], "samples_s": samples[name]}
                    for name, of in ((name, stats.summary(values)) for name, values in samples.items())]
            print(f"{ranks} ranks, {bytes_of_rank / 1e6:.0f} MB each")
            for row in rows:
                print(f"{row['what']:50} {row['median_s']:8.3f} s  (p10 {row['p10_s']:.3f}, p90 {row['p90_s']:.3f})")
            print(verdict({row["what"]: row["median_s"] for row in rows}, fio))
            if options.json:
                pathlib.Path(options.json).write_text(json.dumps({"ranks": ranks, "rank_bytes": bytes_of_rank, "rows": rows}, indent=1))
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
