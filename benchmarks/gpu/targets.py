"""The ratios Tessera sets out to reach on a GPU: the peer's time over its own, in the same run.

A target of None is reported and not judged. Nothing fails for missing one.
"""

# (peer, kernel of `tessera bench optimizer --gpu`, target). "limit": a copy of as many bytes, timed between the steps.
OPTIMIZER = (
    ("limit", "fp32", 0.93),
    ("fused_fp32", "fp32", 1.05),
    ("chain_bf16", "mixed", 1.7),
    ("chain_bf16", "mixed_bf16_moments", 2.6),
    ("chain_bf16", "mixed_8bit_moments", 3.3),
)

# (work, or None for every work; peer; Tessera's contender; target). A rank alone has nothing to send: a strategy may
# add 1 % to the plain module's step.
STEPS = (
    (None, "torch_eager", "tessera_no_shard", 1 / 1.01),
    (None, "torch_eager", "tessera_shard_gradients", 1 / 1.01),
    (None, "torch_eager", "tessera_full_shard", 1 / 1.01),
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
    ("gpt_1b5_rules", "rule_adamw", "rule_adafactor", None),
    ("gpt_1b5_rules", "rule_adamw", "rule_muon", None),
    ("gpt_1b5_rules", "rule_adamw", "rule_muon_bf16", None),
    ("gpt_1b5_rules", "rule_adamw", "rule_lars", None),
)

# The most that a unit may cost the host above the plain module, microseconds.
UNIT_US = 20
