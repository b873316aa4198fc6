"""Draws the results of `images sweep`: the share of communication against the size of buckets.

Usage: python plot_buckets.py buckets.csv s.svg
"""

import csv
import sys

from matplotlib.figure import Figure

with open(sys.argv[1], newline="") as file:
    rows = [(float(row["bucket_mb"]), float(row["communication_share"])) for row in csv.DictReader(file)]
figure = Figure(figsize=(6, 3.5), layout="constrained")
axes = figure.add_subplot(xlabel="bucket, MB", ylabel="s, share of communication", xscale="log", ylim=(0, None))
axes.plot(*zip(*rows), marker="o")
axes.set_xticks([size for size, _ in rows], [f"{size:g}" for size, _ in rows])
figure.savefig(sys.argv[2])
