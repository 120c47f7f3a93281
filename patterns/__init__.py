"""The patterns, one file each. They are found by walking this folder."""
