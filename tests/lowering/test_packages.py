"""Packages of AOTInductor run without mla_fx: their graphs contain none of its operators, and an operator that cannot
be decomposed is an error when they are made."""

import contextlib
import copy
import subprocess
import sys

import pytest
import torch
from lib.coded_heads import ZeroPoints, in_codes
from lib.operators.harness import TOLERANCE
from lib.paged_heads import Engine, Sizes, arguments
from mla_fx.lowering import loops
from mla_fx.lowering.cpu import costs
from torch import nn
from torch._inductor.virtualized import V

import mla_fx
from mla_fx import cases
from mla_fx.errors import NoMatch
from mla_fx.ops import catalogue

pytestmark = pytest.mark.usefixtures("no_gradients")
EXACT = {"rtol": 1e-4, "atol": 1e-5}
BLOCK, BLOCKS, PAGES = 4, 4, 37


class Paged(cases.Layer):
    """Latents in pages, read through a table; batch, tokens and blocks may be symbols."""

    def forward(self, x, cos, sin, position, table, latents, keys):
        batch, tokens, _ = x.shape
        query = self.query(x).view(batch, tokens, cases.N, -1).transpose(1, 2)
        q_nope, q_rope = torch.split(query, [cases.D, cases.DR], dim=-1)
        latent, k_rope = (rows.squeeze(1) for rows in self.rows(x))
        slots = table[:, position // BLOCK] * BLOCK + position % BLOCK
        latents.view(-1, cases.HCKV)[slots] = latent
        keys.view(-1, cases.DR)[slots] = self.rotate_key(k_rope, cos, sin)
        latent, k_rope = latents[table].flatten(1, 2), keys[table].flatten(1, 2)
        expanded = (latent @ self.kv_b.T).unflatten(-1, (cases.N, -1)).transpose(1, 2)
        k_nope, value = torch.split(expanded, [cases.D, cases.DV], dim=-1)
        key = torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, cases.N, -1, -1)), dim=-1)
        query = torch.cat((q_nope, self.rotate(q_rope, cos, sin)), -1)
        seen = torch.arange(key.shape[2]) <= position[:, None]
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return out.transpose(1, 2).flatten(2) @ self.o.T


def paged(tokens, batch=2, blocks=BLOCKS):
    generator = torch.Generator().manual_seed(tokens)
    angle = torch.rand(tokens, cases.DR // 2, generator=generator).repeat(1, 2) * 6
    table = torch.randperm(PAGES, generator=generator)[: batch * blocks].view(batch, blocks)
    pages = (torch.randn(PAGES, BLOCK, width, generator=generator) for width in (cases.HCKV, cases.DR))
    position = torch.arange(blocks * BLOCK - tokens - 1, blocks * BLOCK - 1)
    return torch.randn(batch, tokens, cases.HE, generator=generator), angle.cos(), angle.sin(), position, table, *pages


def engine():
    return arguments(Sizes(), torch.float32)


def shapes_of(**names):
    """Symbolic sizes of the arguments of `Paged`."""
    tokens, batch, blocks = (names.get(name) for name in ("tokens", "batch", "blocks"))
    sizes = {0: batch, 1: tokens}, {0: tokens}, {0: tokens}, {0: tokens}, {0: batch, 1: blocks}, {}, {}
    return tuple({place: size for place, size in one.items() if size is not None} for one in sizes)


def dim(name, least, most):
    return torch.export.Dim(name, min=least, max=most)


TOKENS, BATCH, MANY = dim("tokens", 2, 14), dim("batch", 2, 7), dim("blocks", 4, 9)
# the module, its arguments, symbolic sizes, what fuses, and arguments of other calls
PROGRAMS = {
    "decode": (Paged, paged(1), None, "latent_attention", ()),
    "decode of any batch": (Paged, paged(1), shapes_of(batch=BATCH), "latent_attention", (paged(1, batch=5),)),
    "few tokens": (Paged, paged(3), None, "latent_attention", ()),
    "any number of tokens": (Paged, paged(3), shapes_of(tokens=TOKENS), "mla_attention", (paged(2), paged(11))),
    "any number of blocks": (Paged, paged(1), shapes_of(blocks=MANY), "latent_attention", (paged(1, blocks=9),)),
    "keys of each head": (Engine, engine(), None, "paged_attention", ()),
    "codes of each head": (ZeroPoints, in_codes(engine()), None, "paged_attention", ()),
}


def module_of(program):
    torch.manual_seed(0)
    module = PROGRAMS[program][0]().eval()
    return module.float()


def exported(program):
    _, given, shapes, *_ = PROGRAMS[program]
    return torch.export.export(module_of(program), copy.deepcopy(given), dynamic_shapes=shapes)


def own_calls(graph):
    return [node for node in graph.nodes if getattr(node.target, "namespace", "") == "mla_fx"]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_of_this_project_is_left_in_the_graph_of_a_package(program, monkeypatch):
    monkeypatch.setattr(costs, "MOST_ABSORBED", 4)
    whole, graph_pass = exported(program).run_decompositions(), mla_fx.MlaPass()
    with V.set_aot_compilation(True):
        graph_pass(whole.graph_module)
    _, given, _, fused, others = PROGRAMS[program]
    assert fused in graph_pass.report.fused
    assert own_calls(whole.graph_module.graph) == []
    for call in (given, *others):
        ours, theirs = copy.deepcopy(call), copy.deepcopy(call)
        torch.testing.assert_close((whole.module()(*ours), ours), (module_of(program)(*theirs), theirs), **EXACT)


LOAD = """
import sys, torch
sys.modules["mla_fx"] = None
package, saved = sys.argv[1:]
layer = torch._inductor.aoti_load_package(package)
for given, out, left in torch.load(saved):
    torch.testing.assert_close((layer(*given), given), (out, left), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.campaign
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_package_runs_where_this_project_cannot_be_imported(program, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "MOST_ABSORBED", 4)
    _, given, _, fused, others = PROGRAMS[program]
    with torch._inductor.config.patch(post_grad_custom_pre_pass=mla_fx.MlaPass(expect=(fused,))):
        path = str(tmp_path / "layer.pt2")
        package = torch._inductor.aoti_compile_and_package(exported(program), package_path=path)
    calls = []
    for call in (given, *others):
        left = copy.deepcopy(call)
        calls.append((copy.deepcopy(call), module_of(program)(*left), left))
    torch.save(calls, tmp_path / "calls.pt")
    subprocess.run([sys.executable, "-c", LOAD, package, str(tmp_path / "calls.pt")], check=True)


ALONE = loops.lowerings(alone=True)


def portable_samples():
    for name, entry in catalogue().items():
        for dtype in (torch.float32, torch.bfloat16):
            for place, sample in enumerate(entry.samples(dtype)):
                with contextlib.suppress(NoMatch):
                    function = ALONE[entry.overload](*sample.args, **sample.kwargs)
                    yield pytest.param(entry, function, sample, dtype, id=f"{name}-{place}-{dtype}")


@pytest.mark.parametrize("entry, function, sample, dtype", list(portable_samples()))
def test_what_is_portable_says_what_the_body_says(entry, function, sample, dtype):
    ours, theirs = copy.deepcopy(sample), copy.deepcopy(sample)
    rtol, atol = TOLERANCE[dtype]
    results = function(*ours.args, **ours.kwargs), entry.body(*theirs.args, **theirs.kwargs)
    torch.testing.assert_close(*results, rtol=rtol, atol=atol)


def test_what_cannot_be_taken_apart_is_an_error_of_packaging():
    entry = catalogue()["paged_attention"]
    sample = next(iter(entry.samples(torch.float32)))
    graph = torch.export.export(_Call(entry.overload, sample), sample.args).run_decompositions().graph_module
    mla_fx.MlaPass()(graph)
    with (
        V.set_aot_compilation(True),
        pytest.raises(mla_fx.FusionError, match=r"the graph calls mla_fx\.paged_attention\.default, .* reads lengths"),
    ):
        mla_fx.MlaPass()(graph)


class _Call(nn.Module):
    def __init__(self, overload, sample):
        super().__init__()
        self.overload, self.options = overload, sample.kwargs

    def forward(self, *given):
        return self.overload(*given, **self.options)
