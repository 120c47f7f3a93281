"""MlaPass: the rewrite in an existing pipeline, and what its uuid depends on."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lib.comparing import ALL, EXACT
from lib.families import cache_tensors, empty_cache, tiny_model, tokens
from mla_fx.lowering.cpu import costs

import mla_fx
from mla_fx import cases
from mla_fx.driver import compile_caches, discovery
from mla_fx.passes.triage import is_functional

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.slow
def test_pass_in_inductor():
    """A plain `torch.compile(model)`; nothing of this project runs before the pass."""
    model = tiny_model("deepseek_v3", num_hidden_layers=1)
    theirs = empty_cache(model, "static")
    model(tokens(2, 6), past_key_values=theirs)
    ours, step, graph_pass = copy.deepcopy(theirs), tokens(2, 1), mla_fx.MlaPass()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=graph_pass):
        found = torch.compile(model)(step, past_key_values=ours).logits
    torch.testing.assert_close(found, model(step, past_key_values=theirs).logits, **EXACT)
    torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), **EXACT)
    assert graph_pass.report.fused == ALL


LOAD = """
import sys, torch
package, saved = sys.argv[1:]
layer = torch._inductor.aoti_load_package(package)
for given, wanted in torch.load(saved):
    torch.testing.assert_close(layer(*given), wanted, rtol=1e-4, atol=1e-5)
assert "mla_fx" not in sys.modules
"""


@pytest.mark.campaign
def test_a_package_runs_without_this_project(tmp_path, monkeypatch):
    """For numbers of query tokens that use either form."""
    monkeypatch.setattr(costs, "MOST_ABSORBED", 4)
    layer, count = cases.Layer().eval(), torch.export.Dim("count", min=2, max=14)
    shapes = ({1: count}, {0: count}, {0: count}, {0: count})
    exported = torch.export.export(copy.deepcopy(layer), cases.inputs(3), dynamic_shapes=shapes)
    graph_pass = mla_fx.MlaPass(expect={"kv_rmsnorm_rope_cache": 1, "mla_attention": 1})
    with torch._inductor.config.patch(post_grad_custom_pre_pass=graph_pass):
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
    torch.save([(cases.inputs(count), layer(*cases.inputs(count))) for count in (3, 5, 13)], tmp_path / "calls.pt")
    subprocess.run([sys.executable, "-c", LOAD, package, str(tmp_path / "calls.pt")], check=True)


class Whole(cases.Layer):
    """PyTorch's own functions compute it; torch.export keeps them whole."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        query = torch.cat((q_nope, q_rope), -1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("layer", [cases.Layer, Whole])
def test_an_exported_program_is_to_be_decomposed(layer):
    exported, graph_pass = torch.export.export(layer(), cases.inputs()), mla_fx.MlaPass(strict=True)
    with pytest.raises(mla_fx.FusionError, match=r"call run_decompositions\(\) on the exported program"):
        graph_pass(exported.graph_module)
    graph_pass(exported.run_decompositions().graph_module)
    assert graph_pass.report.fused == ALL


class Written(torch.nn.Module):
    def forward(self, cache, row):
        before = cache[:, :2] * 2
        cache[:, 1:].add_(row)
        return before


def test_a_graph_that_writes_its_inputs_before_its_end_is_not_functional():
    """Rules would read the cache after the write as what it was before."""
    exported = torch.export.export(Written(), (torch.ones(2, 3), torch.ones(2)))
    assert not is_functional(exported.graph)
    assert is_functional(exported.run_decompositions().graph)


@pytest.mark.slow
def test_shapes_of_an_exported_program_stay_symbols(monkeypatch):
    """Outside a compiler, C++ would compute the shape of a pad, and turn the symbol into a number."""
    monkeypatch.setattr(costs, "MOST_ABSORBED", 4)
    count = torch.export.Dim("count", min=2, max=14)
    shapes = ({1: count}, {0: count}, {0: count}, {0: count})
    exported = torch.export.export(cases.Layer(), cases.inputs(3), dynamic_shapes=shapes).run_decompositions()
    mla_fx.MlaPass(expect={"kv_rmsnorm_rope_cache": 1, "mla_attention": 1})(exported.graph_module)
    for steps in (3, 5, 13):
        inputs = cases.inputs(steps)
        torch.testing.assert_close(exported.module()(*inputs), cases.Layer()(*cases.inputs(steps)), **EXACT)


def test_uuid_tells_passes_apart():
    assert mla_fx.MlaPass(strict=True).uuid() == mla_fx.MlaPass(strict=True).uuid()
    kinds = [{}, {"strict": True}, {"disable": "mla_prolog"}, {"absorb": "never"}, {"target": "reference"}]
    assert len({mla_fx.MlaPass(**options).uuid() for options in kinds}) == len(kinds)


def test_a_variable_set_later_changes_neither_key_nor_fusions(monkeypatch):
    """A later process that sets no variable would otherwise get the unfused graph from Inductor's cache."""
    graph_pass = mla_fx.MlaPass(target="reference")
    before = graph_pass.uuid()
    monkeypatch.setenv("MLA_FX_DISABLE", "mla_prolog")
    graph_pass(torch.export.export(cases.Layer(), cases.inputs()).run_decompositions().graph_module)
    assert graph_pass.uuid() == before != mla_fx.MlaPass(target="reference").uuid()
    assert graph_pass.report.fused == ALL


def test_uuid_changes_with_the_sources(monkeypatch):
    before = mla_fx.MlaPass().uuid()
    monkeypatch.setattr(compile_caches, "source_hash", lambda: "other sources")
    assert mla_fx.MlaPass().uuid() != before


@pytest.mark.parametrize("changed", ["mla_fx/ops/common/math.py", "mla_fx/readings/rope.py", "patterns/mla_prolog.py"])
def test_uuid_knows_the_sources_in_every_folder(tmp_path, monkeypatch, changed):
    root, before = Path(mla_fx.__file__).parents[1], compile_caches.source_hash()
    places = {"mla_fx": "mla_fx", discovery.PATTERNS: "patterns", discovery.LOWERING: "lowering"}
    for package, folder in places.items():
        shutil.copytree(root / folder, tmp_path / folder)
        monkeypatch.setattr(sys.modules[package], "__path__", [str(tmp_path / folder)])
    rules = discovery.found_rules()
    assert compile_caches._hash_of.__wrapped__(rules) == before
    (tmp_path / changed).write_text("changed = True")
    assert compile_caches._hash_of.__wrapped__(rules) != before
