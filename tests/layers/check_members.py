"""Checks that no class or struct of the library, the workshop or the Python module's C++ has more than 20 members.

Usage: check_members.py ROOT
"""

import pathlib
import sys

import cpp_source
from check_parameters import follows, sources

MOST = 20
KEYS = "each member is a key of the strategy file, and programs write it by its name"
EXCEPT = {
    ("include/tessera/strategy.h", "Strategy"): KEYS,
    ("include/tessera/strategy.h", "OptimizerConfig"): KEYS,
    ("include/tessera/engine.h", "StepResult"): "programs read each member by its name",
}
NO_MEMBER = {"using", "friend", "static", "typedef", "template", "enum", "class", "struct", "union", "static_assert"}
MACRO = "ABSL_"  # an attribute of a member, such as ABSL_GUARDED_BY(mutex_)


def opens_arguments(cpp, i):
    """Returns whether token i begins template arguments. A "<" after `operator` does not: `operator<(const A& a)`."""
    return cpp.is_sign(i, "<") and cpp.is_name(i - 1) and not cpp.is_name(i - 1, "operator") and follows(cpp, i)


def end_of_arguments(cpp, i):
    """Returns the token that ends the template arguments that token i begins."""
    depth = 0
    while i < len(cpp.tokens):
        depth += opens_arguments(cpp, i) - cpp.is_sign(i, ">")
        if depth == 0:
            break
        i = cpp.partner.get(i, i) + 1 if cpp.is_sign(i, *cpp_source.PAIRS) else i + 1
    return i


def classes(cpp):
    """Yields (name, opening brace) of each class and struct that is defined here."""
    for i in range(len(cpp.tokens)):
        if not cpp.is_name(i, "class", "struct") or cpp.is_name(i - 1, "enum"):
            continue
        end, name = i + 1, ""
        while cpp.is_name(end) or cpp.is_sign(end, "::", "(", "[") or opens_arguments(cpp, end):  # alignas(64), [[nodiscard]]
            if cpp.is_name(end) and cpp.tokens[end].text not in ("final", "alignas"):
                name = cpp.tokens[end].text
            end = (end_of_arguments(cpp, end) if opens_arguments(cpp, end) else cpp.partner.get(end, end)) + 1
        if cpp.is_sign(end, ":"):  # the bases
            while end < len(cpp.tokens) and not cpp.is_sign(end, "{", ";"):
                end += 1
        if cpp.is_sign(end, "{") and end in cpp.partner:
            yield name or "a struct", end


def statements(cpp, brace):
    """Yields the statements of a class. Each is a list of the tokens outside of inner brackets and template arguments."""
    found, i, depth, close = [], brace + 1, 0, cpp.partner[brace]
    while i < close:
        if opens_arguments(cpp, i):
            depth += 1
        elif cpp.is_sign(i, ">") and depth > 0:
            depth -= 1
        elif depth == 0 and cpp.is_sign(i, ";"):
            yield found
            found = []
        elif depth == 0 and cpp.is_sign(i, ":") and len(found) == 1 and cpp.is_name(found[0], "public", "private", "protected"):
            found = []
        elif depth == 0:
            found.append(i)
            # The body of a function ends the statement. A type's body and the value of a member do not.
            if cpp.is_sign(i, "{") and is_function(cpp, found) and not cpp.is_sign(cpp.partner[i] + 1, ";", ",", "{"):
                found = []
        i = cpp.partner.get(i, i) + 1 if cpp.is_sign(i, *cpp_source.PAIRS) else i + 1


def names_pointer(cpp, i):
    """Returns whether bracket i names a pointer to a function or a reference to one, as in `void (*x)(int)`."""
    inside, end = i + 1, cpp.partner.get(i, i)
    while cpp.is_name(inside) and cpp.is_sign(inside + 1, "::"):
        inside += 2
    return cpp.is_sign(inside, "*", "&") and cpp.is_sign(end + 1, "(") and not any(cpp.is_sign(k, "(") for k in range(inside, end))


def is_function(cpp, statement):
    """Returns whether a bracket of parameters stands before the statement's first value."""
    for i in statement:
        if cpp.is_name(i, "operator"):
            return True
        if cpp.is_sign(i, "=", "{"):
            return False
        if cpp.is_sign(i, "(") and not (cpp.is_name(i - 1) and cpp.tokens[i - 1].text.startswith((MACRO, "alignas"))):
            return not names_pointer(cpp, i)
    return False


def members(cpp, brace):
    """Returns the number of the members of the class whose body begins at `brace`."""
    count = 0
    for statement in statements(cpp, brace):
        if not statement or cpp.tokens[statement[0]].text in NO_MEMBER or is_function(cpp, statement):
            continue
        count += 1 + sum(cpp.is_sign(i, ",") for i in statement)
    return count


def complaints(root):
    for name in sources(root):
        cpp = cpp_source.Cpp(name, (root / name).read_text(encoding="utf-8"))
        for kind, brace in classes(cpp):
            count, place = members(cpp, brace), f"{name}:{cpp.line(cpp.tokens[brace].start)}"
            if count > MOST and (name, kind) not in EXCEPT:
                yield (f"{place}: {kind} has {count} members, at most {MOST} are wanted. hint: make a class of those that belong together and "
                       "have an invariant of their own")
            if count <= MOST and (name, kind) in EXCEPT:
                yield f"{place}: {kind} has {count} members. hint: remove it from EXCEPT of check_members.py"


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or f"no class has more than {MOST} members, but {len(EXCEPT)} that programs see")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
