"""Everything of one layer before its attention, quantised or not, by the third interface of the vendor."""
