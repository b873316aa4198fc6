"""Tests that check_members.py finds a class with too many members, and counts only members."""

import pathlib
import subprocess
import tempfile
import unittest

import check_members

MEMBERS = "\n".join(f"  int a{i} = {i};" for i in range(20))
ONE_MORE = ["double x = 0;", "const std::map<int, std::pair<int, int>> x;", "std::function<void(int, int)> x = [](int a, int b) { f(a); };",
            "bool operator<(const A& a) const { return a0 < a.a0; }\n  int x;",
            "int x ABSL_GUARDED_BY(mutex_) = 0;", "alignas(64) std::atomic<bool> x{false};", "Other& x;", "std::array<int, 3> x{};", "float x[4];",
            "void (*x)(int a, int b) = nullptr;", "int (B::*x)(int a) const;", "double (*x[3])(const float* a, int b);"]
NO_MEMBER = ["void x(int a, int b) const;", "int x() const { return 1; }", "A(int a) : a0(a), a1{a} {}", "A() = default;",
             "A& operator=(const A&) = delete;", "bool operator<(const A& a) const { return a0 < a.a0; }", "using X = std::map<int, int>;",
             "static constexpr int kX = 1, kY = 2;", "struct X { int a; int b; };", "class X;", "enum class X { kA, kB };", "friend class B;",
             "template <class T> void x(T t) { t(); }", " public:", "int x() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return 1; }",
             "[[nodiscard]] std::vector<int> x(int a = 1);", "void (*x(int a))(int b);"]


def complaints_about(text, name="engine/some.h"):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
        subprocess.run(["git", "-C", root, "init", "-q"], check=True)
        subprocess.run(["git", "-C", root, "add", "."], check=True)
        return list(check_members.complaints(root))


def of_class(line):
    return f"class A final : public B<int> {{\n{MEMBERS}\n  {line}\n}};\n"


class CheckMembersTest(unittest.TestCase):
    def test_a_class_of_twenty_one_members_is_a_complaint(self):
        for line in ONE_MORE:
            found = complaints_about("int x;\n" + of_class(line))
            self.assertEqual(len(found), 1, line)
            self.assertIn("engine/some.h:2: A has 21 members, at most 20 are wanted", found[0])

    def test_members_of_one_line_count_each(self):
        self.assertIn(" has 23 members", complaints_about(of_class("int x = 0, y = f(1, 2), z{3};"))[0])

    def test_an_inner_struct_of_twenty_one_members_is_a_complaint(self):
        found = complaints_about(f"class A {{\n  struct B {{\n{MEMBERS}\n  int x;\n  }};\n  B b;\n}};\n")
        self.assertEqual(len(found), 1)
        self.assertIn(": B has 21 members", found[0])

    def test_a_specialization_of_twenty_one_members_is_a_complaint(self):
        found = complaints_about(of_class("int x;").replace("class A", "template <>\nclass A<B<int>, 2>"))
        self.assertEqual(len(found), 1)
        self.assertIn(": A has 21 members", found[0])

    def test_what_is_no_member_does_not_count(self):
        for line in NO_MEMBER:
            self.assertEqual(complaints_about(of_class(line)), [], line)

    def test_an_exception_that_is_not_needed_is_a_complaint(self):
        name = "include/tessera/engine.h"
        self.assertEqual(complaints_about(of_class("int x;").replace("A final", "StepResult final"), name), [])
        self.assertIn("remove it from EXCEPT", complaints_about("struct StepResult { int a; };\n", name)[0])

    def test_a_class_of_the_tests_is_no_complaint(self):
        self.assertEqual(complaints_about(of_class("int x;"), "tests/some.h"), [])


if __name__ == "__main__":
    unittest.main()
