"""The ratios Tessera sets out to reach: the peer's time (or bytes) over its own, in the same run.

A target of None is reported and not judged. Nothing fails for missing one: results are bits, not timings.
"""

# (peer, Tessera's contender of the same stage, target) of step times, for every work.
STEPS = (
    ("torch_ddp", "tessera_no_shard", 2.0),
    ("deepspeed_zero1", "tessera_shard_optimizer", None),
    ("deepspeed_zero2", "tessera_shard_gradients", None),
    ("torch_fsdp2_no_reshard", "tessera_shard_grad_op", 3.0),
    ("torch_fsdp2", "tessera_full_shard", 3.0),
    ("deepspeed_zero3", "tessera_full_shard", None),
)

# The same of peak memory.
MEMORY = (
    ("torch_fsdp2", "tessera_full_shard", 1.3),
    ("deepspeed_zero3", "tessera_full_shard", None),
)

# (peer, Tessera's kernel of `tessera bench optimizer`, target); "limit" is the kernel's own limit over its time.
OPTIMIZER = (
    ("limit", "fp32", 0.95),
    ("deepspeed_fp32", "fp32", 1.1),
    ("fused_fp32", "fp32", 1.0),
    ("chain_bf16", "mixed", 1.8),
    ("chain_bf16", "mixed_bf16_moments", 2.7),
)

# (collective, bytes or None for the largest, target over Gloo), private memory, fp32.
COLLECTIVES = (
    ("barrier", 0, 100.0),
    ("all_reduce", 4, 100.0),
    ("all_reduce", None, 8.0),
    ("reduce_scatter", None, 12.0),
    ("all_gather", None, 5.0),
)

# The best bucket over one collective a tensor.
BUCKETS = 1.2
