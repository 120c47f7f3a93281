"""A file with a rule is tried as a whole: what fails is named, and the rest goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_a_pattern.py"


def tried(path):
    done = subprocess.run([sys.executable, "-m", "mla_fx.driver.try_cases", str(path)], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_a_failure_is_named_and_the_rest_goes_on(tmp_path):
    """The fake kernel has another width; the first case counts wrong, and ten cases share the code of one layer."""
    right = EXAMPLE.read_text()
    wrong = right.replace("a.weight_o.shape[2])", "a.weight_o.shape[1])")
    wrong = wrong.replace('"latent_output": 1}),)', '"latent_output": 2}), *[Case("again", Layer, {}, "")] * 9)')
    assert wrong.count("shape[1]") > right.count("shape[1]") and "again" in wrong
    (tmp_path / "at_fault.py").write_text(wrong)
    status, lines = tried(tmp_path / "at_fault.py")
    assert status == 1
    told = [line for line in lines if "FAILED" in line]
    assert told[0].startswith("latent_output, sample 'plain': FAILED. ")
    assert told[1].startswith("plain: FAILED. ")
    assert len([line for line in told if line.startswith("again: FAILED. AssertionError: expected {}, mla_fx")]) == 9
    assert lines[-1] == "scaled values: refused, because 'a matrix product is multiplied by another value'"
