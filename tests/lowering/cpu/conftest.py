"""Kernels are tested on several threads: what only one of them may write is wrong there alone."""

import pytest
import torch

THREADS = 2


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)
