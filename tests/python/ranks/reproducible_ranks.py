"""transformers_test.py runs this program on one rank, on two ranks and on four. It trains architectures of transformers
with dropout and "reproducible", and expects the losses, norms and parameters of one rank, bit for bit.

The arguments are a folder, in which one rank leaves its results, and names of architectures.py.
"""

import pathlib
import sys

import torch
import transformers
from architectures import SAMPLE
from beside_plain import CLIP, STRATEGIES

import tessera

STEPS, MICROBATCHES, DROPOUT = 3, 4, 0.1


def trained(architecture, strategy, dropout=DROPOUT):
    """Returns the losses, norms and final parameters. A microbatch is one row of a batch. Only rank 0 gets parameters."""
    model = architecture.make(dropout=dropout)
    engine = tessera.Engine(model, {"reproducible": True, "gradient_accumulation": MICROBATCHES // tessera.world_size(),
                                    "gradient_clipping": CLIP, "optimizer": {"lr": 0.01},
                                    "units": {"classes": architecture.units}, **strategy})
    results = []
    for batch in architecture.batches(STEPS):
        assert batch[0].size(0) == MICROBATCHES
        while True:
            row = engine.microbatch()
            engine.backward(architecture.loss_of(model, tuple(tensor[row:row + 1] for tensor in batch)))
            if engine.step_is_due():
                break
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


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
for name in names:
    print(name, flush=True)
    of_one = folder / name.replace(" ", "_")
    if tessera.world_size() == 1:
        results = trained(SAMPLE[name], {})
        torch.save(results, of_one)
        without = trained(SAMPLE[name], {}, dropout=0.0)
        assert without[0] != results[0], f"{name}: nothing is dropped, so this test would prove nothing"
    else:
        for title in ("FULL_SHARD", "FULL_SHARD, private copies", "NO_SHARD"):
            expect_bits(f"{name}, {title}", torch.load(of_one), trained(SAMPLE[name], STRATEGIES[title]))
print("all architectures have the bits of one rank")
