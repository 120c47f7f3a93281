"""Lowers graphs for Ascend NPUs, of both kinds that torchair compiles, GE graphs and ACL graphs.

`operators/` has a file for each operator, which lowers it to the vendor's. Several of these files call
`fused_infer_attention_score.py`, and share `causal_masks.py`, `prolog_form.py` and `limits.py`. `target.py` is the base
of both targets, and `toolchain.py` calls torch_npu and torchair for them, with `converters.py` and
`numbers_of_sizes.py`. `stub/` takes the place of CANN on a machine without an NPU."""
