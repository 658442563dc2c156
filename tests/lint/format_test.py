#!/usr/bin/env python3
"""C and C++ files are as clang-format 14 writes them with the .clang-format of the root.

Exit 77 (skipped) where clang-format-14 is not installed; other versions break lines elsewhere. abi/ and the tables
made from it keep their own columns, and are left out.
"""
import shutil
import subprocess
import sys

import house

OWN_COLUMNS = ("abi/", "tests/abi/freeze_")


def main():
    tool = shutil.which("clang-format-14")
    if not tool:
        print("skipped: clang-format-14 is not installed")
        return 77
    paths = [str(path) for path in house.files() if not str(path).startswith(OWN_COLUMNS)]
    # One run for all files; each deviation is an error on stderr.
    result = subprocess.run([tool, "--dry-run", "-Werror", *paths], cwd=house.ROOT, capture_output=True, text=True)
    wrong = sorted({line.split(":")[0] for line in result.stderr.splitlines() if "clang-format-violations" in line})
    if result.returncode != 0 and not wrong:
        wrong = [result.stderr.strip()]
    return house.report(f"format of {len(paths)} files", [f"{path}: run clang-format-14 -i on it" for path in wrong])


if __name__ == "__main__":
    sys.exit(main())
