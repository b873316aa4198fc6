"""Statistics of timings. It uses the standard library only."""

import math


def percentile(samples, percent):
    """Returns the `percent`-th percentile, interpolated linearly between the two neighbouring samples.

    REQUIRES: at least one sample; 0 <= percent <= 100. Raises ValueError otherwise.
    """
    if not samples:
        raise ValueError("a percentile of no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be from 0 to 100, got {percent}")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(samples):
    return percentile(samples, 50)


def summary(samples):
    """Returns {"n", "p10", "median", "p90"}, in the samples' unit."""
    return {"n": len(samples), "p10": percentile(samples, 10), "median": median(samples),
            "p90": percentile(samples, 90)}


def interval_of_median(samples):
    """Returns a 95 % interval (least, most) of the median of the distribution from which the samples were drawn. Both
    ends are samples. The number of samples below the median has a binomial distribution, and its standard deviation is
    sqrt(n) / 2."""
    ordered = sorted(samples)
    below = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return ordered[below], ordered[-1 - below]


def thinned(samples, most):
    """Returns at most `most` samples, evenly spread over the time of the measurement."""
    if len(samples) <= most:
        return samples
    return [samples[k * len(samples) // most] for k in range(most)]


def sample_of(samples, most):
    """Returns at most `most` samples in order of size. It is for lists whose order in time does not matter. Sorted
    samples need a third of the space in a file."""
    return sorted(thinned(samples, most))


def ratio_by_turns(longer, shorter, a_turn):
    """Returns the time of `longer` divided by that of `shorter`. Both were measured in turn, with `a_turn` samples each
    time. The ratio of both medians is computed for each turn, and the median of these ratios is returned. A load on the
    machine that lasts longer than a turn thus slows both."""
    turns = min(len(longer), len(shorter)) // a_turn
    if turns == 0:
        raise ValueError("a ratio needs a whole turn of both")
    return median([median(longer[k:k + a_turn]) / median(shorter[k:k + a_turn])
                   for k in range(0, turns * a_turn, a_turn)])


def alpha_beta_fit(points):
    """Fits seconds = alpha + beta * bytes (Hockney's model) to pairs (bytes, seconds). Returns (alpha s, beta s/byte).

    The fit uses least squares of the *relative* error, sum of ((alpha + beta b - t) / t)^2. Sizes span many powers of
    two, and with absolute errors the largest size would decide alone. REQUIRES: points of at least two sizes, and times
    above 0. Raises ValueError otherwise.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError("a line needs points of two sizes or more")
    if any(seconds <= 0 for _, seconds in points):
        raise ValueError("times must be above 0")
    # These are the normal equations of the rows (1/t, b/t) with right-hand side 1.
    a11 = a12 = a22 = b1 = b2 = 0.0
    for size, seconds in points:
        x, y = 1.0 / seconds, size / seconds
        a11, a12, a22 = a11 + x * x, a12 + x * y, a22 + y * y
        b1, b2 = b1 + x, b2 + y
    determinant = a11 * a22 - a12 * a12
    return (b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant


def log_histogram(samples, bins_a_decade=10):
    """Returns counts in bins of equal ratio, [(low, high, count)], from the bin of the smallest sample to that of the largest.

    Bin edges are powers of 10^(1/bins_a_decade), so different histograms share them. REQUIRES: samples above 0.
    """
    if not samples:
        raise ValueError("a histogram of no samples")
    if min(samples) <= 0:
        raise ValueError("a logarithmic histogram needs samples above 0")
    numbers = [math.floor(math.log10(sample) * bins_a_decade) for sample in samples]
    counts = {number: 0 for number in range(min(numbers), max(numbers) + 1)}
    for number in numbers:
        counts[number] += 1
    return [(10 ** (n / bins_a_decade), 10 ** ((n + 1) / bins_a_decade), count) for n, count in counts.items()]


def communication(step_seconds, alone_seconds):
    """Returns {"exposed_s", "fraction", "gustafson"}: how much longer a step takes with communication than without.

    exposed_s: step - alone. fraction: exposed / step. gustafson: alone / step. Every rank brings its own batch, so N
    ranks do N times the work of one rank. The scaled speed-up is therefore N * alone / step (Gustafson 1988), and
    gustafson is this speed-up divided by N. With a strategy that shards the optimizer, a rank does less work than a
    rank alone: exposed_s may be negative and gustafson above 1.
    """
    return {"exposed_s": step_seconds - alone_seconds, "fraction": (step_seconds - alone_seconds) / step_seconds,
            "gustafson": alone_seconds / step_seconds}
