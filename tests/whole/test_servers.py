"""Layers of servers with symbolic sizes: what fuses, and which symbol is the reason if something does not."""

from dataclasses import replace

import pytest
import torch
from lib.comparing import check_same
from lib.layers import QUIET, Reporting
from lib.zoo import parts, servers
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import Step

pytestmark = [pytest.mark.usefixtures("no_gradients"), *(pytest.mark.filterwarnings(line) for line in QUIET)]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ALL, PACKED = {"mla_prolog": 1, "latent_attention": 1}, {"packed_mla_attention": 1}
KEY_SIDE = {"kv_rmsnorm_rope_cache": 1}
BUT_QUERY = {**KEY_SIDE, "mla_attention": 1}
MERGED = {"mla_prolog": 1, "latent_attention": 2, "merge_attention": 1}
UNLIKE = ((5, 7, 3), (3, 4, 2))
PROMPTS = ((5, 9, 7), (4, 3, 11))
PAGED = (4, (5, 3), (9, 7), (2, 4)), (3, (6, 4), (3, 2), (11, 5))
LINES = (((5, 3), (9, 7), (2, 4)), ((6, 4), (3, 2), (11, 5)))
SPELLINGS = {
    servers.Drafts: ([servers.drafts(*sizes[:2]) for sizes in UNLIKE], ALL),
    servers.DraftsScattered: ([servers.drafts(*sizes[:2]) for sizes in UNLIKE], ALL),
    servers.DraftsFlat: ([servers.drafts(*sizes[:2]) for sizes in UNLIKE], ALL),
    servers.PagedDrafts: ([servers.paged_drafts(*sizes) for sizes in UNLIKE], ALL),
    servers.PagedDraftsBatched: ([servers.paged_drafts_batched(*sizes) for sizes in UNLIKE], ALL),
    servers.TokensOfPositions: ([servers.tokens_of_positions(*sizes) for sizes in UNLIKE], ALL),
    servers.VarlenPrefill: ([servers.prefill(*lens) for lens in PROMPTS], PACKED),
    servers.VarlenSliced: ([servers.prefill(*lens) for lens in PROMPTS], PACKED),
    servers.VarlenExpanded: ([servers.prefill(*lens) for lens in PROMPTS], PACKED),
    servers.Window: ([servers.drafts(*sizes[:2]) for sizes in UNLIKE], ALL),
    servers.DraftsExpanded: ([servers.drafts(*sizes[:2]) for sizes in UNLIKE], BUT_QUERY),
    servers.PagedDraftsDivided: ([servers.paged_drafts(*sizes) for sizes in UNLIKE], ALL),
    servers.VarlenPaged: ([servers.paged(*lines) for lines in PAGED], {**KEY_SIDE, "latent_attention": 3}),
    parts.ChunkedPrompt: (
        [parts.chunked_prompt(*sizes) for sizes in ((3, 5, 6), (4, 7, 8))],
        {"mla_attention": 2, "merge_attention": 1},  # the chunks of the context are one
    ),
    parts.MixedBatch: (
        [parts.mixed_batch(*sizes) for sizes in ((3, 5, 6), (4, 7, 8))],
        # the key side asks for a torch._check: caches of equal sizes
        {"latent_attention": 1, "mla_attention": 2, "merge_attention": 1},
    ),
    parts.SharedPrefix: ([parts.shared_prefix(*sizes) for sizes in UNLIKE], MERGED),
    parts.Shards: ([servers.drafts(*sizes[:2]) for sizes in UNLIKE], MERGED),
    servers.OneSequence: ([servers.one_sequence(tokens) for tokens in (5, 7)], BUT_QUERY),
}
QUICK = (servers.TokensOfPositions, servers.OneSequence, parts.SharedPrefix)
KINDS = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.campaign]) for kind in SPELLINGS]


def compared(module, given, dynamic, **options):
    """The report of the last graph; all calls gave eager's results and caches."""
    backend = Reporting(**options)
    run = torch.compile(module, backend=backend, dynamic=dynamic)
    for one in given:
        check_same(module, one, run)
    return backend.reports[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_sizes(kind):
    given, fused = SPELLINGS[kind]
    report = compared(kind(), given, True)
    assert report.fused == fused, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, target",
    [
        (servers.VarlenPrefill, "reference"),
        pytest.param(servers.VarlenPrefill, "inductor", marks=pytest.mark.campaign),
        pytest.param(servers.VarlenSliced, "reference", marks=pytest.mark.campaign),
        pytest.param(servers.VarlenSliced, "inductor", marks=pytest.mark.campaign),
        pytest.param(servers.VarlenExpanded, "reference", marks=pytest.mark.campaign),
        pytest.param(servers.VarlenExpanded, "inductor", marks=pytest.mark.campaign),
    ],
)
def test_sizes_that_become_symbols(kind, target):
    """At the second call Dynamo turns the lengths into symbols, each a different one."""
    given, fused = SPELLINGS[kind]
    report = compared(kind(), given, None, target=target)
    assert report.fused == fused, str(report)


class Checked(servers.PagedDraftsBatched):
    """What a refusal asks for."""

    def forward(self, x, positions, caches, block_table):
        torch._check(caches[0].size()[0] == caches[1].size()[0])
        return super().forward(x, positions, caches, block_table)


@pytest.mark.slow
@pytest.mark.parametrize("kind, is_known", [(servers.PagedDraftsBatched, False), (Checked, True)])
def test_a_refusal_names_its_symbols_and_the_remedy(kind, is_known):
    """Two caches with equal numbers of pages become two symbols once they have changed, until the model says
    otherwise."""
    report = compared(kind(), SPELLINGS[servers.PagedDraftsBatched][0], None)
    assert (report.fused == ALL) == is_known, str(report)
    remedy = "torch._check(caches[0].size()[0] == caches[1].size()[0]) in the model says so"
    assert (remedy in str(report)) != is_known


@pytest.mark.campaign
def test_several_tokens_appended_on_inductor():
    """The context has old and new tokens, and no tensor has the length of the old ones alone."""
    entry = Entry(replace(DEFAULT, cache="appended"))
    given = [entry.arguments(Step("", tokens, past, batch)) for tokens, past, batch in ((5, 6, 3), (4, 7, 4))]
    report = compared(entry.build(), given, True, target="inductor")
    assert report.fused == BUT_QUERY, str(report)


@pytest.mark.slow
def test_loops_over_lines_of_a_cache():
    """Each line is a cache of its own: what does not fuse is refused, and no pass fails."""
    report = compared(servers.VarlenCached(), [servers.cached(*lines) for lines in LINES], None)
    assert report.fused["latent_attention"] == 3, str(report)
