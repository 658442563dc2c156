#!/usr/bin/env python3
"""Tests the tests: changed copies of the headers must be refused by the freeze table, and legal growth must not be.

For every struct: a field appended at the end compiles; a field inserted, two fields swapped, a field removed and a
field retyped do not. For every enum, id and function: a change does not compile. A new struct compiles, but
tools/freeze.py --check names it.
"""
import concurrent.futures
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import abi_headers  # noqa: E402

TABLE = ROOT / "tests" / "abi" / "freeze_1_0.c"
# Grows only with a new interface id, because strata_optim_layout holds an array of it by value.
EMBEDDED = {"strata_optim_array"}


def struct_body(text, name):
    match = re.search(r"typedef struct %s \{\n(.*?)\} %s;" % (name, name), text, re.S)
    return match.start(1), match.end(1)


def declarations(text, name):
    """Spans in `text` of the struct's declarations, comments in front of them left out."""
    start, end = struct_body(text, name)
    code, _ = abi_headers.blank_comments(text)
    return [(start + offset, start + offset + len(body) + 1)
            for offset, body in abi_headers.split_declarations(code[start:end])]


def replaced(text, span, new):
    return text[:span[0]] + new + text[span[1]:]


def struct_mutations(text, struct):
    """(what, changed text, whether it must compile)"""
    spans = declarations(text, struct.name)
    end = struct_body(text, struct.name)[1]
    extra = "  void *strata_new_field;\n"
    yield "append", text[:end] + extra + text[end:], struct.name not in EMBEDDED
    yield "insert first", text[:spans[0][0]] + extra + text[spans[0][0]:], False
    yield "insert last but one", text[:spans[-1][0]] + extra + text[spans[-1][0]:], False
    yield "remove last", replaced(text, spans[-1], ""), False
    yield "rename last", replaced(text, spans[-1], "void *strata_new_field;"), False
    first, second = (text[a:b] for a, b in spans[-2:])
    yield "swap last two", replaced(replaced(text, spans[-1], first), spans[-2], second), False
    for span, slot in zip(spans, struct.slots):
        declaration = text[span[0]:span[1]]
        if slot.is_function:
            yield f"argument of {slot.name}", replaced(text, span, declaration[:-2] + ", int strata_new_arg);"), False
        elif "[" not in declaration:
            kind = "float" if slot.type != "float" else "int32_t"
            yield f"retype {slot.name}", replaced(text, span, f"{kind} {slot.name};"), False


def other_mutations(text, header):
    for name in header.constants:
        if name == "STRATA_ABI_MINOR":
            continue
        changed = re.sub(r"\b%s = (\w+)" % name, r"%s = 77 + \1" % name, text, count=1)
        if changed == text:
            changed = re.sub(r"(#define %s[ \t]+)(\S+)" % name, r"\1(\2 - 1)", text, count=1)
        yield f"renumber {name}", changed, False
    for name, string in header.strings:
        yield f"change {name}", re.sub(r'(#define %s\s+)"' % name, r'\1"x', text, count=1), False
    for slot in header.functions:
        changed = re.sub(r"(STRATA_CALL\s+%s\()(void(?=\)))?" % slot.name, lambda m: m.group(1) + (
            "int strata_new_arg" if m.group(2) else "int strata_new_arg, "), text, count=1)
        yield f"argument of {slot.name}", changed, False
    for slot in header.typedefs:
        if not slot.is_function:
            changed = re.sub(r"typedef \w+ %s;" % slot.name, f"typedef char {slot.name};", text)
            yield f"retype {slot.name}", changed, False


def verdict(relative, text):
    """True: it compiles. False: the table refuses it. A text: it fails for another reason, and tests nothing."""
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory) / "strata"
        shutil.copytree(abi_headers.ABI, copy)
        (copy / relative).write_text(text)
        result = subprocess.run(["cc", "-std=c11", "-fsyntax-only", "-w", f"-I{directory}", TABLE],
                                capture_output=True, text=True)
        if result.returncode == 0:
            return True
        errors = re.findall(r"freeze_1_0\.c:\d+:\d+: error: (.*)", result.stderr)
        refusal = re.compile("static assertion failed|has no member|static_assert failed|no member named|unknown type")
        return False if any(refusal.search(error) for error in errors) else result.stderr


def new_struct_is_named():
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory) / "strata"
        shutil.copytree(abi_headers.ABI, copy)
        types = copy / "types.h"
        new = "typedef struct strata_brand_new {\n  uint32_t struct_size;\n  uint32_t abi_minor;\n} strata_brand_new;\n"
        types.write_text(types.read_text().replace("/* One setting of a plugin", new + "\n/* One setting of a plugin"))
        result = subprocess.run([sys.executable, ROOT / "tools" / "freeze.py", "--check", "--abi", copy],
                                capture_output=True, text=True)
        return result.returncode == 1 and "struct strata_brand_new" in result.stdout


def main():
    cases = []
    for header in abi_headers.stable(abi_headers.read_all()):
        relative = header.path.relative_to(abi_headers.ABI)
        text = header.path.read_text()
        cases.append((f"{relative} unchanged", relative, text, True))
        cases += [(f"{relative}: {what}", relative, changed, legal)
                  for what, changed, legal in other_mutations(text, header)]
        for struct in header.structs:
            cases += [(f"{relative}: {struct.name}: {what}", relative, changed, legal)
                      for what, changed, legal in struct_mutations(text, struct)]
    failures = [f"{what}: the mutation changed nothing" for what, relative, text, _ in cases
                if "unchanged" not in what and text == (abi_headers.ABI / relative).read_text()]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for (what, _, _, legal), passed in zip(cases, pool.map(lambda case: verdict(case[1], case[2]), cases)):
            if isinstance(passed, str):
                failures.append(f"{what}: not a C header any more: {passed[:300]}")
            elif passed != legal:
                failures.append(f"{what}: {'refused, and is legal' if legal else 'accepted, and breaks the ABI'}")
    if not new_struct_is_named():
        failures.append("a new struct without a freeze table was not named by tools/freeze.py --check")
    print("\n".join(failures))
    print(f"{len(cases) + 1} changed headers, {len(failures)} wrong verdicts")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
