"""What each release of CANN takes as a key side and as attention, without torch_npu.

`test_prolog_releases.py` is about the prolog."""

from pathlib import Path

import pytest
from lib.ascend_calls import A2, DR, HCKV, B, N, S, caches, calls, index, lower, make, of
from mla_fx.lowering.ascend import fused_infer_attention_score, toolchain
from mla_fx.lowering.ascend.fused_infer_attention_score import RULES
from mla_fx.lowering.ascend.limits import RELEASES
from mla_fx.lowering.ascend.operators import attention, multi_latent_attention
from npu import ge_releases, refused
from npu.ge_ops import attention_rules, key_side_rules

pytestmark = pytest.mark.usefixtures("mode")


def test_the_oldest_release_counts_where_torch_npu_is_missing():
    assert toolchain.missing() is not None
    assert toolchain.release({}) == RELEASES[0] and toolchain.release({"cann": "9.0.0"}) == "9.0.0"


# --- the key side ----------------------------------------------------------------------------------------------------


def key_side(width=HCKV + DR, gamma=HCKV, rope=DR, heads=1, values=None):
    call = {
        "kv": make(B, heads, S, width),
        "gamma": make(gamma),
        "cos": make(B, 1, S, rope),
        "sin": make(B, 1, S, rope),
        "k_cache": make(8, 128, heads, rope if values is None else width),
        "ckv_cache": make(8, 128, heads, values or gamma),
    }
    return call if values is None else call | {"v": make(B, heads, S, values)}


KEY_SIDES = {
    "latents": {},
    "another rank": {"width": 320, "gamma": 256},
    "another rotary part": {"width": 544, "rope": 32},
    "v": {"width": 192, "gamma": 192, "heads": 2, "values": 128},
    "v of one head": {"width": 192, "gamma": 192, "values": 128},
    "v of 3 heads": {"width": 192, "gamma": 192, "heads": 3, "values": 128},
    "v of another width": {"width": 192, "gamma": 192, "heads": 2, "values": 64},
    "v of 160 columns": {"width": 160, "gamma": 160, "heads": 2, "values": 128},
}
TAKEN = {"8.5.0.alpha001": 1, "8.5.0": 1, "9.0.0": 3, "9.1.0": 3}


@pytest.mark.parametrize("release", RELEASES)
def test_key_sides_by_lowering_and_interpreter(release):
    taken = 0
    for given in KEY_SIDES.values():
        found = lower("kv_rmsnorm_rope_cache", of(release), **key_side(**given))
        call = calls()["kv_rmsnorm_rope_cache"] | key_side(**given)
        complaints = key_side_rules.complaints("KvRmsNormRopeCache", call, release)
        assert callable(found) == (not complaints), (found, complaints)
        taken += not complaints
    assert taken == TAKEN[release]


@pytest.mark.parametrize("release", RELEASES)
def test_the_release_that_has_no_v(release):
    found = lower("kv_rmsnorm_rope_cache", of(release), **key_side(**KEY_SIDES["v"]))
    if release in ("9.0.0", "9.1.0"):
        assert callable(found)
    else:
        assert found == f"v is given; KvRmsNormRopeCache of CANN {release} takes none on Ascend910B3"


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.fixture
def emitted(monkeypatch):
    """The options of each call of FusedInferAttentionScore, and whether its pages are in FRACTAL_NZ."""
    found = []

    def attend(surface, query, key, value, **options):
        found.append((options, key.ndim == 5))
        return query, query

    monkeypatch.setattr(fused_infer_attention_score, "attend_and_sum", attend)
    return found


@pytest.mark.parametrize("size", [16, 48, 64, 128, 512, 1024, 2048])
def test_pages_of_latents_are_those_of_all_releases(emitted, size):
    tables = {"block_table": index(B, 4), "context_lens": index(B), "is_causal": False}
    call = calls()["latent_attention"] | caches(8, size) | tables | {"mask": None}
    assert callable(lower("latent_attention", of("8.5.0"), **call))
    attention.attend_to_latents(A2, attention.Arguments(**call))
    ((options, is_nz),) = emitted
    assert size % options["block_size"] == 0 and not is_nz
    for release in RELEASES:
        rules = RULES[release]
        assert options["block_size"] in rules.pages and options["input_layout"] in rules.layouts


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("size", [8, 16, 48, 128, 1024, 2048])
def test_pages_of_latents_in_fractal_nz_are_not_cut(emitted, size, release):
    tables = {"block_table": index(B, 4), "context_lens": index(B), "is_causal": False}
    call = calls()["latent_attention"] | fractals(size) | tables | {"mask": None}
    found = lower("latent_attention", of(release), **call)
    assert callable(found) == (size in RULES[release].nz_pages), found
    if not callable(found):
        assert found.startswith(f"kv_cache in FRACTAL_NZ has BlockSize = {size}; {KERNEL} of CANN {release} takes ")
        return
    attention.attend_to_latents(A2, attention.Arguments(**call))
    ((options, is_nz),) = emitted
    assert options["block_size"] == size and is_nz and options["input_layout"] in RULES[release].nz_layouts


KERNEL = "FusedInferAttentionScore"


def fractals(size, lanes=16):
    return {"kv_cache": make(8, HCKV // lanes, size, lanes), "kr_cache": make(8, DR // lanes, size, lanes)}


@pytest.mark.parametrize("operator", ["mla_prolog", "kv_rmsnorm_rope_cache", "latent_attention"])
def test_fractals_of_other_widths_are_refused(operator):
    caches = fractals(128, lanes=8)
    if operator == "kv_rmsnorm_rope_cache":
        caches = {"k_cache": caches["kr_cache"], "ckv_cache": caches["kv_cache"]}
    rest = {"block_table": index(B, 4)} if operator == "latent_attention" else {"cache_mode": "NZ"}
    found = lower(operator, of("8.5.0"), **calls()[operator] | caches | rest)
    assert "has n0 = 8 columns side by side" in found and "takes 32 bytes, 16 of torch.bfloat16" in found


@pytest.mark.parametrize("positions", [1, 100, 250, 256])
def test_contiguous_latents_become_pages_of_all_releases(emitted, positions):
    call = calls()["latent_attention"] | caches(B, positions) | {"mask": None}
    attention.attend_to_latents(A2, attention.Arguments(**call))
    ((options, _),) = emitted
    assert all(options["block_size"] in RULES[release].pages for release in RELEASES)


@pytest.mark.parametrize("steps", [None, [1, 1]])
@pytest.mark.parametrize("is_nz", [False, True])
def test_pages_of_multi_latent_attention_are_those_of_all_releases(emitted, is_nz, steps):
    call = calls()["multi_latent_attention"] | {"q_seqlen": steps}
    if is_nz:
        call |= {"ctkv": make(8, HCKV // 16, 128, 16), "k_rope": make(8, DR // 16, 128, 16), "cache_mode": "nzcache"}
    if steps:
        call |= {"q_nope": make(B, 4 * N, HCKV), "q_rope": make(B, 4 * N, DR), "calc_type": "calc_type_spec"}
    assert callable(lower("multi_latent_attention", of("8.5.0"), **call))
    multi_latent_attention.as_fused_infer_attention_score(A2, multi_latent_attention.Arguments(**call))
    ((options, found_nz),) = emitted
    assert found_nz == is_nz
    for release in RELEASES:
        rules = RULES[release]
        pages, layouts = (rules.nz_pages, rules.nz_layouts) if is_nz else (rules.pages, rules.layouts)
        assert options["block_size"] in pages and options["input_layout"] in layouts


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("size", [16, 48, 128, 1024])
@pytest.mark.parametrize("is_nz", [False, True])
def test_pages_by_rules_and_interpreter(release, size, is_nz):
    key = make(8, 1, HCKV // 16, size, 16) if is_nz else make(8, size, HCKV)
    call = {"query_rope": make(B, S, N, DR), "query": make(B, S, N, HCKV), "key": [key], "block_table": index(B, 4)}
    rules = RULES[release]
    for layout in rules.layouts:
        call |= {"block_size": size, "input_layout": layout, "num_heads": 1}
        complaints = attention_rules.complaints("FusedInferAttentionScore", call, release)
        pages, layouts = (rules.nz_pages, rules.nz_layouts) if is_nz else (rules.pages, rules.layouts)
        assert (not complaints) == (size in pages and layout in layouts), complaints


# --- what the interpreter checks operators by ------------------------------------------------------------------------


def check(**given):
    ge_releases.refused.clear()
    ge_releases.check("KvRmsNormRopeCache", calls()["kv_rmsnorm_rope_cache"] | key_side(**given))
    return ge_releases.refused


def test_what_other_releases_refuse_is_noted(monkeypatch):
    assert check() == set()
    monkeypatch.setattr(ge_releases, "RELEASE", "9.0.0")
    assert check(**KEY_SIDES["v"]) == {f"{release}: KvRmsNormRopeCache: v is given" for release in RELEASES[:2]}


def test_what_the_release_of_the_graph_refuses_is_an_error():
    with pytest.raises(ValueError, match=r"KvRmsNormRopeCache: v is given; in CANN 8\.5\.0 it is no input"):
        check(**KEY_SIDES["v"])


def test_what_neither_the_oldest_nor_the_newest_release_takes_is_an_error(monkeypatch):
    def complaints(kernel, call, release):
        return [] if release == ge_releases.RELEASE else [f"{kernel}: N is 1; CANN {release} takes 2"]

    monkeypatch.setattr(key_side_rules, "complaints", complaints)
    with pytest.raises(ValueError, match=r"neither .* take this call: KvRmsNormRopeCache: N is 1; CANN 9\.0\.0 takes"):
        check()


def test_a_refusal_without_a_name_is_an_error(monkeypatch):
    monkeypatch.delenv("MLA_FX_ACCEPT", raising=False)
    reason = "8.5.0.alpha001: MlaPrologV3: He is 1024"
    refused.check("test_aclgraph.py", {reason})
    for file, other in (("test_aclgraph.py", f"{reason}0"), ("test_no_such_file.py", reason)):
        with pytest.raises(AssertionError, match=rf"{file}: run with MLA_FX_ACCEPT=1 .*He is 1024"):
            refused.check(file, {other})


def test_files_that_are_named_exist():
    folder = Path(ge_releases.__file__).parent
    assert all((folder / file).exists() for files in refused.accepted().values() for file in files)
