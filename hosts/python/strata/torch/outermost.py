"""Whether what a hook saw begin is still running: torch calls no hook when KeyboardInterrupt or SystemExit ends it.

The frame of the call tells: Python clears the frame of a call that is over, and refuses while it runs, in any thread.
"""
import contextlib
import pathlib
import sys

import torch

_BETWEEN = (str(pathlib.Path(__file__).parent), str(pathlib.Path(torch._dynamo.__file__).parent), contextlib.__file__)
_ITSELF = str(pathlib.Path(__file__).parent / "engine.py")


class Outermost:
    """The outermost call that is running. What it has begun is ended when it was left without a word."""

    def __init__(self):
        self._what = self._frame = None

    def begin(self, what):
        """Before anything else of a call is begun; inside another one it does nothing."""
        if self._frame is None:
            self._what, self._frame = what, _caller()

    def end(self, what):
        if self._what is what:
            self.forget()

    def forget(self):
        self._what = self._frame = None

    @property
    def is_none(self):
        return self._frame is None

    def was_left(self):
        """It is over, without end()."""
        if self._frame is None:
            return False
        try:
            self._frame.clear()
        except RuntimeError:
            return False
        return True


def _caller():
    """The frame of the call of a module, or of Engine, whose hook or context manager calls this."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_code.co_filename != _ITSELF:
        frame = frame.f_back
    return frame
