"""Options: what is accepted, what is refused and in which words, at every entry; strict, expect and expecting."""

import copy
import pickle
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lib.comparing import ALL, with_backend
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.negatives import expanded_cache
from lib.zoo.sizes import DECODE, PREFILL
from torch import nn

import mla_fx
from mla_fx import cases
from mla_fx.driver import discovery
from mla_fx.driver.compilation import checked
from mla_fx.graph.torch_compilers import inductor_options
from mla_fx.options import expectation

pytestmark = pytest.mark.usefixtures("no_gradients")

WRONG = {
    "strict, as text": ({"strict": "False"}, "option strict is 'False'; it takes False, True"),
    "strict, as a number": ({"strict": 1}, "option strict is 1; it takes False, True"),
    "strict, as nothing": ({"strict": None}, "option strict is None; it takes False, True"),
    "dump, no name": ({"dump": ""}, "option dump is ''; it takes a folder"),
    "dump": ({"dump": 3}, "option dump is 3; it takes a folder, as a string or a path, or None"),
    "disable": ({"disable": None}, "option disable is None; it takes the name of a pattern, or several"),
    "disable, a number in it": ({"disable": [3]}, r"option disable is \[3\]; it takes the name"),
    "verify": ({"verify": ["first"]}, r"option verify is \['first'\]; it takes 'off', 'first', 'always'"),
    "target": ({"target": 3}, "unknown target 3; known targets are 'auto'"),
    "a mode": ({"mode": "x"}, "mode is 'x'; target 'inductor' has 'default', "),
    "misspelt": ({"targt": "reference"}, r"unknown option 'targt' for target '\w+'; do you mean 'target'\?$"),
    "in capitals": ({"Verify": "first"}, r"unknown option 'Verify' for target '\w+'; do you mean 'verify'\?$"),
    "misspelt, of the target": ({"freezng": True}, r"'freezng' for target '\w+'; do you mean 'freezing'\?$"),
    "like no other": ({"colour": 1}, r"known options are 'absorb', .* and those of the target: \d+ of its own$"),
    "all in one": ({"options": {"strict": True}}, "options are keywords, as in target='reference'"),
    "of another target": ({"target": "reference", "freezing": True}, "it is one of target 'inductor'$"),
    "of two targets": ({"freezing": True, "pieces": True}, "'pieces'"),
    "a type of the target's": ({"freezing": "yes"}, "option freezing is 'yes'; Inductor takes bool"),
    "a type of this target's": ({"target": "reference", "pieces": 1}, "option pieces is 1; it takes False, True"),
    "a type of ours for Inductor": ({"dot_products": 1}, "option dot_products is 1; it takes False, True"),
    "kernels": ({"kernels": "fa3"}, "option kernels is 'fa3'; it takes 'auto', 'triton', 'flash_mla', 'flashinfer'$"),
    "kernels, no name": ({"kernels": ["triton"]}, r"option kernels is \['triton'\]; it takes 'auto', "),
    "expect": ({"expect": 3}, "option expect is 3; it takes operators, or a mapping"),
    "expect, misspelt": ({"expect": {"mla_prologue": 1}}, "expect names 'mla_prologue'; known operators are 'kv_"),
    "expect, misspelt in a list": ({"expect": ["mla_prologue"]}, "expect names 'mla_prologue'; known operators are"),
    "expect, a word for a number": ({"expect": {"mla_prolog": "1"}}, "expect holds the number '1'; it takes operators"),
    "expect, a truth for a number": ({"expect": {"mla_prolog": True}}, "expect holds the number True"),
    "expect, no number": ({"expect": {"mla_prolog": ()}}, r"expect holds the number \(\)"),
    "expect, less than nothing": ({"expect": {"mla_prolog": -1}}, "expect holds the number -1"),
}  # fmt: skip


@pytest.mark.parametrize("make", [mla_fx.get_backend, mla_fx.MlaPass], ids=["get_backend", "MlaPass"])
@pytest.mark.parametrize(("options", "complaint"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused_when_they_are_bound(make, options, complaint):
    with pytest.raises(mla_fx.OptionError, match=complaint):
        make(**options)


def test_wrong_options_of_a_call_are_refused(decode):
    module, arguments = decode
    with pytest.raises(mla_fx.OptionError, match="option strict is 'no'"):
        torch.compile(module, backend="mla", options={"strict": "no"})(*arguments)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["a"], r"options is \['a'\]; it takes a dict of options, such as {'target': 'reference'}"),
        ("reference", "options is 'reference'; it takes a dict"),
        (3, "options is 3; it takes a dict"),
        ({1: 2}, "options holds the name 1; the names of options are strings"),
        ({None: 2}, "options holds the name None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["mla", mla_fx.get_backend(target="reference")], ids=["name", "get_backend"])
def test_options_that_are_none_are_refused(backend, options, complaint):
    with pytest.raises(mla_fx.OptionError, match=complaint):
        torch.compile(nn.ReLU(), backend=backend, options=options)(torch.ones(1))


@pytest.mark.parametrize("mode", ["max-speed", 3, ["default"]], ids=str)
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(mla_fx.OptionError, match=f"mode is {re.escape(repr(mode))}; target 'inductor' has 'default', "):
        torch.compile(nn.ReLU(), backend="mla", mode=mode)(torch.ones(1))


def test_a_mode_is_an_option_too():
    """A mode is one of the named target or, without one, of any; keyword options come first."""
    mla_fx.get_backend(mode="max-autotune")
    options = checked({"target": "inductor", "mode": "max-autotune", "max_autotune": False})
    assert options.extra == {**torch._inductor.list_mode_options("max-autotune"), "max_autotune": False}
    with pytest.raises(mla_fx.OptionError, match=r"^target 'reference' has no modes, so mode='max-autotune' does not"):
        mla_fx.get_backend(target="reference", mode="max-autotune")
    with pytest.raises(mla_fx.OptionError, match=r"target 'ge' has 'max-autotune'.* target 'reference' has no modes"):
        mla_fx.get_backend(mode="x")


def test_what_inductor_has_by_default_it_takes():
    """All except those with a value whose type is unknown."""
    defaults = torch._inductor.config.get_config_copy()
    discovery.targets()["inductor"].check({name: defaults[name] for name in inductor_options()})


def test_a_path_is_a_folder(decode, tmp_path):
    module, arguments = decode
    with_backend(module, dump=Path(tmp_path))(*arguments)
    assert (tmp_path / "graph_000" / "index.md").exists()


def test_options_of_any_target_will_do_for_auto():
    mla_fx.get_backend(freezing=True)
    with pytest.raises(mla_fx.OptionError, match="unknown option 'colour' for target 'auto'"):
        mla_fx.get_backend(colour="red")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"verify": "first"}, "option verify does not apply to MlaPass"),
        ({"freezing": True}, "option 'freezing' does not apply to MlaPass; give it to what compiles the graph"),
        ({"mode": "max-autotune"}, "option 'mode' does not apply to MlaPass; give it to what compiles the graph"),
    ],
    ids=str,
)
def test_a_pass_refuses_what_cannot_apply(options, complaint):
    with pytest.raises(mla_fx.OptionError, match=complaint):
        mla_fx.MlaPass(**options)


def test_a_backend_takes_no_other_keywords():
    with pytest.raises(TypeError, match="colour"):
        mla_fx.get_backend()(None, (), colour="red")


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_a_backend_can_be_copied(decode, copied):
    module, arguments = decode
    backend = copied(mla_fx.get_backend(target="reference", expect=ALL))
    torch.compile(module, backend=backend)(*arguments)
    assert mla_fx.last_report().fused == ALL


def test_a_pass_can_be_pickled():
    graph_pass = mla_fx.MlaPass(strict=True, expect=("mla_prolog",))
    assert pickle.loads(pickle.dumps(graph_pass)).uuid() == graph_pass.uuid()


# --- expect ----------------------------------------------------------------------------------------------------------

MET = ["mla_prolog", ["latent_attention"], {"mla_prolog"}, ALL, {**ALL, "mla_attention": (0, 1)}]
UNMET = ["mla_attention", ["mla_prolog", "mla_attention"], {"mla_prolog": 1}, {**ALL, "mla_prolog": (0, 2)}, {}]


@pytest.mark.parametrize("expect", MET, ids=str)
def test_met(expect):
    assert expectation(expect).is_met(ALL)


@pytest.mark.parametrize("expect", UNMET, ids=str)
def test_unmet(decode, expect):
    module, arguments = decode
    with pytest.raises(mla_fx.FusionError, match=r"expected .*, fused {'mla_prolog': 1, 'latent_attention': 1}"):
        with_backend(module, expect=expect)(*arguments)


class Broken(nn.Module):
    """An embedding and two layers, each in a graph of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, cases.HE)
        self.layers = nn.ModuleList([cases.Layer(), cases.Layer()])

    def forward(self, tokens, cos, sin, position):
        x = self.embed(tokens)
        torch._dynamo.graph_break()
        x = self.layers[0](x, cos, sin, position)
        torch._dynamo.graph_break()
        return self.layers[1](x, cos, sin, position)


def broken_call():
    _, *rest = cases.inputs()
    return torch.randint(8, (cases.B, cases.S)), *rest


def test_a_graph_without_attention_is_held_to_nothing():
    with_backend(Broken().eval(), expect=ALL, strict=True)(*broken_call())


def test_one_expectation_for_every_prompt_length():
    entry = Entry(replace(DEFAULT, cache="appended"))
    alternatives = {"mla_prolog": (0, 1), "latent_attention": (0, 1), "mla_attention": (0, 1)}
    run = with_backend(entry.build(), expect=alternatives)
    with mla_fx.expecting(mla_prolog=1, mla_attention=1, latent_attention=1):
        run(*entry.arguments(DECODE))
        torch._dynamo.reset()
        run(*entry.arguments(PREFILL))


@pytest.mark.parametrize("backend", ["reference", pytest.param("pass", marks=pytest.mark.campaign)])
def test_expecting_counts_over_all_graphs(backend):
    module = Broken().eval()
    if backend == "pass":
        run = torch.compile(module, options={"post_grad_custom_pre_pass": mla_fx.MlaPass()})
    else:
        run = with_backend(module)
    with mla_fx.expecting(mla_prolog=2, latent_attention=2):
        run(*broken_call())


def test_expecting_tells_both_counts(decode):
    module, arguments = decode
    with (
        pytest.raises(mla_fx.FusionError, match=r"expected {'mla_prolog': 2}, fused {'mla_prolog': 1, 'latent_att"),
        mla_fx.expecting(mla_prolog=2),
    ):
        with_backend(module)(*arguments)


def test_expecting_without_a_compilation():
    with pytest.raises(mla_fx.FusionError, match="nothing was compiled"), mla_fx.expecting(mla_prolog=1):
        pass


def test_expecting_lets_errors_through():
    with pytest.raises(ZeroDivisionError), mla_fx.expecting(mla_prolog=1):
        raise ZeroDivisionError


def test_expecting_refuses_operators_that_do_not_exist():
    with pytest.raises(mla_fx.OptionError, match="known operators are"), mla_fx.expecting(mla_prologue=1):
        pass


# --- strict, wherever something stands in the way --------------------------------------------------------------------


class Dropped(cases.Layer):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) + mask
        return nn.functional.dropout(scores.softmax(-1), 0.1) @ value


class DroppedInside(cases.Layer):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        query = torch.cat((q_nope, q_rope), dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.1)


class Flexible(cases.Layer):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        from torch.nn.attention.flex_attention import flex_attention

        key, value = self.keys(latent, k_rope)
        return flex_attention(torch.cat((q_nope, q_rope), dim=-1), key, value)


class Cut(cases.Layer):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        torch._dynamo.graph_break()
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) + mask
        return scores.softmax(-1) @ value


HINDERED = {
    Dropped: "attention with dropout is not fused",
    DroppedInside: "attention with dropout is not fused",
    Flexible: "flex_attention is not supported",
    Cut: "no softmax follows: the attention is of another kind",
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "inductor"])
@pytest.mark.parametrize("kind", HINDERED, ids=lambda kind: kind.__name__)
def test_strict_refuses_what_could_not_be_looked_at(kind, target):
    with pytest.raises(mla_fx.FusionError, match=f"looks like MLA was not fused: .*{HINDERED[kind]}"):
        with_backend(kind(), strict=True, target=target)(*cases.inputs())


@pytest.mark.parametrize("kind", [Dropped, DroppedInside, Flexible], ids=lambda kind: kind.__name__)
def test_expect_holds_what_could_not_be_looked_at(kind):
    with pytest.raises(mla_fx.FusionError, match=r"expected 'mla_prolog', fused {}"):
        with_backend(kind(), expect="mla_prolog")(*cases.inputs())


@pytest.mark.parametrize("kind", HINDERED, ids=lambda kind: kind.__name__)
def test_otherwise_it_is_told_once_and_noted(kind):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = mla_fx.explain(kind(), target="reference")(*cases.inputs())
    told = [str(warning.message) for warning in caught if issubclass(warning.category, mla_fx.MlaWarning)]
    assert len(told) == 1 and HINDERED[kind] in told[0]
    assert HINDERED[kind] in str(report)


def test_a_graph_after_the_break_says_what_it_lacks():
    with pytest.warns(mla_fx.MlaWarning):
        report = mla_fx.explain(Cut(), target="reference")(*cases.inputs())
    assert "attention without the projections that feed it; a graph break may have cut the layer" in report.notes
    assert "no attention in this graph: there is nothing to fuse" in report.notes


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_strict_and_expect_in_training(target):
    module = Entry(DEFAULT).build()
    with torch.enable_grad():
        with pytest.raises(mla_fx.FusionError, match="was not fused: training graph: left unchanged"):
            with_backend(module, strict=True, target=target)(*Entry(DEFAULT).arguments(PREFILL))
        torch._dynamo.reset()
        with pytest.raises(mla_fx.FusionError, match=r"expected 'mla_prolog', fused {}"):
            with_backend(module, expect="mla_prolog", target=target)(*Entry(DEFAULT).arguments(PREFILL))


def test_strict_has_nothing_against_training_something_else():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with torch.enable_grad(), pytest.warns(mla_fx.MlaWarning, match="fuses inference only"):
        with_backend(model, strict=True, expect=ALL)(torch.randn(2, 8)).sum().backward()


def test_a_pass_is_as_strict_with_a_warm_cache():
    module, arguments = expanded_cache(DECODE)
    for _ in range(2):
        torch._dynamo.reset()
        graph_pass = mla_fx.MlaPass(strict=True)
        with pytest.raises(mla_fx.FusionError, match="looks like MLA was not fused"):
            torch.compile(module, options={"post_grad_custom_pre_pass": graph_pass})(*copy.deepcopy(arguments))
