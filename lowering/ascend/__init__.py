"""Ascend NPUs, for both targets: torch_npu's operators, which torchair compiles.

`operators/` lowers ours to the vendor's. `toolchain.py` brings the graph to torchair."""
