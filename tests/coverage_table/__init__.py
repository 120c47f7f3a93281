"""What fuses in the models of transformers and in the zoo, on every target, as a table in docs/coverage.md.

rows.py       what is run: a module and its arguments, for each line and column of the tables
outcome.py    what became of it on each target
tables.py     the lines, as Markdown
npu.py        the rows and lines of NPUs
command.py    runs all of it in several processes, shows and writes the tables
"""
