"""How each operator becomes the vendor's operator in torch_npu, one file for each.

Such a file says which one it lowers, `OPERATOR`, and has a function `lower(surface, *args, **kwargs)`. Asked with what
is known of a call's arguments, it answers with a plain function of the same arguments, which is traced in the place of
the call, or with a sentence: which limit of the vendor's kernel the call is not known to keep. `limits.py` has those
that several kernels share. torch_npu's operators are named within the plain functions only, so that the files import
anywhere."""
