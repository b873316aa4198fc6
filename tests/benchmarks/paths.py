"""Adds benchmarks/ and tests/support/ to the folders from which tests import modules."""

import importlib.util
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/support")]
NEEDS_MATPLOTLIB = unittest.skipUnless(importlib.util.find_spec("matplotlib"),
                                       "this Python has no matplotlib. hint: scripts/setup --tests installs it")
