#!/usr/bin/env python3
"""Makes small random models with `transformers`, and writes the results with which a C++ test compares.

    Usage: make_models.py FOLDER

FOLDER/<name>/model has the files that `save_pretrained` writes for a model of MODELS. FOLDER/<name>/batch has
`tokens` and `targets` ([B, T] int64, in the format of exchange.h). FOLDER/<name>/wanted has `logits`, `loss` and the
gradient of every parameter, under the name that transformers uses for the parameter.
"""

import pathlib
import sys

import torch
import transformers
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "oracle"))
from exchange import write_tensors  # noqa: E402

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8, **NO_TOKENS}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, **NO_DROPOUT, **NO_TOKENS}

# Maps a name to a function that makes the model, and to the largest allowed size of the model's files.
MODELS = {
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), "1GB"),
    "gpt2_untied": (lambda: GPT2LMHeadModel(GPT2Config(**{**GPT2, "n_inner": 64, "layer_norm_epsilon": 1e-3,
                                                          "tie_word_embeddings": False})), "30KB"),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), "20KB"),
    "llama3": (lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True,
                                                       "tie_word_embeddings": True})), "1GB"),
    "llama_linear": (lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}})), "1GB"),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=7)), "1GB"),
    "mistral_no_window": (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)), "1GB"),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)), "1GB"),
    "qwen2_window": (lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5,
                                                          max_window_layers=1, tie_word_embeddings=True)), "1GB"),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "head_dim": 16})), "1GB"),
}


def main(folder):
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    for name, (make, shard_size) in MODELS.items():
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms must not be 0 and 1
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder / name / "model", max_shard_size=shard_size)
        tokens, targets = torch.randint(0, 61, (3, 21)), torch.randint(0, 61, (3, 21))
        write_tensors(folder / name / "batch", {"tokens": tokens, "targets": targets})
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        wanted = {"logits": logits, "loss": loss, **{n: p.grad for n, p in model.named_parameters()}}
        write_tensors(folder / name / "wanted", wanted)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
