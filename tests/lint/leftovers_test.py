#!/usr/bin/env python3
"""Nothing is left for later, and nothing belongs to one machine.

No notes to finish something; no file opens without saying what it is for; no absolute path of a developer's tree; no
line longer than 120 columns in code; no trailing blanks.
"""
import re
import sys

import house

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
THIS_TREE = str(house.ROOT.parent) + "/"
TEXT = house.C_ENDINGS | {".py", ".md", ".toml", ".cmake", ".txt", ".rs", ".json"}


def opening(text):
    return text.lstrip().startswith(("//", "/*", "#", '"""'))


def main():
    failures = []
    for path in house.files(TEXT):
        text = (house.ROOT / path).read_text(errors="replace")
        if "corpus" in path.parts or path.name in ("leftovers_test.py", "linters_test.py"):  # wrong on purpose
            continue
        if path.suffix in {".cc", ".c", ".cu", ".py"} and text.strip() and not opening(text):
            failures.append(f"{path}:1: does not open with what it is for")
        for number, line in enumerate(text.splitlines(), 1):
            if UNFINISHED.search(line):
                failures.append(f"{path}:{number}: finish it, or take it out: {line.strip()[:80]}")
            # A root like "/" or "/src" would match everywhere; paths of a developer's tree are longer.
            if len(THIS_TREE) > 5 and THIS_TREE in line:
                failures.append(f"{path}:{number}: a path of one machine")
            if line != line.rstrip() and path.suffix != ".md":
                failures.append(f"{path}:{number}: blanks at the end of the line")
            if len(line) > 120 and path.suffix in house.C_ENDINGS | {".py"} and not path.name.startswith("freeze_"):
                failures.append(f"{path}:{number}: {len(line)} columns")
    return house.report("leftovers", failures)


if __name__ == "__main__":
    sys.exit(main())
