"""Tests that check_comments.py finds a long line, a sentence that begins with "Of", a header without a comment, a long
source without a paragraph at its head, and a test whose name has no subject."""

import pathlib
import subprocess
import tempfile
import unittest

import check_comments


def complaints_about(text, name="some.h"):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / name).write_text(text)
        subprocess.run(["git", "-C", root, "init", "-q"], check=True)
        subprocess.run(["git", "-C", root, "add", "."], check=True)
        return list(check_comments.complaints(root))


class CheckCommentsTest(unittest.TestCase):
    def test_a_long_line_is_a_complaint(self):
        self.assertEqual(len(complaints_about("/// " + "word " * 30 + "\n")), 1)

    def test_a_long_address_is_no_complaint(self):
        self.assertEqual(complaints_about("/// https://example.org/" + "x" * 120 + "\n"), [])

    def test_a_sentence_that_begins_with_of_is_a_complaint(self):
        for text in ("/// Of a unit.\n", "/// A unit. Of it the sums.\n", "/// A unit.\n/// Of it the sums.\n", "int x;  ///< of a unit\n"):
            self.assertEqual(len(complaints_about(text)), 1, text)

    def test_of_inside_a_sentence_is_no_complaint(self):
        for text in ("/// The sums\n/// of a unit.\n", "int x;  ///< sums of a unit\n"):
            self.assertEqual(complaints_about(text), [], text)

    def test_a_header_without_a_comment_is_a_complaint(self):
        self.assertEqual(len(complaints_about("int x;\n")), 1)
        self.assertEqual(complaints_about("int x;\n", "some.cc"), [])

    def test_a_long_source_without_a_paragraph_is_a_complaint(self):
        code = "int x;\n" * 248
        self.assertEqual(complaints_about("// A.\n// B.\n" + code, "some.cc"), [])
        self.assertEqual(len(complaints_about("// A.\n// B.\n" + code + "int y;\n", "some.cc")), 1)
        self.assertEqual(len(complaints_about("/// A.\n" * 4 + code, "some.cc")), 1)
        self.assertEqual(len(complaints_about(code[:70 * 7] + "// A.\n" * 3 + code, "some.cc")), 1)

    def test_a_long_source_with_a_paragraph_is_no_complaint(self):
        code = "int x;\n" * 248
        for head in ("// A.\n//\n// B.\n", "int y;\n\n// A.\n// B.\n// C.\n", "/// A.\n" * 5):
            self.assertEqual(complaints_about(head + code, "some.cc"), [], head)

    def test_a_test_without_a_subject_is_a_complaint(self):
        for line in ("TEST(Sums, OfNothingAreZero) {", "TEST_F(Sums, AndProductsAreExact) {", "TEST_P(Sums, ButNotThis) {",
                     "TYPED_TEST(Sums,\n           Of) {"):
            found = complaints_about("int x;\n" + line + "\n}\n", "some_test.cc")
            self.assertEqual(len(found), 1, line)
            self.assertIn("some_test.cc:2: the test Sums.", found[0])

    def test_a_test_with_a_subject_is_no_complaint(self):
        for line in ("TEST(Sums, OffsetsAreAligned) {", "TEST(Of, SumsAreZero) {", "TEST_F(Sums, NothingOfThemIsLost) {", "TEST(Sums, Andy) {"):
            self.assertEqual(complaints_about(line + "\n}\n", "some_test.cc"), [], line)


if __name__ == "__main__":
    unittest.main()
