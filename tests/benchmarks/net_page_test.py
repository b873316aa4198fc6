#!/usr/bin/env python3
"""Tests the table and the page of a made-up network run. Every number below can be computed by hand from that run."""

import copy
import re
import unittest

import paths
import throughput
from contenders import CONTENDERS
from net import measure, rates, tables

NAMES = ("torch_alone", "tessera_alone", "torch_ddp", "tessera_no_shard", "torch_fsdp2", "tessera_int8")


def steps(name, *seconds, link=None, rate="1gbit"):
    return {"work": "w", "rate": rate, "contender": name, "rounds": [
        {"round": number, "samples_s": [second - 0.1, second, second + 0.5], "losses": [], "link_bytes": link and {"sent": link, "received": 5}}
        for number, second in enumerate(seconds, start=1)]}


DATA = {
    "schema": 3, "where": "net", "quick": False, "versions": {"torch": "2.15"}, "checks": [],
    "runs": [{"command": "benchmarks/run_net", "sections": ["w"], "rounds": 2, "seconds": 60.0, "started": "then",
              "commit": {"hash": "abc", "dirty": True}, "hosts": 2, "ranks_per_host": 1, "rates": ["unlimited", "1gbit"],
              "processor": "CPU <X>", "machine": {"cpu": "X", "cores": 2, "memory_bytes": 2**30, "kernel": "6", "load_average_at_start": 0}}],
    "works": [{"name": "w", "title": "A work", "model": {"seq_len": 100}, "dtype": "fp32", "parameters": 10, "batch": 1, "steps": 3,
               "warm_up": 1, "contenders": list(NAMES)}],
    "contenders": [CONTENDERS[name].facts() for name in NAMES],
    "wire": [{"rate": "1gbit", "round": number, "one_way": 9e8, "both_ways": speed} for number, speed in ((1, 1e8), (2, 3e8))],
    "steps": [steps("torch_alone", 0.5, 0.5), steps("tessera_alone", 0.25, 0.5), steps("torch_ddp", 1.0, 2.0, link=100_000_000),
              steps("tessera_no_shard", 0.5, 3.0), steps("torch_fsdp2", 4.0), steps("tessera_int8", 0.5)],
    "predicted": [{"rate": "1gbit", "contender": "tessera_no_shard", "round": number, "seconds": seconds} for number, seconds in ((1, 1.0), (2, 3.2))],
    "failed": [{"key": "1gbit/torch_fsdp2", "what": "PyTorch FSDP2 at 1 Gbit/s", "round": 2, "why": "exit code 1\nno <luck>"}],
    "not_run": [{"key": "w/deepspeed_zero3", "what": "DeepSpeed ZeRO-3", "round": None, "why": "not installed"}]}


class Tables(unittest.TestCase):
    def setUp(self):
        self.results = tables.NetResults(copy.deepcopy(DATA))

    def row(self, name):
        return self.results.row("1gbit", name)

    def test_a_sample_is_the_median_of_a_round(self):
        row = self.row("tessera_no_shard")
        self.assertEqual((row["samples"], row["median_s"], row["p10_s"]), (2, 1.75, 0.75))
        self.assertEqual((row["bits_per_s"], row["wire_bytes_per_s"], row["compressed"]), (10**9, 2e8, False))
        self.assertTrue(self.row("tessera_int8")["compressed"])

    def test_ratios_are_of_the_same_round(self):
        self.assertEqual(self.row("tessera_no_shard")["over_ddp"], (0.5 / 1.0 + 3.0 / 2.0) / 2)
        self.assertEqual(self.row("tessera_no_shard")["over_fsdp2"], 0.5 / 4.0)  # the second round has no FSDP2
        self.assertIsNone(tables.ratio({1: 1.0}, {2: 1.0}))

    def test_exposed_time_is_over_one_rank_alone(self):
        self.assertEqual(self.row("tessera_no_shard")["exposed_s"], (0.25 + 2.5) / 2)
        self.assertEqual(self.row("torch_ddp")["exposed_s"], (0.5 + 1.5) / 2)
        self.assertEqual((self.row("torch_alone")["exposed_s"], self.row("tessera_alone")["alone_s"]), (None, 0.375))

    def test_wire_time_is_the_busier_directions_bytes_over_its_speed(self):
        self.assertEqual((self.row("torch_ddp")["link_bytes"], self.row("torch_ddp")["wire_s"]), (100_000_000, 0.5))
        self.assertIsNone(self.row("torch_fsdp2")["wire_s"])

    def test_predicted_time_is_compared_with_the_median(self):
        row = self.row("tessera_no_shard")
        self.assertEqual(row["predicted_s"], 2.1)
        self.assertAlmostEqual(row["predicted_off"], 0.2)
        self.assertAlmostEqual(*self.results.predictions_off(), 0.2)

    def test_contender_without_samples_has_no_row(self):
        self.assertIsNone(self.results.row("unlimited", "torch_ddp"))
        table = tables.table(self.results)
        self.assertEqual([row[table["columns"].index("contender")] for row in table["rows"]], [CONTENDERS[name].label for name in NAMES])

    def test_targets_are_judged_at_their_rate_or_not_measured(self):
        found = {(of["measure"], of["ours"], of["bits_per_s"]): (of["ratio"], of["met"]) for of in tables.judged(self.results)}
        self.assertEqual(found["step", "Tessera NO_SHARD", 10**9], (1.0, False))
        self.assertEqual(found["step", "Tessera NO_SHARD", 2 * 10**9], (None, None))
        self.assertEqual(found["step", "Tessera NO_SHARD, lossless", 10**9], (None, None))  # this contender was not run
        self.results.data["steps"][3] = steps("tessera_no_shard", 0.95, 1.9)
        met, = (of["met"] for of in tables.judged(self.results) if (of["ours"], of["bits_per_s"]) == ("Tessera NO_SHARD", 10**9))
        self.assertTrue(met)


@paths.NEEDS_MATPLOTLIB
class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        from net import page
        cls.page = page.Page(copy.deepcopy(DATA)).text()

    def test_page_tells_what_was_run_and_what_was_not(self):
        for wanted in ("2 hosts with 1 rank of one thread each", "2 rounds a rate", "no limit is not measured; 1 Gbit/s is 200 MB/s",
                       "abc with uncommitted changes, then, 60 s", "CPU &lt;X&gt;, 1 GiB", "<code>benchmarks/run_net</code>",
                       "PyTorch FSDP2 at 1 Gbit/s, round 2: exit code 1<details>", "no &lt;luck&gt;", "DeepSpeed ZeRO-3: not installed",
                       "Tessera NO_SHARD, int8 (less on the wire)", "One connection carries 200 MB/s each way"):
            self.assertIn(wanted, self.page)

    def test_a_rate_without_samples_has_no_section(self):
        titles = re.findall("<h2[^>]*>([^<]*)", self.page)
        self.assertEqual(titles, ["Targets", "Step time and rate", "At 1 Gbit/s", "Not in this run, or failed", "This run"])

    def test_page_judges_predictions_by_their_target(self):
        self.assertRegex(self.page, "the farthest off of 1</td><td>step</td><td>all</td>.*?0.10</td>.*?0.200</td><td class=\"no\">no")


class Throughput(unittest.TestCase):
    def setUp(self):
        def of(hosts, name, seconds, link=None, batch=2):
            return {"work": f"w{batch}", "hosts": hosts, "contender": name, "rounds": [
                {"round": 1, "samples_s": [seconds, seconds, 9.0], "losses": [], "link_bytes": link and {"sent": link, "received": 5}}]}

        names = ("torch_alone", "torch_ddp")
        work = DATA["works"][0] | {"name": "w2", "batch": 2}
        self.data = DATA | {
            "runs": [DATA["runs"][0] | {"hosts": [1, 2], "rate": "1gbit", "rounds": 1}], "works": [work],
            "contenders": [CONTENDERS[name].facts() for name in names],
            "steps": [of(1, "torch_alone", 0.5), of(2, "torch_alone", 1.0), of(2, "torch_ddp", 2.0, 1050)],
            "payloads": [{"hosts": 2, "contender": "torch_ddp", "bytes": 1000.0}]}

    def test_tokens_are_those_of_all_hosts_beside_ranks_that_are_alone(self):
        found = throughput.ThroughputResults(self.data)
        rows = {(row["hosts"], row["contender"]): row for row in found.rows()}
        self.assertEqual(len(rows), 3)
        self.assertEqual(rows[1, CONTENDERS["torch_alone"].label]["tokens_per_s"], 1 * 2 * 100 / 0.5)
        of = rows[2, CONTENDERS["torch_ddp"].label]
        self.assertEqual((of["tokens_per_s"], of["of_no_communication"], of["over_formula"]), (2 * 2 * 100 / 2.0, 0.5, 1.05))
        page = throughput.page_of(found)
        self.assertIn(f"| {CONTENDERS['torch_ddp'].label} | 2 |  | 200 (0.50) |", page)
        self.assertIn(f"| {CONTENDERS['torch_ddp'].label} | 2 |  | 0.0 (1.05) |", page)

    def test_payload_that_is_not_the_formulas_is_found(self):
        self.assertEqual(throughput.ThroughputResults(self.data).far_off(), [])
        for sent in (850, 1150):
            self.data["steps"][2]["rounds"][0]["link_bytes"] = {"sent": sent, "received": 0}
            row, = throughput.ThroughputResults(self.data).far_off()
            self.assertEqual(row["link_bytes"], sent)

    def test_formula_of_an_all_reduce_is_that_of_a_ring(self):
        self.assertEqual([throughput.payload("torch_ddp", hosts, 10) for hosts in (1, 2, 4)], [0, 40, 60])
        self.assertIsNone(throughput.payload("tessera_full_shard", 2, 10))

    def test_batch_is_in_the_work_and_no_steps_are_for_power_sgd(self):
        options = throughput.parsed(["--quick", "--batches", "4", "2", "--hosts", "3"])
        self.assertEqual((options.batches, options.hosts, options.rounds), ([2, 4], [3], 1))
        work = throughput.work_of(options, 4)
        self.assertEqual((work.batch, work.warm_up, work.name), (4, 1, "quick_batch_4"))


class Rates(unittest.TestCase):
    def test_rates_are_read_as_tc_writes_them(self):
        self.assertEqual([rates.bits_per_s(rate) for rate in ("unlimited", "10gbit", "200mbit", "8kbit", "9bit")],
                         [None, 10**10, 2 * 10**8, 8000, 9])
        self.assertEqual([rates.rate_label(rate) for rate in ("unlimited", "10gbit", "200mbit")], ["no limit", "10 Gbit/s", "200 Mbit/s"])

    def test_other_rates_are_refused(self):
        for text, said in (("fast", "wants rates such as 2gbit"), ("1gbit,1000mbit", "names a rate twice")):
            with self.assertRaisesRegex(Exception, said):
                measure.rates_of(text)


if __name__ == "__main__":
    unittest.main()
