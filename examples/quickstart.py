"""Compiles a DeepSeek-V3-shaped decode step with and without mla_fx, and compares.

Takes a minute or two on a laptop, or five on a CPU that has no instructions for bfloat16.

pip install 'mla_fx[demo]' && python examples/quickstart.py
"""

import torch

import mla_fx
from mla_fx.commands import demo

# Hugging Face's own model code with DeepSeek-V3's attention: one layer, random weights, bfloat16.
model = demo.deepseek_v3()

stock = torch.compile(model)
fused = torch.compile(model, backend=mla_fx.mla_backend)

with demo.progress() as announce:
    ways = {"eager": model, "torch.compile": stock, "mla_fx": fused}
    comparison = demo.compare(model, ways, context=4096, announce=announce)

print(mla_fx.last_report())  # what fused, what almost did, and why not
demo.show(comparison)
