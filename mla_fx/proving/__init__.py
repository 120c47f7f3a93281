"""Checks each rewrite before it is made: the calls that a plan adds against the calls that they replace.

Both are run by PyTorch itself, in float64, on random numbers, at sizes that are small and all different. Two different
computations agree on random numbers with probability zero, and in float64 the same computation agrees with itself to
about 14 digits, so ten digits tell one from the other: a factor, a sign, a swapped half, a wrong row, a stale cache, a
mask that is off by one. Nothing has to be known about softmax, norms or rotations for that, and no rounding of the
program's own dtype can hide a difference. What a program rounds to a coarser dtype than the result, or to codes, is
rounded here, too.

The check shares no code with the readings, the rules and the lowerings: it knows calls, and values that the plan reads.
Its files: `equations` and `small_sizes` shrink a part of a graph, `region` finds the part, `inputs` draws what it
reads, `ranges` makes that large, `interpreter` runs it, `check` compares, `programs` writes down what differs. `memory`
checks writes in place."""
