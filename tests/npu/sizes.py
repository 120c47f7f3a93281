"""Sizes that the kernels of all releases of CANN take, and no larger than they must be."""

from lib.zoo.sizes import Sizes

# Of a model of Hugging Face, and what some families call otherwise or do without.
CONFIG = {
    "hidden_size": 7168,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 16,  # so many that scores of zero, which are equal, are rare
}
OF_FAMILY = {
    "glm5_next": {"qk_rope_head_dim": 0, "qk_head_dim": 128},
    "dots3_note": {
        "swa_q_lora_rank": 1536,
        "swa_kv_lora_rank": 512,
        "swa_head_dim": 192,
        "swa_qk_nope_head_dim": 128,
        "swa_qk_rope_head_dim": 64,
        "swa_v_head_dim": 128,
    },
}
CONTEXT = 128  # a multiple of the 16 rows that a block of them has

# Of a layer of the zoo.
SIZES = Sizes(
    hidden=7168, heads=4, nope=128, rope=64, value=128, q_rank=1536, kv_rank=512, context=2 * CONTEXT, block=CONTEXT
)

# Of prologs over packed rows.
PACKED = {"SLOTS": 64, "HE": 1024, "HCQ": 1536, "RANK": 512, "D": 128, "DR": 64, "DV": 128}
