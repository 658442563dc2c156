"""Skipped, with the reason, where the other tests of this folder cannot run."""
import pytest

import conftest


def test_torch_is_there():
    if why := conftest.missing():
        pytest.skip(why)
