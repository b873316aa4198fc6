"""Makes a page for each public header from Doxygen's output: cpp_api.py XML OUT.

A page shows the header's classes, enums and functions in the order of the header, each with its declaration and its
comment. Private members, and names with `detail` in them, are left out. OUT/index.md lists the headers with their
declarations.
"""

import itertools
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

SPACES = re.compile(r"\s+")
BLOCK_BEGINS = re.compile(r"^(```|[|>-]|1\.)", re.MULTILINE)


def escaped(text):
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text or "")


def words(element):
    """Returns all text below an element, without escapes. Each run of white space becomes one space."""
    return SPACES.sub(" ", "".join(element.itertext())).strip() if element is not None else ""


def inline(element):
    """Returns the text of a paragraph as Markdown."""
    out = [escaped(element.text)]
    for child in element:
        if child.tag == "computeroutput":
            out.append(f"`{words(child)}`")
        elif child.tag in ("emphasis", "bold"):
            mark = "*" if child.tag == "emphasis" else "**"
            out.append(f"{mark}{inline(child)}{mark}")
        elif child.tag == "ulink":
            out.append(f"[{inline(child)}]({child.get('url')})")
        elif child.tag == "zwj":
            pass
        else:
            out.append(inline(child))
        out.append(escaped(child.tail))
    return "".join(out)


def table(element):
    rows = [[SPACES.sub(" ", " ".join(inline(para) for para in entry)).strip() for entry in row] for row in element.findall("row")]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def code_of(element):
    """Returns the text of a block of code, which Doxygen writes verbatim, or as <codeline> elements with <sp/>
    for spaces."""
    if element.tag in ("verbatim", "preformatted"):
        return element.text or ""
    for space in element.iter("sp"):
        space.text = " "
    return "\n".join("".join(line.itertext()) for line in element.findall("codeline"))


BLOCKS = {"table", "itemizedlist", "orderedlist", "blockquote", "verbatim", "preformatted", "programlisting"}


def block(element):
    if element.tag == "table":
        return table(element)
    if element.tag in ("verbatim", "preformatted", "programlisting"):
        return f"```cpp\n{code_of(element).rstrip()}\n```"
    if element.tag == "blockquote":
        return "\n".join(f"> {line}" for line in blocks(element).splitlines())
    mark = "-   " if element.tag == "itemizedlist" else "1.  "
    return "\n".join(mark + blocks(item).replace("\n", "\n    ") for item in element.findall("listitem"))


def blocks(element):
    """Returns a description as Markdown: paragraphs, and blocks among their text."""
    out = []
    for para in element:
        if para.tag in BLOCKS:
            out.append(block(para))
            continue
        text = ElementTree.Element("para")
        text.text = para.text
        for child in para:
            if child.tag not in BLOCKS:
                text.append(child)
                continue
            out += [inline(text), block(child)]
            text = ElementTree.Element("para")
            text.text = child.tail
        out.append(inline(text))
    return "\n\n".join(part for part in (SPACES.sub(" ", one).strip() if "\n" not in one.strip() or not re.match(r"[`|>1-]", one.strip())
                                         else one.strip() for one in out) if part)


def described(element):
    return "\n\n".join(text for text in (blocks(element.find(tag)) for tag in ("briefdescription", "detaileddescription")
                                         if element.find(tag) is not None) if text)


def line_of(element):
    return int(element.find("location").get("line", 0))


def template(element):
    parameters = element.find("templateparamlist")
    if parameters is None:
        return ""
    names = [" ".join(filter(None, (words(one.find("type")), words(one.find("declname"))))) for one in parameters]
    return f"template <{', '.join(names)}>\n"


def declaration(member):
    """Returns a declaration as it is in the header, without its body."""
    kind, name = member.get("kind"), words(member.find("name"))
    if kind == "enum":
        values = ", ".join(words(value.find("name")) for value in member.findall("enumvalue"))
        under = words(member.find("type"))
        return f"enum class {name}{f' : {under}' if under else ''} {{ {values} }};"
    if kind == "typedef":
        return f"using {name} = {words(member.find('type'))};"
    kinds = "static " if member.get("static") == "yes" else ""
    text = f"{kinds}{words(member.find('type'))} {name}{words(member.find('argsstring'))} {words(member.find('initializer'))}"
    text = SPACES.sub(" ", text).strip()
    return template(member) + re.sub(r" ?([&*]) ?(?=\w+[ (])", r"\1 ", text) + ";"


def of_member(member):
    text = described(member)
    for value in member.findall("enumvalue"):
        if described(value):
            text += f"\n\n- `{words(value.find('name'))}`: " + SPACES.sub(" ", described(value))
    return f"```cpp\n{declaration(member)}\n```\n\n{text}\n".rstrip() + "\n"


def members_of(compound):
    found = [member for section in compound.findall("sectiondef") for member in section.findall("memberdef")
             if member.get("prot") in ("public", "protected") and member.get("kind") != "friend"]
    return sorted(found, key=line_of)


def table_of(variables):
    rows = ["| member | meaning |", "|---|---|"]
    for member in variables:
        text = described(member)
        if "\n" in text and BLOCK_BEGINS.search(text):
            return "\n\n".join(map(of_member, variables))
        declared = declaration(member).removesuffix(";").replace("|", "\\|")
        rows.append(f"| `{declared}` | {SPACES.sub(' ', text)} |")
    return "\n".join(rows)


def of_members(members):
    """Returns Markdown for members. Neighbouring data members become a table, and each other member gets a block of
    code."""
    for is_data, together in itertools.groupby(members, lambda one: one.get("kind") == "variable"):
        yield table_of(list(together)) if is_data else "\n\n".join(map(of_member, together))


def of_class(xml, reference, level):
    compound = ElementTree.parse(xml / f"{reference}.xml").find("compounddef")
    name = words(compound.find("compoundname")).removeprefix("tessera::")
    bases = ", ".join(words(base) for base in compound.findall("basecompoundref"))
    out = [f"{'#' * level} {compound.get('kind')} {name}", f"From `{bases}`." if bases else "", described(compound)]
    out += of_members(members_of(compound))
    out += [of_class(xml, inner.get("refid"), level + 1) for inner in compound.findall("innerclass") if inner.get("prot") == "public"]
    return "\n\n".join(part for part in out if part)


def of_header(xml, file):
    """Returns (line, Markdown) of everything that the header declares in the namespace tessera."""
    path = file.find("location").get("file").removeprefix("include/")
    for inner in file.findall("innerclass"):
        compound = ElementTree.parse(xml / f"{inner.get('refid')}.xml").find("compounddef")
        # A header that only forward-declares a class lists the class too. A nested class is shown with its outer class.
        name = words(compound.find("compoundname"))
        if compound.find("location").get("file").endswith(path) and re.fullmatch(r"tessera::\w+", name):
            yield line_of(compound), of_class(xml, inner.get("refid"), 2)
    for space in file.findall("innernamespace"):
        if space.text != "tessera":
            continue
        namespace = ElementTree.parse(xml / f"{space.get('refid')}.xml").find("compounddef")
        for member in namespace.iter("memberdef"):
            if member.find("location").get("file").endswith(path):
                yield line_of(member), f"## {words(member.find('name'))}\n\n{of_member(member)}"


def joined(parts):
    """Joins neighbouring functions of the same name under one heading."""
    last = None
    for _, text in sorted(parts):
        heading, _, rest = text.partition("\n")
        yield rest.lstrip("\n") if heading == last else text
        last = heading


def main(xml, out):
    xml, out = pathlib.Path(xml), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for file in sorted(xml.glob("*_8h.xml")):
        compound = ElementTree.parse(file).find("compounddef")
        path = compound.find("location").get("file").removeprefix("include/")
        parts = list(joined(of_header(xml, compound)))
        about = described(compound)
        names = [re.sub(r"^(class|struct) ", "", heading) for part in parts for heading in re.findall(r"^## (.*)", part)]
        rows.append((path, ", ".join(f"`{one}`" for one in dict.fromkeys(names)) or "the headers above"))
        name = path.removeprefix("tessera/").removesuffix(".h")
        (out / f"{name}.md").write_text("\n\n".join(filter(None, [f"# {path}", f"```cpp\n#include <{path}>\n```", about, *parts])) + "\n", encoding="utf-8")
    if len(rows) < 30:
        sys.exit(f"Doxygen found {len(rows)} public headers, and there are more")
    (out / "index.md").write_text(
        "# C++ API\n\nEach public header has a page, which is made from its comments. `#include <tessera/tessera.h>` brings those that a "
        "training program needs. [Start in C++](../start-cpp.md) shows them at work.\n\n| header | declares |\n|---|---|\n"
        + "".join(f"| [{path}]({path.removeprefix('tessera/').removesuffix('.h')}.md) | {text} |\n" for path, text in rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
