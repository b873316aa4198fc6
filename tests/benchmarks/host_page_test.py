#!/usr/bin/env python3
"""Tests the tables and the page of made_up_results.json. Every number below can be computed from that file by hand."""

import csv
import html.parser
import json
import pathlib
import re
import tempfile
import unittest

import paths
import tables as all_tables
import timeline
from host import tables

COSTS = ("exposed_s", "communication_fraction", "gustafson_efficiency")


def made_up():
    return json.loads((pathlib.Path(__file__).resolve().parent / "made_up_results.json").read_text())


def csv_of(data):
    """Returns {file name: text} of the tables of `data`."""
    with tempfile.TemporaryDirectory() as folder:
        all_tables.write_csv(tables.all_tables(tables.HostResults(data)), pathlib.Path(folder))
        return {path.name: path.read_text() for path in pathlib.Path(folder).iterdir()}


def page_of(data):
    from host import page  # this import needs matplotlib
    return page.Page(data).text()


def rows_of(text):
    return list(csv.DictReader(text.splitlines()))


def numbers(row, *columns):
    return [round(float(row[column]), 9) for column in columns]


class Tables(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = csv_of(made_up())

    def row(self, file, **key):
        found = [row for row in rows_of(self.files[file]) if all(row[name] == value for name, value in key.items())]
        self.assertEqual(len(found), 1, (file, key))
        return found[0]

    def test_step_quantiles_are_over_all_rounds(self):
        row = self.row("steps.csv", contender="PyTorch FSDP2")
        self.assertEqual(numbers(row, "samples", "median_s", "p10_s", "p90_s"), [3, 4.0, 3.2, 4.8])
        self.assertEqual(numbers(row, "tokens_per_s"), [50.0])  # two ranks train 100 tokens each in 4 s

    def test_exposed_time_is_over_the_familys_step_without_communication(self):
        row = self.row("steps.csv", contender="PyTorch FSDP2")
        self.assertEqual(numbers(row, *COSTS), [3.0, 0.75, 0.25])
        row = self.row("steps.csv", contender="DeepSpeed ZeRO-3")  # compared with PyTorch's step without communication
        self.assertEqual(numbers(row, *COSTS), [1.0, 0.5, 0.5])
        row = self.row("steps.csv", contender="Tessera FULL_SHARD")
        self.assertEqual(numbers(row, *COSTS), [0.25, 0.25, 0.75])
        self.assertEqual(self.row("steps.csv", contender="PyTorch, no communication")["exposed_s"], "")

    def test_memory_is_compared_with_the_formula(self):
        row = self.row("memory.csv", contender="Tessera FULL_SHARD")  # 16P/N of 2^20 parameters: 8 MiB; measured 16 MiB
        self.assertEqual(numbers(row, "measured_bytes", "formula_bytes", "measured_over_formula", "planned_bytes"),
                         [2**24, 2**23, 2.0, 9000000])
        self.assertEqual(self.row("memory.csv", contender="PyTorch FSDP2")["planned_bytes"], "")

    def test_ratio_is_peer_over_tessera_and_judged_by_its_target(self):
        row = self.row("ratios.csv", measure="step", subject="w", peer="PyTorch FSDP2")
        self.assertEqual((*numbers(row, "measured_ratio"), row["target"], row["reached"]), (4.0, "", ""))
        row = self.row("ratios.csv", measure="step", subject="w", peer="DeepSpeed ZeRO-3")
        self.assertEqual((*numbers(row, "measured_ratio"), row["target"], row["reached"]), (2.0, "", ""))
        row = self.row("ratios.csv", measure="peak_memory", subject="w", peer="PyTorch FSDP2")
        self.assertEqual((*numbers(row, "measured_ratio", "target"), row["reached"]), (1.25, 2.0, "no"))
        row = self.row("ratios.csv", measure="peak_memory", subject="w", peer="plan")
        self.assertAlmostEqual(numbers(row, "measured_ratio")[0], 9000000 / 2**24)
        # Targets of one workload are not applied to another workload.
        self.assertNotIn("no communication,Tessera FULL_SHARD", self.files["ratios.csv"])

    def test_python_steps_are_compared_with_pytorch_alone(self):
        row = self.row("python.csv", contender="Tessera in Python, FULL_SHARD")
        self.assertEqual(numbers(row, "samples", "median_s", "tokens_per_s", "exposed_s", "measured_bytes"),
                         [2, 1.25, 160.0, 0.25, 2**21])
        self.assertEqual(self.row("python.csv", contender="PyTorch, no communication")["exposed_s"], "")
        row = self.row("ratios.csv", measure="python_step", peer="PyTorch FSDP2")
        self.assertEqual((*numbers(row, "measured_ratio"), row["reached"]), (1.6, "no"))
        row = self.row("ratios.csv", measure="python_step", peer="PyTorch, no communication")
        self.assertEqual((*numbers(row, "measured_ratio"), row["reached"]), (0.8, "no"))
        row = self.row("ratios.csv", measure="python_memory")
        self.assertEqual((*numbers(row, "measured_ratio"), row["reached"]), (2.0, "yes"))

    def test_optimizer_ratio_compares_time_per_parameter(self):
        # torch takes 3 us for 1000 parameters, and Tessera takes 4 us for 2000.
        row = self.row("ratios.csv", measure="optimizer", peer="fused_fp32")
        self.assertEqual(numbers(row, "measured_ratio"), [1.5])
        self.assertEqual(numbers(self.row("ratios.csv", measure="optimizer", peer="limit"), "measured_ratio"), [0.975])
        self.assertEqual(numbers(self.row("optimizer.csv", contender="fused_fp32"), "parameters_per_s"), [1000 / 3e-6])

    def test_avx2_optimizer_ratio_uses_the_avx2_rounds(self):
        # DeepSpeed takes 7 us for 1000 parameters. Tessera takes 7 us for 2000, and 5.6 us with bf16 moments.
        row = self.row("ratios.csv", measure="optimizer_avx2", peer="deepspeed_fp32")
        self.assertEqual((*numbers(row, "measured_ratio", "target"), row["reached"]), (2.0, 1.0, "yes"))
        row = self.row("ratios.csv", measure="optimizer_avx2", tessera="tessera fp32_bf16_moments")
        self.assertEqual((*numbers(row, "measured_ratio", "target"), row["reached"]), (1.25, 1.2, "yes"))
        self.assertEqual(numbers(self.row("optimizer_avx2.csv", contender="tessera fp32"), "samples", "share_of_limit"), [2, 0.9])
        self.assertEqual(self.row("optimizer_avx2.csv", contender="deepspeed_fp32")["share_of_limit"], "")

    def test_collective_ratio_needs_the_same_bytes_and_dtype(self):
        row = self.row("ratios.csv", measure="collective", subject="barrier", bytes="0")
        self.assertEqual(numbers(row, "measured_ratio"), [200.0])
        # fp32 is compared with fp32; bf16 has another ratio. Tessera has no measurement with 4 bytes, so no row has 4
        # bytes.
        self.assertEqual(numbers(self.row("ratios.csv", subject="all_reduce", bytes="1048576", peer="gloo"),
                                 "measured_ratio"), [8.0])
        row = self.row("ratios.csv", subject="all_reduce", bytes="1048576", peer="limit")
        self.assertEqual(numbers(row, "target"), [0.9])
        self.assertNotIn("all_reduce,4,", self.files["ratios.csv"])
        row = self.row("collectives.csv", contender="gloo", collective="all_reduce", bytes="1048576")
        self.assertEqual(numbers(row, "bytes_per_s", "share_of_limit"), [1048576e3, 0.1])

    def test_crowded_ranks_are_compared_with_the_fewest_ranks(self):
        row = self.row("crowded.csv", contender="Tessera FULL_SHARD", ranks="4")  # 400 tokens in 0.5 s; 200 in 0.2 s
        self.assertEqual(numbers(row, "tokens_per_s", "over_fewest_ranks"), [800.0, 0.8])
        row = self.row("ratios.csv", measure="crowded_work", subject="4 ranks")
        self.assertEqual((*numbers(row, "measured_ratio", "target"), row["reached"]), (0.8, 0.9, "no"))
        row = self.row("ratios.csv", measure="crowded_step", subject="4 ranks")
        self.assertEqual((*numbers(row, "measured_ratio"), row["peer"]), (8.0, "PyTorch FSDP2"))

    def test_buckets_name_a_winner_and_its_gain(self):
        row = self.row("buckets.csv", bucket_bytes="4194304")
        self.assertEqual(numbers(row, "gain_over_per_tensor", "communication_gain", "collectives"), [1.5, 3.0, 12])
        row = self.row("ratios.csv", measure="buckets", subject="resnet18")
        self.assertEqual(numbers(row, "measured_ratio"), [1.5])
        row = self.row("ratios.csv", measure="buckets_communication", subject="resnet18")
        self.assertEqual(numbers(row, "measured_ratio"), [3.0])

    def test_buckets_have_quantiles_and_the_fits_seconds(self):
        row = self.row("buckets.csv", bucket_bytes="")  # one collective per tensor: 62 x 10 us + 10 MB at 10 GB/s
        self.assertEqual(numbers(row, "p50_s", "p95_s", "p99_s", "communication_s"), [0.3, 0.3, 0.3, 0.06])
        self.assertAlmostEqual(float(row["communication_by_fit_s"]), 62 * 1e-5 + 1e-3, places=8)
        self.assertEqual(numbers(row, "gain_over_per_tensor", "communication_gain"), [1.0, 1.0])

    def test_inference_is_a_table_of_its_own(self):
        row = self.row("inference.csv", model="resnet18")
        self.assertEqual(numbers(row, "loss", "accuracy", "samples", "p50_s", "p95_s"), [1.25, 0.5, 3, 0.06, 0.069])

    def test_tables_without_rows_are_not_written(self):
        self.assertIn("tessera_overhead.csv", self.files)
        self.assertNotIn("tessera_step.csv", self.files)

    def test_csv_numbers_read_back_to_the_same_bits(self):
        data = made_up()
        data["steps"][1]["rounds_s"] = [[0.1 + 0.2]]
        row = next(row for row in rows_of(csv_of(data)["steps.csv"]) if row["contender"] == "PyTorch FSDP2")
        self.assertEqual(float(row["median_s"]), 0.1 + 0.2)


class Balanced(html.parser.HTMLParser):
    """Lists in `problems` the tags and attributes that would load something, and the tags that are closed out of order.
    Records ids and links."""

    VOID = {"meta"}

    def __init__(self):
        super().__init__()
        self.open, self.problems, self.ids, self.links, self.used = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name == "href" and value.startswith("#"):
                (self.links if tag == "a" else self.used).append(value[1:])
            elif name in ("src", "href", "xlink:href", "onload"):
                self.problems.append(f"{tag} {name}")
        if tag in ("script", "link", "iframe", "img"):
            self.problems.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> out of order")


@paths.NEEDS_MATPLOTLIB
class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.page = page_of(made_up())

    def test_page_is_well_formed_and_loads_nothing(self):
        parser = Balanced()
        parser.feed(self.page)
        self.assertEqual((parser.problems, parser.open), ([], []))
        self.assertNotIn("url(http", self.page)
        used = parser.used + re.findall(r"url\(#([^)]*)\)", self.page)  # markers and hatches of pictures
        self.assertGreater(len(used), 10)
        self.assertLessEqual(set(used), set(parser.ids))

    def test_every_link_of_the_contents_leads_to_one_section(self):
        parser = Balanced()
        parser.feed(self.page)
        sections = re.findall(r'<h2 id="([^"]*)"', self.page)
        self.assertGreater(len(sections), 10)
        self.assertEqual(parser.links, sections)
        self.assertEqual(len(set(parser.ids)), len(parser.ids))

    def test_summary_comes_first_with_ratios_and_targets(self):
        summary = self.page[:self.page.index("<nav>")]
        self.assertIn("A step of Tessera FULL_SHARD is faster than one of PyTorch FSDP2 by the factors 4.0; the peak "
                      "memory of a rank is smaller by the factors 1.2", summary)
        judged = [row for row in rows_of(csv_of(made_up())["ratios.csv"]) if row["reached"]]
        reached = sum(row["reached"] == "yes" for row in judged)
        self.assertIn(f"Of {len(judged)} targets {reached} are reached", summary)
        self.assertIn('<td>FULL_SHARD beside PyTorch FSDP2</td><td class="number no">1.25 (2.00)</td>', summary)
        self.assertIn("Peak memory of a rank, A work, beside PyTorch FSDP2: 1.25 of 2", summary)

    def test_page_shows_readable_names(self):
        words = re.sub(r"<style>.*?</style>|<[^>]*>", " ", self.page, flags=re.DOTALL)
        for name in ("fused_fp32", "deepspeed_fp32", "all_reduce", "measured_ratio", "resnet18", "peak_memory",
                     "per_tensor", "1048576"):
            self.assertNotIn(name, words)
        for name in ("PyTorch, fused, fp32", "all-reduce, 1 MiB", "ResNet-18", "one collective a tensor"):
            self.assertIn(name, words)
        self.assertIn("<li>A work: 1 strategies, 5 steps: losses equal bit for bit</li>", self.page)

    def test_page_explains_sharing_on_one_host(self):
        self.assertIn("With ranks of one host sharing one copy of the parameters nothing is gathered", self.page)
        self.assertIn("This run has no rows with private copies", self.page)
        data = made_up()
        data["contenders"].append(data["contenders"][-1] | {
            "name": "tessera_full_shard_private", "label": "Tessera FULL_SHARD, private copies", "family": "tessera",
            "private_copies": True})
        data["steps"].append({"work": "w", "contender": "tessera_full_shard_private", "rounds_s": [[2.0]]})
        page = page_of(data)
        self.assertNotIn("This run has no rows with private copies", page)
        self.assertIn('<td>FULL_SHARD with private copies beside PyTorch FSDP2</td><td class="number">2.00</td>', page)

    def test_colours_follow_the_readers_mode(self):
        style = re.search("<style>(.*?)</style>", self.page, re.DOTALL).group(1)
        light, dark = re.findall(r":root {([^}]*)}", style)
        variables = [re.findall(r"(--[\w-]+):", mode) for mode in (light, dark)]
        self.assertEqual(sorted(variables[0]), sorted(variables[1]))
        self.assertLessEqual(set(re.findall(r"var\((--[\w-]+)\)", self.page)), set(variables[0]))
        self.assertIn("prefers-color-scheme: dark", style)
        # No colour is set outside the <style> element.
        self.assertEqual(re.findall(r'(?:fill|stroke)(?:: |=")(?!none|var\(|url\().*', self.page.replace(style, "")), [])

    def test_page_names_commit_command_and_checks(self):
        self.assertIn("0123456789abcdef0123456789abcdef01234567 with uncommitted changes", self.page)
        self.assertIn("benchmarks/run --rounds 1", self.page)
        self.assertIn("losses equal bit for bit", self.page)

    def test_text_from_the_machine_is_escaped(self):
        self.assertIn("Made-up &lt;CPU&gt;", self.page)
        self.assertNotIn("<CPU>", self.page)

    def test_page_names_the_best_bucket_and_why(self):
        # If alpha = 10 us and 1/beta = 10 GB/s, 100000 bytes reach half of the bandwidth.
        self.assertIn("The best bucket is 4 MiB (12 collectives a step): 1.50 times as fast", self.page)
        self.assertIn("3.00 times in communication alone, which is 20 % of a step", self.page)
        self.assertIn("made-up &lt;images&gt;", self.page)
        self.assertRegex(self.page, r"alpha = 10 µs and 1/beta = 10 GB/s: below 97\.7 KiB")

    def test_page_shows_every_section_and_missing_parts(self):
        for words in ("Ratios", "Step time: A work", "Peak memory: A work", "One Python model", "Optimizer step", "Collectives",
                      "Latencies", "More ranks than cores", "Buckets", "One step", "What the Engine costs an operator",
                      "Not in this run", "This run"):
            self.assertRegex(self.page, f"<h2[^>]*>{words}")
        self.assertIn("tessera bench step: this build does not have it", self.page)

    def test_sections_without_data_are_left_out(self):
        data = made_up() | {"steps": [], "memory": [], "optimizer": [], "optimizer_avx2": [], "collectives": [], "tessera_bench": {},
                            "timeline": None, "not_run": []}
        self.assertEqual(csv_of(data), {})
        self.assertEqual(re.findall("<h2[^>]*>([^<]*)", page_of(data)), ["This run"])

    def test_page_of_a_smoke_test_says_so(self):
        self.assertNotIn("smoke test", self.page)
        self.assertIn("smoke test", page_of(made_up() | {"quick": True}))

    def test_page_tells_that_samples_were_thinned(self):
        self.assertNotIn("thinned", self.page)
        self.assertIn("lists of samples were thinned evenly, to 300 each", page_of(made_up() | {"thinned_to": 300}))


class Trace(unittest.TestCase):
    def test_takes_the_last_step_from_its_beginning(self):
        def span(name, start, duration, tid=1):
            return {"ph": "X", "name": name, "pid": 0, "tid": tid, "ts": start, "dur": duration}

        named = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
                 {"ph": "M", "name": "thread_name", "pid": 0, "tid": 2, "args": {"name": "comm"}}]
        events = [span("step", 0, 100), span("gather", 10, 20), span("step", 100, 100), span("gather", 130, 20, tid=2),
                  span("reduce", 199, 9), span("gather", 200, 5)]
        got = timeline.last_step_of_trace({"traceEvents": named + events})
        self.assertEqual(got, [{"track": "rank 0 / comm", "name": "gather", "start_us": 30, "duration_us": 20},
                               {"track": "rank 0 / 1", "name": "reduce", "start_us": 99, "duration_us": 9}])

    def test_refuses_a_trace_without_steps(self):
        with self.assertRaises(ValueError):
            timeline.last_step_of_trace([])


def passes(contender, seconds, cpu_seconds):
    return {"contender": contender, "kind": "mixed", "bytes": 2**30, "settings": "some", "rounds_s": [seconds],
            "rounds_cpu_s": [cpu_seconds]}


class Disk(unittest.TestCase):
    """Tests passes over a disk, and steps whose state lies on a disk. Older results have neither of the two."""

    @classmethod
    def setUpClass(cls):
        data = made_up()
        data["disk"] = [passes("fio", [4.0, 4.0], [0.1, 0.1]), passes("deepspeed_aio", [3.0, 3.0], [0.8, 0.8]),
                        passes("deepspeed_aio_best", [5.0, 5.0], [1.0, 1.0]),
                        passes("tessera", [2.0, 2.0], [0.2, 0.2])]
        data["disk_steps"] = [
            {"contender": "deepspeed_swapper", "numel": 100, "bytes": 2400, "memory_bytes": 1500, "rounds_s": [[6.0]]},
            {"contender": "tessera fp32", "numel": 50, "bytes": 800, "rounds_s": [[2.0]], "rounds_limit_s": [[1.8]]},
            {"contender": "tessera fp32 cached", "numel": 50, "bytes": 400, "memory_bytes": 300, "rounds_s": [[1.0]],
             "rounds_limit_s": [[1.0]]}]
        cls.data = data
        cls.files = csv_of(data)

    def ratio(self, peer, measure, cached=False):
        found = [row for row in rows_of(self.files["ratios.csv"]) if row["peer"] == peer and row["measure"] == measure
                 and row["tessera"].endswith(" cached") == cached]
        self.assertEqual(len(found), 1)
        return found[0]

    def test_mixed_pass_counts_bytes_read_and_written(self):
        row = next(row for row in rows_of(self.files["disk.csv"]) if row["contender"] == "tessera")
        self.assertEqual(numbers(row, "bytes_per_s", "cpu_s_per_gib"), [2.0**30, 0.1])

    def test_target_is_set_against_the_faster_disk_peer(self):
        self.assertEqual(numbers(self.ratio("fio", "disk"), "measured_ratio", "target"), [2.0, 0.98])
        defaults = self.ratio("deepspeed_aio", "disk")
        self.assertEqual(numbers(defaults, "measured_ratio"), [1.5])
        self.assertEqual(defaults["target"], "")  # these defaults were faster than fio
        self.assertEqual(numbers(self.ratio("deepspeed_aio", "disk_cpu"), "measured_ratio"), [4.0])

    def test_disk_steps_are_compared_per_parameter_and_with_their_limit(self):
        self.assertEqual(numbers(self.ratio("deepspeed_swapper", "disk_step"), "measured_ratio", "target"), [1.5, 1.5])
        self.assertEqual(numbers(self.ratio("disk_limit", "disk_step"), "measured_ratio"), [0.9])
        cached = self.ratio("deepspeed_swapper", "disk_step", cached=True)
        self.assertEqual(numbers(cached, "measured_ratio", "target"), [3.0, 1.5])

    @paths.NEEDS_MATPLOTLIB
    def test_page_shows_the_disk_tables(self):
        page = page_of(self.data)
        self.assertIn("Passes over a disk: mixed", page)
        self.assertIn("DeepSpeed&#x27;s swapper, fp32", page)

    @paths.NEEDS_MATPLOTLIB
    def test_sections_of_a_later_run_name_that_run(self):
        first, = self.data["runs"]
        later = first | {"sections": ["disk"], "commit": {"hash": "abc123", "dirty": True}, "started": "then", "command": "run",
                         "machine": first["machine"] | {"cpu": "another", "cores": 3}}
        page = page_of(self.data | {"runs": [first, later]})
        self.assertRegex(page, "run 2</td><td>disk: commit abc123 with uncommitted changes, then, .*another, 3 cores.*<code>run</code>")

    def test_results_without_disk_have_no_such_section(self):
        self.assertNotIn("disk.csv", csv_of(made_up()))


if __name__ == "__main__":
    unittest.main()
