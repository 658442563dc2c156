"""Every failed call raises the StrataError subclass of its status code, with the engine's full text.

The text says what was being done, to what, with which numbers, and which manifest key would change it. `code` is the
status number of abi/strata/abi.h. After a failed background update the engine has FAILED: every later call but
queries, load and close raises that first error again. InvalidArgument is a ValueError as well.
"""
import difflib

from ._abi import STATUS


class StrataError(Exception):
    """Base of all errors of the engine. str(error) is the text alone."""

    code = STATUS["UNKNOWN"]


class LibraryNotFound(StrataError):
    """libstrata.so is missing or does not load; the text lists every path tried."""

    code = STATUS["NOT_FOUND"]


def _subclass(status):
    name = "".join(word.capitalize() for word in status.split("_"))
    bases = (StrataError, ValueError) if status == "INVALID_ARGUMENT" else (StrataError,)
    return type(name, bases, {"code": STATUS[status], "__module__": __name__,
                              "__doc__": f"STRATA_{status} of abi/strata/abi.h."})


_BY_CODE = {code: _subclass(status) for status, code in STATUS.items() if status != "OK"}
globals().update({cls.__name__: cls for cls in _BY_CODE.values()})
__all__ = ["StrataError", "LibraryNotFound"] + [cls.__name__ for cls in _BY_CODE.values()]


def did_you_mean(word, known):
    """The end of a message about a word that is not known."""
    near = difflib.get_close_matches(word, known, 1)
    return f", did you mean {near[0]}?" if near else ""


def error_of(code, text):
    """The exception for a status; a code this package does not know means INTERNAL."""
    return _BY_CODE.get(code, _BY_CODE[STATUS["INTERNAL"]])(text)
