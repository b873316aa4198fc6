"""training_test.py runs this program on all ranks, with a folder for scratch files. A step with
activations on disk gives the same numbers as a step with activations in memory."""

import sys

import torch
from beside_plain import expect_like_plain
from launched import LONG
from models import BATCH, CLASSES, WIDTH, Classifier, Hooked, Transformer, units_of

import tessera

ON_DISK = {"offload": {"activations": {"tier": "nvme", "min": 1}, "paths": [sys.argv[1]], "record": 4096, "queue_depth": 1}}


def batch(generator):
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def made(kind):
    def make():
        torch.manual_seed(3)
        return kind()

    return make


generator = torch.Generator().manual_seed(7)
batches = [batch(generator) for _ in range(4 if LONG else 2)]
for kind in (Classifier, Hooked, Transformer):
    expect_like_plain(kind.__name__, made(kind), batches, lambda model, batch: model(*batch), units_of(kind),
                      strategies={"in memory": {}, "on disk": ON_DISK}
                      | ({"on disk, NO_SHARD": {"strategy": "NO_SHARD", **ON_DISK}} if LONG or kind is Classifier else {}))

model = made(Classifier)()
engine = tessera.Engine(model, ON_DISK)
written = engine.traffic["disk_bytes_written"]
assert written == 0, written
loss = model(*batches[0])
written = engine.traffic["disk_bytes_written"]
assert written > 0, "forward saved nothing"
engine.backward(loss)
engine.step()

# The hooks of a program are used before the Engine's hooks.
seen = []


def pack(tensor):
    seen.append(tensor.shape)
    return tensor.detach()


with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    loss = model(*batches[1])
assert seen and engine.traffic["disk_bytes_written"] == written, "the program's hooks come before the Engine's"
engine.backward(loss)
engine.step()
engine.close()
print("activations lay on disk")
