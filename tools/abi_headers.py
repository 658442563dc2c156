"""Reads abi/strata/*.h into lists of structs, functions, typedefs and constants.

No compiler and no libclang: the headers keep to a small part of C on purpose (typedef struct with plain fields and
function pointers, typedef, anonymous enum, #define, STRATA_API functions), and whatever does not fit that is an error
here, not a gap. Comments are kept beside the declarations, because the thread tags live in them (tests/lint).

`read_all` returns one Header per file, stable headers first. Drafts are read too; they carry no promise.
"""
import pathlib
import re
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[1]
ABI = ROOT / "abi" / "strata"


class Unreadable(Exception):
    """A declaration outside the part of C these headers keep to."""


@dataclass
class Slot:
    """A field of a struct, or a function (then `name` is the function's). `type` is the abstract type in C."""
    name: str
    type: str
    is_function: bool
    line: int
    comment: str = ""  # above it, and after it on its line
    end_line: int = 0


@dataclass
class Struct:
    name: str
    line: int
    slots: list = field(default_factory=list)


@dataclass
class Header:
    path: pathlib.Path
    structs: list = field(default_factory=list)
    opaque: list = field(default_factory=list)
    typedefs: list = field(default_factory=list)  # Slot: name and type
    functions: list = field(default_factory=list)  # Slot: name and pointer type
    constants: list = field(default_factory=list)  # names: enum constants and numeric macros
    strings: list = field(default_factory=list)  # (name, text): macros that are strings, interface ids among them
    opening: str = ""  # the comment the file opens with

    @property
    def is_draft(self):
        return self.path.parent.name == "draft"


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def blank_comments(text):
    """The text with comments replaced by spaces (line breaks kept), and [(first line, last line, comment)]."""
    comments = []

    def blank(match):
        first = line_of(text, match.start())
        body = re.sub(r"^\s*\*?", "", match.group(0)[2:-2], flags=re.M)
        comments.append((first, first + match.group(0).count("\n"), " ".join(body.split())))
        return re.sub(r"[^\n]", " ", match.group(0))

    return re.sub(r"/\*.*?\*/", blank, text, flags=re.S), comments


FUNCTION_POINTER = re.compile(r"^(.*?)\(\s*STRATA_CALL\s*\*\s*(\w+)\s*\)\s*\((.*)\)$", re.S)
PLAIN = re.compile(r"^(.*?[\s*])(\w+)((?:\[[^\]]*\])*)$", re.S)


def squeeze(text):
    return re.sub(r"\s*([(),*])\s*", r"\1", " ".join(text.split())).replace("*", " *").replace(",", ", ").strip()


def parse_slot(text, line):
    text = text.strip()
    pointer = FUNCTION_POINTER.match(text)
    if pointer:
        result, name, args = pointer.groups()
        return Slot(name, f"{squeeze(result)} (STRATA_CALL *)({squeeze(args)})", True, line)
    plain = PLAIN.match(text)
    if not plain:
        raise Unreadable(f"line {line}: cannot read the declaration \"{' '.join(text.split())}\"")
    type_, name, array = plain.groups()
    return Slot(name, squeeze(type_) + (" " + array if array else ""), False, line)


def split_declarations(body):
    """(offset, text) of each declaration that ends with ';' at depth 0."""
    depth = start = 0
    for i, char in enumerate(body):
        depth += char in "({[" and 1 or char in ")}]" and -1 or 0
        if char == ";" and depth == 0:
            text = body[start:i]
            lead = len(text) - len(text.lstrip())
            yield start + lead, text.strip()
            start = i + 1


def attach_comments(slots, comments, first_line):
    """Gives each slot the comment that ends on the line above it, and the one on its own last line."""
    last_end = first_line
    for slot in slots:
        above = [body for first, last, body in comments if first > last_end and last == slot.line - 1]
        beside = [body for first, _, body in comments if slot.line <= first <= slot.end_line]
        slot.comment = " ".join(above + beside)
        last_end = slot.end_line


TOP = re.compile(
    r"typedef\s+struct\s+(?P<struct>\w+)\s*\{(?P<body>.*?)\}\s*(?P=struct)\s*;"
    r"|typedef\s+struct\s+(?P<opaque>\w+)\s+(?P=opaque)\s*;"
    r"|enum\s*\{(?P<enum>.*?)\}\s*;"
    r"|STRATA_(?:API|EXPORT)\s+(?P<function>[^;{]*?)\s*;"
    r"|typedef\s+(?P<typedef>[^;{]*?);"
    r"|(?P<skip>STRATA_EXTERN_C_(?:BEGIN|END)|extern\s+\"C\"\s*\{)", re.S)
MACRO = re.compile(r"^[ \t]*#\s*define\s+(STRATA_\w+)[ \t]+"
                   r"(?:(\"[^\"\n]*\")|(\(?[0-9][\w]*\)?|UINT(?:32|64)_MAX))[ \t]*$", re.M)


def read_struct(header, match, code, comments):
    line = line_of(code, match.start())
    struct = Struct(match.group("struct"), line)
    for offset, text in split_declarations(match.group("body")):
        start = match.start("body") + offset
        slot = parse_slot(text, line_of(code, start))
        slot.end_line = slot.line + text.count("\n")
        struct.slots.append(slot)
    attach_comments(struct.slots, comments, line)
    header.structs.append(struct)


def read_function(header, match, code):
    line = line_of(code, match.start())
    text = match.group("function")
    signature = re.match(r"(.*?)\s*STRATA_CALL\s+(\w+)\s*\((.*)\)$", text, re.S)
    if not signature:
        raise Unreadable(f"{header.path.name}:{line}: a function without STRATA_CALL: {' '.join(text.split())}")
    result, name, args = signature.groups()
    slot = Slot(name, f"{squeeze(result)} (STRATA_CALL *)({squeeze(args)})", True, line)
    slot.end_line = line + match.group(0).count("\n")
    header.functions.append(slot)


def read_header(path):
    text = path.read_text()
    code, comments = blank_comments(text)
    header = Header(path)
    for name, string, number in MACRO.findall(code):
        header.strings.append((name, string)) if string else header.constants.append(name)
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), code, flags=re.M)
    for match in TOP.finditer(code):
        if match.group("struct"):
            read_struct(header, match, code, comments)
        elif match.group("opaque"):
            header.opaque.append(match.group("opaque"))
        elif match.group("enum") is not None:
            header.constants += [item.split("=")[0].strip() for item in match.group("enum").split(",") if item.strip()]
        elif match.group("function"):
            read_function(header, match, code)
        elif match.group("typedef"):
            slot = parse_slot(match.group("typedef"), line_of(code, match.start()))
            slot.end_line = slot.line + match.group(0).count("\n")
            header.typedefs.append(slot)
    rest = re.sub(r"\s+", " ", TOP.sub("", code)).replace("}", "").strip()
    if rest:
        raise Unreadable(f"{path.name}: outside the part of C these headers keep to: {rest[:120]}")
    attach_comments(header.functions, comments, 0)
    attach_comments(header.typedefs, comments, 0)
    header.opening = comments[0][2] if comments else ""
    return header


def read_all(abi=ABI):
    paths = sorted(abi.glob("*.h")) + sorted(abi.glob("iface/*.h")) + sorted(abi.glob("draft/*.h"))
    return [read_header(path) for path in paths]


def stable(headers):
    return [header for header in headers if not header.is_draft]
