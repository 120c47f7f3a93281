"""Everything of one layer before its attention, by the first interface of the vendor."""
