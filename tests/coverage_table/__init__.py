"""What fuses in the models of transformers, in the zoo and in quantised models, as tables in docs/coverage.md.

rows.py       what runs: a module and its arguments, for each line and column of the tables
outcome.py    what fused on each target
tables.py     the lines, as Markdown
quantised.py  the rows and lines of quantised models
npu.py        the rows and lines of NPUs
command.py    runs everything in several processes, shows and writes the tables
"""
