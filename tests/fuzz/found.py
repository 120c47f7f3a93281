"""Failures that were found once, by what went wrong: a base and its failing mutations, as data."""

from .reduce import Mutant

FOUND = {
    "factors and signs that are dropped": (
        Mutant("plain", (("argument", "mul_8", 1, 0.0),)),
        Mutant("equal-eager", (("scale", "_unsafe_view_1", -1, 0.0, "div"),)),
        Mutant("B=S-batched-complex-bshd-einsum-two_products", (("scale", "squeeze", 0, -1.0, "first"),)),
        Mutant("He=Hcq=R-vector_norm-low_returned", (("scale", "linalg_vector_norm", 0, 3.0, "mul"),)),
        Mutant("exp over sum", (("scale", "sum_1", -1, 3.0, "mul"),)),
        Mutant("exp over sum unsqueezed", (("negate", "sum_1", -1),)),
    ),
    "dimensions that are mistaken for others of the same size": (
        Mutant("exp over sum", (("exchange_dims", "sum_1", -1, 1, 2),)),
        Mutant("plain even", (("exchange_dims", "_softmax", 0, 0, 2),)),
        Mutant("blind row", (("exchange_dims", "masked_fill", -1, 0, 2),)),
        Mutant("complex", (("exchange_dims", "view_as_complex", -1, 0, 2),)),
        Mutant("complex", (("exchange_dims", "cat_1", 0, 0, 2), ("exchange_dims", "mul_3", -1, 0, 1))),
        Mutant("batched", (("exchange_dims", "getitem_1", -1, 0, 2),)),
        Mutant("batched", (("scale", "arange", -1, -1, "mul"),)),
        Mutant("equal-combined_in_two-by_head", (("exchange_dims", "slice_scatter_1", 0, 0, 2),)),
    ),
    "orders that are lost in a view, or turned around": (
        Mutant("twos-by_hand-batched", (("rotate", "bmm", -1, 1, 1),)),
        Mutant("T=D-index_put-rotate_half (decomposed)", (("rotate", "squeeze", -1, 0, 1),)),
        Mutant("plain level", (("riffle", "transpose_1", -1, 0, 2),)),
        Mutant("absorbed", (("riffle", "bmm_2", 0, 0, 2),)),
        Mutant("plain level", (("chunk_and_stack", "transpose", -1, 0, 2),)),
        Mutant("apart-slice-complex-fused-bshd-direct", (("split_dim", "view_as_real", -1, 0, 2),)),
        Mutant("apart-narrow_copy-slice_assigned-unit_offset-two_projections", (("split_dim", "mul_13", -1, 0, 2),)),
        Mutant("He=Hcq=R-slots_given-masked_fill-direct", (("riffle", "view_1", 0, 2, 3),)),
        Mutant("He=Hcq=R-slots_given-masked_fill-direct (decomposed)", (("columns", "mm", "riffle", 3),)),
    ),
    "the old cache, read after it was written": (
        Mutant("plain", (("late_read", "arg10_1", "unbind", 3, True),)),
        Mutant("plain", (("late_read", "arg8_1", "unbind", 2, True),)),
        Mutant("apart-slice-complex-fused-bshd-direct", (("late_read", "arg6_1", "split", 2, True),)),
    ),
    "casts that round": (
        Mutant("plain", (("narrow", "mm", 0, "bfloat16"),)),
        Mutant("plain", (("narrow", "expand_4", 0, "float32"),)),
        Mutant("plain", (("narrow", "rsqrt", -1, "float16"),)),
        Mutant("plain", (("narrow", "_softmax", 0, "float16"),)),
        Mutant("equal-combined_in_two-by_head", (("narrow", "slice_scatter_1", 0, "float32"),)),
    ),
    "bytes of rows that cannot be viewed in the pages": (
        Mutant("rows of bytes", (("rotate", "view_10", 0, 1, 26),)),
    ),
    "pages that are one block, repeated": (
        Mutant("combined pages, square (decomposed)", (("one_for_all", "index", 0, 0, 2),)),
        Mutant("combined pages in two", (("one_for_all", "slice_scatter_1", 1, 0, 3),)),
    ),
    "rows that all go to one position": (
        Mutant("equal-combined_in_two-by_head", (("one_for_all", "arg10_1", -1, 0, 3),)),
    ),
    "unused attention leaves nothing to fuse": (
        Mutant("cold S=T=D-none-eager-query", (("operand", "view_12", 0, "_unsafe_view_4"),)),
    ),
    "a cache that is read by attention with a factor before it": (
        Mutant("two layers", (("scale", "index_copy_2", -1, 0.5, "mul"),)),
    ),
    "returned probabilities keep the NaN of a row that sees nothing; fused attention gives zeros there": (
        Mutant("blind row", (("give_back", "view_10"),)),
    ),
    "rows that see nothing, verified": (Mutant("blind row (decomposed)", (("run_by", "verified", 2),)),),
    "a slice that is overwritten by what has fewer dimensions, which raises": (
        Mutant("one buffer by layer (decomposed)", (("exchange", "index_put_1", 0, 1),)),
    ),
    "a mask that overflows between two factors that cancel": (
        Mutant("smallest number (decomposed)", (("double_and_halve", "sub", 0),)),
        Mutant("smallest number (decomposed)", (("scale", "exp", 0, 2.0, "mul"),)),
    ),
    "more terms than can be counted": (Mutant("plain", (("pile", "add_4", 0, 24),)),),
    "hidden slots that hold no number": (
        Mutant("filled", (("garbage", "arg10_1", 2, 7, 8, "nan"),)),
        Mutant("flat cache", (("garbage", "arg9_1", 1, 7, 8, "nan"), ("hide", "_softmax", 0, 1, "fill"))),
    ),
    "positions out of range, where the program raises": (
        Mutant("plain", (("position", "arg9_1", 1, -1),)),
        Mutant("tied", (("position", "arg8_1", 0, -11),)),
        Mutant("at index", (("position", "arg9_1", 1, -20),)),
        Mutant("blocks and offsets", (("shifted", "gather", -1, -20),)),
    ),
    "the second of two layers, in which the written half of a cache is also read by its strides": (
        Mutant("two layers combined in two", (("also_read", "index_put_3", "strides"), ("run_by", "lowered", 1))),
        Mutant("two layers combined in two", (("also_read", "index_put_3", "view"),)),
    ),
    "numbers that the graph holds itself, and rewrites at each call": (
        Mutant("plain", (("number_kept", "mul_8", 1, 2.0, True), ("held", "state"), ("run_by", "reference", 2))),
        Mutant("combined", (("number_kept", "add", 1, 3.0, True), ("held", "state"), ("run_by", "reference", 3))),
        Mutant("two tables", (("position_counted", "index_3", 1, -1), ("held", "state"), ("run_by", "reference", 2))),
    ),
    "weights that change where no counter of writes notices": (
        Mutant("combined", (("changed", "arg10_1", "data", 1.25), ("run_by", "kept", 2))),
        Mutant("combined", (("changed", "arg10_1", "numpy", 1.25), ("run_by", "kept", 2))),
    ),
    "numbers that a whole type cuts off, or wraps around": (
        Mutant("plain", (("whole", "mul_8", -1, 1.9, "int64", "full", "mul"),)),
        Mutant("plain", (("whole", "mul_8", -1, 300, "uint8", "cast", "mul"),)),
    ),
    "state that verification must not rewrite twice": (
        Mutant("plain", (("counter", 1), ("parameter", "state"), ("run_by", "verified", 2))),
    ),
    "numbers at the edges of a type": (
        Mutant("plain level (float16)", (("loud", "arg3_1", -2, False),)),
        Mutant(
            "cold S=T=D-none-eager-query (float16)",
            (("loud", "arg10_1", -0.5, False), ("loud", "arg6_1", -0.25, False)),
        ),
        Mutant("absorbed (float32)", (("loud", "arg8_1", -1, True), ("scale", "arg2_1", -1, 0.0, "mul"))),
        Mutant("one head-eager-view_transpose (float16)", (("taken_back", "mm_1", 0, 1e-06),)),
    ),
    "computed in float32, where the factor has room": (
        Mutant("safe softmax (float16)", (("taken_back", "bmm_1", 1, 1024.0), ("loud", "arg8_1", -0.25, True))),
    ),
    "the last digit decides": (
        Mutant("tied (float16)", (("shared_out", "mm_1", 0, 1024.0), ("loud", "arg4_1", -0.25, True))),
        Mutant("blind row (bfloat16)", (("loud", "arg10_1", -8, False),)),
    ),
    "a dimension that there is none of, which tracing does not refuse": (
        Mutant("plain", (("argument", "_softmax", 1, -33),)),
        Mutant("at slice", (("argument", "slice_scatter_1", 2, -30),)),
        Mutant("axes of tables (float32)", (("argument", "slice_scatter_4", 2, -31),)),
    ),
    "a number that fills a tensor, and that its dtype rounds": (
        Mutant(
            "S=N-indexed-narrow-in_first-rope_first-divided-where (float16)",
            (("swap_numbers", "scalar_tensor", 0, 2.3076923076923075, "div", 1, -65504.0),),
        ),
    ),
    "whole numbers instead of scaled ones": (Mutant("quantised tokens", (("operand", "mul_10", 0, "_to_copy_4"),)),),
    "probabilities of one row, repeated for all": (
        Mutant("absorbed (decomposed)", (("one_for_all", "div", -1, 1, 2),)),
    ),
    "the logarithm of a sum over one key, repeated for all": (
        Mutant("summed", (("one_for_all", "logsumexp", 0, 3, 1),)),
    ),
    "a subtraction of integers in the judge's second reference": (
        Mutant("blind row (decomposed)", (("rows_from_the_end", "index_put_1", 1, 8),)),
    ),
    "logarithms of sums of another softmax's scores": (
        Mutant("halves, even (bfloat16)", (("operand", "_softmax_1", 0, "add_4"),)),
    ),
    "fills within fills": (Mutant("plain", (("nested", "_softmax", 0, 24, 0.01, "where"),)),),
    "twenty steps of a code, where all codes are open and the largest would wrap around": (
        Mutant(
            "quantised tokens",
            (("narrow", "split_with_sizes_1", 0, "bfloat16"), ("flawed", "aten.round.default", 558, -20)),
        ),
    ),
    "a part whose heads another reading splits": (
        Mutant("running sums (float16)", (("riffle", "expand_8", 0, 3, 2),)),
        Mutant("sums apart, even (float32)", (("exchange_dims", "bmm_3", 0, 0, 2),)),
    ),
    "a test beside merged sums": (Mutant("shards, one token", (("duplicate", "add_6"),)),),
    "a test of the first of two results": (Mutant("sums apart, even", (("argument", "eq_1", 1, 0.0),)),),
    "parts that no view reads as one": (Mutant("expanded sums", (("split_and_join", "view_17", -1, 1, 12),)),),
}
