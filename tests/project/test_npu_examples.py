"""The vendor's documents as examples: each runs here, too, and checks its results against float64."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("npu_*.py"))
DOCUMENTED = ("mla_prolog", "kv_rmsnorm_rope_cache", "multi_latent_attention", "paged_attention")


def test_there_is_one_for_each_document():
    assert sorted(EXAMPLES) == sorted(f"npu_{name}.py" for name in DOCUMENTED)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_it_runs_without_torch_npu_and_says_so(example):
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "torch.ops.mla_fx on the CPU"
    assert rest and all(line.endswith("right") for line in rest)
