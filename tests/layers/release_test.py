"""Tests that `scripts/release --check` accepts a tree that can be released, and names everything that prevents the
release."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = {"CMakeLists.txt": "project(Tessera VERSION 1.4.2 LANGUAGES CXX)\n",
         "CHANGELOG.md": "# Changelog\n\n## [1.4.2] - 2020-02-29\n",
         "CITATION.cff": "version: 1.4.2\n",
         "scripts/wheel": "#!/bin/sh\nmkdir -p dist\necho \"wheel $*\"\n",
         ".gitignore": "/dist/\n"}


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=folder, check=True, capture_output=True)


class Release(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        (self.folder / "tests/layers").mkdir(parents=True)
        (self.folder / "scripts").mkdir()
        shutil.copy(ROOT / "tests/layers/check_version.py", self.folder / "tests/layers")
        shutil.copy(ROOT / "scripts/release", self.folder / "scripts")
        for name, text in FILES.items():
            (self.folder / name).write_text(text)
        (self.folder / "scripts/wheel").chmod(0o755)
        git(self.folder, "init", "-q")
        git(self.folder, "config", "user.name", "a")
        git(self.folder, "config", "user.email", "a@b.c")
        self.commit()

    def commit(self):
        git(self.folder, "add", "-A")
        git(self.folder, "commit", "-q", "-m", "A tree", "--allow-empty")

    def release(self, *words):
        ended = subprocess.run(["scripts/release", *words], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return ended.returncode, ended.stdout

    def expect_refused(self, *says):
        code, output = self.release("--check")
        self.assertEqual(code, 1, output)
        for text in says:
            self.assertIn(text, output)
        self.assertIn(f"{len(says)} problem(s)", output)

    def test_a_tree_that_is_ready_is_accepted_and_not_tagged(self):
        code, output = self.release("--check")
        self.assertEqual((code, "1.4.2 can be released" in output), (0, True), output)
        self.assertEqual(subprocess.check_output(["git", "tag"], cwd=self.folder), b"")

    def test_a_release_builds_wheels_and_tags(self):
        code, output = self.release("--skip-tests")
        self.assertEqual(code, 0, output)
        self.assertIn("wheel --out dist", output)
        self.assertEqual(subprocess.check_output(["git", "tag"], cwd=self.folder), b"v1.4.2\n")
        self.expect_refused("the tag v1.4.2 is there already")

    def test_a_tree_with_changes_is_refused(self):
        (self.folder / "new").write_text("")
        self.expect_refused("changes that are not committed")

    def test_another_version_somewhere_is_refused(self):
        (self.folder / "CITATION.cff").write_text("version: 1.4.1\n")
        self.commit()
        self.expect_refused("the version differs")

    def test_a_changelog_without_a_date_is_refused(self):
        for said, problem in (("Unreleased", "has no date for 1.4.2"), ("2020-02-30", "has no date for 1.4.2"),
                              ("9999-01-01", "is of 9999-01-01, which is to come")):
            with self.subTest(said):
                (self.folder / "CHANGELOG.md").write_text(f"## [1.4.2] - {said}\n")
                self.commit()
                self.expect_refused(problem)

    def test_a_missing_wheel_script_is_refused(self):
        (self.folder / "scripts/wheel").unlink()
        self.commit()
        self.expect_refused("scripts/wheel is missing")

    def test_an_unknown_argument_is_refused(self):
        code, output = self.release("--dry-run")
        self.assertEqual(code, 64, output)


if __name__ == "__main__":
    unittest.main()
