"""Run on every rank by transformers_test.py: architectures of transformers, small and with random weights, beside plain PyTorch.

Arguments: names of architectures, or none for all; "long" for every strategy.
"""

import sys

import torch
import transformers
from beside_plain import STRATEGIES, expect_like_plain
from transformers import AutoModelForCausalLM

import tessera

VOCABULARY, SEQUENCE, BATCH, STEPS = 97, 16, 4, 3
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
# Configuration, and the class that is a unit.
CAUSAL = {
    "llama": (transformers.LlamaConfig(**SMALL), "LlamaDecoderLayer"),
    "tied llama": (transformers.LlamaConfig(**SMALL, tie_word_embeddings=True), "LlamaDecoderLayer"),
    "gpt2": (transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **NO_DROPOUT), "GPT2Block"),
    "mistral": (transformers.MistralConfig(**SMALL, sliding_window=8), "MistralDecoderLayer"),
    "qwen2": (transformers.Qwen2Config(**SMALL), "Qwen2DecoderLayer"),
    "gemma": (transformers.GemmaConfig(**SMALL, head_dim=8), "GemmaDecoderLayer"),
    "phi": (transformers.PhiConfig(**{**SMALL, "num_key_value_heads": 4}, resid_pdrop=0.0), "PhiDecoderLayer"),
    "gpt_neox": (transformers.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}), "GPTNeoXLayer"),
    "opt": (transformers.OPTConfig(vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
                                   max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0), "OPTDecoderLayer"),
    "mixtral": (transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2), "MixtralDecoderLayer"),
}


def causal(config):
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config).float().train()


def batches():
    generator = torch.Generator().manual_seed(11)
    return [(torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator),) for _ in range(STEPS)]


def loss_of(model, batch):
    return model(input_ids=batch[0], labels=batch[0], use_cache=False).loss


def vision():
    torch.manual_seed(5)
    config = transformers.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
                                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=7)
    return transformers.ViTForImageClassification(config).train()


def encoder():
    torch.manual_seed(5)
    config = transformers.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0, num_labels=7)
    return transformers.BertForSequenceClassification(config).train()


def seq2seq():
    torch.manual_seed(5)
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
                                   decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).train()


def others():
    generator = torch.Generator().manual_seed(12)
    images = [(torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(0, 7, (BATCH,), generator=generator)) for _ in range(STEPS)]
    classes = [(tokens, torch.randint(0, 7, (BATCH,), generator=generator)) for (tokens,) in batches()]
    yield "vit", vision, images, lambda model, b: model(pixel_values=b[0], labels=b[1]).loss, "ViTLayer"
    yield "bert", encoder, classes, lambda model, b: model(input_ids=b[0], labels=b[1]).loss, "BertLayer"
    yield "t5", seq2seq, batches(), lambda model, b: model(input_ids=b[0], labels=b[0]).loss, "T5Block"


def generation():
    """model.generate on sharded weights, on all ranks alike; and under gathered, on one rank more than on the others."""
    model = causal(CAUSAL["llama"][0]).eval()
    prompt = torch.arange(3, 9)[None]
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    for strategy in STRATEGIES.values():
        model = causal(CAUSAL["llama"][0]).eval()
        engine = tessera.Engine(model, {"units": {"classes": ["LlamaDecoderLayer"]}, **strategy})
        assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
        with engine.gathered():
            for _ in range(1 + tessera.rank()):
                assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
        engine.close()


def recomputation():
    """Gradient checkpointing as transformers has it, in both of torch's ways."""
    for reentrant in (False, True):

        def make(reentrant=reentrant):
            model = causal(CAUSAL["llama"][0])
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            return model

        expect_like_plain(f"recomputation, reentrant {reentrant}", make, batches(), loss_of, {"classes": ["LlamaDecoderLayer"]})


def lora():
    """A frozen base with adapters from peft."""
    from peft import LoraConfig, get_peft_model

    def make():
        base = causal(CAUSAL["llama"][0])
        torch.manual_seed(6)
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    expect_like_plain("lora", make, batches(), loss_of, {"classes": ["LlamaDecoderLayer"]})


def deferred():
    """Architectures under deferred_init have the values of eager construction."""
    for name, (config, unit) in CAUSAL.items():
        eager = causal(config)
        with tessera.deferred_init():
            model = causal(config)
        engine = tessera.Engine(model, {"units": {"classes": [unit]}})
        state = engine.state_dict()
        if tessera.rank() == 0:
            assert all(torch.equal(state[key], value) for key, value in eager.state_dict().items()), name
        engine.close()


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
strategies = STRATEGIES if "long" in sys.argv else {key: STRATEGIES[key] for key in ("FULL_SHARD", "FULL_SHARD, private copies")}
chosen = [name for name in sys.argv[1:] if name != "long"]
for name, (config, unit) in CAUSAL.items():
    if not chosen or name in chosen:
        print(name, flush=True)
        expect_like_plain(name, lambda config=config: causal(config), batches(), loss_of, {"classes": [unit]}, strategies=strategies)
for name, make, data, loss, unit in others():
    if not chosen or name in chosen:
        print(name, flush=True)
        expect_like_plain(name, make, data, loss, {"classes": [unit]}, strategies=strategies)
for extra in (recomputation, generation, lora, deferred):
    if not chosen or extra.__name__ in chosen:
        print(extra.__name__, flush=True)
        extra()
print("all architectures train like plain PyTorch")
