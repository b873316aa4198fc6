"""training_test.py runs this program on two ranks, then on one rank and on four ranks. Each run makes some steps of a
network with dropout and commits them. It goes on from the commits of the run before, which had another number of ranks.
One rank that makes all steps has the same bits.

Usage: moved_ranks.py FOLDER BEGIN END. The run makes the steps BEGIN + 1 to END. The run of the last step compares its
results with those of a run without commits, which one rank has left in FOLDER. That run has BEGIN 0 and END 4.
"""

import pathlib
import sys

import torch
from torch import nn

import tessera

ALL, ROWS, STEPS = 8, 2, 4
folder, begin, end = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ranks, is_whole = tessera.world_size(), (begin, end) == (0, STEPS)

torch.set_num_threads(1)
torch.manual_seed(1 + begin)  # a run that goes on takes the seed of the run before
net = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.3), nn.Linear(20, 6, bias=False))
strategy = {"reproducible": True, "gradient_accumulation": ALL // ranks, "gradient_sync": "last_microbatch",
            "units": {"classes": ["Linear"]}, "optimizer": {"lr": 0.01}}
if not is_whole:
    strategy["durable"] = {"every": 1, "dir": str(folder / "commits")}
engine = tessera.Engine(net, strategy)
resumed = None if is_whole else engine.resume_durable()
assert (resumed.step if resumed else 0) == begin, resumed
assert resumed is None or resumed.json == {"losses": begin}, resumed.json
for step in range(begin, end):
    while not engine.step_is_due():
        x = torch.sin(torch.arange(6.0 * ROWS) + 10.0 * (ALL * step + engine.microbatch())).reshape(ROWS, 6)
        engine.backward((net(x) - x).square().mean())
    loss = engine.step().loss
    if not is_whole:
        engine.commit_durable(json={"losses": step + 1})
if not is_whole:
    engine.finish_commit()
state = engine.state_dict()  # only rank 0 gets it
engine.close()
if tessera.rank() == 0 and is_whole:
    torch.save((loss, state), folder / "whole")
elif tessera.rank() == 0 and end == STEPS:
    wanted_loss, wanted = torch.load(folder / "whole")
    assert loss == wanted_loss, (loss, wanted_loss)
    assert list(state) == list(wanted) and all(torch.equal(state[name], wanted[name]) for name in wanted)
print(f"steps {begin} to {end} are right", flush=True)
