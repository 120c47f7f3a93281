"""`import mla_fx`: what it imports, and what it has."""

import json
import subprocess
import sys

IMPORTED = """
import json, sys, torch

before = set(sys.modules)
import mla_fx

brought = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([sorted(brought), str(torch.ops.mla_fx.mla_prolog.default._schema)]))
"""


def test_importing_brings_nothing_but_itself_and_the_operators_are_there():
    """Neither sympy, which takes longer to import than this whole package, nor Dynamo."""
    told = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True).stdout
    brought, schema = json.loads(told)
    assert brought == ["mla_fx"]
    assert schema.startswith("mla_fx::mla_prolog(Tensor token_x, ")
