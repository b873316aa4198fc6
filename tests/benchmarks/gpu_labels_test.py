#!/usr/bin/env python3
"""Tests with label gpu are declared WHOLE (one entry of ctest): scripts/gpu_check asks ctest for them before they are
built, and uses their names as targets. A test with an entry for each case has no label until it is built. Such a test
would be neither built nor run, without any message. Tests with label gpu share no program with other tests (IN), since
scripts/gpu_bundle packs the program that has the name of the test, with the time limit that the test has here.
"""

import json
import re
import subprocess
import sys
import unittest

import paths  # noqa: F401
from works import REPOSITORY

DECLARATION = re.compile(r"tessera_test\(\s*(\w+)([^)]*)\)")


def gpu_tests(text):
    """Returns {name: its arguments} of the tests with label gpu that a CMakeLists.txt declares."""
    uncommented = re.sub(r"#.*", "", text)
    return {name: arguments.split() for name, arguments in DECLARATION.findall(uncommented)
            if re.search(r"\bLABELS\b[^)]*\bgpu\b", arguments)}


class Labels(unittest.TestCase):
    def test_declarations_are_understood(self):
        text = "tessera_test(a WHOLE SOURCES a.cc\n  LABELS slow gpu)\ntessera_test(b SOURCES gpu.cc LABELS forks)\n"
        self.assertEqual(gpu_tests(text), {"a": ["WHOLE", "SOURCES", "a.cc", "LABELS", "slow", "gpu"]})

    def test_every_gpu_test_is_whole_and_has_a_program(self):
        found = {}
        for file in (REPOSITORY / "tests").glob("**/CMakeLists.txt"):
            text = file.read_text()
            found |= gpu_tests(text)
            self.assertNotRegex(DECLARATION.sub("", text), r"\bLABELS\b[^)]*\bgpu\b", file)  # no other test has the label
        self.assertIn("device_kernels_test", found)
        self.assertEqual([name for name, arguments in found.items() if "WHOLE" not in arguments or "IN" in arguments], [])

    def test_a_packed_test_has_the_limit_of_its_entry(self):
        code = re.search(r"python3 -c '\n(.*?)' >", (REPOSITORY / "scripts/gpu_bundle").read_text(), re.DOTALL)[1]
        tests = [{"name": "a", "command": ["/b/with_patience", "300", "/b/a"]}, {"name": "c", "command": ["/b/with_patience", "120", "/b/c"]}]
        listed = subprocess.run([sys.executable, "-c", code], input=json.dumps({"tests": tests}), capture_output=True, text=True, check=True)
        self.assertEqual(listed.stdout, "a 300\nc 120\n")


if __name__ == "__main__":
    unittest.main()
