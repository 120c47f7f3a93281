"""Everything of one layer before its attention, quantised or not: the vendor's third interface."""
