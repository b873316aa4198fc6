"""Rates of links, in the form that tc writes, or "unlimited". It uses the standard library only."""

import re


def bits_per_s(rate):
    """Returns the number of bits per second; None for "unlimited"."""
    if rate == "unlimited":
        return None
    number, factor = re.fullmatch(r"([1-9][0-9]*)([kmg]?)bit", rate).groups()
    return int(number) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[factor]


def rate_label(rate):
    """Returns a text such as "10 Gbit/s"."""
    bits = bits_per_s(rate)
    return "no limit" if bits is None else bits_label(bits)


def bits_label(bits):
    factor, unit = next((factor, unit) for factor, unit in ((10**9, "Gbit/s"), (10**6, "Mbit/s"), (10**3, "kbit/s"),
                                                            (1, "bit/s")) if bits >= factor)
    return f"{bits / factor:g} {unit}"
