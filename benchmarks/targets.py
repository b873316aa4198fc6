"""The ratios that Tessera should reach within one run. On a host and a GPU, they are the peer's time (or bytes) divided
by Tessera's. Over a network, they are Tessera's time divided by the peer's.

A ratio whose target is None is reported and not judged. No run fails because it misses a target: a run is judged by the
bits of its results, not by its timings.
"""

# This is {where: (workload, or None for every workload; peer; Tessera's contender; target)} of step times. "alone" is a
# step without communication: 1 / 1.05 means that sharding may add 5 % to its time. A single rank on a GPU sends
# nothing: a strategy may add 1 % to the plain module's step.
STEPS = {
    "host": (
        ("gpt_69m_fp32", "tessera_alone", "tessera_full_shard", 1.0),
        ("gpt_69m_bf16", "torch_alone", "tessera_full_shard", 1 / 1.05),
        ("narrow_24x64", "tessera_alone", "tessera_full_shard", 1 / 1.15),
        (None, "torch_ddp", "tessera_no_shard", None),
        *((None, peer, f"tessera_{ours}{copies}", None)
          for copies in ("", "_private")
          for peer, ours in (("deepspeed_zero1", "shard_optimizer"), ("deepspeed_zero2", "shard_gradients"),
                             ("torch_fsdp2_no_reshard", "shard_grad_op"), ("torch_fsdp2", "full_shard"),
                             ("deepspeed_zero3", "full_shard"))),
        ("python", "torch_fsdp2", "python_full_shard", 1 / 0.60),
        ("python", "torch_alone", "python_full_shard", 1 / 1.03),
        ("python", "deepspeed_zero3", "python_full_shard", None),
        ("python", "torch_ddp", "python_no_shard", None),
        ("python", "torch_fsdp2", "python_full_shard_private", None),
        ("python", "torch_alone", "python_full_shard_private", None),
        ("python", "deepspeed_zero3", "python_full_shard_private", None),
    ),
    "gpu": (
        *((None, "torch_eager", f"tessera_{ours}", 1 / 1.01) for ours in ("no_shard", "shard_gradients", "full_shard")),
        ("gpt_124m", "torch_fsdp2", "tessera_full_shard", None),
        ("gpt_1b5", "torch_fsdp2", "tessera_full_shard", 1.03),
        ("gpt_7b", "torch_fsdp2", "tessera_full_shard", 1.03),
        ("gpt_1b5_host", "torch_fsdp2_host", "tessera_host_backward", 2.0),
        ("gpt_1b5_host", "torch_fsdp2_host", "tessera_host_gpu", None),
        ("gpt_1b5_host", "torch_fsdp2_host", "tessera_host_cpu", None),
        ("gpt_1b5_host", "torch_fsdp2_host", "tessera_host_all", None),
        ("gpt_7b_host", "torch_fsdp2_host", "tessera_host_backward", 2.0),
        ("gpt_7b_host", "torch_fsdp2_host", "tessera_host_gpu", None),
        ("gpt_1b5_rules", "rule_adamw", "rule_lamb", 1 / 1.1),
        *(("gpt_1b5_rules", "rule_adamw", f"rule_{ours}", None) for ours in ("adafactor", "muon", "muon_bf16", "lars")),
    ),
}

# These are the targets for peak memory on a host. For the peer "plan", the ratio is the plan's number of bytes divided
# by the measured number.
MEMORY = (
    (None, "plan", "tessera_full_shard", 1 / 1.02),
    (None, "torch_fsdp2", "tessera_full_shard", 2.0),
    (None, "deepspeed_zero3", "tessera_full_shard", None),
    (None, "plan", "tessera_full_shard_private", None),
    (None, "torch_fsdp2", "tessera_full_shard_private", None),
    (None, "deepspeed_zero3", "tessera_full_shard_private", None),
    ("python", "torch_fsdp2", "python_full_shard", 1 / 0.6),
    ("python", "torch_fsdp2", "python_full_shard_private", None),
    ("python", "deepspeed_zero3", "python_full_shard", None),
)

# This is {where: (peer, Tessera's kernel of `tessera bench optimizer`, target)}. The peer "limit" is the kernel's own
# limit: the limit's time is divided by the kernel's time. On a GPU, this limit is a copy of as many bytes, timed
# between the steps.
OPTIMIZER = {
    "host": (
        ("limit", "fp32", 0.95),
        ("deepspeed_fp32", "fp32", 1.1),
        ("fused_fp32", "fp32", 1.0),
        ("chain_bf16", "mixed", 1.8),
        ("deepspeed_chain_bf16", "mixed", 2.5),
        ("chain_bf16", "mixed_bf16_moments", 2.7),
        ("deepspeed_chain_bf16", "mixed_bf16_moments", 4.0),
    ),
    "gpu": (
        ("limit", "fp32", 0.93),
        ("fused_fp32", "fp32", 1.05),
        ("chain_bf16", "mixed", 1.7),
        ("chain_bf16", "mixed_bf16_moments", 2.6),
        ("chain_bf16", "mixed_8bit_moments", 3.3),
    ),
}

# This is the target of each kernel of `tessera bench codecs --gpu`: the time of a copy of as many bytes, divided by the
# kernel's time.
CODECS_OF_LIMIT = 0.6

# Each entry is (contender, Tessera's kernel, target), all with AVX2 only. Narrow moments are compared with Tessera's own fp32.
OPTIMIZER_AVX2 = (
    ("deepspeed_fp32", "tessera fp32", 1.0),
    ("fused_fp32", "tessera fp32", 1.1),
    ("tessera fp32", "tessera fp32_bf16_moments", 1.2),
    ("tessera fp32", "tessera fp32_8bit_moments", 1.0),
)

# Each entry is (collective, bytes or None for the largest size, target over Gloo), with fp32. A call of the largest
# size uses the group's memory, where the Engine has its buffers, and gathers into a private copy. Other calls use
# private memory.
COLLECTIVES = (
    ("barrier", 0, 500.0),
    ("all_reduce", 4, 500.0),
    ("all_reduce", None, 9.0),
    ("reduce_scatter", None, 13.0),
    ("all_gather", None, 10.0),
)
# These are the targets for the largest size of each collective, as a share of the speed of a loop that only reads and
# writes the same bytes: (memory, share). A call in a program's private memory has to go through memory of the group, so
# its target is lower.
COLLECTIVES_OF_LIMIT = (("group", 0.9), ("private", 0.85))

# These are the targets of passes over a disk. DISK: Tessera's speed over the larger of the speeds of fio and of
# DeepSpeed's sweep. DISK_DEFAULTS: Tessera's speed over the speed of DeepSpeed's defaults, if the defaults reach less
# than the share DISK_SLOW of fio's speed. DISK_CPU: DeepSpeed's CPU time for each byte over Tessera's.
DISK = 0.98
DISK_DEFAULTS = 1.2
DISK_SLOW = 0.8
DISK_CPU = 2.0
# Each entry is (Tessera's kernel, target over DeepSpeed's swapper), for the time of a step per parameter, with the
# state on disk. DISK_STEPS_OF_LIMIT: the time of the longer of the step's two parts (disk and update), divided by the
# time of the step.
DISK_STEPS = {"fp32": 1.5, "mixed_bf16_moments": 2.5, "mixed_8bit_moments": 3.5}
DISK_STEPS_OF_LIMIT = 0.95

# This is the target with more ranks than cores: the work per second of all ranks together, divided by the work per
# second of the run with the fewest ranks.
CROWDED = 0.9
# This target says how many times faster steps are with the best bucket than with one collective for each tensor.
BUCKETS = 1.2
# This is the largest time, in microseconds, that a unit may cost the host on a GPU, in addition to the plain module's
# time.
UNIT_US = 20

GBIT = 10**9
# Each entry is (Tessera's contender, its peer, {bits per second: target}). The targets are for step times over a
# network: the contender's divided by the peer's.
NET_STEPS = (
    ("tessera_no_shard", "torch_ddp", {10 * GBIT: 1.0, 2 * GBIT: 1.0, GBIT: 0.95}),
    ("tessera_lossless", "torch_ddp", {10 * GBIT: 1.0, 2 * GBIT: 1.0, GBIT: 0.95}),
    ("tessera_full_shard", "torch_fsdp2", {2 * GBIT: 0.5, GBIT: 0.5}),
    ("python_full_shard", "torch_fsdp2", {2 * GBIT: 0.5, GBIT: 0.5}),
    ("tessera_int8", "torch_ddp_power_sgd", {GBIT // 5: 1.0}),
    ("tessera_power_sgd", "torch_ddp_power_sgd", {GBIT // 5: 1.0}),
)
# These targets have the form of NET_STEPS. They are for the time of a step minus the computation of a single rank.
NET_EXPOSED = (
    ("tessera_int8", "tessera_no_shard", {GBIT // 5: 0.35}),
    ("tessera_power_sgd", "tessera_no_shard", {GBIT // 5: 0.10}),
)
# These are the limits of |predicted / measured - 1| over all rates and contenders: for the largest, and for the median.
PREDICTED_WITHIN, PREDICTED_MEDIAN = 0.10, 0.05

# These are the columns of the summary on a host's page, for every workload: (heading, measure of the ratios, peer,
# Tessera's contender).
SUMMARY = (
    ("FULL_SHARD beside PyTorch FSDP2", "step", "torch_fsdp2", "tessera_full_shard"),
    ("FULL_SHARD with private copies beside PyTorch FSDP2", "step", "torch_fsdp2", "tessera_full_shard_private"),
    ("FULL_SHARD beside DeepSpeed ZeRO-3", "step", "deepspeed_zero3", "tessera_full_shard"),
    ("NO_SHARD beside PyTorch DDP", "step", "torch_ddp", "tessera_no_shard"),
    ("FULL_SHARD beside Tessera without communication", "step", "tessera_alone", "tessera_full_shard"),
    ("FULL_SHARD beside PyTorch without communication", "step", "torch_alone", "tessera_full_shard"),
    ("FULL_SHARD beside PyTorch FSDP2", "peak_memory", "torch_fsdp2", "tessera_full_shard"),
    ("FULL_SHARD with private copies beside PyTorch FSDP2", "peak_memory", "torch_fsdp2", "tessera_full_shard_private"),
    ("FULL_SHARD beside Tessera's plan", "peak_memory", "plan", "tessera_full_shard"),
)
