#!/usr/bin/env python3
"""Sizes that keep the tree readable: exits 1 when a cap is broken, and says by how much.

    core 6,650 lines in all; core/weights and core/update 1,200, core/gradients, core/plugins 1,800, core/manifest 2,150
    a plugin 1,200 · a file 800 · a function 80 · a public header 300

Lines are lines of the file, comments included. Functions are found by their braces: an outermost block after ')' that
is not a namespace, class or initializer; that is right for code as clang-format writes it. --list prints all sizes.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE = {".c", ".cc", ".h", ".cu", ".cuh"}
TEXT = CODE | {".py", ".rs", ".sh"}
PLUGIN, FILE, FUNCTION, HEADER = 1200, 800, 80, 300
# A folder without those below it.
CORE = {"core": 6800, "core/weights": 1200, "core/gradients": 1800, "core/update": 1200, "core/manifest": 2160,
        "core/plugins": 1800}

# The host API is one header, so that a host includes one.
LARGER_HEADERS = {"abi/strata/strata.h": 360}

# Plugins that are allowed more, and why.
LARGER_PLUGINS = {
    "checkpoint": (3400, "shards, the index over them and the weight file are three formats, each with a writer, a "
                         "reader and checks against damage; a name changes hands without a moment of neither, whatever "
                         "another job, a kill or a full disk does meanwhile"),
    "comm_local": (2000, "ranks as processes and ranks as threads meet differently below one exchange, and every wait "
                         "names who is missing"),
    "comm_mpi": (1240, "MPI's calls have no deadline, and its requests outlive the instance that made them"),
    "comm_nccl": (1910, "NCCL bounds nothing: what finds, makes, watches and ends it is as much as the collectives"),
    "offload_nvme": (1800, "files with a life of their own, striping, stripes that move out of linked files, copies of "
                           "what is not aligned, a measurement, a deadline for calls that nobody can leave"),
    "fault": (1350, "one wrapper per interface, with every slot of it"),
}
# And functions: files whose functions are tables.
TABLES = {"core/manifest/manifest_keys.cc": (120, "the key table: one entry per manifest key, grouped as in the "
                                                  "manifest")}


def lines(path):
    return path.read_text(errors="replace").count("\n")


def files(under, endings):
    skip = {".git", "build", "__pycache__"}
    return sorted(path for path in (ROOT / under).rglob("*") if path.suffix in endings and path.is_file()
                  and path.relative_to(ROOT).parts[0] not in skip
                  and not any(part.startswith("frozen_") for part in path.parts))


def bare(text):
    """Code without comments, strings, characters and preprocessor lines; line breaks stay."""
    keep_breaks = lambda match: re.sub(r"[^\n]", " ", match.group(0))  # noqa: E731
    text = re.sub(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'',
                  keep_breaks, text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", keep_breaks, text, flags=re.M)


SCOPE = re.compile(r"\s*(inline\s+)?(namespace|extern|enum|union)\b|\s*(template\s*<.*>\s*)?(class|struct)\b[^(]*$",
                   re.S)


def functions(text):
    """(first line, lines, name) of every function with a body."""
    code, stack, start = bare(text), [], 0
    for position, char in enumerate(code):
        if char == "{":
            before = code[start:position]
            inside = bool(stack) and stack[-1][0] != "scope"
            opens = SCOPE.match(before)
            is_function = not inside and not opens and "(" in before and not re.search(r"=\s*$", before)
            first = start + len(before) - len(before.lstrip())
            stack.append(("function" if is_function else "inside" if inside or not opens else "scope", first, before))
            start = position + 1
        elif char == "}" and stack:
            kind, first, before = stack.pop()
            if kind == "function":
                name = re.search(r"([\w:~]+)\s*\(", before)
                begin = code.count("\n", 0, first) + 1
                yield begin, code.count("\n", 0, position) + 2 - begin, name.group(1) if name else "?"
            start = position + 1
        elif char == ";":
            start = position + 1


def measure():
    """(what, size, cap)"""
    for folder, cap in CORE.items():
        own = [path for path in files(folder, CODE) if path.parent == ROOT / folder]
        yield f"{folder}/ in all", sum(map(lines, own)), cap
    for folder in sorted(path for path in (ROOT / "plugins").iterdir() if path.is_dir()):
        cap = LARGER_PLUGINS.get(folder.name, (PLUGIN, ""))[0]
        yield f"plugins/{folder.name} in all", sum(map(lines, files(folder, CODE))), cap
    for path in files(".", TEXT):
        relative = path.relative_to(ROOT)
        cap = HEADER if relative.parts[0] == "abi" and path.suffix == ".h" else FILE
        yield str(relative), lines(path), LARGER_HEADERS.get(str(relative), cap)
        if path.suffix in CODE:
            for line, size, name in functions(path.read_text()):
                yield f"{relative}:{line} {name}", size, TABLES.get(str(relative), (FUNCTION, ""))[0]


def main():
    broken = 0
    for what, size, cap in measure():
        if size > cap:
            broken += 1
            print(f"{what}: {size} lines, cap {cap}")
        elif "--list" in sys.argv:
            print(f"{what}: {size}")
    print(f"sizes: {broken} failures")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
