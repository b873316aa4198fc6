#!/usr/bin/env python3
"""Tests charts: marks lie where their values are, an inline picture takes its colours from the page, and ids of
different pictures differ."""

import pathlib
import re
import runpy
import sys
import tempfile
import unittest
import unittest.mock

import paths
import readable

FAMILIES = {"tessera": "Tessera", "torch": "PyTorch", "deepspeed": "DeepSpeed", "python": "Tessera in Python"}


def bar(family, value, **more):
    return {"label": f"<{family}>", "family": family, "value": value, "note": f"{value} s"} | more


@paths.NEEDS_MATPLOTLIB
class Charts(unittest.TestCase):
    def setUp(self):
        import plots
        self.plots = plots

    def test_bars_and_references_stand_at_their_values(self):
        values = [1.0, 4.0, 2.0, 0.75]
        figure = self.plots.bars([bar(family, value, low=value / 2, high=value * 2, mark=3.0) for family, value in zip(FAMILIES, values)],
                                 "seconds", FAMILIES, [("alone", 0.75)])
        axes = figure.axes[0]
        self.assertEqual([patch.get_width() for patch in axes.patches], values)
        self.assertEqual([patch.get_x() for patch in axes.patches], [0] * 4)
        whiskers = [collection.get_segments()[0][:, 0].tolist() for collection in axes.collections]
        self.assertEqual(whiskers, [[value / 2, value * 2] for value in values])
        self.assertIn([0.75, 0.75], [list(line.get_xdata()) for line in axes.lines])
        self.assertEqual(sum(list(line.get_xdata()) == [3.0, 3.0] for line in axes.lines), 4)
        # The families of contenders can be told apart without colours.
        self.assertEqual([patch.get_hatch() for patch in axes.patches], [None, None, "////", None])

    def test_values_of_a_chart_with_logarithmic_axes_lie_between_ticks(self):
        for values in ([0.2, 0.25], [3.0, 40.0], [1.0, 1.0], [0.05, 900.0]):
            axes = self.plots.lines([{"label": "a", "points": list(zip([1024, 4096], values))}], "time").axes[0]
            low, high = axes.get_ylim()
            ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
            self.assertTrue(low < min(values) and max(values) < high, values)
            self.assertEqual([min(ticks), max(ticks)], [low, high])
            self.assertTrue(2 <= len(ticks) <= 8, ticks)

    def test_a_series_without_points_keeps_its_line_for_others(self):
        one = self.plots.lines([{"label": "a", "points": []}, {"label": "b", "points": [(1, 1), (2, 2)]}], "time").axes[0].lines
        both = self.plots.lines([{"label": name, "points": [(1, 1), (2, 2)]} for name in "ab"], "time").axes[0].lines
        self.assertEqual([line.get_color() for line in one], [both[1].get_color()])
        self.assertEqual(len({(line.get_linestyle(), line.get_marker()) for line in both}), 2)

    def test_histograms_are_shares_of_their_largest_bin(self):
        rows = [{"label": "a", "note": "", "bins": [(1e-6, 1e-5, 5), (1e-5, 1e-4, 10)]},
                {"label": "b", "note": "", "bins": [(1e-5, 1e-4, 3)]}]
        heights = [[patch.get_data().baseline - value for value in patch.get_data().values]
                   for patch in self.plots.histograms(rows).axes[0].patches]
        self.assertEqual([[round(height, 9) for height in row] for row in heights], [[0.4, 0.8], [0.8]])

    def test_spans_lie_in_the_lane_of_their_track(self):
        events = [{"track": "rank 1", "name": "reduce a", "start_us": 100.0, "duration_us": 900.0},
                  {"track": "rank 0", "name": "gather b", "start_us": 0.0, "duration_us": 400.0}]
        patches = self.plots.timeline(events).axes[0].patches
        self.assertEqual([(patch.get_x(), patch.get_width(), round(patch.get_y())) for patch in patches], [(0.1, 0.9, 1), (0.0, 0.4, 0)])
        self.assertEqual(len({patch.get_alpha() for patch in patches}), 2)

    def test_inline_svg_uses_colour_variables_and_unique_ids(self):
        first, second = (self.plots.svg(self.plots.bars([bar(family, 1.0, low=0.9, high=1.1) for family in FAMILIES], "s", FAMILIES), title)
                         for title in ("A & <b>", "C"))
        self.assertTrue(first.startswith('<svg viewBox="0 0 900 164" role="img" aria-label="A &amp; &lt;b&gt;"><title>A &amp;'), first[:200])
        self.assertIn("&lt;tessera&gt;", first)
        self.assertNotRegex(first, r"(?:fill|stroke): #|xlink|<style|<metadata|<!|font-family|clip-path")
        names = {f"--{name}" for name in self.plots.COLOURS}
        self.assertLessEqual(set(re.findall(r"var\(([\w-]+)\)", first)), names)
        ids = [set(re.findall(r' id="([^"]*)"', text)) for text in (first, second)]
        self.assertEqual(ids[0], set(re.findall(r'(?:url\(#|href="#)([^")]*)', first)))
        self.assertTrue(ids[0] and not ids[0] & ids[1], ids)

    def test_standalone_svg_has_fixed_colours(self):
        text = self.plots.svg(self.plots.curves([{"label": "a", "points": [(1, 2), (2, 1)]}], "step", "loss", (1, 4)), "T", inline=False)
        self.assertIn('xmlns="http://www.w3.org/2000/svg"', text)
        self.assertRegex(text, "stroke: #[0-9a-f]{6}")
        self.assertNotIn("var(--", text)

    def test_colours_differ(self):
        self.assertEqual(len(set(self.plots.COLOURS.values())), len(self.plots.COLOURS))


class Labels(unittest.TestCase):
    def test_labels_pick_a_readable_unit(self):
        self.assertEqual([readable.size_label(size) for size in (4, 1024, 1536, 1 << 27)],
                         ["4 B", "1 KiB", "1.5 KiB", "128 MiB"])
        self.assertEqual([readable.time_label(t) for t in (2.0, 0.0125, 3e-6, 5e-8, -0.5)], ["2 s", "12.5 ms", "3 µs", "50 ns", "-500 ms"])

    def test_cells_have_the_unit_of_their_column(self):
        cells = [("median_s", 0.5), ("bytes_per_s", 2e9), ("parameters_per_s", 5e8), ("peak_bytes", 1024), ("share_of_limit", 0.5),
                 ("samples", 1000), ("tokens_per_s", 1234.5), ("bucket_bytes", None), ("exposed_s", None)]
        self.assertEqual([readable.shown(*cell) for cell in cells],
                         ["500 ms", "2 GB/s", "0.5 G/s", "1 KiB", "50 %", "1,000", "1,234", "one a tensor", ""])

    def test_lists_are_joined_with_commas_and_and(self):
        self.assertEqual([readable.listed(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])], ["a", "a and b", "a, b and c"])


@paths.NEEDS_MATPLOTLIB
class BucketSweep(unittest.TestCase):
    def test_shares_of_communication_stand_above_their_sizes_of_buckets(self):
        with tempfile.TemporaryDirectory() as name:
            table, picture = pathlib.Path(name) / "buckets.csv", pathlib.Path(name) / "s.svg"
            table.write_text("step,bucket_mb,seconds,communication_share,loss\n1,0.5,2,0.25,7\n2,25,1,0.125,7\n")
            with unittest.mock.patch.object(sys, "argv", ["plot_buckets.py", str(table), str(picture)]):
                axes = runpy.run_path(str(paths.ROOT / "examples/images/plot_buckets.py"))["axes"]
            [line] = axes.lines
            self.assertEqual(list(zip(line.get_xdata(), line.get_ydata())), [(0.5, 0.25), (25, 0.125)])
            self.assertEqual([label.get_text() for label in axes.get_xticklabels()], ["0.5", "25"])
            self.assertIn("<svg", picture.read_text())


if __name__ == "__main__":
    unittest.main()
