"""Codes and their scales. An element of codes carries `Scales`, each the same along some of the axes of its value.

code_arithmetic.py  what is rounded to codes, evaluated as a function of a value and its row
whole_numbers.py    what is rounded, clamped and cast to codes, and what becomes of each whole number
tokens.py           codes that the program computes, with a scale per row of a value, from the largest of it
tiles.py            the same for tiles of a row, as kernels compute them to the last bit; also in rows of bytes
given.py            codes in int8 with a scale that is given
dequantised.py      numbers that are computed from codes, a scale and an offset
products.py         products whose operands carry scales, and values that are multiplied by smaller tensors
vendor_calls.py     Ascend's own operators for quantised values, where a program calls them
"""
