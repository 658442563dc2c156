#!/usr/bin/env python3
"""Freezes the ABI of one release, and checks that nothing public escapes the freeze.

    tools/freeze.py --write 1.0   writes tests/abi/freeze_1_0.c and copies the stable headers to tests/abi/frozen_1_0/
    tools/freeze.py --check       every public name of the present headers is in some freeze table; exit 1 if not

A freeze table is a C file of _Static_asserts over the headers it is compiled with: size (at least), offset and type of
every field, signature of every function, value of every constant, text of every id. Appending to a struct passes;
inserting, retyping, renumbering and removing do not compile. It is written once per minor and then never again: a new
minor adds a table of its own. Numbers come from a small C program that the script compiles ($CC, or cc).
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import abi_headers

TESTS = abi_headers.ROOT / "tests" / "abi"

OPENING = """/* freeze_{tag}.c - what release {version} promised, as assertions over the headers it is compiled with.
 *
 * Written by tools/freeze.py --write {version} when that minor was released; not edited by hand. It compiles as long as
 * structs were only appended to, and constants, ids and signatures kept. A compile error here is an ABI break: undo
 * the change, or make it a new interface id. tests/abi/mutation_test.py shows that it does refuse what it should. */
{includes}

#define SIZE(type, bytes) _Static_assert(sizeof(type) >= (bytes), #type " shrank")
#define FIELD(type, field, offset, ...)                                                                   \\
  _Static_assert(offsetof(type, field) == (offset), #type "." #field " moved");                           \\
  _Static_assert(__builtin_types_compatible_p(__typeof__(((type *)0)->field), __VA_ARGS__),               \\
                 #type "." #field " has another type")
#define ALIAS(name, ...) _Static_assert(__builtin_types_compatible_p(name, __VA_ARGS__), #name " has another type")
#define FUNCTION(name, ...) \\
  _Static_assert(__builtin_types_compatible_p(__typeof__(&name), __VA_ARGS__), #name " has another signature")
#define VALUE(name, value) _Static_assert((name) == (value), #name " has another value")
#define TEXT(name, text) _Static_assert(__builtin_strcmp(name, text) == 0, #name " has another text")
"""


def include_lines(headers):
    return "\n".join(f'#include "strata/{h.path.relative_to(abi_headers.ABI).as_posix()}"' for h in headers)


def measure(headers):
    """{expression: number} for sizes, offsets and constants, from the compiler."""
    wanted = []
    for header in headers:
        for struct in header.structs:
            last = struct.slots[-1].name
            wanted.append((f"sizeof {struct.name}",
                           f"offsetof({struct.name}, {last}) + sizeof((({struct.name} *)0)->{last})"))
            wanted += [(f"{struct.name}.{slot.name}", f"offsetof({struct.name}, {slot.name})") for slot in struct.slots]
        wanted += [(name, name) for name in header.constants]
    lines = [f'  printf("%s\\t%llu\\n", "{key}", (unsigned long long)({value}));' for key, value in wanted]
    source = f"#include <stdio.h>\n{include_lines(headers)}\nint main(void) {{\n" + "\n".join(lines) + "\n}\n"
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        (path / "probe.c").write_text(source)
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-I", abi_headers.ROOT / "abi", path / "probe.c", "-o",
                        path / "probe"], check=True)
        output = subprocess.run([path / "probe"], check=True, capture_output=True, text=True).stdout
    return dict(line.split("\t") for line in output.splitlines())


def table(version):
    headers = abi_headers.stable(abi_headers.read_all())
    numbers = measure(headers)
    text = OPENING.format(tag=version.replace(".", "_"), version=version, includes=include_lines(headers))
    for header in headers:
        text += f"\n/* {header.path.relative_to(abi_headers.ABI).as_posix()} */\n"
        constants = [name for name in header.constants if name != "STRATA_ABI_MINOR"]  # grows by definition
        text += "".join(f"VALUE({name}, {numbers[name]}u);\n" if int(numbers[name]) < 2**63
                        else f"VALUE({name}, {numbers[name]}ull);\n" for name in constants)
        text += "".join(f"TEXT({name}, {string});\n" for name, string in header.strings)
        text += "".join(f"ALIAS({slot.name}, {slot.type});\n" for slot in header.typedefs)
        for struct in header.structs:
            text += f"SIZE({struct.name}, {numbers['sizeof ' + struct.name]});\n"
            for slot in struct.slots:
                text += f"FIELD({struct.name}, {slot.name}, {numbers[f'{struct.name}.{slot.name}']}, {slot.type});\n"
        text += "".join(f"FUNCTION({slot.name}, {slot.type});\n" for slot in header.functions)
    return text, headers


def write(version):
    tag = version.replace(".", "_")
    text, headers = table(version)
    (TESTS / f"freeze_{tag}.c").write_text(text)
    frozen = TESTS / f"frozen_{tag}" / "strata"
    shutil.rmtree(frozen, ignore_errors=True)
    for header in headers:
        target = frozen / header.path.relative_to(abi_headers.ABI)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(header.path, target)
    print(f"wrote freeze_{tag}.c ({text.count(chr(10))} lines) and {len(headers)} headers to frozen_{tag}/")


def missing_names(abi, tables):
    """Public names of the headers in `abi` that no freeze table holds."""
    frozen = "\n".join(path.read_text() for path in tables)
    held = set(re.findall(r"^(?:SIZE|ALIAS|FUNCTION|VALUE|TEXT)\((\w+),", frozen, re.M))
    missing = []
    for header in abi_headers.stable(abi_headers.read_all(abi)):
        names = [(s.name, "struct") for s in header.structs] + [(s.name, "function") for s in header.functions]
        names += [(s.name, "type") for s in header.typedefs] + [(name, "constant") for name in header.constants]
        names += [(name, "text") for name, _ in header.strings]
        missing += [f"{header.path.name}: {kind} {name}" for name, kind in names
                    if name not in held and name != "STRATA_ABI_MINOR"]
    return missing


def check(abi):
    missing = missing_names(abi, sorted(TESTS.glob("freeze_*.c")))
    for line in missing:
        print(f"not in any tests/abi/freeze_*.c: {line}")
    if missing:
        print("A new minor gets a table of its own: raise STRATA_ABI_MINOR, then tools/freeze.py --write MAJOR.MINOR")
    return 1 if missing else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", metavar="MAJOR.MINOR")
    action.add_argument("--check", action="store_true")
    parser.add_argument("--abi", type=pathlib.Path, default=abi_headers.ABI, help="headers to check (default: ours)")
    args = parser.parse_args()
    if args.write:
        write(args.write)
        return 0
    return check(args.abi)


if __name__ == "__main__":
    sys.exit(main())
