#!/usr/bin/env python3
"""Trains a model of models.py with PyTorch's own DDP or FSDP2 on Gloo ranks, as a reference for Tessera.

    Usage: train.py --init weights --batches batches --config model.json --strategy fsdp2 --ranks 2 --steps 20

`--init` and `--batches` are folders in the format of exchange.h. The folder of `--init` holds every parameter by name.
The folder of `--batches` holds `tokens` and `targets`, each [batches, global_batch, time] int64. Update s takes
`--accumulation` batches, beginning with number s * accumulation. The first batch follows the last batch.
Rank r of N takes rows r * B / N to (r + 1) * B / N of each batch of B rows.

The program prints one JSON object. It has the global mean loss before each update, and the norm of the averaged
gradient before clipping. It also has the loss scale of each update, and whether the update was skipped because of an
overflow. If --save is given, the final weights are written as a folder of the same format.

Precision: if --dtype is fp32, everything is fp32. If --dtype is bf16 or fp16, the parameters that compute are 16-bit,
the optimizer owns fp32 masters, and gradients are reduced in fp32. FSDP2 has the MixedPrecisionPolicy(param_dtype,
reduce_dtype=float32) for this. --reduce sets another reduce_dtype, or none. `single` and `ddp` use a 16-bit copy of the
model, since DDP has no such mode. If `ddp` has such a copy, it does not use torch's class, but all-reduces the
gradients one by one. The optimizer is torch.optim with foreach=False and fused=False, which updates one tensor after
the other by one formula. """

import argparse
import copy
import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from exchange import read_tensors, write_tensors  # noqa: E402
from models import make_model  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", required=True, help="folder with the initial weights")
    parser.add_argument("--batches", required=True, help="folder with tokens and targets")
    parser.add_argument("--config", required=True, help="the model file")
    parser.add_argument("--strategy", choices=["single", "ddp", "fsdp2", "fsdp2_no_reshard"], default="single")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--reduce", choices=[*DTYPES, "none"], default="fp32", help="reduce_dtype of fsdp2")
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: off")
    parser.add_argument("--optimizer", choices=["adamw", "adam", "sgd"], default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--dampening", type=float, default=0.0)
    parser.add_argument("--nesterov", action="store_true")
    parser.add_argument("--loss-scale", type=float, default=0.0, help="initial dynamic loss scale; 0: off")
    parser.add_argument("--growth-interval", type=int, default=2000)
    parser.add_argument("--save", help="folder for the final weights")
    options = parser.parse_args(arguments)
    if options.strategy == "single" and options.ranks != 1:
        parser.error("--strategy single has one rank")
    return options


def make_optimizer(parameters, options):
    common = dict(lr=options.lr, weight_decay=options.weight_decay, foreach=False, fused=False)
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=options.momentum, dampening=options.dampening,
                               nesterov=options.nesterov, **common)
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, betas=(options.beta1, options.beta2), eps=options.eps, **common)


def local(tensor):
    """Returns the part of a possibly sharded tensor that lies on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Trainee:
    """A model under one strategy: `module` computes, `masters` are the fp32 parameters that the optimizer owns."""

    def __init__(self, model, options):
        self.options = options
        self.dtype = DTYPES[options.dtype]
        self.sharded = options.strategy.startswith("fsdp2")
        self.copy_of_masters = not self.sharded and self.dtype != torch.float32
        self.module = model
        if self.sharded:
            self._shard(model)
        elif self.copy_of_masters:
            self.module = copy.deepcopy(model).to(self.dtype)
        elif options.strategy == "ddp":
            self.module = torch.nn.parallel.DistributedDataParallel(model)
        self.model = model
        self.masters = [p for p in model.parameters()]

    def _shard(self, model):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        reshard = self.options.strategy == "fsdp2"
        arguments = {"mesh": init_device_mesh("cpu", (self.options.ranks,)), "reshard_after_forward": reshard}
        if self.dtype != torch.float32:
            arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=DTYPES.get(self.options.reduce))
        for unit in model.units():
            fully_shard(unit, **arguments)
        fully_shard(model, **arguments)

    def accumulate(self, tokens, targets, factor, last):
        """Runs backward of loss * factor, adds the mean gradient over ranks to the masters' gradients, and returns the loss."""
        if isinstance(self.module, torch.nn.parallel.DistributedDataParallel):
            self.module.require_backward_grad_sync = last
        loss = self.module(tokens, targets)
        (loss * factor).backward()
        if self.copy_of_masters:
            self._collect_gradients()
        return loss.detach().double()

    def _collect_gradients(self):
        for master, parameter in zip(self.masters, self.module.parameters(), strict=True):
            gradient = parameter.grad.float()
            parameter.grad = None
            if self.options.ranks > 1:
                dist.all_reduce(gradient)
                gradient /= self.options.ranks
            master.grad = gradient if master.grad is None else master.grad + gradient

    def publish(self):
        """Rounds the masters into the model that computes, unless this model computes with the masters themselves."""
        if not self.copy_of_masters:
            return
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.module.parameters(), strict=True):
                parameter.copy_(master)

    def weights(self):
        full = {}
        for name, parameter in self.model.named_parameters():
            full[name] = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        return full


class LossScale:
    """torch.amp.GradScaler's rule, written out here so that it is the same for sharded and unsharded gradients."""

    def __init__(self, options):
        self.active = options.loss_scale > 0
        self.scale = torch.tensor(options.loss_scale if self.active else 1.0)
        self.tracker = torch.zeros((), dtype=torch.int32)
        self.growth_interval = options.growth_interval

    def unscale(self, gradients, ranks):
        """Divides the gradients by the scale, and updates the scale. Returns whether any rank's part has an infinity or
        a NaN."""
        if not self.active:
            return False
        found = torch.zeros(())
        for gradient in gradients:
            torch._amp_foreach_non_finite_check_and_unscale_([local(gradient)], found, 1.0 / self.scale)
        if ranks > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        torch._amp_update_scale_(self.scale, self.tracker, found, 2.0, 0.5, self.growth_interval)
        return bool(found)


def clip(parameters, limit):
    """Clips the gradients to the norm `limit` if `limit` is above 0, and returns the norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit if limit > 0 else float("inf"), foreach=False)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def global_mean(loss, ranks):
    if ranks > 1:
        dist.all_reduce(loss)
    return float(loss) / ranks


def train(rank, options):
    torch.set_num_threads(1)
    config = json.loads(pathlib.Path(options.config).read_text())
    model = make_model(config)
    model.load_state_dict(read_tensors(options.init), strict=True)
    trainee = Trainee(model, options)
    optimizer = make_optimizer(trainee.masters, options)
    scale = LossScale(options)
    batches = read_tensors(options.batches)
    share = batches["tokens"].shape[1] // options.ranks
    rows = slice(rank * share, (rank + 1) * share)

    result = {"losses": [], "grad_norms": [], "skipped": [], "scales": []}
    for step in range(options.steps):
        used_scale = float(scale.scale)
        loss = torch.zeros((), dtype=torch.float64)
        for i in range(options.accumulation):
            number = (step * options.accumulation + i) % batches["tokens"].shape[0]
            loss += trainee.accumulate(batches["tokens"][number, rows], batches["targets"][number, rows],
                                       used_scale / options.accumulation, i + 1 == options.accumulation)
        skipped = scale.unscale([p.grad for p in trainee.masters], options.ranks)
        norm = clip(trainee.masters, 0.0 if skipped else options.clip)
        if not skipped:
            optimizer.step()
            trainee.publish()
        optimizer.zero_grad(set_to_none=True)
        result["losses"].append(global_mean(loss / options.accumulation, options.ranks))
        result["grad_norms"].append(norm)
        result["skipped"].append(skipped)
        result["scales"].append(used_scale)
    weights = trainee.weights() if options.save else None  # every rank takes part in gathering the weights
    if rank == 0 and options.save:
        write_tensors(options.save, weights)
    return result


def run_rank(rank, options, port, result_file):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, options.ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    result = train(rank, options)
    if rank == 0:
        pathlib.Path(result_file).write_text(json.dumps(result))
    # The group's worker threads hold Python objects (the tensors of finished work) and need the interpreter to release
    # them. They sometimes ask for the interpreter at the end of the process, when it no longer exists. They must then
    # exit in the middle of a destructor, which aborts the process (SIGABRT, "terminate called without an active
    # exception"). This also happens if the group is destroyed first, but less often. So the process ends here, after
    # all ranks have finished with the group.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def train_ranks(options):
    """Trains on several ranks, and returns the result of rank 0. Ranks are forked from the server of multiprocessing,
    which has imported the modules that set_forkserver_preload names."""
    store = dist.TCPStore("127.0.0.1", 0, options.ranks, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        result_file = pathlib.Path(folder) / "result.json"
        multiprocessing.start_processes(run_rank, args=(options, store.port, result_file), nprocs=options.ranks, start_method="forkserver")
        return json.loads(result_file.read_text())


def main():
    options = parse_arguments()
    # One process imports the modules that ranks need, and the ranks are forked from this process. Optimizers import
    # torch._dynamo when they are made.
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh"])
    result = train(0, options) if options.strategy == "single" else train_ranks(options)
    result["torch"] = torch.__version__
    result["optimizer"] = f"torch.optim.{options.optimizer}(foreach=False, fused=False)"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
