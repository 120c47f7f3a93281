"""What is recognised: one file per pattern, found by walking this folder."""
