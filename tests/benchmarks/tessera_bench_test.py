#!/usr/bin/env python3
"""Tests how `tessera bench` is called. A script takes the command's place."""

import json
import os
import pathlib
import tempfile
import unittest

import paths  # noqa: F401
import tessera_bench

CASE = {"operation": "all_gather", "memory": "private", "dtype": "u8", "bytes": 64, "samples_ns": [1500, 2500],
        "limit_s": None}


class TesseraBench(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def binary(self, *lines):
        path = pathlib.Path(self.folder.name) / "tessera"
        path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
        os.chmod(path, 0o755)
        return str(path)

    def test_a_command_without_bench_offers_nothing(self):
        # This command prints the same help for every call, and its help does not name `bench`.
        self.assertEqual(tessera_bench.offered_sections(self.binary('echo "  train  a model, or memory"')), [])

    def test_sections_are_those_that_its_help_names(self):
        binary = self.binary('case "$1" in bench) printf "  collectives  x\\n  buckets  of memory\\n";; '
                             '*) printf "  train x\\n  bench x\\n";; esac')
        self.assertEqual(tessera_bench.offered_sections(binary), ["collectives", "buckets"])

    def test_collectives_have_the_peers_names_and_seconds(self):
        data = json.dumps({"cases": [CASE]})
        binary = self.binary(f"echo \"$@\" >&2; [ \"$3\" = --json ] && [ \"$5\" = --quick ] && echo '{data}' >\"$4\"")
        case, = tessera_bench.run_section(binary, "collectives", quick=True)["cases"]
        self.assertEqual(case["collective"], "all_gather")
        self.assertEqual([round(sample * 1e9) for sample in case["samples_s"]], [1500, 2500])

    def test_failed_bench_quotes_its_output(self):
        with self.assertRaisesRegex(tessera_bench.BenchFailed, "(?s)ended with 70.*sums differ"):
            tessera_bench.run_section(self.binary("echo sums differ >&2; exit 70"), "collectives", quick=False)

    def test_a_missing_field_is_named(self):
        for name in CASE:
            with self.subTest(name), self.assertRaisesRegex(tessera_bench.BenchFailed, f'no "{name}"'):
                tessera_bench.checked("collectives", {"cases": [{k: v for k, v in CASE.items() if k != name}]})
        model = {"model": "m", "data": "d", "gradient_bytes": 4, "steps_a_round": 1, "per_tensor_collectives": 2,
                 "per_tensor_samples_s": [1.0], "per_tensor_communication_s": [0.5],
                 "reductions": [{"bytes": 4, "samples_s": [1e-6]}],
                 "sweep": [{"bucket_bytes": 4, "collectives": 1, "samples_s": [1.0], "communication_s": [0.1]}],
                 "inference": {"loss": 1.0, "accuracy": 0.5, "samples_s": [1.0]}}
        tessera_bench.checked("buckets", {"models": [model]})
        for holder in (model, model["sweep"][0], model["inference"]):
            for name in list(holder):
                value = holder.pop(name)
                with self.subTest(name), self.assertRaisesRegex(tessera_bench.BenchFailed, f'no "{name}"'):
                    tessera_bench.checked("buckets", {"models": [model]})
                holder[name] = value
        with self.assertRaisesRegex(tessera_bench.BenchFailed, "a row has not 2 columns"):
            tessera_bench.checked("overhead", {"columns": ["a", "b"], "rows": [[1]]})


if __name__ == "__main__":
    unittest.main()
