"""Tests that check_folders.py finds a folder with too many files, and an exception that is not needed any more."""

import pathlib
import subprocess
import tempfile
import unittest
from unittest import mock

import check_folders


class CheckFoldersTest(unittest.TestCase):
    def complaints_about(self, files, exceptions=()):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in files:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text("")
            subprocess.run(["git", "-C", root, "init", "-q"], check=True)
            subprocess.run(["git", "-C", root, "add", "."], check=True)
            with mock.patch.dict(check_folders.EXCEPT, dict.fromkeys(exceptions, "why"), clear=True):
                return list(check_folders.complaints(root))

    def test_folder_with_too_many_files_is_a_complaint(self):
        files = [f"room/{number}.cc" for number in range(check_folders.MOST + 1)]
        self.assertEqual(len(self.complaints_about(files)), 1)
        self.assertIn("room has 31 files", self.complaints_about(files)[0])
        self.assertEqual(self.complaints_about(files, ["room"]), [])

    def test_files_of_inner_folders_do_not_count(self):
        self.assertEqual(self.complaints_about([f"room/{number % 2}/{number}.cc" for number in range(2 * check_folders.MOST)]), [])

    def test_exception_that_is_not_needed_is_a_complaint(self):
        self.assertEqual(len(self.complaints_about(["room/a.cc"], ["room"])), 1)


if __name__ == "__main__":
    unittest.main()
