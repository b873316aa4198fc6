"""check_docs.py notices a name of a file that is gone, in pages and comments, and nothing else."""

import pathlib
import tempfile
import unittest

import check_docs

FILES = {"README.md": "`runtime/base/log.h`, [the design](docs/design.md), `log.{h,cc}`, `<absl/log/log.h>`, log_gone.h\n",
         "docs/design.md": "nothing\n",
         "runtime/base/log.h": "/// See include's tessera/run.h and log.cc. The path is FOLDER/page.md.\n",
         "runtime/base/log.cc": '#include "gone.h"\n// the same\n',
         "include/tessera/run.h": "int run();\n",
         "tests/layers/trees.py": "# made/up.h\n"}


def found_in(changed):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in (FILES | changed).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        files = set(check_docs.ours(root))
        return [f"{source}: {text}" for source in sorted(files) if not source.startswith(tuple(check_docs.EXCEPT))
                for text in check_docs.complaints(root, files, source)]


class Docs(unittest.TestCase):
    def test_what_is_there_is_right(self):
        self.assertEqual(found_in({}), [])

    def test_names_that_are_gone_are_found(self):
        for source, text, name in (("README.md", "`runtime/log.h`", "runtime/log.h"),
                                   ("README.md", "`runtime/base/`, `scripts/gone --all`", "scripts/gone"),
                                   ("README.md", "`runtime/gone/`", "runtime/gone/"),
                                   ("README.md", "[here](docs/gone.md)", "docs/gone.md"),
                                   ("README.md", "`log.{h,cu}`", "log.cu"),
                                   ("runtime/base/log.cc", "int a;  // as in gone.h\n", "gone.h"),
                                   ("optim/a.py", '"""Of optim/b.py."""\n', "optim/b.py")):
            with self.subTest(text):
                self.assertEqual(found_in({source: text}), [f"{source}: names {name}, which is not there"])


if __name__ == "__main__":
    unittest.main()
