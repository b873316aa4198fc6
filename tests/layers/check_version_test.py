"""Tests that check_version.py reports each file that states another version, and each file that should state none."""

import pathlib
import tempfile
import unittest

import check_version

FILES = {"CMakeLists.txt": 'cmake_minimum_required(VERSION 3.25)\nproject(Tessera VERSION 1.4.2 LANGUAGES CXX DESCRIPTION "...")\n',
         "CHANGELOG.md": "# Changelog\n\n## [1.4.2] - Unreleased\n\n## [1.4.1] - 2030-01-02\n",
         "CITATION.cff": "cff-version: 1.2.0\nversion: 1.4.2\n",
         "README.md": "find_package(Tessera 1.4 REQUIRED CONFIG)\n",
         "scripts/setup": 'PACKAGES=("other==1.4.2")\nTAG=11.4.2 OTHER=1.4.21 AND=1.4.2.1\n',
         "tests/golden/1.4/manifest.json": '{"written_by": "tessera 1.4.2"}\n'}


def found_in(changed):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in (FILES | changed).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return check_version.complaints(root)


class Version(unittest.TestCase):
    def test_a_tree_that_agrees_has_no_complaints(self):
        self.assertEqual(found_in({}), [])

    def test_another_version_is_found_wherever_it_stands(self):
        for path, text, complaint in (
                ("README.md", "find_package(Tessera 1.3 REQUIRED)", "asks for Tessera 1.3, and the version is 1.4.2: write 1.4"),
                ("tests/consumer/CMakeLists.txt", "find_package(Tessera 0.1)", "asks for Tessera 0.1, and the version is 1.4.2: write 1.4"),
                ("CHANGELOG.md", "## [1.4.1] - 2030-01-02\n## [1.4.2]\n", "says 1.4.1 first, and CMakeLists.txt 1.4.2"),
                ("CHANGELOG.md", "# Changelog\n", "says no version first, and CMakeLists.txt 1.4.2"),
                ("CITATION.cff", "cff-version: 1.2.0\nversion: 1.4.0\n", "says 1.4.0 first, and CMakeLists.txt 1.4.2")):
            with self.subTest(text):
                self.assertEqual(found_in({path: text}), [f"{path}: {complaint}"])

    def test_the_version_in_another_file_is_found(self):
        for text in ('version = "1.4.2"\n', "tessera 1.4.2.\n", "v1.4.2"):
            with self.subTest(text):
                self.assertEqual(found_in({"python/pyproject.toml": text}),
                                 ["python/pyproject.toml: says 1.4.2, which CMakeLists.txt alone should say"])

    def test_a_project_without_a_version_is_found(self):
        self.assertEqual(found_in({"CMakeLists.txt": "project(Tessera LANGUAGES CXX)\n"}),
                         ["CMakeLists.txt: has no project(Tessera VERSION X.Y.Z ...)"])


if __name__ == "__main__":
    unittest.main()
