"""What the lints share: the project's own source files, and one way to report.

Files are found in the source tree (build/ and the frozen headers of old releases left out), so that a lint works in a
clean clone as in a tree with untracked files. Standard library only.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

C_ENDINGS = {".c", ".cc", ".h", ".cu", ".cuh"}
ABOVE_TOP = {".git", "build", "__pycache__", ".pytest_cache"}
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"]+)[>\"]", re.M)


def files(endings=C_ENDINGS, under="."):
    """Source files with these endings, sorted, as paths relative to the root."""
    found = []
    for path in (ROOT / under).rglob("*"):
        relative = path.relative_to(ROOT)
        if relative.parts[0] in ABOVE_TOP or "__pycache__" in relative.parts:
            continue
        if any(part.startswith("frozen_") for part in relative.parts):
            continue
        if path.suffix in endings and path.is_file():
            found.append(relative)
    return sorted(found)


def includes(relative):
    """[(line, '<' or '"', name)]"""
    text = (ROOT / relative).read_text()
    return [(text.count("\n", 0, match.start()) + 1, match.group(1), match.group(2))
            for match in INCLUDE.finditer(text)]


def report(what, failures):
    """Prints the failures and a count; the exit code."""
    for failure in failures:
        print(failure)
    print(f"{what}: {len(failures)} failures")
    return 1 if failures else 0
