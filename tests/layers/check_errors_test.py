"""Tests that check_errors.py reads the texts of errors, and finds ids that are missing, given twice, removed or given
to other errors. Also tests that scripts/errors repairs these faults."""

import importlib.machinery
import importlib.util
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import check_errors
import error_texts

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/errors"
CODES = "enum class ExitCode : int {\n  kUsage = 64,\n  kIo = 74,\n  kConfig = 78,\n};\n"
SOURCE = 'void f(int steps) { expect(steps > 0, "steps are ", steps, ", want 1 or more. hint: give another number of them"); }\n'
OTHER = 'absl::Status g() { return make_error(ExitCode::kIo, "the disk is full by now. hint: free some space there"); }\n'


def tool():
    loader = importlib.machinery.SourceFileLoader("errors_script", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("errors_script", loader))
    loader.exec_module(module)
    return module


class Tree:
    """A tree of two sources and a page."""

    def __init__(self, folder):
        self.root = pathlib.Path(folder)
        for name in ("include/tessera", "engine", "offload", "docs", "python/tessera"):
            (self.root / name).mkdir(parents=True)
        (self.root / check_errors.CODES).write_text(CODES)
        self.write("engine/f.cc", SOURCE)
        self.write("offload/g.cc", OTHER)

    def write(self, path, text):
        (self.root / path).write_text(text)

    def read(self, path):
        return (self.root / path).read_text()

    def complaints(self):
        return check_errors.all_complaints(self.root)

    def mend(self, *arguments):
        return tool().main(self.root, arguments)


def one_error(text, path="engine/f.cc"):
    return next(error_texts.CppTexts({path: text}).errors())


class ErrorTextsTest(unittest.TestCase):
    def test_values_are_placeholders_named_for_what_they_are(self):
        for source in ['throw Error(ExitCode::kIo, name_of(path) + " has " + std::to_string(file.bytes) + " bytes. [T0007] hint: cut it");',
                       'throw Error(ExitCode::kIo, c10::str(path, " has ", file.bytes(), " bytes", ". [T0007] "\n "hint: cut it"));',
                       'throw Error(ExitCode::kIo, fmt::format("{} has {:>3} bytes. [T0007] hint: cut it", path.string(), bytes));',
                       'throw Error(ExitCode::kIo, is_long ? path + " has " + bytes + " bytes. [T0007] hint: cut it" : "nothing is wrong");',
                       'expect(bytes < 3, path, " has ", bytes, " bytes. [T0007] hint: cut it");']:
            error = one_error("void f() { " + source + " }")
            self.assertEqual((error.id, error.text, error.remedy), ("T0007", "{path} has {bytes} bytes", "cut it"), source)

    def test_name_of_a_rank_has_both_numbers(self):
        error = one_error('absl::Status f() { return make_error(ExitCode::kIo, rank_name(rank_, size()) + ": no store. [T0007] hint: wait"); }')
        self.assertEqual(error.text, "rank {rank}/{world_size}: no store")

    def test_shared_hint_takes_the_text_of_its_users(self):
        user = '\nabsl::Status g() { return make_error(ExitCode::kIo, path + " is too long" + %s); }\n'
        for maker, use in [('constexpr char kHint[] = ". hint: cut it";', "kHint"),
                           ('std::string hint_of(int error) { return ". hint: cut it"; }', "hint_of(errno)")]:
            error = one_error(maker + user % use)
            self.assertEqual((error.text, error.remedy, error.codes), ("{path} is too long", "cut it", ("kIo",)))

    def test_errno_hint_names_its_reason(self):
        error = one_error('std::string hint_of(int error) {\n switch (error) {\n case ENOSPC:\n return ". hint: free some"; } }\n'
                          'absl::Status g() { return make_error(ExitCode::kIo, path + ": " + reason + hint_of(errno)); }')
        self.assertEqual(error.text, "{path}: {reason} — No space left on device")

    def test_comments_samples_and_searches_are_no_errors(self):
        for source in ['// "bad. hint: none"\n', 'bool b = text.find("hint: ") != npos;\n', 'auto page = R"(bad. hint: none)";\n']:
            self.assertEqual(list(error_texts.CppTexts({"engine/f.cc": source}).errors()), [], source)

    def test_python_errors_are_read_with_their_ids(self):
        said = error_texts.python_errors("python/tessera/a.py", 'raise Error(f"{name!r} is no key. "\n            "[T0003] hint: take another", 78)\n')
        error = next(said)
        self.assertEqual((error.id, error.text, error.remedy, error.codes, error.line), ("T0003", "{name} is no key", "take another", (78,), 2))

    def test_python_error_has_the_code_that_another_module_names(self):
        source = 'raise Error("no key is known. [T0003] hint: take another", CONFIG)\n'
        self.assertEqual([each.codes for each in error_texts.python_errors("python/tessera/a.py", source, {"CONFIG": 78})], [(78,)])

    def test_python_text_that_reaches_its_error_through_a_function_has_the_code_of_its_folder(self):
        source = 'self.fail(offset, "given twice. [T0003] hint: remove one", pointer)\n'
        for folder, code in ("python/tessera/import_config", 78), ("python/tessera", 64):
            self.assertEqual([each.codes for each in error_texts.python_errors(f"{folder}/a.py", source)], [(code,)], folder)


class CheckErrorsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = Tree(folder.name)

    def test_an_error_without_an_id_is_a_complaint_and_gets_one(self):
        self.assertEqual([text.split(": a remedy")[0] for text in self.tree.complaints()], ["engine/f.cc:1", "offload/g.cc:1"])
        self.assertEqual(self.tree.mend(), 0)
        self.assertEqual(self.tree.complaints(), [])
        self.assertIn(". [T0001] hint: give another", self.tree.read("engine/f.cc"))
        row = "| 64 | steps are {steps}, want 1 or more | give another number of them |"
        self.assertIn('<a id="T0001"></a>T0001 ' + row, self.tree.read(check_errors.PAGE))

    def test_changed_errors_get_new_ids_and_others_keep_theirs(self):
        self.tree.mend()
        self.tree.write("engine/a.cc", OTHER.replace("disk", "cup"))
        self.assertEqual(self.tree.mend(), 0)
        self.assertIn("[T0003]", self.tree.read("engine/a.cc"))
        self.assertIn("[T0001]", self.tree.read("engine/f.cc"))

    def test_an_id_at_two_places_is_a_complaint(self):
        self.tree.mend()
        self.tree.write("engine/a.cc", self.tree.read("offload/g.cc").replace("disk", "cup"))
        self.assertIn("T0002 is given at engine/a.cc:1 and offload/g.cc:1", "\n".join(self.tree.complaints()))

    def test_an_id_that_vanished_is_a_complaint_until_it_is_retired(self):
        self.tree.mend()
        self.tree.write("offload/g.cc", "")
        self.assertIn("T0002 is in no source", "\n".join(self.tree.complaints()))
        self.assertEqual(self.tree.mend(), 1)
        self.assertEqual(self.tree.mend("--retire", "T0002"), 0)
        self.assertEqual(self.tree.complaints(), [])
        self.assertIn("T0002 | retired | the disk is full by now |", self.tree.read(check_errors.PAGE))
        self.tree.write("engine/a.cc", OTHER.replace("disk", "cup"))
        self.tree.mend()
        self.assertIn("[T0003]", self.tree.read("engine/a.cc"))
        self.tree.write("engine/a.cc", OTHER.replace("hint:", "[T0002] hint:"))
        self.assertIn("T0002 was retired", "\n".join(self.tree.complaints()))

    def test_an_id_of_another_error_is_a_complaint_unless_that_is_said(self):
        self.tree.mend()
        self.tree.write("offload/g.cc", OTHER.replace("hint:", "[T0002] hint:").replace("free some space there", "take another one"))
        self.assertEqual([text for text in self.tree.complaints()], [f"{check_errors.PAGE} is not as the sources say. hint: call scripts/errors"])
        self.assertEqual(self.tree.mend(), 0)
        self.tree.write("offload/g.cc", 'void h() { throw Error(ExitCode::kIo, "rank 3 sleeps. [T0002] hint: wake it up"); }\n')
        self.assertIn("T0002 was another error: the disk is full", "\n".join(self.tree.complaints()))
        self.assertEqual(self.tree.mend(), 1)
        self.assertEqual(self.tree.mend("--reworded", "T0002"), 0)
        self.assertEqual(self.tree.complaints(), [])

    def test_a_remedy_without_its_text_in_place_is_a_complaint(self):
        self.tree.write("engine/f.cc", 'void f() { throw Error(ExitCode::kIo, "all is lost. hint: " + advice); }\n')
        self.assertIn("a remedy without words", "\n".join(self.tree.complaints()))


if __name__ == "__main__":
    unittest.main()
