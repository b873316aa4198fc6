"""Checks that each file of this project that a page or a comment names exists, and that each test that a page names
exists.


A name ends in .h, .cc, .cu, .cuh, .py or .md. Names in backticks and in links are checked in pages, and names in
comments are checked in sources. A name with a '/' is a path from the root, from include/ or docs/, or from the folder
of the file that names it. A name without a '/' may be that of any file of this project. Pages may also name folders and
programs. Such names are checked if they begin with a folder of ours. A link of a page is a path from the page's folder,
as a browser follows it.

A page in MOST_BYTES has the limit of bytes that is given there. Other pages of docs/ have a limit too, except
pages that a program makes.

An option after the name of a program of scripts/ must be in the text of the program.

A page names a test as `FILE: Suite.Name` (GoogleTest), `FILE: method` (Python), or, for the table in
tests/app/odd_inputs, `FILE: name of a row`.

Usage: check_docs.py ROOT
"""

import functools
import importlib.util
import pathlib
import posixpath
import re
import sys

PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "*/README.md", "*/*/README.md"]
MOST_BYTES = {"README.md": 8192}  # the most bytes that a page outside of docs/ may have
MOST_BYTES_OF_A_PAGE = 25 * 1024
MADE = "<!-- Made by "  # marks a page that a program makes
CODE = ["benchmarks", "checkpoint", "cmake", "engine", "examples", "include", "offload", "optim", "planner", "python", "runtime", "scripts",
        "sharding", "tests", "workshop"]
SUFFIXES = (".h", ".cc", ".cu", ".cuh", ".py", ".md")
# A name whose folder is in capitals (DIRECTORY/strategy.md) is a placeholder, and is not checked.
NAME = re.compile(r"(?<![\w/.:<~-])(?![A-Z]+/)((?:[\w.{},-]+/)*[\w{},-]+\.(?:h|cc|cuh|cu|py|md|\{[\w,]+\}))(?![\w/(-])")
IN_BACKTICKS = re.compile(r"`([^`\n]+)`|\]\(([^)\n]+)\)")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)(?:#[^)\s]*)?\)")
BLOCK_OF_CODE = re.compile(r"^```.*?^```", re.M | re.S)
TEST = re.compile(r"`(tests/[\w/]+\.(?:cc|py)): ([^`\n]+)`")
ROWS = "tests/app/odd_inputs/rows.py"
COMMENTS = {".py": re.compile(r'#.*|"""[\s\S]*?"""')}
C_COMMENTS = re.compile(r"//.*")
# Headers and files of other projects: those of LibTorch, PyTorch, the standard library and the system, and files that a
# user writes.
ELSEWHERE = re.compile(r"(ATen|c10|torch|caffe2|absl|nlohmann|gloo|CLI|sys|linux|arpa|netinet)/|(nccl|mpi|sysexits)\.h$|main\.cc$")
OPTIONS = re.compile(r"(?<!\w)scripts/(\w+)((?:\s+--[a-z-]+)+)")
EXCEPT = ["tests/layers/", "runtime/comm/c10d/gloo_stubs/"]  # tests/layers/ names files of trees that its tests make


def folders_and_programs_in(page):
    """Returns names such as `scripts/test`, which begin with a folder of ours and have no suffix of a source."""
    words = [word.rstrip(".,;:") for code, _ in IN_BACKTICKS.findall(page.read_text(encoding="utf-8"))
             for word in code.split()]
    return [word for word in words if re.fullmatch(r"[\w./-]+", word) and word.partition("/")[0] in CODE
            and "/" in word and not word.endswith(SUFFIXES)]


@functools.cache
def rows_of(file):
    """Returns the names of all rows of the table in tests/app/odd_inputs."""
    sys.dont_write_bytecode = True
    spec = importlib.util.spec_from_file_location("rows_of_odd_inputs", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.everything = True
    return {row.name for row in module.all_rows()}


def has_test(root, file, name):
    if file == ROWS:
        return name in rows_of(root / file)
    text = (root / file).read_text(encoding="utf-8")
    if file.endswith(".py"):
        return re.search(rf"\bdef {re.escape(name)}\(", text) is not None
    suite, _, test = map(re.escape, name.partition("."))
    return re.search(rf"^TEST(_F|_P)?\(\s*{suite},\s*{test}\)", text, re.MULTILINE) is not None


def expanded(name):
    """Returns all names for which a name with {a,b} stands: one with a and one with b."""
    choice = re.search(r"\{([^{}]*)\}", name)
    if choice is None:
        return [name]
    return [one for word in choice[1].split(",") for one in expanded(name[:choice.start()] + word + name[choice.end():])]


def names_in(source):
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        parts = [a or b for a, b in IN_BACKTICKS.findall(text)]
    else:
        parts = COMMENTS.get(source.suffix, C_COMMENTS).findall(text)
    return [one for part in parts for name in NAME.findall(part) for one in expanded(name)
            if one.endswith(SUFFIXES) and not ELSEWHERE.search(one)]


def dead_links(page):
    text = BLOCK_OF_CODE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in LINK.findall(text) if not (page.parent / target).exists()]


def gone_options(root, source):
    """Yields the options of our scripts that the file names, and that the script's text does not contain."""
    for script, options in OPTIONS.findall((root / source).read_text(encoding="utf-8")):
        file = root / "scripts" / script
        text = file.read_text(encoding="utf-8") if file.is_file() else options
        yield from (f"scripts/{script} {option}" for option in options.split() if not re.search(rf"(?<![\w-]){option}(?![\w-])", text))


def ours(root):
    """Returns the files of this project, relative to the root. Files of builds, virtual environments and git are left
    out."""
    for top in [root, *(root / folder for folder in [*CODE, "docs"])]:
        for file in top.glob("*") if top == root else top.rglob("*"):
            path = file.relative_to(root)
            if file.suffix in SUFFIXES and not any(part.startswith(".") for part in path.parts):
                yield path.as_posix()


def most_bytes(root, source):
    """Returns how many bytes a page may have, or None if there is no limit."""
    if not source.startswith("docs/") or not source.endswith(".md"):
        return MOST_BYTES.get(source)
    return None if MADE in (root / source).read_text(encoding="utf-8") else MOST_BYTES_OF_A_PAGE


def complaints(root, files, source):
    basenames = {path.rsplit("/", 1)[-1] for path in files}
    folder = pathlib.PurePosixPath(source).parent
    gone = [name for name in names_in(root / source) if name not in basenames
            and not {name, f"include/{name}", f"docs/{name}", posixpath.normpath(folder / name)} & files]
    yield from (f"names {name}, which is not there" for name in gone)
    size, most = (root / source).stat().st_size, most_bytes(root, source)
    if most is not None and size > most:
        yield f"has {size} bytes, and {most} are the most"
    yield from (f"names {command}, which is no option" for command in gone_options(root, source))
    if source.endswith(".md"):
        yield from (f"names {name}, which is not there" for name in folders_and_programs_in(root / source)
                    if not (root / name).exists())
        yield from (f"links to {target}, which is not there from this page" for target in dead_links(root / source)
                    if target not in gone)
        yield from (f"names the test {file}: {name}, which is not there"
                    for file, name in TEST.findall((root / source).read_text(encoding="utf-8"))
                    if file in files and not has_test(root, file, name))


def main(root):
    root = pathlib.Path(root).resolve()
    files = set(ours(root))
    pages = {page.relative_to(root).as_posix() for pattern in PAGES for page in root.glob(pattern)} & files
    sources = {path for path in files if not path.endswith(".md") and "/" in path and not path.startswith(tuple(EXCEPT))}
    looked_at = sorted(pages | sources)
    found = [f"{source}: {text}" for source in looked_at for text in complaints(root, files, source)]
    scripts = [file.relative_to(root).as_posix() for file in sorted((root / "scripts").glob("*")) if file.is_file()]
    found += [f"{script}: names {command}, which is no option" for script in scripts for command in gone_options(root, script)]
    print("\n".join(found) or f"{len(looked_at)} pages and sources name files that are there")
    return 1 if found or len(looked_at) < 50 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
