"""Every test has a deadline: a hang ends the run with the stack of every thread."""
import faulthandler

import pytest

SECONDS = 300


@pytest.fixture(autouse=True)
def deadline():
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
