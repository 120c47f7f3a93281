"""What `python -m mla_fx` does. The library needs none of it."""
