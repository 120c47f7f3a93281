"""Tests that need torch_npu, on a machine without an NPU: `python -m tests.npu` runs them.

`environment.py` runs pytest where torch_npu and stub libraries of CANN can be imported, as `explain` has them
(`lowering/ascend/stub/`); `tests/test_npu.py` does that for the whole suite. Each file has a process of its own, a fork
of one that has imported torch_npu (`forks.py`). There a test has the fixture `converted` (`converted.py`): functions
compiled with the real torchair, whose GE graphs run on the CPU (`ge_interpreter.py`, `ge_ops/`) and can be read as text
(`golden.py`). The fixture `captured` (`captured.py`) has the graphs of torchair's other mode, ACL graph, which run on
the CPU too (`cpu_kernels.py`). `formats.py` simulates FRACTAL_NZ. `planted/` has faults, for test_planted_faults.py.
"""
