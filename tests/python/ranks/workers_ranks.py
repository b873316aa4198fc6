"""rules_test.py runs this program as each worker of a job whose workers come and go. Worker 1 is killed while it has a
step, and is then started again.

Usage: workers_ranks.py FOLDER. Workers append the samples of each step that they have made to FOLDER/made.
"""

import json
import os
import pathlib
import signal
import sys
import time

import tessera
import torch
from torch import nn

STEPS = 12
folder, number = pathlib.Path(sys.argv[1]), int(os.environ["TESSERA_WORKER"])
begins_anew, again = folder / "once", folder / "again"
is_first_life = number == 1 and not begins_anew.exists()
torch.set_num_threads(1)
torch.manual_seed(1)
net = nn.Linear(1, 1)
engine = tessera.Engine(net, {"strategy": "SHARD_OPTIMIZER", "gradient_accumulation": 2, "optimizer": {"type": "sgd", "lr": 0.01},
                              "sync": {"type": "asynchronous", "owners": "servers", "elastic": True}})
if number == 1 and not is_first_life:
    again.touch()
sampler = tessera.StepSampler(engine, 40, steps=STEPS, batch_size=2, seed=1)
loader = torch.utils.data.DataLoader(range(40), batch_sampler=sampler)
made, samples = 0, []
while not engine.steps_are_over():
    for batch in loader:
        if is_first_life:
            begins_anew.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        samples += batch.tolist()
        inputs = batch.float().unsqueeze(1) / 40
        engine.backward((net(inputs) - 2 * inputs).square().mean())
        if not engine.step_is_due():
            continue
        result = engine.step()
        with open(folder / "made", "a") as lines:
            lines.write(json.dumps(samples) + "\n")
        made, samples = made + 1, []
        assert result.loss >= 0 and engine.steps_applied >= made
        while number == 0 and made == 2 and not again.exists():  # worker 1 has not joined yet
            time.sleep(0.01)
if engine.writes_results():
    engine.save_weights(folder / "weights.pt")
    engine.note_results_written()
    print("this worker has written the weights")
engine.close()
