"""Tests that check_hints.py finds an error without a remedy, wherever its text is made, and accepts errors that are
bugs of Tessera."""

import unittest

from check_hints import complaints_about, complaints_about_python

IN_FUNCTION = "absl::Status f(const std::string& path) {{\n  {}\n}}\n"


def lines_of(text):
    return [line for line, _ in complaints_about(text)]


class CheckHintsTest(unittest.TestCase):
    def test_an_error_without_a_hint_is_a_complaint(self):
        for call in ['return make_error(ExitCode::kIo, path + " cannot be read at all");',
                     'throw Error(ExitCode::kUsage, "a call out of turn" + path);',
                     'TORCH_CHECK(path.empty(), "a path was given, ", path);']:
            self.assertEqual(lines_of(IN_FUNCTION.format(call)), [2], call)
        self.assertEqual(lines_of('#include "runtime/border/expect.h"\n' + IN_FUNCTION.format('expect(good, "a call out of turn");')), [3])

    def test_a_hint_is_enough(self):
        self.assertEqual(lines_of(IN_FUNCTION.format('return make_error(ExitCode::kIo, path + " cannot be read. hint: name it");')), [])
        self.assertEqual(lines_of(IN_FUNCTION.format('return make_error(ExitCode::kIo, path + " cannot be read" + hint_of(error));')), [])

    def test_a_bug_and_another_errors_text_need_none(self):
        self.assertEqual(lines_of(IN_FUNCTION.format('return make_error(ExitCode::kInternal, path + " has two lengths");')), [])
        self.assertEqual(lines_of(IN_FUNCTION.format('return make_error(code, path + " is wrong: " + message_of(status));')), [])

    def test_hint_may_come_from_the_caller_of_a_wrapper(self):
        wrapper = "absl::Status refuse(const std::string& what) { return make_error(ExitCode::kIo, what); }\n"
        self.assertEqual(lines_of(wrapper + IN_FUNCTION.format('return refuse("it is too long by far");')), [3])
        self.assertEqual(lines_of(wrapper + IN_FUNCTION.format('return refuse("it is too long. hint: cut it");')), [])

    def test_comments_are_no_errors(self):
        self.assertEqual(lines_of('// make_error(ExitCode::kIo, "cannot be read at all")\n'), [])

    def test_an_error_of_python_without_a_hint_is_a_complaint(self):
        lines = lambda text: [line for line, _ in complaints_about_python(text)]
        self.assertEqual(lines('raise Error(f"a strategy of type {kind} was given")\n'), [1])
        self.assertEqual(lines('raise Error(f"a strategy of type {kind} was given. hint: it is a dict")\n'), [])
        self.assertEqual(lines('raise Error(losses.problem)\nraise Error(f"{error}. In Lightning it is trainer.strategy.engine")\nraise\n'), [])


if __name__ == "__main__":
    unittest.main()
