"""The demo at toy size, and the command line."""

import copy
import subprocess
import sys

import pytest
import torch
from lib.families import SIZES

import mla_fx
from mla_fx.__main__ import main
from mla_fx.commands import demo
from mla_fx.commands.models import tiny_call

TOY = {name: SIZES[name] for name in (*demo.ATTENTION, "intermediate_size")} | {"vocab_size": 512}
CONTEXT = 32
SCRIPTS = {
    "def construct(): pass": "defines no build()",
    "build = 3": "defines no build()",
    "def build(): return 3": "returned int",
    "def build(): return (3, 4)": "returned tuple",
}


@pytest.fixture
def toy():
    torch.manual_seed(0)
    yield demo.deepseek_v3(layers=2, **TOY)
    torch._dynamo.reset()


def test_fused_step_agrees(toy, capsys):
    backend = mla_fx.get_backend(target="reference", expect={"mla_prolog": 2, "latent_attention": 2})
    stages = []
    ways = {"eager": toy, "mla_fx": torch.compile(toy, fullgraph=True, backend=backend)}
    comparison = demo.compare(toy, ways, CONTEXT, repeats=2, announce=stages.append)
    assert comparison.agree
    assert [len(run.milliseconds) for run in comparison.runs] == [2, 2]
    assert stages == ["float32 reference", "eager: first call", "mla_fx: first call", "timing"]
    eager, fused = comparison.runs
    assert 0 < fused.temporaries < eager.temporaries
    demo.show(comparison)
    assert "mla_fx" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
def test_wrong_attention_is_seen(toy, part):
    wrong = copy.deepcopy(toy)
    with torch.no_grad():
        getattr(wrong.model.layers[0].self_attn, part).weight.mul_(1.2)
    assert not demo.compare(toy, {"eager": toy, "wrong": wrong}, CONTEXT, repeats=1).agree


def test_wrong_cache_is_seen(toy):
    latents = demo.random_latents(toy.config, CONTEXT)
    cache, exact = (demo.filled_cache(toy.config, latents, dtype) for dtype in (torch.bfloat16, torch.float32))
    exact.layers[1].values[:, :, -1] = 1
    cache.layers[1].values[:, :, -1] = 1
    cache.layers[1].keys[:, :, -1] = exact.layers[1].keys[:, :, -1]
    cache.layers[0].values[:, :, 3, 0] += 1
    assert demo.cache_error(cache, exact) == float("inf")


def test_temporaries_are_the_peak_not_the_sum():
    megabyte = 2**20

    def step():
        for _ in range(3):
            torch.zeros(2 * megabyte, dtype=torch.uint8)

    assert 2 * megabyte <= demo.temporaries(step) < 3 * megabyte


def test_missing_dependency_is_a_sentence():
    with pytest.raises(ModuleNotFoundError, match=r"this needs no_such_module; pip install"):
        demo.require("torch", "no_such_module")


@pytest.mark.slow
def test_unknown_model_type_lists_the_families(capsys):
    assert main(["explain", "deepseek_v99"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("mla_fx: transformers has no model type 'deepseek_v99'; ")
    assert {"deepseek_v3", "minicpm3", "kimi_linear"} <= set(message.replace(",", "").replace(".", "").split())


def test_model_without_decode_step_is_a_sentence(capsys):
    assert main(["explain", "vit"]) == 2
    assert "a tiny vit cannot be built and prefilled" in capsys.readouterr().err


def test_unknown_target_is_a_sentence(capsys):
    assert main(["explain", "deepseek_v3", "--target", "abacus"]) == 2
    message = capsys.readouterr().err
    assert "unknown target 'abacus'; known targets are " in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(("text", "complaint"), SCRIPTS.items())
def test_script_without_a_proper_build_is_a_sentence(tmp_path, capsys, text, complaint):
    script = tmp_path / "script.py"
    script.write_text(text)
    assert main(["explain", str(script)]) == 2
    message = capsys.readouterr().err
    assert complaint in message
    assert message.endswith("It should return (callable, args) or (callable, args, kwargs).\n")


def test_missing_script_is_a_sentence(capsys):
    assert main(["explain", "no_such.py"]) == 2
    assert capsys.readouterr().err == "mla_fx: no_such.py is not a file.\n"


@pytest.mark.parametrize("flags", [["--context", "1"], ["--layers", "0"]])
def test_demo_sizes_are_checked(capsys, flags):
    assert main(["demo", *flags]) == 2
    assert "--context takes two tokens or more" in capsys.readouterr().err


def test_explain_a_model_type(capsys):
    assert main(["explain", "deepseek_v3"]) == 0
    assert "mla_fx on reference: fused mla_prolog x2, latent_attention x2" in capsys.readouterr().out


def test_explain_a_script(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import torch\ndef build(): return torch.softmax, (torch.ones(3),), {'dim': 0}")
    assert main(["explain", str(script)]) == 0
    assert "fused nothing" in capsys.readouterr().out


UNLIKE = """
from mla_fx import cases

class Summed(cases.Layer):
    def keys(self, latent, k_rope):
        key, value = super().keys(latent, k_rope)
        return key, value.cumsum(-2)

def build():
    return Summed(), cases.inputs()
"""


def test_mla_in_which_nothing_fused_is_a_failure(tmp_path, capsys):
    """Values are no projection of the latents, keys are."""
    (script := tmp_path / "script.py").write_text(UNLIKE)
    assert main(["explain", str(script)]) == 1
    assert "expected a matrix product, found cumsum" in capsys.readouterr().out


def test_hybrids_get_a_layer_with_attention():
    model, _, kwargs = tiny_call("bailing_hybrid")
    assert "full_attention" in model.config.layer_types
    assert kwargs["input_ids"].shape == (1, 1)


@pytest.mark.slow
def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "mla_fx", "--help"], capture_output=True, text=True, check=True)
    assert "explain" in done.stdout
