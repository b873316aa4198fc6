"""The models that a GPU trains, alone: GPTs of about 124 M, 1.5 B and 7 B parameters in bf16 with fp32 masters."""

import dataclasses

from works import parameter_count

SHARED = tuple(f"shared_{strategy}_{ranks}" for ranks in (1, 2, 4)
               for strategy in ("full_shard", "shard_gradients", "no_shard"))
RULES = ("rule_adamw", "rule_lamb", "rule_adafactor", "rule_muon", "rule_muon_bf16", "rule_lars")
EVERYONE = ("torch_eager", "tessera_full_shard", "torch_fsdp2", "tessera_no_shard", "torch_ddp",
            "tessera_shard_gradients")


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, how many of its steps make a round, and who takes part, the most important first."""

    name: str
    title: str
    model: dict           # the model file
    batch: int            # samples of a step
    steps: int            # timed steps of a round
    warm_up: int          # steps before them
    estimate_s: float     # of a contender's turn, start of the process included
    limit_s: float        # after so long it is stopped
    contenders: tuple = EVERYONE
    needs_per_parameter: int = 20

    def parameters(self):
        return parameter_count(self.model)

    def tokens(self):
        """Of a step."""
        return self.batch * self.model["seq_len"]

    def needs_bytes(self):
        """Of the GPU. PyTorch with masters by hand needs most: 2 bytes each for a bf16 parameter and its gradient, 4
        each for the fp32 master, its gradient and two moments; and 4 GiB for activations, logits and libraries."""
        return self.needs_per_parameter * self.parameters() + 2**32


def flops_per_token(model):
    """Floating-point operations of forward and backward, by the formula of PaLM (arXiv 2204.02311, appendix B):
    6 for each parameter of a matrix product (four of width^2 in attention, eight in the feed-forward layers, and the
    head), and 12 * layers * width * seq_len for attention itself, whose masked half counts. What is computed again in
    backward does not count: the model does not ask for it."""
    layers, width = model["layers"], model["width"]
    matrices = 12 * layers * width * width + model["vocab_size"] * width
    return 6 * matrices + 12 * layers * width * model["seq_len"]


def _gpt(layers, width, heads, recompute):
    """GPT-2's form, its vocabulary filled up to a multiple of 64."""
    return {"model": "gpt", "vocab_size": 50304, "seq_len": 1024, "layers": layers, "width": width, "heads": heads,
            "tie_head": True, "recompute": recompute}


def full_works():
    return [
        Work("gpt_124m", "GPT of 124 M parameters", _gpt(12, 768, 12, False), batch=16, steps=20, warm_up=5,
             estimate_s=12, limit_s=60),
        Work("gpt_1b5", "GPT of 1.5 B parameters, blocks recomputed", _gpt(48, 1600, 25, True), batch=8, steps=10,
             warm_up=3, estimate_s=20, limit_s=90),
        Work("gpt_7b", "GPT of 6.7 B parameters, blocks recomputed", _gpt(32, 4096, 32, True), batch=4, steps=6,
             warm_up=2, estimate_s=35, limit_s=150,
             contenders=("torch_fsdp2", "tessera_full_shard", "torch_eager")),
        Work("gpt_124m_shared", "GPT of 124 M parameters, ranks that share the GPU", _gpt(12, 768, 12, False), batch=16,
             steps=20, warm_up=5, estimate_s=12, limit_s=60, contenders=SHARED),
        Work("gpt_1b5_rules", "GPT of 1.5 B parameters, blocks recomputed, update rules", _gpt(48, 1600, 25, True), batch=8,
             steps=6, warm_up=2, estimate_s=12, limit_s=90, contenders=RULES),
        # bf16 parameters and gradients stay on the GPU; 6 bytes more for what is on its way.
        Work("gpt_1b5_host", "GPT of 1.5 B parameters, optimizer states in the host's memory",
             _gpt(48, 1600, 25, True), batch=8, steps=5, warm_up=2, estimate_s=40, limit_s=120,
             contenders=("tessera_host_backward", "torch_fsdp2_host", "tessera_host_gpu", "tessera_host_cpu", "tessera_host_all"),
             needs_per_parameter=10),
        # 10 bytes a parameter of the host's memory pinned for Tessera, 16 for FSDP2.
        Work("gpt_7b_host", "GPT of 6.7 B parameters, optimizer states in the host's memory", _gpt(32, 4096, 32, True),
             batch=4, steps=3, warm_up=1, estimate_s=90, limit_s=200, contenders=("tessera_host_backward", "torch_fsdp2_host", "tessera_host_gpu"), needs_per_parameter=10),
    ]


def quick_works():
    """Small enough for a smoke test of the whole path; its figures mean nothing."""
    model = {"model": "gpt", "vocab_size": 1024, "seq_len": 128, "layers": 2, "width": 128, "heads": 4,
             "tie_head": True, "recompute": True}
    return [Work("quick", "GPT of 0.5 M parameters, blocks recomputed (smoke test)", model, batch=2, steps=3, warm_up=2,
                 estimate_s=12, limit_s=90, contenders=(*EVERYONE, "shared_full_shard_2"))]
