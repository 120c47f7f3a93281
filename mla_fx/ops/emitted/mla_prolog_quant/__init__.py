"""DeepSeek-V3.2's prolog with an int8 query path."""
