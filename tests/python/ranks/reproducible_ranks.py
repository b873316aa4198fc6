"""transformers_test.py runs this program on one rank, on two ranks, on three and on four. It trains architectures of
transformers with dropout and "reproducible", and expects the losses, norms and parameters of one rank, bit for bit.

Usage: reproducible_ranks.py FOLDER MICROBATCHES NAME...
       reproducible_ranks.py FOLDER (replay | divergence | nonfinite) NAME

FOLDER is where one rank leaves its results. The names are those of architectures.py. Four ranks record hashes of the
first architecture's steps. The second form makes these steps again on one rank, by TESSERA_REPLAY.
"""

import json
import os
import pathlib
import sys

import torch
import transformers
from architectures import BATCH, SAMPLE
from beside_plain import CLIP, STRATEGIES

import tessera

STEPS, RECORDED, DROPOUT = 3, 4, 0.1
FAULT = 1, 2
"""the step and the microbatch, both counted from 0, in which `nonfinite` plants a NaN"""


def batches_of(architecture, rows):
    parts, each = architecture.batches(STEPS * rows // BATCH), rows // BATCH
    return [tuple(map(torch.cat, zip(*parts[first:first + each]))) for first in range(0, len(parts), each)]


def trained(architecture, strategy, microbatches, dropout=DROPOUT, fault=None):
    """Returns the losses, norms and final parameters. A microbatch is one row of a batch. Only rank 0 gets parameters."""
    model, ranks = architecture.make(dropout=dropout), tessera.world_size()
    sync = "last_microbatch" if ranks == 3 else "each_microbatch"
    engine = tessera.Engine(model, {"reproducible": True, "gradient_accumulation": microbatches // ranks,
                                    "gradient_sync": sync, "gradient_clipping": CLIP, "optimizer": {"lr": 0.01},
                                    "units": {"classes": architecture.units}, **strategy})
    results = []
    for step, batch in enumerate(batches_of(architecture, microbatches)):
        assert batch[0].size(0) == microbatches
        while not engine.step_is_due():
            row = engine.microbatch()
            loss = architecture.loss_of(model, tuple(tensor[row:row + 1] for tensor in batch))
            engine.backward(loss * (loss.detach() * 0 - 1).sqrt() if (step, row) == fault else loss)
        result = engine.step()
        results.append((result.loss, result.grad_norm))
    state = engine.state_dict()
    engine.close()
    return results, state


def expect_bits(name, wanted, got):
    assert wanted[0] == got[0], f"{name}: losses and norms {got[0]}, wanted {wanted[0]}"
    if tessera.rank() == 0:
        assert list(wanted[1]) == list(got[1]), name
        for key, value in wanted[1].items():
            assert torch.equal(value, got[1][key]), f"{name}: the bits of {key} differ"


def train_all(microbatches, names):
    for name in names:
        print(name, flush=True)
        of_one = folder / f"{name} {microbatches}"
        if tessera.world_size() == 1:
            results = trained(SAMPLE[name], {}, microbatches)
            torch.save(results, of_one)
            without = trained(SAMPLE[name], {}, microbatches, dropout=0.0)
            assert without[0] != results[0], f"{name}: nothing is dropped, so this test would prove nothing"
            continue
        for title in ("FULL_SHARD", "FULL_SHARD, private copies", "NO_SHARD"):
            strategy = dict(STRATEGIES[title])
            if tessera.world_size() == RECORDED and (name, title) == (names[0], "FULL_SHARD"):
                strategy["record_hashes"] = {"every": 1, "file": str(folder / "hashes")}
            expect_bits(f"{name}, {title}", torch.load(of_one), trained(SAMPLE[name], strategy, microbatches))
    print("all architectures have the bits of one rank")


def replay(find, name):
    """Makes the recorded steps again. For "divergence", dropout is off. For "nonfinite", a NaN is planted."""
    request = {"step": STEPS, "hashes": str(folder / "hashes"), "find": "nonfinite" if find == "nonfinite" else "divergence"}
    os.environ["TESSERA_REPLAY"] = json.dumps(request)
    dropout = 0.0 if find == "divergence" else DROPOUT
    one = {"gradient_accumulation": 1}  # a replay takes the number of microbatches from the file
    words = {"replay": (), "divergence": ("step 1 differs from ",),
             "nonfinite": (f"in step {FAULT[0] + 1}, microbatch {FAULT[1]} (of 0 to 3)", "aten::sqrt (forward)")}[find]
    try:
        trained(SAMPLE[name], one, RECORDED, dropout, FAULT if find == "nonfinite" else None)
        assert not words, f"{find}: nothing was found"
    except tessera.Error as error:
        assert words and error.exit_code == 65 and all(word in str(error) for word in words), (find, error.exit_code, str(error))
    print("the replay found what it should find", flush=True)
    os._exit(0)  # after an error, the job cannot end as it usually does


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
folder, what, *names = pathlib.Path(sys.argv[1]), *sys.argv[2:]
if what.isdigit():
    train_all(int(what), names)
else:
    replay(what, *names)
