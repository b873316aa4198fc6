"""transformers_test.py runs this program on every rank. It trains small architectures, which begin with random weights,
and compares the results with those of plain PyTorch.

The arguments are names of architectures.py or of functions in this file. The program trains the architectures in SAMPLE
if there are no arguments, as in CI, and all architectures under every strategy for ten steps if "long" is given.
Differences in rounding grow over ten steps. Plain PyTorch therefore computes parts of batches as ranks do, and the
learning rate is low. """

import sys

import torch
import transformers
from architectures import OF_TIMM, OF_TORCHVISION, OTHERS, SAMPLE
from beside_plain import STRATEGIES, Training, expect_like_plain

import tessera

STEPS = 3
LLAMA = SAMPLE["llama"]


def generation():
    """Tests model.generate on sharded weights, called in the same way on all ranks. Also tests it under `gathered`,
    where one rank calls generate more often than the other ranks."""
    model = LLAMA.make().eval()
    prompt = torch.arange(3, 9)[None]
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    for strategy in STRATEGIES.values():
        model = LLAMA.make().eval()
        engine = tessera.Engine(model, {"units": {"classes": ["LlamaDecoderLayer"]}, **strategy})
        assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
        with engine.gathered():
            for _ in range(1 + tessera.rank()):
                assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
        engine.close()


def recomputation():
    """Trains with the gradient checkpointing of transformers, in both ways that torch has."""
    for reentrant in (False, True):

        def make(reentrant=reentrant):
            model = LLAMA.make()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            return model

        expect_like_plain(f"recomputation, reentrant {reentrant}", make, LLAMA.batches(STEPS), LLAMA.loss_of,
                          {"classes": LLAMA.units})


def lora():
    """Trains a frozen base with adapters from peft."""
    from peft import LoraConfig, get_peft_model

    def make():
        base = LLAMA.make()
        torch.manual_seed(6)
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    expect_like_plain("lora", make, LLAMA.batches(STEPS), LLAMA.loss_of, {"classes": LLAMA.units})


def deferred():
    """Architectures made under deferred_init have the values of eager construction."""
    for name, architecture in SAMPLE.items():
        eager = architecture.make()
        with tessera.deferred_init():
            model = architecture.make()
        engine = tessera.Engine(model, {"units": {"classes": architecture.units}})
        state = engine.state_dict()
        if tessera.rank() == 0:
            assert all(torch.equal(state[key], value) for key, value in eager.state_dict().items()), name
        engine.close()


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
is_long = "long" in sys.argv
chosen = [name for name in sys.argv[1:] if name != "long"]
strategies = STRATEGIES if is_long else {key: STRATEGIES[key] for key in ("FULL_SHARD", "FULL_SHARD, private copies")}
architectures = {**SAMPLE, **OTHERS, **OF_TORCHVISION, **OF_TIMM} if is_long or chosen else SAMPLE
training = Training(parts=tessera.world_size(), lr=1e-3) if is_long else Training()
extras = {extra.__name__: extra for extra in (recomputation, generation, lora, deferred)}
assert set(chosen) <= {*architectures, *extras}, f"there is no {set(chosen) - {*architectures, *extras}}"
for name, architecture in architectures.items():
    if not chosen or name in chosen:
        print(name, flush=True)
        expect_like_plain(name, architecture.make, architecture.batches(10 if is_long else STEPS), architecture.loss_of,
                          {"classes": architecture.units}, training, strategies)
for name, extra in extras.items():
    if not chosen or name in chosen:
        print(name, flush=True)
        extra()
print("all architectures train like plain PyTorch")
