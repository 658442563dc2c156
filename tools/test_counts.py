#!/usr/bin/env python3
"""Adds up JUnit files of ctest and pytest: reasons of skipped tests, names of failed ones, then one line of counts.

    tools/test_counts.py FILE.xml...      exit 1 when a test failed, when none passed, or when a file is missing
"""
import pathlib
import re
import sys
import xml.etree.ElementTree as tree
from collections import Counter


def outcome(case):
    """("passed" | "skipped" | "failed", why)"""
    for child in case:
        if child.tag in ("failure", "error"):
            return "failed", child.get("message") or ""
    skipped = case.find("skipped")
    if skipped is None and case.get("status") not in ("notrun", "disabled"):
        return "passed", ""
    why = skipped.get("message", "") if skipped is not None else "disabled"
    if why.startswith("SKIP_"):  # ctest knows that it was skipped, not why: the test printed it
        output = case.findtext("system-out") or ""
        said = re.search(r"\bskipped: (.*)", output) or re.search(r": Skipped\n(.+)", output)
        why = said.group(1).strip() if said else "no reason given"
    return "skipped", why


def main():
    counts, reasons, failed = Counter(), Counter(), []
    for path in map(pathlib.Path, sys.argv[1:]):
        if not path.exists():
            failed.append(f"{path.name}: was not written, so its tests did not run")
            continue
        for case in tree.parse(path).getroot().iter("testcase"):
            what, why = outcome(case)
            counts[what] += 1
            reasons[why] += what == "skipped"
            if what == "failed":
                failed.append(f"{path.stem}: {case.get('name')}")
    for why, count in sorted(reasons.items()):
        if count:
            print(f"skipped {count}: {why}")
    for name in failed:
        print(f"FAILED {name}")
    print(f"{counts['passed']} passed, {max(counts['failed'], len(failed))} failed, {counts['skipped']} skipped")
    return 0 if counts["passed"] and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
