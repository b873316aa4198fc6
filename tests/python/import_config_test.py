"""Tests configurations of DeepSpeed, Accelerate and FSDP as people write them (import_configs/). Each configuration has
a file with the expected strategy, and with the keys that must be mapped, ignored and refused
(import_configs/*/expected/). Other tests check single keys, how files are chosen, and what the command does with
them."""

import contextlib
import copy
import errno
import functools
import importlib.util
import io
import json
import math
import os
import pathlib
import random
import tempfile
import unittest
from unittest import mock

import tessera
import torch
from tessera import import_config
from tessera.import_config import page
from tessera.import_config.__main__ import main

TREE = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = sorted(path for path in (pathlib.Path(__file__).parent / "import_configs").glob("*/*") if path.is_file())
LONG = bool(os.environ.get("TESSERA_LONG_TESTS"))
READS_YAML = importlib.util.find_spec("yaml") is not None
needs_yaml = unittest.skipUnless(READS_YAML, "no PyYAML: scripts/setup --tests")
DEFAULTS = json.loads(tessera._native.Strategy.from_json("{}", "strategy").to_json())
FSDP = "distributed_type: FSDP\nfsdp_config:\n  "


def translated(text, format="", **more):
    return import_config.translate(text if isinstance(text, (str, bytes)) else json.dumps(text), "config", format, **more)


def strategy_of(config):
    """Returns the strategy as its reader resolves it. Every key is present."""
    return json.loads(tessera._native.Strategy.from_json(config.strategy, "strategy").to_json())


def fate_of(config, path):
    [found] = [key for key in config.keys if key.path == path]
    return found


def paths_of(values, path=""):
    """Returns the paths of all values of a file. An empty object counts as a value."""
    if not isinstance(values, dict) or not values:
        return [path]
    return [inner for name, value in values.items() for inner in paths_of(value, f"{path}.{name}" if path else name)]


@functools.cache
def values_of(path):
    if path.suffix == ".json":
        return json.loads(path.read_text())
    import yaml
    return yaml.safe_load(path.read_text())


class ConfigsTest(unittest.TestCase):
    def for_each(self, check):
        """Calls `check` with each file, its result, and the expected result."""
        for path in CONFIGS:
            if path.suffix == ".json" or READS_YAML:
                with self.subTest(path.name):
                    expected = json.loads((path.parent / "expected" / f"{path.name}.json").read_text())
                    check(path, import_config.translate(path.read_bytes(), path.name), expected)

    def test_every_key_is_mapped_ignored_or_refused_as_expected(self):
        def check(_, config, expected):
            self.assertEqual(config.title, expected["format"])
            for fate in ("mapped", "ignored", "refused"):
                self.assertEqual([key.path for key in config.keys if key.fate == fate], expected[fate])
            self.assertEqual([each.pointer for each in config.implied], expected["also_set"])
        self.for_each(check)

    def test_every_key_of_the_file_is_listed_once_with_a_reason(self):
        def check(path, config, _):
            self.assertCountEqual([key.path for key in config.keys], paths_of(values_of(path)))
            self.assertTrue(all(key.text and key.value for key in config.keys))
        self.for_each(check)

    def test_the_strategy_is_the_expected_one_and_accepted(self):
        def check(_, config, expected):
            self.assertEqual(json.loads(config.strategy), expected["strategy"])
            strategy_of(config)
        self.for_each(check)

    def test_the_strategy_has_no_defaults_and_the_order_of_the_page(self):
        def check(written, defaults, pointer):
            self.assertEqual(list(written), [name for name in defaults if name in written])
            for name, value in written.items():
                if isinstance(value, dict):
                    check(value, defaults[name], f"{pointer}/{name}")
                elif pointer != "/optimizer":  # defaults depend on the rule and the library, so they are always written
                    self.assertNotEqual(value, defaults[name], name)
        self.for_each(lambda _, config, expected: check(json.loads(config.strategy), DEFAULTS, ""))

    @needs_yaml
    def test_configs_cover_all_formats(self):
        self.assertGreaterEqual(len(CONFIGS), 31)
        titles = {import_config.translate(path.read_bytes(), path.name).title for path in CONFIGS}
        self.assertEqual(titles, {form.title for form in import_config.FORMATS.values()})


class FormatsTest(unittest.TestCase):
    def test_every_row_has_a_place_of_its_own_and_a_text(self):
        for form in import_config.FORMATS.values():
            names = [row.name for row in form.rows]
            self.assertEqual(len(set(names)), len(names), form.name)
            self.assertTrue(all(row.doc for row in form.rows))

    def test_format_is_recognised_by_its_keys(self):
        for text, title in [('{"zero_optimization": {"stage": 2}}', "a DeepSpeed configuration"),
                            ('{"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}', "an Accelerate configuration"),
                            ('{"auto_wrap_policy": "NO_WRAP"}', "an fsdp_config of transformers"),
                            ('{"fsdp_config": {"fsdp_version": 2}}', "an fsdp_config of transformers"),
                            *([("distributed_type: MULTI_CPU\nnum_processes: 2\n", "an Accelerate configuration"),
                               ("zero_optimization:\n  stage: 1\n", "a DeepSpeed configuration")] if READS_YAML else [])]:
            self.assertEqual(translated(text).title, title)

    def test_a_file_of_no_kind_asks_for_the_format(self):
        for text in ('{"learning_rate": 1}', "{}"):
            with self.assertRaisesRegex(tessera.Error, "config:1:1: .*--format") as caught:
                translated(text)
            self.assertEqual(caught.exception.exit_code, 78)

    def test_a_format_or_device_that_there_is_not_is_a_wrong_call(self):
        for more in ({"format": "megatron"}, {"device": "tpu"}):
            with self.assertRaisesRegex(tessera.Error, "hint: it is one of") as caught:
                translated("{}", **more)
            self.assertEqual(caught.exception.exit_code, 64)

    def test_an_unknown_key_names_the_nearest_or_where_all_are_listed(self):
        for key, near in {"gradient_cliping": "gradient_clipping", "Train_Batch_Sise": "train_batch_size",
                          "zero_optimization.stage3_max_live_paramters": "zero_optimization.stage3_max_live_parameters",
                          "overlap_comm": "zero_optimization.overlap_comm"}.items():
            config = translated(import_config.nested({f"/{key.replace('.', '/')}": 1}), "deepspeed")
            self.assertIn(f'did you mean "{near}"?', fate_of(config, key).text)
        config = translated({"distributed_type": "FSDP", "fsdp_config": {"fsdp_shardng_strategy": 1}, "x": 1}, "accelerate")
        self.assertIn('did you mean "fsdp_config.fsdp_sharding_strategy"?', fate_of(config, "fsdp_config.fsdp_shardng_strategy").text)
        self.assertIn("docs/import-config.md", fate_of(config, "x").text)

    def test_a_strategy_that_contradicts_itself_is_an_error_that_says_how(self):
        with self.assertRaisesRegex(tessera.Error, "(?s)/optimizer/nesterov.*hint:.*in config") as caught:
            translated({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}})
        self.assertEqual(caught.exception.exit_code, 78)

    def test_control_characters_of_a_file_are_not_printed(self):
        config = translated(r'{"a\u001b[31m": "\u001b[0m", "stage\n": ["\u001b"]}', "deepspeed")
        self.assertEqual([key for key in config.keys if set("\x1b\n") & set(key.path + key.value + key.text)], [])

    def test_whatever_a_file_says_the_strategy_is_accepted_or_a_key_is_named(self):
        draw = random.Random(1)
        files = [values_of(path) for path in CONFIGS if path.suffix == ".json" or READS_YAML]
        odd = [None, True, False, 0, 3, -1, 0.5, 2**70, math.inf, math.nan, "auto", "cpu", "nvme", "3", "no", "x" * 300, "", [], {}, [0.9, 1.5], ["a", 1]]
        for _ in range(2000 if LONG else 200):
            config = copy.deepcopy(draw.choice(files))
            form = draw.choice(list(import_config.FORMATS.values()))
            for row in draw.choices(form.rows, k=draw.randint(0, 4)):
                *sections, name = row.title().replace("*", "x").split(".")
                place = config
                for section in sections:
                    place = place[section] if isinstance(place.get(section), dict) else place.setdefault(section + "_", {})
                place[name] = copy.deepcopy(draw.choice(odd))
            try:
                result = translated(config, draw.choice(["", form.name]), device=draw.choice(["", "cpu", "gpu"]))
            except tessera.Error as error:
                self.assertEqual(error.exit_code, 78, config)
                self.assertIn("hint:", str(error))
                continue
            self.assertTrue(result.strategy or result.refused, config)
            if result.strategy:
                strategy_of(result)

    def test_whatever_bytes_are_in_a_file_it_is_read_or_refused_with_a_remedy(self):
        draw = random.Random(2)
        files = [(path.name, path.read_bytes()) for path in CONFIGS if path.suffix == ".json" or READS_YAML]
        marks = [b"{", b"}", b"[", b"]", b":", b",", b'"', b"'", b"\n", b"\t", b"#", b"/*", b"*/", b"//", b"\\", b"&a", b"*a", b"!", b"- ", b"? ", b"---\n",
                 b"\xff", b"\0", b"\xe2\x80\xa8", b"1e999", b"-", b"0x", b"null"]
        for _ in range(5000 if LONG else 500):
            name, data = draw.choice(files)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(data))
                data = data[:at] + draw.choice([draw.choice(marks), draw.randbytes(1), data[at:at + 30] * 2, b""]) + data[at + draw.randint(0, 3):]
            try:
                translated(data, draw.choice(["", "deepspeed"]))
                import_config.translate(data, name)
            except tessera.Error as error:
                self.assertEqual(error.exit_code, 78, data)
                self.assertIn("hint:", str(error), data)


class DeepSpeedTest(unittest.TestCase):
    def test_values_outside_of_their_range_are_refused_all_at_once(self):
        config = translated('{"gradient_clipping": -1, "gradient_accumulation_steps": 1.5, "zero_optimization": {"stage": "three", "prefetch_bucket_size":'
                            ' -5}, "optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5], "lr": true, "eps": NaN, "amsgrad": true}}}')
        self.assertEqual(config.refused, ["gradient_clipping", "gradient_accumulation_steps", "zero_optimization.stage",
                                          "zero_optimization.prefetch_bucket_size", "optimizer.params.betas", "optimizer.params.lr",
                                          "optimizer.params.eps", "optimizer.params.amsgrad"])
        self.assertIn("optimizer.betas must be a number from 0 to below 1, got 1.5", fate_of(config, "optimizer.params.betas").text)
        self.assertIn("optimizer.eps must be a finite number", fate_of(config, "optimizer.params.eps").text)

    def test_fixed_loss_scale_is_kept(self):
        config = translated({"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 16, "loss_scale_window": 7}})
        self.assertEqual(strategy_of(config)["mixed_precision"]["loss_scale"],
                         DEFAULTS["mixed_precision"]["loss_scale"] | {"dynamic": False, "initial": 128})

    def test_defaults_that_are_not_tesseras_are_set(self):
        strategy = strategy_of(translated({"fp16": {"enabled": True}, "optimizer": {"type": "Adagrad"}, "zero_optimization": {"stage": 1}}))
        precision, optimizer = strategy["mixed_precision"], strategy["optimizer"]
        self.assertEqual((precision["reduce"], precision["loss_scale"]["growth_interval"], precision["loss_scale"]["hysteresis"]), ("fp16", 1000, 2))
        self.assertEqual((optimizer["lr"], optimizer["eps"], optimizer["weight_decay"]), (0.01, 1e-10, 0))
        self.assertEqual(strategy_of(translated({"train_batch_size": 8}))["strategy"], "NO_SHARD")

    def test_the_defaults_of_an_optimizer_are_written_whatever_ours_are(self):
        """A strategy in which the defaults are written keeps its meaning if defaults change."""
        for name, more in [*((name, {}) for name in ("Adam", "AdamW", "SGD", "Lion", "Adagrad", "RMSprop")), ("Adam", {"adam_w_mode": False})]:
            written = json.loads(translated({"optimizer": {"type": name, "params": more}}).strategy)["optimizer"]
            self.assertEqual(written["weight_decay"], 0.0, name)
            if name == "Lion":
                self.assertEqual((written["lr"], written["betas"]), (0.001, [0.9, 0.99]))

    def test_the_schedulers_peak_is_the_learning_rate(self):
        config = translated({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
                             "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25, "warmup_type": "linear"}}})
        self.assertEqual(strategy_of(config)["optimizer"]["lr"], 0.25)
        self.assertEqual(fate_of(config, "optimizer.params.lr").fate, "ignored")
        self.assertEqual(strategy_of(config)["lr_schedule"]["warmup_steps"], 1001)

    def test_schedules_are_equal_from_the_end_of_the_warm_up_on_and_near_before(self):
        def of_deepspeed(name, update, warmup=20, total=100, end=0.1):
            """Returns the rate of DeepSpeed's scheduler. Its first step comes after the first update."""
            iteration = update - 1
            if iteration < warmup:
                return max(iteration, 0) / warmup
            if name == "WarmupLR":
                return 1
            if name == "WarmupDecayLR":
                return max(0.0, (total - iteration) / (total - warmup))
            return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, (iteration - warmup + 1) / (total - warmup))))

        for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
            params = {"warmup_num_steps": 20, "warmup_type": "linear", **({} if name == "WarmupLR" else {"total_num_steps": 100}),
                      **({"cos_min_ratio": 0.1} if name == "WarmupCosineLR" else {"warmup_max_lr": 1.0})}
            config = translated({"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "scheduler": {"type": name, "params": params}})
            engine = tessera.Engine(torch.nn.Linear(1, 1), json.loads(config.strategy))
            for update in range(130):
                ours, theirs = engine.lr(), of_deepspeed(name, update)
                if update > 20:
                    self.assertAlmostEqual(ours, theirs, 12, f"{name} update {update}")
                else:
                    self.assertTrue(theirs <= ours <= theirs + 2.0 / 20, f"{name} update {update}")
                engine.backward(engine.model(torch.zeros(1, 1)).sum() * 0)
                engine.step()
            engine.close()

    def test_a_logarithmic_warm_up_is_refused_whether_it_is_said_or_not(self):
        for more, key in [({}, "scheduler.type"), ({"warmup_type": "log"}, "scheduler.params.warmup_type")]:
            config = translated({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, **more}}})
            self.assertEqual(fate_of(config, key).fate, "refused")

    def test_batch_sizes_that_contradict_each_other_are_refused(self):
        sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
        self.assertIn("8 ranks", fate_of(translated(sizes), "train_batch_size").text)
        self.assertEqual(fate_of(translated(sizes | {"train_batch_size": 60}), "train_batch_size").fate, "refused")

    def test_two_disks_are_both_used_in_any_order_of_keys(self):
        for device, path in [("device", "nvme_path"), ("nvme_path", "device")]:
            def disk(name):
                return {key: {"device": "nvme", "nvme_path": name, "ratio": 0.5}[key] for key in (device, path, "ratio")}
            config = translated({"zero_optimization": {"offload_param": disk("/a") | {"ratio": None}, "offload_optimizer": disk("/b"), "stage": 3},
                                 "bf16": {"enabled": True}})
            offload = strategy_of(config)["offload"]
            self.assertEqual(offload["paths"], ["/a", "/b"])
            self.assertEqual((offload["masters"], offload["parameters"]["tier"]), ({"tier": "nvme", "fraction": 0.5}, "nvme"))


class SecondCopyTest(unittest.TestCase):
    HPZ = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}

    def test_hpz_and_a_number_of_ranks_of_fsdp_2_become_a_second_copy(self):
        fsdp = {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": 4}}
        for config in (translated(self.HPZ), translated(self.HPZ, device="gpu"), translated(fsdp)):
            strategy = strategy_of(config)
            self.assertEqual((strategy["strategy"], strategy["secondary"]), ("FULL_SHARD", {"form": "plain", "ranks": 4}))

    def test_where_there_is_none_it_is_refused_or_ignored(self):
        name = "zero_optimization.zero_hpz_partition_size"
        offloaded = {"zero_optimization": self.HPZ["zero_optimization"] | {"offload_param": {"device": "nvme", "nvme_path": "/a"}}}
        self.assertEqual(fate_of(translated(offloaded), name).fate, "refused")
        self.assertEqual(fate_of(translated({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 4}}), name).fate, "ignored")


class FsdpTest(unittest.TestCase):
    @needs_yaml
    def test_sections_count_with_their_distributed_type_only(self):
        config = translated("distributed_type: MULTI_CPU\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n")
        self.assertEqual(strategy_of(config)["strategy"], "NO_SHARD")
        self.assertEqual(fate_of(config, "fsdp_config.fsdp_sharding_strategy").fate, "ignored")

    @needs_yaml
    def test_sharding_strategies_by_number_and_by_name(self):
        for number, name in enumerate(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"], 1):
            for said in (str(number), f"'{number}'", name, name.lower(), f"ShardingStrategy.{name}"):
                self.assertEqual(strategy_of(translated(f"{FSDP}fsdp_sharding_strategy: {said}\n"))["strategy"], name, said)
        for said in ("'5'", "_HYBRID_SHARD_ZERO2"):
            fifth = fate_of(translated(f"{FSDP}fsdp_sharding_strategy: {said}\n"), "fsdp_config.fsdp_sharding_strategy")
            self.assertIn("SHARD_GRAD_OP", fifth.text)
            self.assertEqual(fifth.fate, "refused")

    def test_fsdp_1_without_reduce_dtype_reduces_in_the_type_of_parameters_and_fsdp_2_in_fp32(self):
        def check(config, param, reduce, implied, notes):
            precision = strategy_of(config)["mixed_precision"]
            self.assertEqual((config.refused, precision["param"], precision["reduce"]), ([], param, reduce))
            self.assertEqual([each.pointer for each in config.implied], ["/mixed_precision/reduce"] * implied)
            self.assertEqual(sum("Without reduce_dtype" in note for note in config.notes), notes)

        for policy, param in [({"param_dtype": "bfloat16"}, "bf16"), ({"param_dtype": "torch.float16", "reduce_dtype": None}, "fp16")]:
            for version, first in [({}, False), ({"version": 1}, True), ({"version": 2}, False)]:  # transformers' default is 2, and Accelerate's 1
                config = translated({"fsdp_config": {"mixed_precision_policy": policy, **version}}, "fsdp")
                check(config, param, param if first else "fp32", first, not first)
            for version, first in [({}, True), ({"fsdp_version": 1}, True), ({"fsdp_version": 2}, False)]:
                config = translated({"distributed_type": "FSDP", "fsdp_config": {"fsdp_mixed_precision_policy": policy, **version}})
                check(config, param, param if first else "fp32", first, not first)
        policy = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
        for config in (translated({"mixed_precision_policy": policy}, "fsdp"), translated({"mixed_precision_policy": policy, "version": 1}, "fsdp")):
            check(config, "bf16", "fp32", False, 0)
        check(translated({"mixed_precision_policy": "bf16"}, "fsdp"), "bf16", "bf16", True, 0)
        check(translated({"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}), "bf16", "bf16", True, 0)

    def test_a_key_under_two_names_is_refused_unless_both_say_the_same(self):
        self.assertEqual(translated({"fsdp_version": 2, "version": 1}, "fsdp").refused, ["version"])
        self.assertEqual(fate_of(translated({"fsdp_version": 2, "version": 2}, "fsdp"), "version").text, "fsdp_version says the same")

    def test_spellings_of_transformers_and_peft_are_read(self):
        for key in ("fsdp_backward_prefetch_policy", "fsdp_backward_prefetch", "backward_prefetch"):
            for said, prefetch in [("BACKWARD_PRE", 1), ("backward_post", 1), ("NO_PREFETCH", 0), (1, 1), ("BackwardPrefetch.BACKWARD_PRE", 1)]:
                config = translated({"fsdp_config": {key: said, "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}, "fsdp": "full_shard auto_wrap"})
                self.assertEqual((config.refused, strategy_of(config)["prefetch"]), ([], prefetch), (key, said))
        for key in ("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"):
            for said in ("T5Block,BertLayer", "T5Block, BertLayer", ["T5Block", "BertLayer"]):
                self.assertEqual(strategy_of(translated({key: said}, "fsdp"))["units"]["classes"], ["T5Block", "BertLayer"])


class DeviceTest(unittest.TestCase):
    """Tests offloading to the CPU. Nothing is offloaded if the CPU trains, and state is offloaded to the host's memory
    if a GPU trains."""

    DEEPSPEED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}, "offload_param": {"device": "cpu"}},
                 "bf16": {"enabled": True}, "activation_checkpointing": {"cpu_checkpointing": True}}
    ACCELERATE = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}, "mixed_precision": "bf16"}

    def offload_of(self, config, *refused, device="gpu"):
        """Returns the keys of the strategy's "offload" that differ from the defaults. If the device is a GPU, also
        checks that the strategy's plan has records in the host's memory."""
        result = translated(config, device=device)
        self.assertEqual(result.refused, list(refused))
        strategy = json.loads(result.strategy)
        self.assertEqual(strategy.get("comm"), {"transport": "nccl"} if device == "gpu" else None)
        if device == "gpu":
            self.assertGreater(tessera.plan(torch.nn.Linear(64, 64), strategy, world_size=4).use["host_records"], 0)
        return strategy.get("offload", {})

    def test_offload_is_refused_without_a_device_and_dropped_on_a_cpu(self):
        self.assertEqual(self.offload_of(self.DEEPSPEED, "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device",
                                         "activation_checkpointing.cpu_checkpointing", device=""), {})
        self.assertEqual(self.offload_of(self.ACCELERATE, "fsdp_config.fsdp_offload_params", device=""), {})
        self.assertEqual(self.offload_of({"fsdp": "full_shard offload"}, "fsdp", device=""), {})
        for config in (self.DEEPSPEED, self.ACCELERATE, {"fsdp": "full_shard offload"}, {"zero_optimization": {"stage": 2, "cpu_offload": True}}):
            self.assertIn("--device", "".join(key.text for key in translated(config).keys))
            self.assertEqual(self.offload_of(config, device="cpu"), {})

    def test_deepspeeds_parts_lie_in_the_memory_of_a_gpus_host(self):
        host = {"tier": "host", "fraction": 0.3}
        self.assertEqual(self.offload_of(self.DEEPSPEED), {"parameters": {"tier": "host"}, "masters": host, "moments": host, "activations": {"tier": "host"}})
        self.assertEqual(self.offload_of({"zero_optimization": {"stage": 2, "cpu_offload": True}}), {"moments": {"tier": "host"}})
        self.assertEqual(self.offload_of({"zero_optimization": {"stage": 3, "cpu_offload_params": True}}), {"parameters": {"tier": "host"}})
        inline = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/a", "offload_param_device": "cpu"}
        self.assertEqual(self.offload_of({"distributed_type": "DEEPSPEED", "deepspeed_config": inline}),
                         {"parameters": {"tier": "host"}, "moments": {"tier": "nvme"}, "paths": ["/a"]})

    def test_fsdps_offload_is_all_of_a_ranks_part_and_the_hosts_update(self):
        host = {"tier": "host"}
        all_parts = {"parameters": host, "masters": host, "moments": host, "step": "cpu", "gradients": host}
        self.assertEqual(self.offload_of(self.ACCELERATE), all_parts)
        fp32 = {name: part for name, part in all_parts.items() if name != "masters"}
        self.assertEqual(self.offload_of({"fsdp": "hybrid_shard offload"}), fp32)
        self.assertEqual(self.offload_of({"fsdp_config": {"cpu_offload": True}}), fp32)
        for sharding in ("SHARD_GRAD_OP", "NO_SHARD"):  # under these strategies, parameters stay gathered
            config = {"fsdp_config": {"offload_params": True, "sharding_strategy": sharding}}
            self.assertEqual(self.offload_of(config), {"moments": host, "gradients": host})
            config["fsdp_config"]["mixed_precision_policy"] = "bf16"
            self.assertEqual(self.offload_of(config), {"masters": host, "moments": host, "step": "cpu", "gradients": host})


class DocumentsTest(unittest.TestCase):
    def read(self, text, name="config"):
        return import_config.read(text if isinstance(text, bytes) else text.encode(), name)

    def error(self, text, name="config"):
        with self.assertRaises(tessera.Error) as caught:
            self.read(text, name)
        self.assertEqual(caught.exception.exit_code, 78)
        self.assertIn("hint:", str(caught.exception))
        return str(caught.exception)

    def test_json_with_comments_and_trailing_commas_is_read(self):
        text = """// made by hand
        {
          "a": 1, # one
          /* two,
             on lines */ "b": [1, 2, ],
          c: -Infinity,
          "d": {"e": NaN, "f": 1e-4, "g": 1E5, "url": "http://x/#y"}
          "h": true,
        }
        # end"""
        read = self.read(text)
        self.assertTrue(math.isnan(read["d"].pop("e")))
        self.assertEqual(read, {"a": 1, "b": [1, 2], "c": -math.inf, "d": {"f": 1e-4, "g": 1e5, "url": "http://x/#y"}, "h": True})
        self.assertEqual(self.read(b"\xef\xbb\xbf{\"a\": \"\\u00e9\\n\"}"), {"a": "é\n"})

    def test_json_that_cannot_be_read_names_the_line_and_a_remedy(self):
        for text, place, *says in [('{"fp16": }', "1:10: /fp16", "want a value"), ('{"a": 1,\n "b" 2}', "2:6: /b", 'want ":"'),
                                   ('{"a": 1 "b": 2}', "1:9: /", 'want "," or "}"'), ('{"a": [1, 2}', "1:12: /a", 'want "," or "]"'),
                                   ('{"a": 1', "1:8: /", "the end of the text"), ('{"a": 1} {', "1:10: /", "want the end of the text"),
                                   ("{'a': 1}", "1:2: /", "Python"), ('{"a": True}', "1:7: /a", "Python", "true"),
                                   ('{\n"a": AdamW\n}', "2:6: /a", "Hjson", "double quotes"), ('{"a": "b\n"}', "1:7: /a", "on one line"),
                                   ('{"a": 1, /* b }', "1:10: /", "no end"), (r'{"a": "\ud800"}', "1:7: /a", "half of a character"),
                                   ('{"a": 01}', "1:7: /a", "want a value"), ('{"a": 1, "a": 2}', "1:10: /a", "given twice", "the first is at 1:2")]:
            said = self.error(text, "a.json")
            for part in (f"a.json:{place}", *says):
                self.assertIn(part, said, text)
        self.assertIn("must be an object with keys, got a list of 2", self.error("[1, 2]", "a.json"))

    def test_too_deep_too_large_and_damaged_documents_are_refused(self):
        for text, says in [("[" * 200_000, "nested more than 32 deep"), ('{"a":' * 200_000, "nested more than 32 deep"),
                           ("{" + ", ".join(f'"k{i}": 0' for i in range(1000)) + "}", "more values than a file of this kind may have"),
                           ('{"a": 1, "a": 2, "b": {"c": 1, "c": 2}}', "/b/c: given twice"), ("", "empty"), (" \n", "empty"),
                           (b'{"a": "\xff"}', "not UTF-8"), (b'{"a": "\0"}', "NUL")]:
            for name in ("a.json", *(["a.yaml"] if READS_YAML else [])):
                self.assertIn(says, self.error(text, name), text[:40])
        self.assertEqual(self.read('{"a": ' + "[" * 31 + "]" * 31 + "}")["a"].__class__, list)

    @needs_yaml
    def test_yaml_words_are_read_as_in_yaml_1_1(self):
        text = ("a: no\nb: 'no'\nc: ~\nd:\ne: 12\nf: 1e-4\ng: .5\nh: yes\ni: nan\nj: 0x10\nk: -3\nl: .inf\nm: !\nn: NO\no: nO\np: 1_000\n"
                "q:\n  - x\n  - {b: [1, 2]}\nr: {}\n# end\n")
        self.assertEqual(self.read(text), {"a": False, "b": "no", "c": None, "d": None, "e": 12, "f": 1e-4, "g": 0.5, "h": True, "i": "nan", "j": "0x10",
                                           "k": -3, "l": math.inf, "m": "", "n": False, "o": "nO", "p": "1_000", "q": ["x", {"b": [1, 2]}], "r": {}})

    @needs_yaml
    def test_hostile_yaml_is_refused_with_its_place(self):
        for text, says in [("a: &x [1]\nb: *x\n", "config:2:4: /: not YAML: aliases"), ("a: &a [*a, *a]\n", "aliases"),
                           ("a: !!python/object/apply:os.system [ls]\n", "tags (!name) are not read"), ("!x a: 1\n", "tags"),
                           ("a: 1\na: 2\n", "hint: remove one; the first is at 1:1"), ("a: 1\n---\nb: 2\n", "a second document"),
                           ("? [a, b]\n: 1\n", "a key must be a word"), ("a: [1, 2\n", "not YAML"), ("a: {b: c: d}\n", "not YAML"), ("\tkey: x", "not YAML"),
                           ("a: \x07\n", "config:1:4: /: not YAML"), ('a: "\\ud800"\n', "half of a character"), ("# only words\n", "got nothing"),
                           ("---\n", "got nothing"), ("- 1\n", "got a list of 1"), ("a:\n" + "- 1\n" * 1000, "more values")]:
            self.assertIn(says, self.error(text), text)

    def test_without_pyyaml_json_is_read_and_yaml_says_what_to_install(self):
        with mock.patch.dict("sys.modules", {"yaml": None}):
            self.assertEqual(self.read('{"a": 1}'), {"a": 1})
            with self.assertRaisesRegex(tessera.Error, "hint: pip install pyyaml") as caught:
                self.read("a: 1\n")
        self.assertEqual(caught.exception.exit_code, 69)


class CommandTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def run_it(self, *words):
        """Runs the command and returns (exit code, stdout, stderr)."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(self.folder):
            try:
                code = main([str(word) for word in words])
            except SystemExit as ended:
                code = ended.code
        return code, out.getvalue(), err.getvalue()

    def config(self, name):
        [found] = [path for path in CONFIGS if path.name == name]
        return found

    def write(self, name, text):
        (self.folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    def expect(self, code, says, *words, keeps=()):
        before = [(self.folder / name).read_bytes() for name in keeps]
        got, out, err = self.run_it(*words)
        self.assertEqual(got, code, err)
        for text in [says] if isinstance(says, str) else says:
            self.assertIn(text, err)
        self.assertIn("hint:", err)
        self.assertLess(len(err), 20_000)
        self.assertEqual(out, "")
        self.assertEqual([(self.folder / name).read_bytes() for name in keeps], before)

    def test_it_writes_the_strategy_to_stdout_and_the_table_to_stderr(self):
        code, out, err = self.run_it(self.config("ds_zero3_bf16.json"))
        self.assertEqual(code, 0, err)
        self.assertEqual(json.loads(out)["lr_schedule"]["type"], "cosine")
        for text in ("is a DeepSpeed configuration", "what became of it", "zero_optimization.stage", 'strategy = "FULL_SHARD"', "ignored: ", "also set",
                     "0 refused"):
            self.assertIn(text, err)

    def test_help_lists_the_options(self):
        code, out, _ = self.run_it("--help")
        self.assertEqual(code, 0)
        for option in ("--format", "--device", "--out", "--overwrite", "--skip-refused"):
            self.assertIn(option, out)

    def test_refused_keys_make_it_end_with_78_and_nothing_is_written(self):
        self.expect(78, ["REFUSED: ", "zero_optimization.zero_quantized_weights", "--skip-refused"], self.config("ds_zeropp.json"), "--out", "S.json")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_skipped_keys_are_left_out_and_named(self):
        code, out, err = self.run_it(self.config("ds_zeropp.json"), "--skip-refused")
        self.assertEqual(code, 0, err)
        self.assertIn("left out, since they are refused: zero_optimization.zero_quantized_weights", err)
        self.assertEqual(json.loads(out)["mixed_precision"]["param"], "bf16")

    def test_the_device_decides_what_offload_to_the_cpu_is(self):
        self.expect(78, "--device gpu", self.config("ds_zero3_offload_cpu.json"))
        for device, tier in [("cpu", None), ("gpu", "host")]:
            code, out, err = self.run_it(self.config("ds_zero3_offload_cpu.json"), "--device", device)
            self.assertEqual(code, 0, err)
            self.assertEqual(json.loads(out).get("offload", {}).get("moments", {}).get("tier"), tier)

    def test_an_existing_strategy_is_kept_unless_it_may_be_replaced(self):
        self.write("S.json", "mine")
        command = [self.config("fsdp_transformers.json"), "--out", "S.json"]
        self.expect(73, ["--out S.json", "--overwrite"], *command, keeps=["S.json"])
        self.assertEqual(self.run_it(*command, "--overwrite")[0], 0)
        self.assertIn("LlamaDecoderLayer", (self.folder / "S.json").read_text())
        self.assertEqual(self.run_it(*command[:2], "new/folder/S.json")[0], 0)
        self.assertEqual({path.name for path in self.folder.rglob("*")}, {"S.json", "new", "folder"})

    def test_inputs_links_and_folders_are_not_overwritten(self):
        config = self.write("c.json", '{"train_batch_size": 1}')
        self.expect(64, "same file", config, "--out", config, "--overwrite", keeps=[config])
        (self.folder / "link").symlink_to(config)
        (self.folder / "there").mkdir()
        for out in ("link", "there", "/dev/null"):
            self.expect(73, f"--out {out}", config, "--out", out, "--overwrite", keeps=[config])
        self.expect(73, "c.json", config, "--out", "c.json/S.json", keeps=[config])
        self.assertEqual({path.name for path in self.folder.iterdir()}, {config, "link", "there"})

    def test_a_full_disk_is_74_and_leaves_nothing(self):
        with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            self.expect(74, ["--out S.json", "No space left on device"], self.config("fsdp_transformers.json"), "--out", "S.json")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_format_option_overrides_recognition(self):
        self.write("empty.json", "{}")
        self.assertEqual(self.run_it("empty.json", "--format", "deepspeed")[0], 0)
        self.expect(78, "--format", "empty.json")
        self.expect(64, "--format", "empty.json", "--format", "megatron")
        self.expect(78, "unknown key", self.config("fsdp_transformers.json"), "--format", "deepspeed")

    def test_wrong_calls_end_with_64(self):
        for words in ([], [""], ["c.json", "--out", ""], ["c.json", "d.json"], ["c.json", "--wibble"], ["c.json", "--device", "tpu"], ["c.json", "--over"]):
            self.expect(64, "--help", *words)

    def test_missing_unreadable_and_empty_inputs_are_refused(self):
        os.mkfifo(self.folder / "pipe")
        for code, says, file in [(66, "No such file", "c.json"), (65, "is a directory", "."), (65, "is a device", "/dev/zero"), (65, "is a pipe", "pipe"),
                                 (78, "larger than 256.00 KiB", self.write("large.json", " " * (1 << 18) + "{}")),
                                 (78, "empty", self.write("empty.yaml", "")), (78, "b.json", self.write("b.json", bytes(range(256)) * 8)),
                                 (78, "b.yaml", self.write("b.yaml", bytes(range(1, 256)) * 8)), (66, "c.json", "pipe/c.json")]:
            with mock.patch("tessera.import_config.__main__._PIPE_SECONDS", 0.1):
                self.expect(code, says, file)

    def test_a_pipe_is_read_to_its_end(self):
        reading, writing = os.pipe()
        os.write(writing, b'{"train_batch_size": 1}')
        os.close(writing)
        self.assertEqual(self.run_it(f"/dev/fd/{reading}")[0], 0)
        os.close(reading)

    def test_failed_output_exits_with_74(self):
        err = io.StringIO()
        with open("/dev/full", "w") as full, contextlib.redirect_stdout(full), contextlib.redirect_stderr(err):
            self.assertEqual(main([str(self.config("ds_zero3_bf16.json"))]), 74)
        self.assertIn("No space left on device", err.getvalue())


class PageTest(unittest.TestCase):
    def test_the_committed_page_is_up_to_date(self):
        self.assertEqual((TREE / "docs" / "import-config.md").read_text(), page.page(), "python -m tessera.import_config.page > docs/import-config.md")


if __name__ == "__main__":
    unittest.main()
