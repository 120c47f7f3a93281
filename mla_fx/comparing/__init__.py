"""Runs two sides and compares: the calls that a plan adds with those that they replace, and a compiled graph with the
original one.

A plan is checked before it is made (`plans`, and `in_place` for writes in place). Both sides are run by PyTorch itself,
in float64, on random numbers, at sizes that are small and all different. Two different computations agree on random
numbers with probability zero, and in float64 the same computation agrees with itself to about 14 digits, so ten digits
tell one from the other: a factor, a sign, a swapped half, a wrong row, a stale cache, a mask that is off by one.
Nothing has to be known about softmax, norms or rotations for that, and no rounding of the program's own dtype can hide
a difference. What a program rounds to a coarser dtype than the result, or to codes, is rounded here, too. `region`
finds the part of the graph; `small_sizes` shrinks it; `inputs` draws what it reads, and `interpreter` runs it.

The option `verify` compares whole graphs on the user's inputs (`verify`): `exact` runs them, `closeness` says how far
apart results are, `choices` what rounding may decide, `culprit` finds the rule at fault. `reproducer` writes a program
that shows a difference without the user's model; it runs `reproduce`, which draws the inputs.

The room shares no code with the readings, the rules and the lowerings: it knows graphs, calls, and values that a plan
reads."""
