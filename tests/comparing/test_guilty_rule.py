"""A rule that is wrong in one of 61 layers: `verify` names the call, its program shows it, and `bisect` finds it."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lib.comparing import compiled
from lib.plants import plant

import mla_fx
from mla_fx.__main__ import main

LAYERS, WRONG = 61, 37
MODEL = """
from mla_fx import cases
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(cases.Layer() for _ in range({layers}))

    def forward(self, x, *rest):
        for layer in self.layers:
            x = x + layer(x, *rest)
        return x

def build():
    return Model(), cases.inputs()
"""

pytestmark = pytest.mark.campaign


@pytest.fixture
def script(monkeypatch, tmp_path):
    plant(monkeypatch, "scale 1 % off", f".layers.{WRONG}.")
    (path := tmp_path / "script.py").write_text(MODEL.format(layers=LAYERS))
    return path


def test_bisect_finds_the_rewrite(script, capsys):
    assert main(["bisect", str(script), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    guilty = found["guilty"]
    assert (guilty["pattern"], guilty["module"], guilty["calls"]) == ("mla_attention", "layers.37", ["mla_attention"])
    assert guilty["before"] < 1e-5 < 1e-4 < guilty["after"]
    assert len(found["steps"]) <= 9  # two, and then seven for 124 rewrites


def test_verify_names_the_call_and_its_program_shows_it(script, tmp_path):
    model, arguments = runpy.run_path(str(script))["build"]()
    with torch.no_grad(), pytest.raises(mla_fx.VerificationError) as caught:
        compiled(model, verify="first", dump=tmp_path / "dump")(*arguments)
    message = str(caught.value)
    assert re.search(r"(output 0|input layers\.\d+\.k\w_cache) of the fused graph is \d\S+ away", message)
    assert "it is computed by latent_attention in layers.37, mla_prolog in layers.37, added by" in message
    file = Path(re.search(r"`python (\S+)` shows the difference with random inputs", message)[1])
    (alone := tmp_path / "alone").mkdir()
    file.rename(alone / file.name)
    done = subprocess.run([sys.executable, file.name], cwd=alone, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.match(r"what replaces bmm_\d+: fused and unfused are 0\.0\d+ apart in float64", done.stdout)
