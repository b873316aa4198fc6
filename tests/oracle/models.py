"""The models of workshop/models/ in PyTorch, written from their papers.

Parameters have the same names and shapes as in the C++ modules, so weights can be copied by name.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, bias = config["width"], config.get("bias", True)
        self.heads = config["heads"]
        self.dropout = config.get("dropout", 0.0)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.projection = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        return F.dropout(self.projection(mixed), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, bias = config["width"], config.get("bias", True)
        hidden = config.get("mlp_ratio", 4) * width
        self.dropout = config.get("dropout", 0.0)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config["width"])
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config["width"])
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """forward(tokens) returns logits, and forward(tokens, targets) returns the mean cross entropy of the logits in
    fp32."""

    def forward(self, tokens, targets=None):
        logits = self.logits(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class GPT(LanguageModel):
    def __init__(self, config):
        super().__init__()
        width, vocab = config["width"], config["vocab_size"]
        self.dropout = config.get("dropout", 0.0)
        self.token_embedding = nn.Embedding(vocab, width)
        self.position_embedding = nn.Embedding(config["seq_len"], width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["layers"]))
        self.norm = nn.LayerNorm(width)
        if not config.get("tie_head", False):
            self.head = nn.Linear(width, vocab, bias=False)
        self._initialise(config["layers"])

    def _initialise(self, layers):
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue
            residual = name.endswith(("projection.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def units(self):
        return list(self.blocks)

    def logits(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if hasattr(self, "head") else F.linear(x, self.token_embedding.weight)


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, bias = config["hidden_size"], config.get("attention_bias", False)
        self.heads = config["num_attention_heads"]
        self.shared = config.get("num_key_value_heads", self.heads)
        self.size = config.get("head_dim", hidden // self.heads)
        self.theta = config.get("rope_theta", 10000.0)
        self.q_proj = nn.Linear(hidden, self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.shared * self.size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.shared * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=bias)

    def rotate(self, x):
        # Rotates pairs as complex numbers are rotated: the pair (i, i + size / 2) turns by position * theta^(-2 i /
        # size).
        half = self.size // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) * 2 / self.size)
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)

    def forward(self, x):
        batch, time, _ = x.shape
        split = lambda y, heads: y.view(batch, time, heads, self.size).transpose(1, 2)
        q = self.rotate(split(self.q_proj(x), self.heads))
        k = self.rotate(split(self.k_proj(x), self.shared))
        v = split(self.v_proj(x), self.shared)
        k, v = (y.repeat_interleave(self.heads // self.shared, dim=1) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))


class LlamaMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner, bias = config["hidden_size"], config["intermediate_size"], config.get("mlp_bias", False)
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, eps = config["hidden_size"], config.get("rms_norm_eps", 1e-6)
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaDecoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config.get("rms_norm_eps", 1e-6))

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(LanguageModel):
    def __init__(self, config):
        super().__init__()
        self.model = LlamaDecoder(config)
        if not config.get("tie_word_embeddings", False):
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def units(self):
        return list(self.model.layers)

    def logits(self, tokens):
        x = self.model(tokens)
        return self.lm_head(x) if hasattr(self, "lm_head") else F.linear(x, self.model.embed_tokens.weight)


def make_model(config):
    """Makes the model that `config`, the content of a model file, describes."""
    return {"gpt": GPT, "llama": Llama}[config["model"]](config)
