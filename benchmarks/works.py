"""The works that contenders are timed on, and the tokens they read. Standard library only."""

import array
import dataclasses
import json
import pathlib
import random
import struct

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER_INTS = 20240520, 1, 256
TOKENS = 200_000


@dataclasses.dataclass(frozen=True)
class Work:
    """A model and how many of its steps make a round. A step is one sample of seq_len tokens a rank, and AdamW."""

    name: str
    title: str
    model: dict        # the model file
    dtype: str         # of parameters: "fp32" or "bf16" (then gradients travel in bf16, and masters are fp32)
    steps: int         # timed steps of a round
    warm_up: int       # steps before them
    cool_down: int     # steps after: ranks that train alone drift apart, and the timed steps of both must overlap

    def parameters(self):
        return parameter_count(self.model)


def parameter_count(model):
    """Parameters of a GPT of models/gpt.h with biases."""
    width, layers = model["width"], model["layers"]
    block = 12 * width * width + 13 * width
    matrices = 1 if model.get("tie_head") else 2  # of vocab_size rows: the token embedding, and a head of its own
    embeddings = (matrices * model["vocab_size"] + model["seq_len"]) * width
    return layers * block + embeddings + 2 * width


def _gpt(layers, width, heads, vocab_size):
    return {"model": "gpt", "vocab_size": vocab_size, "seq_len": 128, "layers": layers, "width": width, "heads": heads}


def full_works():
    gpt = json.loads((REPOSITORY / "examples/configs/gpt_69m.json").read_text())
    return [
        Work("gpt_69m_fp32", "GPT of 69 M parameters, fp32", gpt, "fp32", steps=6, warm_up=2, cool_down=1),
        Work("gpt_69m_bf16", "GPT of 69 M parameters, bf16 with fp32 masters", gpt, "bf16", steps=8, warm_up=2,
             cool_down=2),
        Work("narrow_24x64", "24 layers of width 64, fp32: the cost of many small units", _gpt(24, 64, 4, 256), "fp32",
             steps=30, warm_up=8, cool_down=15),
    ]


def python_work(quick):
    """What PyTorch, its peers and Tessera's Python package train, with one Python model."""
    if quick:
        return Work("python", "GPT of 0.7 M parameters, fp32 (smoke test)",
                    {"model": "gpt", "vocab_size": 1024, "seq_len": 64, "layers": 2, "width": 128, "heads": 4}, "fp32",
                    steps=3, warm_up=2, cool_down=0)
    return Work("python", "GPT of 27 M parameters, fp32",
                {"model": "gpt", "vocab_size": 8192, "seq_len": 512, "layers": 6, "width": 512, "heads": 8}, "fp32",
                steps=6, warm_up=2, cool_down=1)


def crowded_work(quick):
    """What more and more ranks train on the same cores."""
    layers, width = (2, 64) if quick else (8, 256)
    return Work("crowded", f"GPT of {layers} layers of width {width}, fp32", _gpt(layers, width, 4, 4096), "fp32",
                steps=2 if quick else 12, warm_up=1 if quick else 3, cool_down=0 if quick else 2)


def quick_works():
    """Small enough for a smoke test of the whole path; its figures mean nothing."""
    return [Work("quick", "GPT of 1 M parameters, bf16 with fp32 masters (smoke test)", _gpt(4, 128, 4, 1024), "bf16",
                 steps=3, warm_up=2, cool_down=0)]


def write_tokens(path, vocab_size):
    """Writes TOKENS tokens below vocab_size in llm.c's format: each is the one before times 5, plus noise."""
    noise = random.Random(1)
    tokens = array.array("H", [0])
    while len(tokens) < TOKENS:
        tokens.append((5 * tokens[-1] + noise.randrange(8)) % vocab_size)
    header = [LLMC_MAGIC, LLMC_VERSION, len(tokens)] + [0] * (LLMC_HEADER_INTS - 3)
    with open(path, "wb") as file:
        file.write(struct.pack(f"<{LLMC_HEADER_INTS}i", *header))
        tokens.tofile(file)
