"""What `explain` uses for NPU targets on a machine without CANN: the real torch_npu and torchair, over stub libraries.

`environment.py` fetches the packages, builds the libraries that they link to, and leaves out the graph engine behind
them. A graph is converted as on an NPU, and cannot run."""
