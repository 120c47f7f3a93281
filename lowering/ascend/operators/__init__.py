"""Lowers each operator to the vendor's operator in torch_npu, one file or folder per operator.

Each file names the operator it lowers, `OPERATOR`, and has a function `lower(surface, a)`, which is called with the
fake values of a call's `Arguments`. It returns a plain function of both, which is traced in place of the call. Or it
raises NoMatch with a sentence that says which limit of the vendor's kernel the call is not known to meet. Such a call
becomes the operator's body, unless the file has a function `refuse_body(a)` that refuses that, too. `limits.py` has the
limits that several kernels share. torch_npu's operators are named only inside the plain functions, so the files can be
imported anywhere."""
