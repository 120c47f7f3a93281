"""One spelling for each computation.

A graph is read, never changed, by asking what *one element* of a value is. `resolve(node, index)` moves the index
through every view, permute, expand, slice, cat and cast to the operation that computes the element. So patterns never
see views, and every spelling looks the same to them:

sizes.py         sizes, as numbers or symbols, and what can be proved about them without a guard
axes.py          index arithmetic: axes, and the digits of axes that a dimension reads
views.py         how each view operation moves an index
constant.py      the numbers that values hold at compile time
element.py       an element of a value with its factor, the walk through views and casts to its operation, and the one
                 to all that a value is computed from
concatenation.py values that were split and joined again, chunked and stacked, or gathered from processes
same_value.py    equal calls of equal operands, and neighbouring pieces of one value
reading.py       the parts of every reading: its node, its elements and indices, its constants
algebra.py       sums and products of elements, with every factor on the way
contraction.py   matmul in any spelling; split where its operands were concatenated
conditions.py    values that depend on a condition, and conditions of conditions
bounds.py        values that are bounded by numbers, or clipped to a bound that the program computes
codes/           codes and their scales, for each token, tile, channel, block or group
behind.py        the nearest products and written caches that a value is computed from
integers.py      sums of positions in whole numbers, and comparisons of two of them
causal.py        masks that hide exactly the keys after a position
paged.py         rows that are gathered from pages
equal_sizes.py   sizes that are equal because of what is written, and what refusals say about others
rms_norm.py, rope.py, softmax.py, attention.py, cache_update.py   the pieces of MLA
index_scores.py, selection.py   how an indexer scores keys, and which keys a query chose
arithmetic.py, merged_parts.py  formulas that are evaluated instead of matched, and merges of attention in parts

An axis never changes. A reader uses everything that an element carries (factor, dtypes it was rounded to, every axis),
or refuses with `NoMatch`, the only exception that readings raise.
"""
