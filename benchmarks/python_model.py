"""One Python model under PyTorch alone, DDP, FSDP2 and Tessera: medians of a step, and ratios.

    PYTHONPATH=build/release/python TESSERA_BIN=build/release/app/tessera .venv/bin/python benchmarks/python_model.py [--rounds 3] [--small]

Contenders take turns, each as two ranks of one thread started by `tessera launch`: a round runs each once, and its steps after the
first two count. `alone` is one rank's work without communication, on both ranks at a time, so that memory and cores are shared alike. The
model, the batches and AdamW are the same; the losses of the last step are compared, so that nobody is fast by doing less.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

WARM_UP = 2


def gpt(small):
    import torch
    from torch import nn

    layers, width, vocabulary, sequence = (2, 64, 256, 32) if small else (6, 512, 8192, 256)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = (each.reshape(batch, length, -1, 64).transpose(1, 2) for each in self.attention(self.before(x)).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.between(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.places.weight
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())

    torch.manual_seed(1)
    return GPT(), vocabulary, sequence


def trainer(contender, model):
    """step(loss) -> loss over all ranks, and what to call for forward."""
    import torch

    if contender.startswith("tessera"):
        import tessera
        strategy = {"tessera": {"host_sharing": False}, "tessera_shared": {}, "tessera_no_shard": {"strategy": "NO_SHARD"}}[contender]
        engine = tessera.Engine(model, {"units": {"classes": ["Block"]}, "optimizer": {"lr": 1e-3}, **strategy})

        def step(loss):
            engine.backward(loss)
            return engine.step().loss

        return step, model
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if contender == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif contender == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in [*model.blocks, model]:
            fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, model


def run_rank(options):
    import torch

    torch.set_num_threads(1)
    model, vocabulary, sequence = gpt(options.small)
    step, forward = trainer(options.contender, model)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(0, vocabulary, (2, sequence), generator=generator)
    seconds, loss = [], 0.0
    for _ in range(WARM_UP + options.steps):
        started = time.perf_counter()
        loss = step(forward(tokens))
        seconds.append(time.perf_counter() - started)
    print("RESULT " + json.dumps({"rank": int(os.environ["RANK"]), "seconds": seconds[WARM_UP:], "loss": loss}), flush=True)
    if not options.contender.startswith("tessera"):
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def run_contender(contender, options):
    command = [os.environ.get("TESSERA_BIN", "tessera"), "launch", "-n", "2", "--", sys.executable, "-B", pathlib.Path(__file__).resolve(),
               "--contender", contender, "--steps", str(options.steps), *(["--small"] if options.small else [])]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "TESSERA_LOG_LEVEL": "error"}, timeout=600)
    results = [json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line]
    if done.returncode != 0 or len(results) != 2:
        sys.exit(f"{contender} failed:\n{done.stdout}")
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="that count, of each contender in each round")
    parser.add_argument("--small", action="store_true", help="a model so small that what remains is overhead")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        run_rank(options)
        return
    contenders = ["alone", "ddp", "fsdp2", "tessera", "tessera_shared", "tessera_no_shard"]
    seconds, losses = {each: [] for each in contenders}, {}
    for _ in range(options.rounds):
        for contender in contenders:
            results = run_contender(contender, options)
            seconds[contender] += results[0]["seconds"]
            mean = sum(each["loss"] for each in results) / 2
            losses.setdefault(contender, mean)
    medians = {contender: statistics.median(each) for contender, each in seconds.items()}
    print(f"{'contender':18} {'ms a step':>10} {'p10':>8} {'p90':>8} {'/ fsdp2':>8} {'/ ddp':>8}  loss")
    for contender in contenders:
        deciles = statistics.quantiles(seconds[contender], n=10)
        print(f"{contender:18} {1e3 * medians[contender]:10.1f} {1e3 * deciles[0]:8.1f} {1e3 * deciles[-1]:8.1f} "
              f"{medians[contender] / medians['fsdp2']:8.2f} {medians[contender] / medians['ddp']:8.2f}  {losses[contender]:.6f}")
    trained = [losses[each] for each in contenders if each != "alone"]
    if max(trained) - min(trained) > 1e-4 * max(trained):
        sys.exit("the contenders' losses differ: they do not do the same work")


if __name__ == "__main__":
    main()
