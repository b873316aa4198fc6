#!/usr/bin/env python3
"""Tests the workloads: sizes are those of the models, and tokens are in the form that the peers and Tessera read."""

import pathlib
import struct
import sys
import tempfile
import unittest
import unittest.mock

import paths  # noqa: F401
import launch
import targets
import works
from contenders import CONTENDERS, named, strategy_file, those_of

OF_GPU = works.of_gpu(quick=False)
EVERY_WORK = [work for quick in (False, True) for work in
              (*works.of_host(quick), works.of_python(quick), works.of_crowd(quick), works.of_net(quick, 3), *works.of_gpu(quick))]


class Sizes(unittest.TestCase):
    def test_parameter_count_equals_the_models(self):
        try:
            import torch
        except ImportError:
            self.skipTest("this interpreter has no torch")
        sys.path.insert(0, str(works.REPOSITORY / "tests" / "oracle"))
        from models import make_model
        for work in EVERY_WORK:
            with self.subTest(work.name), torch.device("meta"):
                self.assertEqual(work.parameters(), sum(p.numel() for p in make_model(work.model).parameters()))

    def test_every_work_has_warm_up_steps(self):
        for work in EVERY_WORK:
            self.assertGreaterEqual(work.warm_up, 1 if work.name in ("crowded", "gpt_7b_host") else 2, work.name)

    def test_gpu_works_have_the_sizes_of_their_names(self):
        wanted = {"124m": 124, "1b5": 1558, "7b": 6654}
        for work in OF_GPU:
            self.assertAlmostEqual(work.parameters() / 1e6, wanted[work.name.split("_")[1]], delta=1)

    def test_large_models_recompute_their_blocks(self):
        for work in OF_GPU:
            self.assertEqual(work.model["recompute"], work.parameters() > 1e9, work.name)

    def test_seven_billion_fit_a_gpu_of_139_gib_and_not_one_of_78(self):
        needs = {work.name: work.needs_bytes() / 2**30 for work in OF_GPU}
        self.assertTrue(120 < needs["gpt_7b"] < 139, needs)
        self.assertLess(needs["gpt_1b5"], 78)

    def test_tokens_of_a_step_fit_into_the_file(self):
        for work in EVERY_WORK:
            self.assertLess(work.tokens(), works.TOKENS, work.name)


class Flops(unittest.TestCase):
    def test_flops_equal_a_hand_computed_example(self):
        model = {"layers": 2, "width": 3, "vocab_size": 5, "seq_len": 7}
        # The matrices are 2 layers of 12 * 9 and a head of 15, so they have 231 parameters. Attention takes
        # 12 * 2 * 3 * 7 = 504 operations.
        self.assertEqual(works.flops_per_token(model), 6 * 231 + 504)

    def test_flops_are_about_six_per_parameter(self):
        for work in OF_GPU:
            self.assertTrue(1.0 < works.flops_per_token(work.model) / (6 * work.parameters()) < 1.2, work.name)


class Contenders(unittest.TestCase):
    def test_works_have_contenders_of_their_place(self):
        places = {"python": "python", "crowded": "host", "gpt_27m": "net"} | {work.name: "gpu" for work in OF_GPU}
        for work in EVERY_WORK:
            if work.name != "quick":
                self.assertLessEqual(set(work.contenders), set(those_of(places.get(work.name, "host"))), work.name)

    def test_ranks_that_share_a_gpu_share_the_batch(self):
        for work in EVERY_WORK:
            for contender in named(work.contenders):
                self.assertEqual(work.batch % contender.ranks, 0, (work.name, contender.name))

    def test_private_copies_are_the_same_strategy_without_host_sharing(self):
        work = works.of_host(quick=False)[1]
        private = [contender for contender in CONTENDERS.values() if contender.private_copies]
        self.assertEqual({contender.argument for contender in private},
                         {"SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD"})
        for contender in private:
            with self.subTest(contender.name):
                shared = CONTENDERS[contender.name.removesuffix("_private")]
                self.assertEqual(contender.stage, shared.stage)
                self.assertNotIn("host_sharing", strategy_file(shared, work))
                self.assertEqual(strategy_file(contender, work), strategy_file(shared, work) | {"host_sharing": False})

    def test_zero_stage_matches_what_is_sharded(self):
        stages = {name: CONTENDERS[name].stage for name in those_of("host") + those_of("python")}
        self.assertEqual({name for name, stage in stages.items() if stage == 3},
                         {"torch_fsdp2", "deepspeed_zero3", "tessera_full_shard", "tessera_full_shard_private", "python_full_shard",
                          "python_full_shard_private"})
        self.assertEqual({name for name, stage in stages.items() if stage == 0},
                         {"torch_alone", "torch_ddp", "tessera_alone", "tessera_no_shard", "python_no_shard"})

    def test_targets_name_contenders_of_their_place(self):
        known = set(those_of("host") + those_of("python") + ("plan",))
        for _, peer, ours, _ in targets.STEPS["host"] + targets.MEMORY:
            self.assertLessEqual({peer, ours}, known)
        self.assertLessEqual({name for _, _, *pair in targets.SUMMARY for name in pair}, known)
        self.assertLessEqual({name for _, *pair, _ in targets.STEPS["gpu"] for name in pair}, set(those_of("gpu")))
        self.assertLessEqual({name for *pair, _ in targets.NET_STEPS + targets.NET_EXPOSED for name in pair}, set(those_of("net")))

    def test_the_package_of_a_build_is_beside_its_program(self):
        with tempfile.TemporaryDirectory() as folder:
            binary = pathlib.Path(folder).resolve() / "app/tessera"
            self.assertEqual(launch.built_package(binary), {})
            package = binary.parents[1] / "python"
            (package / "tessera").mkdir(parents=True)
            with unittest.mock.patch.dict("os.environ", PYTHONPATH="/other"):
                self.assertEqual(launch.built_package(binary), {"PYTHONPATH": f"{package}:/other"})


class Tokens(unittest.TestCase):
    def test_token_file_is_llmc_format_and_deterministic(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = pathlib.Path(folder) / "a", pathlib.Path(folder) / "b"
            works.write_tokens(first, 300)
            works.write_tokens(second, 300)
            data = first.read_bytes()
            self.assertEqual(data, second.read_bytes())
            self.assertEqual(struct.unpack("<3i", data[:12]), (20240520, 1, works.TOKENS))
            tokens = struct.unpack(f"<{works.TOKENS}H", data[1024:])
            self.assertLess(max(tokens), 300)
            self.assertEqual(len(set(tokens)), 300)


if __name__ == "__main__":
    unittest.main()
