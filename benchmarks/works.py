"""The workloads ("works") on which contenders are timed, and the tokens that they read. It uses the standard library
only."""

import array
import dataclasses
import json
import pathlib
import random
import struct

from contenders import CONTENDERS, those_of

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER_INTS = 20240520, 1, 256
TOKENS = 200_000


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, the number of its steps in a round, and its contenders, with the most important contender first. In each
    step, each rank trains on `batch` samples of seq_len tokens, and AdamW updates the weights."""

    name: str
    title: str
    model: dict                 # the model file
    dtype: str                  # dtype of parameters: "fp32" or "bf16" (then masters are fp32)
    steps: int                  # timed steps of a round
    warm_up: int                # steps before the timed steps
    contenders: tuple
    # This is the number of steps after the timed steps. Ranks that train alone run at different speeds, and their timed
    # steps must overlap.
    cool_down: int = 0
    batch: int = 1
    reduce: str = "bf16"        # dtype in which gradients are reduced if parameters are bf16
    estimate_s: float = 0.0     # time of one contender's run and its process's start, for workloads of a GPU
    limit_s: float = 600.0      # time after which a contender is stopped
    needs_per_parameter: int = 20

    def parameters(self):
        return parameter_count(self.model)

    def tokens(self):
        """Returns the number of tokens on which one rank trains in a step."""
        return self.batch * self.model["seq_len"]

    def needs_bytes(self):
        """Returns the bytes that a GPU needs. If states are on the GPU, a PyTorch program that stores masters itself
        needs most: 2 bytes each for a bf16 parameter and its gradient, and 4 bytes each for the fp32 master, its
        gradient and two moments. Activations, logits and libraries need 4 GiB more."""
        return self.needs_per_parameter * self.parameters() + 2**32

    def facts(self):
        """Returns the fields of this workload in the results."""
        names = ("name", "title", "model", "dtype", "batch", "steps", "warm_up", "contenders")
        return {name: getattr(self, name) for name in names} | {"parameters": self.parameters()}


def parameter_count(model):
    """Returns the number of parameters of a GPT of workshop/models/gpt.h with biases."""
    width, layers = model["width"], model["layers"]
    block = 12 * width * width + 13 * width
    matrices = 1 if model.get("tie_head") else 2  # matrices with vocab_size rows: the token embedding, and the head unless it is tied
    embeddings = (matrices * model["vocab_size"] + model["seq_len"]) * width
    return layers * block + embeddings + 2 * width


def flops_per_token(model):
    """Returns the floating-point operations of forward and backward, by the formula of PaLM (arXiv 2204.02311, appendix
    B). There are 6 operations for each parameter of a matrix product. A layer has 4 * width^2 of these parameters in
    attention and 8 * width^2 in its feed-forward part. The head has vocab_size * width. Attention itself has 12 *
    layers * width * seq_len operations. The masked half of attention counts. Operations that recompute repeats do not
    count, since the model itself does not need them."""
    layers, width = model["layers"], model["width"]
    matrices = 12 * layers * width * width + model["vocab_size"] * width
    return 6 * matrices + 12 * layers * width * model["seq_len"]


def _gpt(layers, width, heads, vocab_size, seq_len=128, **more):
    return {"model": "gpt", "vocab_size": vocab_size, "seq_len": seq_len, "layers": layers, "width": width, "heads": heads} | more


_SMALL = _gpt(2, 128, 4, 1024, 64)  # a model for smoke tests, whose figures mean nothing
_SMALL_TITLE = "GPT of 0.7 M parameters, fp32 (smoke test)"


def of_host(quick):
    """Returns the workloads that all contenders of a host train. A step of the first workload is traced."""
    families = ("torch", "deepspeed", "tessera")
    everyone = tuple(sorted(those_of("host"), key=lambda name: families.index(CONTENDERS[name].family)))
    if quick:
        return [Work("quick", "GPT of 1 M parameters, bf16 with fp32 masters (smoke test)", _gpt(4, 128, 4, 1024), "bf16",
                     3, 2, everyone)]
    gpt = json.loads((REPOSITORY / "examples/configs/gpt_69m.json").read_text())
    return [
        Work("gpt_69m_fp32", "GPT of 69 M parameters, fp32", gpt, "fp32", 6, 2, everyone, cool_down=1),
        Work("gpt_69m_bf16", "GPT of 69 M parameters, bf16 with fp32 masters", gpt, "bf16", 8, 2, everyone, cool_down=2),
        Work("narrow_24x64", "24 layers of width 64, fp32: the cost of many small units", _gpt(24, 64, 4, 256), "fp32", 30, 8,
             everyone, cool_down=15),
    ]


def of_python(quick):
    """Returns the workload with one Python model, which contenders of PyTorch, of DeepSpeed and of Tessera's Python
    package train."""
    if quick:
        return Work("python", _SMALL_TITLE, _SMALL, "fp32", 3, 2, those_of("python"))
    return Work("python", "GPT of 27 M parameters, fp32", _gpt(6, 512, 8, 8192, 512), "fp32", 6, 2, those_of("python"), cool_down=1)


def of_crowd(quick):
    """Returns a workload that is trained several times, each time with more ranks on the same cores."""
    layers, width = (2, 64) if quick else (8, 256)
    steps, warm_up, cool_down = (2, 1, 0) if quick else (12, 3, 2)
    return Work("crowded", f"GPT of {layers} layers of width {width}, fp32", _gpt(layers, width, 4, 4096), "fp32", steps, warm_up,
                ("torch_fsdp2", "tessera_full_shard"), cool_down)


def of_net(quick, steps):
    warm_up = 3  # DDP's hook for PowerSGD sends the first two steps' gradients uncompressed
    if quick:
        return Work("quick", _SMALL_TITLE, _SMALL, "fp32", steps, warm_up, those_of("net"))
    return Work("gpt_27m", "GPT of 27 M parameters, fp32", _gpt(6, 512, 8, 8192, 256), "fp32", steps, warm_up, those_of("net"))


_ON_GPU = ("torch_eager", "tessera_full_shard", "torch_fsdp2", "tessera_no_shard", "torch_ddp", "tessera_shard_gradients")
_STATES_ON_HOST = ("tessera_host_backward", "torch_fsdp2_host", "tessera_host_gpu", "tessera_host_cpu", "tessera_host_all")


def _of_gpu(name, title, model, batch, steps, warm_up, estimate_s, limit_s, contenders=_ON_GPU, **more):
    """Returns a workload with bf16 parameters and fp32 masters. Its gradients are reduced in fp32, as in FSDP2."""
    return Work(name, title, model, "bf16", steps, warm_up, contenders, batch=batch, reduce="fp32", estimate_s=estimate_s,
                limit_s=limit_s, **more)


def of_gpu(quick):
    """Returns the workloads that one GPU trains: models of GPT-2's form, whose vocabulary is padded to a multiple of
    64."""
    if quick:
        model = _gpt(2, 128, 4, 1024, tie_head=True, recompute=True)
        return [_of_gpu("quick", "GPT of 0.5 M parameters, blocks recomputed (smoke test)", model, 2, 3, 2, 12, 90,
                        (*_ON_GPU, "shared_full_shard_2"))]

    def gpt(layers, width, heads, recompute=True):
        return _gpt(layers, width, heads, 50304, 1024, tie_head=True, recompute=recompute)

    small, middle, large = gpt(12, 768, 12, recompute=False), gpt(48, 1600, 25), gpt(32, 4096, 32)
    middle_title, large_title = "GPT of 1.5 B parameters", "GPT of 6.7 B parameters"
    recomputed, on_host = ", blocks recomputed", ", optimizer states in the host's memory"
    shared = tuple(name for name in those_of("gpu") if name.startswith("shared_"))
    rules = tuple(f"rule_{name}" for name in ("adamw", "lamb", "adafactor", "muon", "muon_bf16", "lars"))
    # With states on the host, bf16 parameters and gradients stay on the GPU. Records that are under way need 6 more
    # bytes for each parameter. Tessera pins 10 bytes of the host's memory for each parameter, and FSDP2 16.
    return [
        _of_gpu("gpt_124m", "GPT of 124 M parameters", small, 16, 20, 5, 12, 60),
        _of_gpu("gpt_1b5", middle_title + recomputed, middle, 8, 10, 3, 20, 90),
        _of_gpu("gpt_7b", large_title + recomputed, large, 4, 6, 2, 35, 150,
                ("torch_fsdp2", "tessera_full_shard", "torch_eager")),
        _of_gpu("gpt_124m_shared", "GPT of 124 M parameters, ranks that share the GPU", small, 16, 20, 5, 12, 60, shared),
        _of_gpu("gpt_1b5_rules", middle_title + recomputed + ", update rules", middle, 8, 6, 2, 12, 90, rules),
        _of_gpu("gpt_1b5_host", middle_title + on_host, middle, 8, 5, 2, 40, 120, _STATES_ON_HOST, needs_per_parameter=10),
        _of_gpu("gpt_7b_host", large_title + on_host, large, 4, 3, 1, 90, 200, _STATES_ON_HOST[:3], needs_per_parameter=10),
    ]


def write_tokens(path, vocab_size):
    """Writes TOKENS tokens below vocab_size in llm.c's format. Each is 5 times the token before it, plus noise."""
    noise = random.Random(1)
    tokens = array.array("H", [0])
    while len(tokens) < TOKENS:
        tokens.append((5 * tokens[-1] + noise.randrange(8)) % vocab_size)
    header = [LLMC_MAGIC, LLMC_VERSION, len(tokens)] + [0] * (LLMC_HEADER_INTS - 3)
    with open(path, "wb") as file:
        file.write(struct.pack(f"<{LLMC_HEADER_INTS}i", *header))
        tokens.tofile(file)
