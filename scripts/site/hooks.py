"""Does for MkDocs what mkdocs.yml cannot express: it adds pages and files from outside of docs/, and links to them.

Pages are written for a reader of the repository: a link may lead out of docs/, for example to SECURITY.md. Such a link
leads to these places on the site:
- for a page of Markdown, to its copy below project/; the files that this page links to are added too,
- for a public header, to the header's page of the C++ API, which cpp_api.py has made,
- for a source, to a page below project/ that shows the source,
- for any other file, to its copy below project/.

If the text of a link is the file name of its page, the site shows that page's title. A link to a folder, or to a
missing file, is a warning, which ends the build.
"""

import os
import pathlib
import posixpath
import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

SITE = pathlib.Path(__file__).resolve().parent
ROOT = SITE.parent.parent
MADE = ROOT / "build" / "docs" / "pages"
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)
OUTSIDE = "project/"
LANGUAGES = {".cc": "cpp", ".h": "cpp", ".cu": "cpp", ".py": "python", ".json": "json", ".txt": "text", ".sh": "bash"}
HEADER = re.compile(r"include/tessera/(\w+)\.h")


def in_site(path):
    """Returns the address on the site of the file at `path`. `path` begins at the root of the repository."""
    header = HEADER.fullmatch(path)
    if header:
        return f"cpp/{header[1]}.md"
    if path == "include/tessera":
        return "cpp/index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OUTSIDE + path + (".md" if language_of(path) else "")


def language_of(path):
    """Returns the language of a source that has its own page on the site; otherwise None."""
    name = pathlib.PurePosixPath(path)
    if name.suffix:
        return LANGUAGES.get(name.suffix)
    source = ROOT / path
    return "bash" if source.is_file() and source.read_bytes().startswith(b"#!") else None


def in_repository(uri):
    """Returns the path of a page of the site, beginning at the root of the repository."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def page_of_source(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~{language_of(path)}\n{text}~~~~\n"


def links_of(page, text):
    """Yields (match, path from the root of the repository) for each link to a file of this project. Links in code are
    left out."""
    code = [match.span() for match in CODE.finditer(text)]
    for match in LINK.finditer(text):
        if re.match(r"[a-z]+:", match[2]) or any(begin <= match.start(2) < end for begin, end in code):
            continue
        yield match, posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))


def title_of(path):
    """Returns the heading of a page; None if the file is no page."""
    if not path.endswith(".md") or not (ROOT / path).is_file():
        return None
    return next((line[2:] for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if line.startswith("# ")), None)


def on_files(files, config):
    for made in sorted(MADE.rglob("*.md")):
        files.append(File.generated(config, made.relative_to(MADE).as_posix(), abs_src_path=str(made)))
    for asset in sorted((SITE / "assets").iterdir()):
        files.append(File.generated(config, asset.name, abs_src_path=str(asset)))
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for _, path in links_of(page, (ROOT / page).read_text(encoding="utf-8")):
            source, uri = ROOT / path, in_site(path)
            if path in seen or not uri.startswith(OUTSIDE):
                continue
            seen.add(path)
            if not source.is_file():
                raise PluginError(f"{page} links to {path}, which is no file")
            if language_of(path):
                file = File.generated(config, uri, content=page_of_source(path))
            else:
                file = File.generated(config, uri, abs_src_path=str(source))
            file.inclusion = file.inclusion.NOT_IN_NAV
            files.append(file)
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if page.file.abs_src_path is None or page.file.generated_by is not None and not uri.startswith(OUTSIDE):
        return markdown
    source, out, end = in_repository(uri), [], 0
    for match, path in links_of(source, markdown):
        target = posixpath.relpath(in_site(path), posixpath.dirname(uri) or ".")
        opening = match[1]
        if opening[1:-2] == posixpath.basename(path) and title_of(path):
            opening = f"[{title_of(path)}]("
        out += [markdown[end:match.start()], opening, target]
        end = match.end(2)
    return "".join(out) + markdown[end:]
