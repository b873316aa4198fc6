"""Tests that check_api.py finds a public declaration without a comment, and a name that the Python page lacks."""

import pathlib
import tempfile
import unittest

import check_api


def complaints_about(text):
    return list(check_api.complaints_about_header("some.h", "namespace tessera {\n" + text + "}\n"))


class CheckApiTest(unittest.TestCase):
    def test_public_declaration_without_a_comment_is_a_complaint(self):
        for text in ("int f(int x);\n", "/// Says f.\nint f(int x);\nint f(double x);\n", "struct S {};\n", "using A = int;\n", "enum class E { kA };\n",
                     "/// Says S.\nstruct S {\n  int x = 0;\n};\n", "/// Says C.\nclass C {\n public:\n  C(int x) : x_{x} {}\n\n private:\n  int x_;\n};\n",
                     "/// Says C.\nclass C {\n protected:\n  template <class T>\n  void f(T value);\n};\n",
                     "/// Says C.\nclass C {\n public:\n  /// Says S.\n  struct S {\n    int x;\n  };\n};\n",
                     "/// Says C.\nclass C {\n public:\n  ~C();\n  int f() const { return 1; }\n  int g_;  ///< says g\n};\n"):
            self.assertEqual(len(complaints_about(text)), 1, text)

    def test_declaration_with_a_comment_is_no_complaint(self):
        for text in ("/// Says f.\nint f(int x);\n", "/// Says f.\ntemplate <class T>\nint f(T x) {\n  return g([] { return 1; });\n}\n",
                     "/// Says S.\nstruct S {\n  int x = 0;  ///< says x\n  /// says y\n  int y{2};\n  int z = 0;\n  ///< says z\n};\n"):
            self.assertEqual(complaints_about(text), [], text)

    def test_what_no_page_shows_is_no_complaint(self):
        for text in ("class C;\n", "enum class E;\n", "namespace detail {\nint f();\n}\n", "#define ROW(x) \\\n  f(x); \\\n  g(x);\n",
                     "/// Says C.\nclass C {\n  int x_ = 0;\n\n public:\n  ~C();\n  C(const C&) = delete;\n  C(C&&) noexcept;\n  C& operator=(C&&) noexcept;\n"
                     "  using Base::f;\n  friend bool operator==(const C&, const C&) = default;\n\n private:\n  int f();\n};\n"):
            self.assertEqual(complaints_about(text), [], text)

    def test_name_of_the_package_that_the_page_lacks_is_a_complaint(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path, text in {check_api.PACKAGE: '__all__ = ["Engine", "__version__", "rank",\n           "ranks"]\n',
                               check_api.PAGE: "::: tessera._engine.Engine\n\n::: tessera._job.ranks\n", "include/tessera/some.h": "class C;\n"}.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            found = list(check_api.complaints(root))
            self.assertEqual(len(found), 1)
            self.assertIn("docs/python-api.md: rank of", found[0])


if __name__ == "__main__":
    unittest.main()
