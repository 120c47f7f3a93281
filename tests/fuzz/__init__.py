"""A fuzzer: small layers of latent attention, mutated as operator graphs, run before and after the rewrite.

    bases.py        the layers that mutants start from, along the axes of the zoo and with sizes that coincide
    layers/         what the zoo lacks: other masks, caches, pages, projections, two steps, two layers
    capture.py      a layer as the graph that a backend gets, or as Inductor decomposes it, and the tensors it is run on
    bench.py        a copy of such a graph that is edited, with `meta["val"]` kept true
    insertions.py   mutations that put something behind a value: factors, casts, reversals; and identities
    edits.py        mutations of another kind: arguments, operands, outputs, writes
    places.py       and more of these: other blocks, slots and positions, two values that change places
    program.py      a mutant as it is run: a graph, its inputs, how often it is called, and what is seen of that
    runners.py      the ways to run it: by the pass, by the backend, with `verify`, with weights laid out once
    scene.py        mutations of inputs and of how a mutant is run; scenes.py has all scenes by name, which are
    garbage.py      caches that hold no numbers, or huge ones, where nothing is seen
    outside.py      positions, offsets and blocks out of range, where the program raises
    state.py        numbers that are kept and rewritten at each call
    ranges.py       numbers at the edges of a type, for bases in float16, bfloat16 and float32
    users.py        twins that differ in who reads a value, and how
    numbers.py      numbers of whole types, fills within fills, weights that change between two calls
    draw.py         mutants drawn at random, as data
    judge.py        what became of a mutant: same, wrong, an error, a hang
    compare.py      in what two runs differ, how far each is from float64, what an error may leave
    reduce.py       a failing mutant made small
    campaign.py     many mutants, drawn or with one insertion everywhere, and counts of what became of them
    found.py        failures that were found once, replayed by every test run
    command.py      `python -m tests.fuzz`
    refusals.py     `python -m tests.fuzz.refusals`: which refusal of the compiler does no test notice?
    removal.py      the plugin that tests run with there

A mutant is a base and a list of mutations, each a tuple of a kind, the name of a node in the captured graph and literal
parameters. That is all there is to it: it does not depend on a random sequence. Half of the mutants drawn are scenes.

In float64 fused and unfused must agree. In fewer digits the fused one may be twice as far from float64 as the unfused
one, and a few roundings; where the unfused one overflows, nothing is asked. Where the program raises because something
is out of range, the fused one must raise, too, and leave in its inputs nothing that the program does not write there.
"""
