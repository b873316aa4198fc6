"""The ratios Tessera sets out to reach: the peer's time (or bytes) over its own, in the same run.

A target of None is reported and not judged. Nothing fails for missing one: results are bits, not timings.
"""

# (work, or None for every work; peer; Tessera's contender; target) of step times. "alone" is a step without
# communication: 1 / 1.05 means that sharding may add 5 % to it.
STEPS = (
    ("gpt_69m_fp32", "tessera_alone", "tessera_full_shard", 1.0),
    ("gpt_69m_bf16", "torch_alone", "tessera_full_shard", 1 / 1.05),
    ("narrow_24x64", "tessera_alone", "tessera_full_shard", 1 / 1.15),
    (None, "torch_ddp", "tessera_no_shard", None),
    (None, "deepspeed_zero1", "tessera_shard_optimizer", None),
    (None, "deepspeed_zero2", "tessera_shard_gradients", None),
    (None, "torch_fsdp2_no_reshard", "tessera_shard_grad_op", None),
    (None, "torch_fsdp2", "tessera_full_shard", None),
    (None, "deepspeed_zero3", "tessera_full_shard", None),
    (None, "deepspeed_zero1", "tessera_shard_optimizer_private", None),
    (None, "deepspeed_zero2", "tessera_shard_gradients_private", None),
    (None, "torch_fsdp2_no_reshard", "tessera_shard_grad_op_private", None),
    (None, "torch_fsdp2", "tessera_full_shard_private", None),
    (None, "deepspeed_zero3", "tessera_full_shard_private", None),
)

# The same of peak memory, for every work; "plan" is what Tessera's plan says over what was measured.
MEMORY = (
    ("plan", "tessera_full_shard", 1 / 1.02),
    ("torch_fsdp2", "tessera_full_shard", 2.0),
    ("deepspeed_zero3", "tessera_full_shard", None),
    ("plan", "tessera_full_shard_private", None),
    ("torch_fsdp2", "tessera_full_shard_private", None),
    ("deepspeed_zero3", "tessera_full_shard_private", None),
)

# (peer, Tessera's contender, target) of the step times of one Python model, and of peak memory.
PYTHON = (
    ("torch_fsdp2", "tessera_python_full_shard", 1 / 0.60),
    ("torch_alone", "tessera_python_full_shard", 1 / 1.03),
    ("deepspeed_zero3", "tessera_python_full_shard", None),
    ("torch_ddp", "tessera_python_no_shard", None),
    ("torch_fsdp2", "tessera_python_full_shard_private", None),
    ("torch_alone", "tessera_python_full_shard_private", None),
    ("deepspeed_zero3", "tessera_python_full_shard_private", None),
)
PYTHON_MEMORY = (
    ("torch_fsdp2", "tessera_python_full_shard", 1 / 0.6),
    ("torch_fsdp2", "tessera_python_full_shard_private", None),
    ("deepspeed_zero3", "tessera_python_full_shard", None),
)

# (peer, Tessera's kernel of `tessera bench optimizer`, target); "limit" is the kernel's own limit over its time.
OPTIMIZER = (
    ("limit", "fp32", 0.95),
    ("deepspeed_fp32", "fp32", 1.1),
    ("fused_fp32", "fp32", 1.0),
    ("chain_bf16", "mixed", 1.8),
    ("deepspeed_chain_bf16", "mixed", 2.5),
    ("chain_bf16", "mixed_bf16_moments", 2.7),
    ("deepspeed_chain_bf16", "mixed_bf16_moments", 4.0),
)

# With AVX2 alone (contender, Tessera's kernel, target); Tessera's own fp32 is what narrow moments are beside.
OPTIMIZER_AVX2 = (
    ("deepspeed_fp32", "tessera fp32", 1.0),
    ("fused_fp32", "tessera fp32", 1.1),
    ("tessera fp32", "tessera fp32_bf16_moments", 1.2),
    ("tessera fp32", "tessera fp32_8bit_moments", 1.0),
)

# (collective, bytes or None for the largest, target over Gloo), fp32. The largest in the group's memory, where the
# Engine has its buffers (what is gathered lands in a private copy); few bytes, and none, in any memory.
COLLECTIVES = (
    ("barrier", 0, 500.0),
    ("all_reduce", 4, 500.0),
    ("all_reduce", None, 9.0),
    ("reduce_scatter", None, 13.0),
    ("all_gather", None, 10.0),
)

# Passes over a disk: over the faster of fio and of DeepSpeed's sweep; over DeepSpeed's defaults, where those reach less
# than DISK_SLOW of fio; and DeepSpeed's CPU time a byte over Tessera's.
DISK = 0.98
DISK_DEFAULTS = 1.2
DISK_SLOW = 0.8
DISK_CPU = 2.0

# (Tessera's kernel, target over DeepSpeed's swapper), a step a parameter with the state on disk; and the longer of the
# two parts of such a step, the disk's and the update's, over the step.
DISK_STEPS = (("fp32", 1.5), ("mixed_bf16_moments", 2.5), ("mixed_8bit_moments", 3.5))
DISK_STEPS_OF_LIMIT = 0.95

# What the summary of the page shows of every work: (heading, measure of tables.ratios, peer, Tessera's contender).
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

# What the largest of each of these is to reach of a loop that only reads and writes as much, by whose memory it is in. A
# program's own has to go through memory of the group.
COLLECTIVES_OF_LIMIT = (("group", 0.9), ("private", 0.85))

# Work a second of all ranks together where they outnumber the cores, over that of the fewest ranks.
CROWDED = 0.9

# The best bucket over one collective a tensor.
BUCKETS = 1.2
