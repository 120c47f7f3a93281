"""A fuzzer: small layers of latent attention, mutated as operator graphs, run before and after the rewrite.

    bases.py        the layers that mutants start from, along the axes of the zoo and with sizes that coincide
    layers/         what the zoo lacks: other masks, caches, pages, projections, two steps, two layers
    capture.py      a layer as the graph that a backend gets, or as Inductor decomposes it, and the tensors it is run on
    bench.py        a copy of such a graph that is edited, with `meta["val"]` kept true
    insertions.py   mutations that put something behind a value: factors, casts, reversals; and identities
    edits.py        mutations of another kind: arguments, operands, outputs, writes
    places.py       and more of these: other blocks, slots and positions, two values that change places
    draw.py         mutants drawn at random, as data
    judge.py        what became of a mutant: same, wrong, an error, a hang
    reduce.py       a failing mutant made small
    campaign.py     many mutants, drawn or with one insertion everywhere, and counts of what became of them
    found.py        failures that were found once, replayed by every test run
    command.py      `python -m tests.fuzz`
    refusals.py     `python -m tests.fuzz.refusals`: which refusal of the compiler does no test notice?
    removal.py      the plugin that tests run with there

A mutant is a base and a list of mutations, each a tuple of a kind, the name of a node in the captured graph and literal
parameters. That is all there is to it: it does not depend on a random sequence.
"""
