"""Run by trainer_test.py: torch.distributed and tessera begin in either order, on the variables of one launcher."""

import functools

import torch
from forked import run_forked
from torch import distributed

import tessera


def both(tessera_first):
    if tessera_first:
        tessera.init()
    distributed.init_process_group("gloo")
    tessera.init()
    ranks = torch.ones(())
    distributed.all_reduce(ranks)
    distributed.destroy_process_group()
    engine = tessera.Engine(torch.nn.Linear(2, 2), {})
    print(f"both have {int(ranks)} and {int(tessera.all_reduce(1))} ranks", flush=True)
    engine.close()


for tessera_first in (False, True):
    codes, output = run_forked(2, functools.partial(both, tessera_first))
    assert codes == [0, 0] and output.count("both have 2 and 2 ranks") == 2, f"{tessera_first}: ended with {codes}:\n{output}"
print("both orders were right")
