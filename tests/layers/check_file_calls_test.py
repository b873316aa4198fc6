"""Tests that check_file_calls.py finds calls of the system that follow links, and an entry of EXCEPT that is not needed
any more."""

import pathlib
import tempfile
import unittest
from unittest import mock

import check_file_calls

PLACE = "checkpoint/writer.cc"


class CheckFileCallsTest(unittest.TestCase):
    def complaints_about(self, text, exceptions=()):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / PLACE).parent.mkdir()
            (root / PLACE).write_text(text)
            with mock.patch.dict(check_file_calls.EXCEPT, dict.fromkeys(exceptions, "why"), clear=True):
                return list(check_file_calls.complaints(root))

    def test_calls_of_the_system_are_complaints(self):
        for call in ("::open(path.c_str(), flags)", "::unlink(name)", "fs::remove(path, error)", "std::ofstream file(path)", "std::rename(a, b)",
                     "for (auto& each : std::filesystem::directory_iterator(folder))", "std::fopen(path, mode)", "if (::renameat2(a, b, c, d, 0) == 0)"):
            found = self.complaints_about(f"void f() {{\n  {call};\n}}\n")
            self.assertEqual(len(found), 1, call)
            self.assertIn(f"{PLACE}:2", found[0])
            self.assertEqual(self.complaints_about(call, [PLACE]), [])

    def test_calls_of_file_calls_and_names_of_classes_are_none(self):
        text = "file_calls::open(file, flags, 0600);\nfile_calls::unlink(file);\nstd::erase(list, 1);\n::fsync(fd);\nWriter::open(path);\n// ::open(path)\n"
        self.assertEqual(self.complaints_about(text), [])

    def test_exception_that_is_not_needed_is_a_complaint(self):
        self.assertEqual(len(self.complaints_about("int a;\n", [PLACE])), 1)


if __name__ == "__main__":
    unittest.main()
