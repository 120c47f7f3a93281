"""Everything of one layer before its attention: the vendor's first interface."""
