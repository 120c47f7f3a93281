"""Multi-head Latent Attention as people write it.

One small module is composed from orthogonal choices, one for each way in which published code differs; a few classics
are written out as their authors wrote them; and a few modules only look like latent attention.

    norms.py, ropes.py, projections.py, factors.py, caches.py, scores.py    the choices, each a table from its names
    mla.py          the module composed from one choice of each
    classics.py     DeepSeek, transformers 4, Megatron, torchtitan, litgpt, sglang, vLLM
    negatives.py    near misses, and attention that is no latent attention
    oracle.py       what all of them must compute, written once and plainly
    entries.py      the entries, and what each must fuse to
"""
