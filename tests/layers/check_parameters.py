"""Checks that no function of the library, the workshop or the Python module's C++ has more than 6 parameters.

Usage: check_parameters.py ROOT
"""

import pathlib
import subprocess
import sys

import cpp_source

MOST = 6
FOLDERS = ["checkpoint", "engine", "include", "offload", "optim", "planner", "python", "runtime", "sharding", "workshop"]
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
EXCEPT = {
    ("engine/loop/sync_batch_norm.cc", "batch_norm_of_ranks"): "it replaces aten::batch_norm, whose parameters are LibTorch's",
}
NO_TYPES = {"new", "delete", "return", "throw", "sizeof", "not", "co_await", "co_return", "co_yield", "else", "typename", "in"}


def sources(root):
    names = subprocess.run(["git", "-C", root, "ls-files", *FOLDERS], capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if pathlib.PurePath(name).suffix in SUFFIXES]


def follows(cpp, i):
    """Returns whether no blank stands between token i and the token before it, as with `&` or `<` after a type
    (clang-format)."""
    return i > 0 and cpp.tokens[i - 1].start + len(cpp.tokens[i - 1].text) == cpp.tokens[i].start


def pieces(cpp, bracket):
    """Returns the parts between a bracket's commas. Each is a list of the tokens outside of inner brackets and template
    arguments."""
    found, depth, i = [[]], 0, bracket + 1
    while i < cpp.partner[bracket]:
        if cpp.is_sign(i, "<") and cpp.is_name(i - 1) and follows(cpp, i):
            depth += 1
        elif cpp.is_sign(i, ">") and depth > 0:
            depth -= 1
            if depth == 0:
                found[-1].append(i)
        elif depth == 0 and cpp.is_sign(i, ","):
            found.append([])
        elif depth == 0:
            found[-1].append(i)
        i = cpp.partner.get(i, i) + 1 if cpp.is_sign(i, *cpp_source.PAIRS) else i + 1
    return found


def is_declaration(cpp, piece):
    """Returns whether `piece` is surely a parameter, such as `const T& t = x`, `T* t`, `T t` and `T&`: no expression
    looks like these."""
    for k, i in enumerate(piece):
        if cpp.is_sign(i, "="):
            piece = piece[:k]
            break
    if not piece or any(cpp.tokens[i].kind not in ("name", "sign") for i in piece):
        return False
    if cpp.is_name(piece[0], "const"):
        return True
    *before, last = piece
    is_reference = cpp.is_sign(last, "&", "*", "&&") and len(before) > 0
    if is_reference:
        return follows(cpp, last)
    if not before or not cpp.is_name(last):
        return False
    of_type = before[-1]
    if cpp.is_name(of_type):
        return cpp.tokens[of_type].text not in NO_TYPES
    return cpp.is_sign(of_type, ">") or (cpp.is_sign(of_type, "&", "*", "&&") and len(before) > 1 and follows(cpp, of_type))


def complaints(root):
    for name in sources(root):
        cpp = cpp_source.Cpp(name, (root / name).read_text(encoding="utf-8"))
        for bracket, token in enumerate(cpp.tokens):
            if token.text != "(" or token.kind != "sign" or bracket not in cpp.partner:
                continue
            parameters = pieces(cpp, bracket)
            if len(parameters) <= MOST or 2 * sum(is_declaration(cpp, piece) for piece in parameters) < len(parameters):
                continue
            function = cpp.called(bracket)[1] or "a lambda"
            if (name, function) not in EXCEPT:
                yield (f"{name}:{cpp.line(token.start)}: {function} has {len(parameters)} parameters, at most {MOST} are wanted. hint: name the "
                       "thing that some of them are, and pass that")


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or f"no function has more than {MOST} parameters")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
