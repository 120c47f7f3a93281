"""Attention over latents beside the logarithm of the sum that its softmax divides by: one operator returns both.

    out = softmax(score) . latent,  lse = log(sum(exp(score)))

Code that attends to parts of a context, and merges the results, has this value: context parallelism, chunks of a long
prompt, flash decoding. Spellings: `logsumexp`, or the largest score plus the logarithm of a sum. It must be of the
very scores that the softmax is of, with their factor and masks: any other stays as it is, and the attention fuses
alone. What the program does with it later, as to scale it to base 2, stays as well.

Rows that see no key give zeros and minus infinity. Where the program has NaN there, so has the rewritten graph: merges
of parts drop such rows or not.
"""

from __future__ import annotations

from mla_fx.rule import NoMatch
from mla_fx.rule.readings import Attention, LogSumExp, log_sum_exp, logarithms


def log_sum_exps(found: Attention) -> list[LogSumExp]:
    """All that are of the attention's sum. Raises NoMatch with the reason if none is."""
    if found.sink is not None:
        raise NoMatch("the sum that the softmax divides by has an attention sink", found.node)
    read, misses = list[LogSumExp](), list[NoMatch]()
    for node in logarithms(part.node for part in found.scores):
        try:
            read.append(log_sum_exp(node, found))
        except NoMatch as miss:
            misses.append(miss)
    if misses and not read:
        raise misses[0]
    if not read:
        raise NoMatch("no logarithm of a sum is computed from the scores of this attention alone", found.node)
    return read
