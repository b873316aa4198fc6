#!/usr/bin/env python3
"""Tests the study of ranks that do not wait, without training: the runs that it makes, the figures that it reads from
them, and how it fills its page."""

import math
import pathlib
import tempfile
import types
import unittest

import paths
import asynchronous
import large_batch
import push_orders
from asynchronous import BATCH, CLOCKS, RANKS, WAYS

COMMIT, MACHINE = {"hash": "0123456789abcdef", "dirty": False}, {"cpu": "a processor", "cores": 2}
SIZE = asynchronous.QUICK | {"clocks": list(CLOCKS)}
TEMPLATE = [("pull", "root", 0, 0), ("push", "root", 0, 0)]


class Trained:
    """Replaces asynchronous.Runs: runs end at once, and a ticket's loss is lower than the losses of earlier tickets."""

    def __init__(self, folder, study, size):
        self.folder, self.study, self.size = folder, study, size
        self.known, self.made = {}, []

    def steps(self):
        return self.size["steps"][self.study]

    def trained(self, wanted):
        for run in wanted:
            if run["name"] in self.known:
                continue
            self.made.append(run)
            if "record_order" in run["strategy"].get("sync", {}):
                timeline = push_orders.asynchronous(push_orders.Clock(*run["clock"]), push_orders.Costs(), 12, 1)
                push_orders.write_order(run["strategy"]["sync"]["record_order"], timeline, [TEMPLATE] * RANKS)
            tickets = run["tickets"] or [[RANKS * step + rank for step in range(run["steps"])] for rank in range(RANKS)]
            self.known[run["name"]] = {
                "name": run["name"], "seconds": 1.1 * run["expected_s"], "pull_s": 0.001, "push_s": 0.002, "meet_s": 0.003,
                "staleness_mean": 1.5, "staleness_max": 4, "dropped": 3 if run["tickets"] is None else 0, "held_out_loss": 0.5,
                "ranks": [{"tickets": own, "losses": [2.0 - ticket / 100 for ticket in own],
                           "ends": [0.1 * (place + 1) for place in range(len(own))]} for own in tickets]}
        return [self.known[run["name"]] for run in wanted]


def study_of(folder, name="digits", size=SIZE):
    runs = Trained(pathlib.Path(folder), name, size)
    return runs, asynchronous.Study(runs)


def results_of(name="digits"):
    with tempfile.TemporaryDirectory() as folder:
        return {"commit": COMMIT, "machine": MACHINE, "small": True, "size": SIZE} | study_of(folder, name)[1].made()


class RunsOfAStudy(unittest.TestCase):
    def test_ways_and_clocks_of_the_study_are_all_there_and_nine_runs_are_forecast(self):
        made = results_of()
        self.assertEqual({(row["way"], row["clock"]) for row in made["rows"]}, {(way, clock) for way in WAYS for clock in CLOCKS})
        self.assertEqual(len({(each["way"], each["clock"]) for each in made["forecasts"]}), 9)
        self.assertEqual(results_of("text")["forecasts"], [])

    def test_played_runs_have_an_order_of_their_tickets_and_wait_for_no_clock(self):
        with tempfile.TemporaryDirectory() as folder:
            _, study = study_of(folder)
            run = study.run("max_staleness", "slow", 0.1, 1)
            self.assertIsNone(run["clock"])
            self.assertEqual(sorted(ticket for own in run["tickets"] for ticket in own), list(range(RANKS * 16)))
            self.assertGreater(len(run["tickets"][0]), len(run["tickets"][3]))
            text = pathlib.Path(run["strategy"]["sync"]["play_order"]).read_text()
            self.assertEqual(push_orders.templates_of(text, RANKS), [TEMPLATE] * RANKS)
            self.assertEqual(text.count('"op": "push"'), RANKS * 16)

    def test_ways_with_the_same_order_share_its_file(self):
        with tempfile.TemporaryDirectory() as folder:
            _, study = study_of(folder)
            orders = {way: study.run(way, "stalls", 0.1, 1)["strategy"]["sync"]["play_order"]
                      for way, of in WAYS.items() if of.kind == "played"}
            self.assertEqual(orders["asynchronous"], orders["inverse"])
            self.assertEqual(orders["asynchronous"], orders["compensated"])
            self.assertNotEqual(orders["asynchronous"], orders["max_staleness"])

    def test_ways_whose_losses_no_clock_decides_are_trained_once_a_seed(self):
        with tempfile.TemporaryDirectory() as folder:
            runs, study = study_of(folder)
            study.made()
            of_way = [run["name"] for run in runs.made if run["way"] == "diloco" and run["seed"] == 1]
            self.assertEqual(len(of_way), 1)
            kept = {run["way"] for run in runs.made if run["clock"] and not run["name"].startswith(("lived", "calibration"))}
            self.assertEqual(kept, {"backups", "hogwild"})
            self.assertEqual(list(runs.folder.glob("*_order_*")), [], "orders of runs that have ended are removed")

    def test_rates_are_chosen_with_a_seed_of_their_own_and_one_rate_is_not_tried(self):
        for size, grid in ((SIZE, 1), (SIZE | {"factors": (1, 0.5)}, 3)):
            with tempfile.TemporaryDirectory() as folder:
                runs, study = study_of(folder, size=size)
                study.tune()
                tried = [run for run in runs.made if not run["name"].startswith("calibration")]
                self.assertEqual({run["seed"] for run in tried} - {asynchronous.TUNING_SEED}, set())
                self.assertEqual(sum(run["way"] == "synchronous" for run in tried), 0 if grid == 1 else grid)
                self.assertEqual(sum(run["way"] == "diloco" for run in tried), 0 if grid == 1 else 2)
                self.assertEqual(set(study.rates), {of.rate_of for of in WAYS.values()})

    def test_study_that_goes_on_trains_nothing_again(self):
        with tempfile.TemporaryDirectory() as folder:
            runs, study = study_of(folder)
            first = study.made()
            count = len(runs.made)
            self.assertEqual(asynchronous.Study(runs).made(), first)
            self.assertEqual(len(runs.made), count)

    def test_runs_of_outer_steps_end_with_a_meeting(self):
        for size in (asynchronous.WHOLE, asynchronous.SMALL, asynchronous.QUICK):
            for steps in size["steps"].values():
                self.assertEqual({steps % of.sync["every"] for of in WAYS.values() if "every" in of.sync}, {0})

    def test_strategies_have_the_keys_of_their_way(self):
        made = {way: asynchronous.strategy("text", way, 0.001) for way in WAYS}
        self.assertNotIn("sync", made["synchronous"])
        self.assertEqual({way for way, of in made.items() if "mesh" in of}, {"local_sgd", "diloco"})
        self.assertEqual({way for way, of in made.items() if of["strategy"] == "NO_SHARD"}, {"local_sgd", "diloco"})
        self.assertTrue(all(of.rate_of in WAYS for of in WAYS.values()))


class Outcome(unittest.TestCase):
    def test_curve_has_the_mean_loss_of_equal_parts_in_the_order_of_time(self):
        moments = [(float(at), 100.0 - at) for at in range(1, 41)]
        found = asynchronous.curve(reversed(moments))
        self.assertEqual(found["ends"], [float(2 * part) for part in range(1, 21)])
        self.assertEqual(found["losses"][0], 98.5)

    def test_simulated_moments_join_the_losses_by_their_tickets(self):
        timeline = push_orders.asynchronous(push_orders.Clock(0.5, (1, 2)), push_orders.Costs(), 3, 1)
        found = {"ranks": [{"tickets": [0, 2], "losses": [3.0, 2.0], "ends": [9.0, 9.0]}, {"tickets": [1], "losses": [1.0], "ends": [9.0]}]}
        self.assertEqual(asynchronous.moments_of(found, timeline), [(0.5, 3.0), (1.0, 2.0), (1.0, 1.0)])
        self.assertEqual(asynchronous.moments_of(found), [(9.0, 3.0), (9.0, 2.0), (9.0, 1.0)])

    def test_seconds_to_a_loss_lie_between_two_points(self):
        of_run = {"ends": [1.0, 2.0, 3.0], "losses": [3.0, 2.0, 1.0]}
        self.assertEqual(asynchronous.seconds_to(of_run, 1.5), 2.5)
        self.assertEqual(asynchronous.seconds_to(of_run, 4.0), 1.0)
        self.assertIsNone(asynchronous.seconds_to(of_run, 0.5))
        self.assertIsNone(asynchronous.seconds_to({"ends": [1.0, 2.0], "losses": [3.0, math.nan]}, 2.0))

    def test_loss_to_reach_is_that_of_the_synchronous_run_at_90_percent(self):
        rows = [{"way": "synchronous", "runs": [{"curve": {"losses": [float(50 - part) for part in range(20)]}}]}]
        self.assertEqual(asynchronous.wanted_loss(rows), 33.0)

    def test_samples_are_those_of_gradients_that_counted(self):
        rows = results_of()["rows"]
        samples = {row["way"]: row["runs"][0]["samples"] for row in rows if row["clock"] == "stalls"}
        self.assertEqual(samples["asynchronous"], 16 * RANKS * BATCH)
        self.assertEqual(samples["asynchronous"], samples["synchronous"])


class Page(unittest.TestCase):
    def setUp(self):
        self.page = (paths.ROOT / "benchmarks/results/asynchronous.md").read_text()
        self.studies = {name: results_of(name) for name in asynchronous.STUDIES}

    def test_page_has_a_place_for_each_study_and_nothing_else_changes(self):
        filled = large_batch.filled(self.page, self.studies, asynchronous.TABLES)
        for name in asynchronous.STUDIES:
            self.assertEqual(filled.count(f"table: {name} -->"), 2)
            self.assertIn(f"### {name.capitalize()}: one rank at half speed", filled)
        self.assertEqual(large_batch.filled(filled, self.studies, asynchronous.TABLES), filled)
        self.assertEqual(filled.split("<!-- table: digits")[0], self.page.split("<!-- table: digits")[0])

    def test_table_of_a_clock_has_a_line_for_each_way(self):
        study = self.studies["digits"]
        lines = asynchronous.clock_table([row for row in study["rows"] if row["clock"] == "alike"], 1.5)
        self.assertEqual(len(lines), 2 + len(WAYS))
        plain = next(line for line in lines if line.startswith("| synchronous"))
        self.assertIn("| 1.00 |", plain)
        self.assertIn("| 1.50, 4 |", plain)
        backups = next(line for line in lines if line.startswith("| backups"))
        self.assertIn("| 3 |", backups)
        self.assertEqual({line.count("|") for line in lines}, {10})

    def test_forecasts_stand_beside_what_was_measured(self):
        lines = asynchronous.forecast_table(self.studies["digits"])
        self.assertEqual(len(lines), 2 + 9 + 2 * len(CLOCKS))
        self.assertTrue(all("| 10.0 % |" in line for line in lines[2:]), lines)
        without = [line for line in lines if line.endswith("| 10.0 % |  |  |")]
        self.assertEqual({line.split(" | ")[0] for line in without}, {"| synchronous", "| backups, 1"})

    def test_losses_that_are_not_finite_end_the_quick_form(self):
        asynchronous.expect_finite(self.studies)
        self.studies["text"]["rows"][0]["runs"][0]["curve"]["losses"][3] = math.nan
        with self.assertRaisesRegex(SystemExit, "text: losses that are not finite: synchronous"):
            asynchronous.expect_finite(self.studies)

    def test_row_says_how_many_seeds_reach_a_loss(self):
        row = {"runs": [{"curve": {"ends": [1.0], "losses": [1.0]}}, {"curve": {"ends": [1.0], "losses": [2.0]}}]}
        self.assertEqual(asynchronous.reached(row, 1.0), "1.0 (1 of 2 seeds)")
        self.assertEqual(asynchronous.reached(row, 0.5), "not reached")

    def test_curves_of_a_picture_are_over_seconds_or_samples(self):
        rows = [row for row in self.studies["digits"]["rows"] if row["clock"] == "alike"]
        for axis in ("seconds", "samples"):
            drawn = asynchronous.series(rows, axis)
            self.assertEqual([len(each["points"]) for each in drawn], [asynchronous.BUCKETS] * len(WAYS))
        self.assertEqual(drawn[0]["points"][-1][0], 16 * RANKS * BATCH)

    @paths.NEEDS_MATPLOTLIB
    def test_pictures_are_drawn_for_each_clock_and_axis(self):
        with tempfile.TemporaryDirectory() as folder:
            asynchronous.draw("digits", self.studies["digits"], pathlib.Path(folder) / "asynchronous")
            text = "\n".join(asynchronous.tables_of("digits", self.studies["digits"]))
            drawn = list(pathlib.Path(folder).rglob("*.svg"))
            self.assertEqual(len(drawn), 2 * len(CLOCKS))
            for path in drawn:
                self.assertIn(f"(asynchronous/{path.name})", text)


class Files(unittest.TestCase):
    def test_folder_of_another_form_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            (path / "form.json").write_text("{}")
            options = types.SimpleNamespace(runs=path, size=asynchronous.SMALL)
            with self.assertRaisesRegex(SystemExit, "has runs of another form"):
                asynchronous.Runs(options, "digits")


if __name__ == "__main__":
    unittest.main()
