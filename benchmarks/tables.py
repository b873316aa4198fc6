"""Makes those parts of tables that host, network and GPU runs share. It uses the standard library only.

A table is {"title", "columns", "rows"}: a row holds text, numbers, and None for a number that was not measured. Units
are in the columns' names. Every number is computed from samples.
"""

import csv

import stats

TIMES = ["samples", "median_s", "p10_s", "p90_s"]


def times(samples, scale=1.0):
    """Returns the cells of the columns TIMES. `scale`: a factor for the seconds."""
    of = stats.summary(samples)
    return [of["n"], scale * of["median"], scale * of["p10"], scale * of["p90"]]


def ratio(theirs, ours):
    """Returns the ratio of the medians; None if one of the two has no samples."""
    return stats.median(theirs) / stats.median(ours) if theirs and ours else None


def reached(measured, target):
    """Returns "yes", "no", or None if nothing is judged."""
    return None if target is None or measured is None else "yes" if measured >= target else "no"


def column(table, name):
    return [row[table["columns"].index(name)] for row in table["rows"]]


def write_csv(tables, folder):
    """Writes `tables`: {file stem: table}. Tables without rows are left out."""
    for name, table in tables.items():
        if table["rows"]:
            with open(folder / f"{name}.csv", "w", newline="") as file:
                # Lines end as in the rest of the repository. Numbers that are read back have the same bits.
                csv.writer(file, lineterminator="\n").writerows([table["columns"], *table["rows"]])
