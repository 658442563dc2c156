"""Puts the Python host on the path and points it at the library of the build under test (STRATA_BUILD_DIR)."""
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("STRATA_BUILD_DIR", ROOT / "build" / "release"))
os.environ["STRATA_LIBRARY"] = str(BUILD / "lib" / "libstrata.so")
sys.path.insert(0, str(ROOT / "hosts" / "python"))
