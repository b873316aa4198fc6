"""Tests that check_environment.py finds a variable that no page names, in each way of reading it, and a row for a
variable that is never read."""

import pathlib
import subprocess
import tempfile
import unittest

import check_environment


def complaints_about(name, text, page=""):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for file, content in {name: text, "docs/environment.md": page, "docs/guide/slurm.md": "| `SLURM_PROCID` |\n"}.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(content)
        subprocess.run(["git", "-C", root, "init", "-q"], check=True)
        subprocess.run(["git", "-C", root, "add", "."], check=True)
        return list(check_environment.complaints(root))


READERS = [
    ("a.cc", 'std::getenv("SECRET");'),
    ("a.cc", '::setenv("SECRET", "1", 1);'),
    ("a.h", 'LauncherVariables v; v.text("SECRET");'),
    ("a.cc", 'LauncherVariables v; v.number(d, "SECRET", 0, 1);'),
    ("a.cc", 'LauncherVariables v; take("SECRET_of_many");'),
    ("a.cc", 'for (const char* name : {"SECRET_NAME"}) std::getenv(name);'),
    ("a.py", 'os.environ.get("SECRET")'),
    ("a.py", 'os.environ["SECRET"] = "1"'),
    ("a.py", '"SECRET" in os.environ'),
    ("scripts/a", "#!/usr/bin/env bash\necho ${SECRET:-1}\n"),
    ("a.cmake", "set(x $ENV{SECRET})"),
    ("tests/a.cc", 'std::getenv("TESSERA_SECRET");'),
]


class CheckEnvironmentTest(unittest.TestCase):
    def test_a_variable_that_no_page_names_is_a_complaint_in_each_way_of_reading_it(self):
        for name, text in READERS:
            with self.subTest(text):
                found = complaints_about(name, text)
                self.assertEqual(len(found), 1)
                self.assertIn("SECRET", found[0])

    def test_a_variable_with_a_row_is_no_complaint(self):
        for name, text in READERS:
            with self.subTest(text):
                self.assertEqual(complaints_about(name, text, "| `SECRET`, `SECRET_of_many`, `SECRET_NAME` | `TESSERA_SECRET` |"
                                                  if "TESSERA" in text else "| `SECRET`, `SECRET_of_many`, `SECRET_NAME` |"), [])

    def test_a_variable_of_slurm_may_stand_on_its_page(self):
        self.assertEqual(complaints_about("a.cc", 'std::getenv("SLURM_PROCID");'), [])

    def test_strings_of_files_that_read_nothing_and_comments_are_no_complaint(self):
        self.assertEqual(complaints_about("a.cc", 'f("SECRET_NAME");'), [])
        self.assertEqual(complaints_about("a.cc", '// std::getenv("SECRET");'), [])

    def test_a_test_may_set_what_others_read(self):
        self.assertEqual(complaints_about("tests/a.cc", '::setenv("SECRET", "1", 1);'), [])

    def test_a_row_of_a_variable_that_nobody_reads_is_a_complaint(self):
        found = complaints_about("a.cc", "int x;", "| `TESSERA_GONE` |")
        self.assertEqual(len(found), 1)
        self.assertIn("TESSERA_GONE", found[0])


if __name__ == "__main__":
    unittest.main()
