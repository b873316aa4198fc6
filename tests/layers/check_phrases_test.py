"""Tests that check_phrases.py finds a text that names a call of C++, and accepts comments and phrases."""

import pathlib
import tempfile
import unittest

import check_phrases


def complaints_about(text):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in check_phrases.FOLDERS:
            (root / name).mkdir()
        (root / "engine" / "some.cc").write_text(text)
        return list(check_phrases.complaints(root))


class CheckPhrasesTest(unittest.TestCase):
    def test_a_call_of_cpp_in_a_text_is_a_complaint(self):
        self.assertEqual(len(complaints_about('throw Error("hint: tessera::Gathered(engine)");\n')), 1)
        self.assertEqual(len(complaints_about('"a" + b + "under Gathered(kWrite)"\n')), 1)

    def test_comments_includes_and_phrases_are_no_complaint(self):
        self.assertEqual(complaints_about('/// "tessera::Gathered"\n#include "tessera/x.h"\nsay("a guard", tessera::phrases::kGuard);\n'), [])


if __name__ == "__main__":
    unittest.main()
