#!/usr/bin/env python3
"""The rules of abi/RULES.md that a program can read off the headers.

- Every function and function pointer has a thread tag, [control], [submit] or [any]: in its own comment; or, when it
  has none, in the comment of the group above it; or because the header's opening comment says that its functions are
  [control] unless marked, which it does by naming "([control])".
- Every struct starts with struct_size and abi_minor.
- Fields have fixed widths: no bool, long, int, enum, bit field.
"""
import re
import sys

import house
import abi_headers

TAG = re.compile(r"\[(control|submit|any)\]")
WIDTHS = re.compile(r"\b(bool|_Bool|long|short|unsigned|signed|int|enum|size_t)\b|:\s*\d+$")
# A struct without a size: its arrays carry a stride, and the interface id changes when it does.
UNSIZED = {"strata_optim_span"}


def untagged(slots, default):
    """Function slots without a tag; a slot without a comment belongs to the group above it."""
    group = default
    for slot in slots:
        if slot.comment:
            group = TAG.search(slot.comment) or default
        if slot.is_function and not group:
            yield slot


def main():
    failures, functions = [], 0
    for header in abi_headers.read_all():
        name = header.path.relative_to(house.ROOT)
        default = "([control])" in header.opening
        groups = [("", header.functions), ("", header.typedefs)]
        for where, slots in groups + [(struct.name + ".", struct.slots) for struct in header.structs]:
            functions += sum(slot.is_function for slot in slots)
            failures += [f"{name}:{slot.line}: {where}{slot.name} has no thread tag"
                         for slot in untagged(slots, default)]
        for struct in header.structs:
            start = [(slot.name, slot.type) for slot in struct.slots[:2]]
            if struct.name not in UNSIZED and start != [("struct_size", "uint32_t"), ("abi_minor", "uint32_t")]:
                failures.append(f"{name}:{struct.line}: {struct.name} does not start with struct_size and abi_minor")
            failures += [f"{name}:{slot.line}: {struct.name}.{slot.name}: the width of \"{slot.type}\" is not fixed"
                         for slot in struct.slots if not slot.is_function and WIDTHS.search(slot.type)]
    return house.report(f"{functions} functions and function pointers", failures)


if __name__ == "__main__":
    sys.exit(main())
