"""One spelling for each computation.

A graph is read, never changed, by asking what *one element* of a value is: `resolve(node, index)` pushes the index
down through every view, permute, expand, slice, cat and cast to the operation that really computes the element. View
noise is gone by construction, and what a pattern sees is the same for every spelling:

    axes.py          index arithmetic: named axes, mixed radix, symbolic sizes
    element.py       an element of a value, and the walk through views to where it is computed
    views.py         how each view operation moves an index
    algebra.py       sums and products of elements
    contraction.py   matmul in any spelling; split where its operands were concatenated
    rms_norm.py, rope.py, softmax.py, cache_update.py   the pieces MLA is made of
"""
