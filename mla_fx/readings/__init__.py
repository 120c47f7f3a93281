"""One spelling for each computation.

A graph is read, never changed, by asking what *one element* of a value is: `resolve(node, index)` pushes the index
down through every view, permute, expand, slice, cat and cast to the operation that really computes the element. View
noise is gone by construction, and what a pattern sees is the same for every spelling:

    sizes.py         sizes, as numbers or symbols, and what can be proved about them without a guard
    axes.py          index arithmetic: axes, and the digits of them that a dimension reads
    views.py         how each view operation moves an index
    element.py       an element of a value with its factor, and the walk through views and casts to what computes it
    concatenation.py what was split and joined again, chunked and stacked
    reading.py       what every reading has: where it begins, its elements and indices, and its constants
    algebra.py       sums and products of elements, with every factor on the way
    contraction.py   matmul in any spelling; split where its operands were concatenated
    integers.py      sums of positions in whole numbers, and what comparing two of them says
    causal.py        masks that hide exactly the keys behind a position
    paged.py         rows that are gathered out of pages
    rms_norm.py, rope.py, softmax.py, attention.py, cache_update.py   the pieces MLA is made of

An axis never changes. What an element carries (factor, types it was rounded to, every axis) is consumed by whoever
reads it, or the reading refuses with `NoMatch`, the only exception that it raises.
"""
