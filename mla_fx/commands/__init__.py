"""The commands of `python -m mla_fx`. The library does not need them."""
