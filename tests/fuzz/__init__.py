"""A fuzzer: small layers of latent attention, mutated as operator graphs, run before and after the rewrite.

bases.py        the layers that mutants start from, along the axes of the zoo and with coinciding sizes
layers/         what the zoo lacks: other masks, caches, pages, projections, two steps, two layers
capture.py      a layer as the graph of a backend, or as Inductor decomposes it, and the tensors it runs on
bench.py        a copy of such a graph to edit, with correct `meta["val"]`
insertions.py   mutations that insert something after a value: factors, casts, reversals; and identities
edits.py        other mutations: arguments, operands, outputs, writes
places.py       more of these: other blocks, slots and positions, two values that are swapped
program.py      a mutant as it runs: a graph, its inputs, the number of calls, and what is observed
runners.py      the ways to run it: by the pass, by the backend, with `verify`, with weights laid out once
scene.py        mutations of inputs and of how a mutant runs; scenes.py has all scenes by name:
garbage.py      caches with NaN or huge numbers where nothing is seen
outside.py      positions, offsets and blocks out of range, where the program raises
state.py        numbers that are kept and rewritten at each call
ranges.py       numbers at the edges of a dtype, for bases in float16, bfloat16 and float32
apart.py        near twins of what several readers compute of one value, each for itself
flaws.py        wrong choices of codes and keys that `verify` must find
users.py        near twins that differ in who reads a value, and how
numbers.py      integers, fills within fills, weights that change between two calls
draw.py         mutants drawn at random, as data
judge.py        the verdict on a mutant: same, wrong, an error, a hang
compare.py      how two runs differ, how far each is from float64, what an error may leave behind
reduce.py       makes a failing mutant small
campaign.py     many mutants, drawn or with one insertion everywhere, and counts of the verdicts
found.py        failures that were found once, replayed by every test run
command.py      `python -m tests.fuzz`
refusals.py     `python -m tests.fuzz.refusals`: which refusal of the compiler does no test notice?
removal.py      the plugin that tests run with there
power.py        `python -m tests.fuzz.power`: does the option `prove` catch what a missing refusal lets through?
unguarded.py    judges programs there, with one refusal after another switched off
switch.py       the switch of both
twins.py        the programs of patterns' rejected cases, and of tests

A mutant is a base and a list of mutations. Each is a tuple of a kind, the name of a node in the captured graph and
literal parameters, and does not depend on a random sequence. Half of the mutants drawn are scenes.

In float64, fused and unfused results must agree. In fewer digits, the fused one may be twice as far from float64 as the
unfused one, plus a few roundings; if the unfused one overflows, nothing is compared. If the program raises because
something is out of range, the fused one must raise, too, and leave nothing in its inputs that the program does not
write.
"""
