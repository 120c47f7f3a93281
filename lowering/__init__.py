"""Where it goes: one file per target, found by walking this folder."""
