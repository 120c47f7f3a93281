import pytest
from lib.ascend_calls import fakes


@pytest.fixture
def mode():
    with fakes() as fake_mode:
        yield fake_mode
