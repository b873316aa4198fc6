"""Tests that check_parameters.py finds a function with too many parameters, and does not mistake a call for a
function."""

import pathlib
import subprocess
import tempfile
import unittest

import check_parameters

SEVEN = "int a, const int& b, std::map<int, int> c, T* d, float e = 1.0f, Tensor&, bool f"


def complaints_about(text, name="engine/some.cc"):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
        subprocess.run(["git", "-C", root, "init", "-q"], check=True)
        subprocess.run(["git", "-C", root, "add", "."], check=True)
        return list(check_parameters.complaints(root))


class CheckParametersTest(unittest.TestCase):
    def test_a_function_of_seven_parameters_is_a_complaint(self):
        for line in (f"void f({SEVEN});", f"int A::f({SEVEN}) const {{}}", f"virtual void f({SEVEN}) = 0;", f"A({SEVEN}) : a_(a) {{}}"):
            found = complaints_about("int x;\n" + line + "\n")
            self.assertEqual(len(found), 1, line)
            self.assertIn("engine/some.cc:2: ", found[0])
            self.assertIn(" has 7 parameters, at most 6 are wanted", found[0])

    def test_a_lambda_of_seven_parameters_is_a_complaint(self):
        self.assertIn("a lambda has 7", complaints_about(f"const auto f = [&]({SEVEN}) {{}};\n")[0])

    def test_a_function_of_six_parameters_is_no_complaint(self):
        for line in ("void f(int a, int b, std::map<int, std::pair<int, int>> c, int d, std::function<void(int, int, int)> e, int f = g(1, 2));",
                     "void f(int a, int b, int c, int d, int e, Options f = {1, 2, 3});"):
            self.assertEqual(complaints_about(line + "\n"), [], line)

    def test_a_call_of_seven_arguments_is_no_complaint(self):
        for line in ("f(a, b.c, d->e, g(1), x * y, new T, [&](int k) { return k; });", "return f(a * b, c & d, e && f, g < h, 1, \"2\", T{});",
                     "f(a, a < b, c > d, e, sizeof a, g<T>(x), h);"):
            self.assertEqual(complaints_about(line + "\n"), [], line)

    def test_a_function_of_the_tests_is_no_complaint(self):
        self.assertEqual(complaints_about(f"void f({SEVEN});\n", "tests/some.cc"), [])

    def test_a_function_that_another_project_declares_is_no_complaint(self):
        line = f"void batch_norm_of_ranks({SEVEN}) {{}}\n"
        self.assertEqual(complaints_about(line, "engine/loop/sync_batch_norm.cc"), [])
        self.assertEqual(len(complaints_about(line)), 1)


if __name__ == "__main__":
    unittest.main()
