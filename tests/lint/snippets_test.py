#!/usr/bin/env python3
"""What README.md shows is compiled and run: its fenced blocks marked ```c and ```python.

    snippets_test.py BUILD_DIR      exit 77 (skipped) while README.md has no such block

Each runs in a directory of its own that holds examples/manifests. A C block without a main becomes
the body of a function that main calls; it must compile as C11 with warnings as errors, and end without a crash. A
Python block is run by $PYTHON (/usr/bin/python3) with hosts/python on the path.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import house

BLOCK = re.compile(r"^```(c|python)\n(.*?)^```", re.M | re.S)


def run(command, directory, build):
    environment = dict(os.environ, PYTHONPATH=str(house.ROOT / "hosts" / "python"), STRATA_BUILD_DIR=str(build),
                       STRATA_LIBRARY=str(build / "lib" / "libstrata.so"), OPENBLAS_NUM_THREADS="1")
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=100)


def check_c(code, directory, build):
    if not re.search(r"\bint main\(", code):
        includes = "".join(re.findall(r"^#include.*\n", code, re.M))
        body = re.sub(r"^#include.*\n", "", code, flags=re.M)
        code = (f'{includes}#include "strata/strata.h"\nstatic void snippet(void) {{\n{body}\n}}\n'
                "int main(void) {\n  snippet();\n  return 0;\n}\n")
    (directory / "snippet.c").write_text(code)
    # A snippet may leave out what its text says around it, such as a use of what it declares.
    result = run(["cc", "-std=c11", "-Wall", "-Werror", "-Wno-unused", f"-I{house.ROOT / 'abi'}", "snippet.c", "-o",
                  "snippet", f"-L{build / 'lib'}", "-lstrata", f"-Wl,-rpath,{build / 'lib'}"], directory, build)
    return result if result.returncode != 0 else run(["./snippet"], directory, build)


def check_python(code, directory, build):
    (directory / "snippet.py").write_text(code)
    return run([os.environ.get("PYTHON", "/usr/bin/python3"), "snippet.py"], directory, build)


def main():
    build = pathlib.Path(sys.argv[1])
    readme = house.ROOT / "README.md"
    text = readme.read_text() if readme.exists() else ""
    failures, count = [], 0
    for match in BLOCK.finditer(text):
        count += 1
        language, code = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        with tempfile.TemporaryDirectory() as name:
            directory = pathlib.Path(name)
            shutil.copytree(house.ROOT / "examples" / "manifests", directory / "examples" / "manifests")
            result = (check_c if language == "c" else check_python)(code, directory, build)
        if result.returncode != 0:
            failures.append(f"README.md:{line}: the {language} block fails:\n{result.stdout}{result.stderr}")
    if count == 0:
        print("skipped: README.md has no block marked c or python")
        return 77
    return house.report(f"{count} snippets", failures)


if __name__ == "__main__":
    sys.exit(main())
