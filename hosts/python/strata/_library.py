"""Finds and opens libstrata.so, once per process, at the first call that needs it.

Places, in this order, never the working directory:
  1. the environment's STRATA_LIBRARY, the path of the file; when it is set, nothing else is tried
  2. lib/ inside the installed package (libstrata.so with plugins/ beside it)
  3. build/release/lib of the checkout this file lies in
"""
import ctypes
import functools
import os
import pathlib

from . import _abi
from .errors import LibraryNotFound

NAME = "libstrata.so"


def candidates():
    """Paths to try, best first."""
    named = os.environ.get("STRATA_LIBRARY")
    if named:
        return [pathlib.Path(named)]
    package = pathlib.Path(__file__).resolve().parent
    paths = [package / "lib" / NAME]
    if len(package.parents) > 2:  # <checkout>/hosts/python/strata
        paths.append(package.parents[2] / "build" / "release" / "lib" / NAME)
    return paths


@functools.lru_cache(maxsize=None)
def library():
    """The library with its prototypes set. LibraryNotFound lists every path tried and why it would not do."""
    tried = []
    for path in candidates():
        if not path.is_file():
            tried.append(f"  {path}: no such file")
            continue
        try:
            return _declare(ctypes.CDLL(str(path.resolve())))
        except (OSError, AttributeError) as e:
            tried.append(f"  {path}: {e}")
    raise LibraryNotFound(
        "libstrata.so was not found; set STRATA_LIBRARY to its path, or build it in a checkout: cmake --preset release "
        "&& cmake --build --preset release. Tried:\n" + "\n".join(tried))


def _declare(lib):
    for name, (result, arguments) in _abi.PROTOTYPES.items():
        function = getattr(lib, name)  # AttributeError: the library is older than this package
        function.restype = result
        function.argtypes = arguments
    return lib
