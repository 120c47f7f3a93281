"""Everything of one layer before its attention: the vendor's first interface, and the third, which is quantised."""
