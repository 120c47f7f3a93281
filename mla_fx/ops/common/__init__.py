"""Code that operators share."""
