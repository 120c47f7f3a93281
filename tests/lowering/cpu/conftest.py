"""Kernels are tested on several threads: what only one of them may write is wrong there alone."""

import pytest
from lib.kernels import threads


@pytest.fixture(autouse=True)
def several_threads():
    with threads(2):
        yield
