"""Tests that check_glossary.py finds a header that uses a coined word and does not name the glossary, and a line that
names other words."""

import pathlib
import subprocess
import tempfile
import unittest

import check_glossary

PAGE = "| word | elsewhere | means here |\n|---|---|---|\n| **slot** | buffer | memory |\n| **flat group** | - | neighbours |\n| host | node | a machine |\n"
LINE = "// See docs/glossary.md: slot.\n"


class CheckGlossaryTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def complaints_about(self, text, name="some.h"):
        for file, content in {name: text, "docs/glossary.md": PAGE}.items():
            (self.root / file).parent.mkdir(parents=True, exist_ok=True)
            (self.root / file).write_text(content)
        subprocess.run(["git", "-C", self.root, "init", "-q"], check=True)
        subprocess.run(["git", "-C", self.root, "add", "."], check=True)
        return list(check_glossary.complaints(self.root))

    def test_a_coined_word_without_a_line_is_a_complaint(self):
        for comment in ("/// A slot.", "int x;  ///< slots of a unit", "/// The flat\n/// group."):
            found = self.complaints_about("#pragma once\n\n" + comment + "\n")
            self.assertEqual(len(found), 1, comment)
            self.assertIn("some.h", found[0])

    def test_a_line_with_the_right_words_is_no_complaint(self):
        self.assertEqual(self.complaints_about("#pragma once\n\n" + LINE + "\n/// A slot.\n"), [])

    def test_a_line_with_other_words_or_in_another_place_is_a_complaint(self):
        for text in ("#pragma once\n\n" + LINE + "\n/// A host.\n", "#pragma once\n\n" + LINE + "\n/// A slot of a flat group.\n",
                     "#pragma once\n\n" + LINE + "\n/// A slot.\n" + LINE, "#pragma once\n\n/// A slot.\n" + LINE):
            self.assertEqual(len(self.complaints_about(text)), 1, text)

    def test_other_words_code_and_tests_are_no_complaint(self):
        self.assertEqual(self.complaints_about("#pragma once\n\n/// A host.\nint slot;\n"), [])
        self.assertEqual(self.complaints_about("#pragma once\n\n/// A slot.\n", "tests/some.h"), [])

    def test_write_puts_the_line_in_and_takes_a_wrong_one_away(self):
        for text in ("#pragma once\n\n/// A slot.\n", "#pragma once\n\n// See docs/glossary.md: host.\n\n/// A slot.\n"):
            self.complaints_about(text)
            check_glossary.write(self.root)
            self.assertEqual((self.root / "some.h").read_text(), "#pragma once\n\n" + LINE + "\n/// A slot.\n")


if __name__ == "__main__":
    unittest.main()
