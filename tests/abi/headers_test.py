#!/usr/bin/env python3
"""Each ABI header compiles alone, as C11, C17, C++17 and C++20, with -pedantic -Werror.

    headers_test.py CXX CC      exit 77 (skipped) when that compiler is not installed

Alone: so that a header never leans on what another one happened to include.
"""
import pathlib
import shutil
import subprocess
import sys

ABI = pathlib.Path(__file__).resolve().parents[2] / "abi"
STRICT = ["-Wall", "-Wextra", "-Wshadow", "-pedantic", "-Werror", "-fsyntax-only", f"-I{ABI}"]


def main():
    cxx, cc = sys.argv[1:3]
    for compiler in (cxx, cc):
        if not shutil.which(compiler):
            print(f"skipped: {compiler} is not installed")
            return 77
    headers = sorted(path.relative_to(ABI).as_posix() for path in ABI.rglob("*.h"))
    failed = 0
    for header in headers:
        for language, compiler, standards in (("c", cc, ("c11", "c17")), ("c++", cxx, ("c++17", "c++20"))):
            for standard in standards:
                # Twice, for the include guard; then one declaration, because an empty C file is not pedantic.
                source = f'#include "{header}"\n#include "{header}"\nextern int strata_nothing;\n'
                result = subprocess.run([compiler, f"-std={standard}", *STRICT, "-x", language, "-"], input=source,
                                        text=True, capture_output=True)
                if result.returncode != 0:
                    failed += 1
                    print(f"{header} as {standard} by {compiler}:\n{result.stderr}")
    print(f"{len(headers)} headers, 4 standards, {failed} failures")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
