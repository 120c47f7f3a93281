"""The examples run, and the one to copy into `patterns/` is found there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "add_a_pattern.py"

# As if the folder were `patterns/` itself: its files are found, and named after the file.
COPIED = """
import sys
import mla_fx.patterns
from mla_fx.driver import discovery
from mla_fx.driver.try_cases import check_accepted, check_refused

mla_fx.patterns.__path__.append(sys.argv[1])
(rule,) = [rule for rule in discovery.rules() if rule.name == "add_a_pattern"]
for case in rule.accepts:
    check_accepted(case)
for case in rule.rejects:
    check_refused(rule, case)
print(rule.name, len(rule.accepts), len(rule.rejects))
"""


def output_of(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.slow
def test_add_a_pattern_tries_its_cases():
    told = output_of("-m", "mla_fx.driver.try_cases", str(EXAMPLE))
    assert "plain: fused {'mla_prolog': 1, 'latent_attention': 1, 'latent_output': 1}, and answers as before" in told
    assert "scaled values: refused, because 'a matrix product is multiplied by another value'" in told


@pytest.mark.slow
def test_add_a_pattern_is_found_among_the_patterns(tmp_path):
    shutil.copy(EXAMPLE, tmp_path)
    assert output_of("-c", COPIED, str(tmp_path)) == "add_a_pattern 1 1\n"


@pytest.mark.slow
def test_server_step_fuses_in_one_graph():
    told = output_of(str(ROOT / "examples" / "server_step.py"))
    assert told.count("outputs and caches are as in eager mode") == 4
    assert "fused mla_prolog x1, latent_attention x1 in" in told and "graphs" not in told


@pytest.mark.campaign
def test_tensor_parallel_fuses_on_each_process():
    run = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    told = output_of(*run, str(ROOT / "examples" / "tensor_parallel.py"))
    for rank in (0, 1):
        assert f"rank {rank}: 4 of 8 heads, fused {{'mla_prolog': 1, 'latent_attention': 1}}" in told
