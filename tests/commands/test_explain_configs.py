"""`python -m mla_fx explain` on published configurations, for one target and for several."""

import importlib.util
import json
from pathlib import Path

import pytest
from lib.families import SIZES
from mla_fx.lowering.ascend import toolchain
from mla_fx.lowering.ascend.stub import environment

import mla_fx
from mla_fx.__main__ import main
from mla_fx.commands import explain
from mla_fx.commands.demo import ATTENTION
from mla_fx.debug.report import Miss, Report

TINY = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    **{name: SIZES[name] for name in (*ATTENTION, "intermediate_size", "moe_intermediate_size", "vocab_size")},
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
CONFIGS = Path(__file__).parents[1] / "configs"
NO_NPU = importlib.util.find_spec("torch_npu") is None


def written(folder, content, name="config.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def told(capsys):
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_a_configuration(tmp_path, capsys, is_folder):
    path = written(tmp_path, TINY)
    flags = "--batch", "3", "--tokens", "2", "--context", "22", "--bandwidth", "500", "--flops", "50"
    assert main(["explain", str(tmp_path) if is_folder else path, "--json", *flags]) == 0
    found = told(capsys)
    report, costs = found["targets"]["reference"], found["costs"]
    fused = {"graphs": [0], "fused": {"mla_prolog": 1, "latent_attention": 1}, "missed": None}
    assert report["layers"] == {f"model.layers.{layer}": [fused] for layer in range(4)}
    assert costs["step"] == {"batch": 3, "tokens": 2, "context": 22}
    assert (costs["layers"], costs["cache_per_token"], costs["caches_read"]) == (4, 80, 3 * 22 * 80)
    absorbed = costs["forms"]["absorbed"]
    assert absorbed["seconds"] == max(absorbed["bytes"] / 500e9, absorbed["flops"] / 50e12)


@pytest.mark.slow
def test_deepseek_v3_as_published(capsys):
    assert main(["explain", str(CONFIGS / "deepseek_v3.json")]) == 0
    text = capsys.readouterr().out
    assert "mla_fx on reference: fused mla_prolog x61, latent_attention x61" in text
    assert "\n  model.layers.0 … 60 (61): mla_prolog, latent_attention\n" in text
    assert "\n  memory, per layer of the 2 traced for 61: 0.0 KiB of copies of weights, 4.5 MiB of caches " in text
    assert "per layer: weights 374.2 MB, cache 1152 B per token, caches read 4.719 MB" in text


@pytest.fixture
def without(monkeypatch, tmp_path):
    """A function that says what this machine lacks; what was found before is forgotten."""
    monkeypatch.setenv("MLA_FX_NPU_CACHE", str(tmp_path / "cache"))
    environment.variables.cache_clear()
    yield lambda lacking: getattr(monkeypatch, lacking[0])(*lacking[1:])
    environment.variables.cache_clear()


@pytest.mark.skipif(not NO_NPU, reason="torch_npu is installed")
@pytest.mark.parametrize("target", ["ge", "aclgraph"])
@pytest.mark.parametrize(
    ("lacking", "why"),
    [
        (("setenv", "PATH", ""), "the stub libraries are built with gcc, which is not installed"),
        (
            ("setattr", environment.platform, "machine", lambda: "aarch64"),
            "torch_npu and its stub libraries need Linux on x86-64, this is linux aarch64",
        ),
        (("setattr", environment, "TORCH_NPU", {"2.9": "2.9.0"}), "torch_npu is known for torch 2.9, this is "),
        (("setenv", "PIP_NO_INDEX", "1"), "pip could not install torch-npu=="),
        (("setenv", environment.IN_CHILD, "1"), "the stub libraries do not take the place of CANN's"),
    ],
    ids=["gcc", "processor", "torch", "network", "stub"],
)
def test_a_target_that_cannot_be_used_is_an_error(tmp_path, capsys, without, target, lacking, why):
    """It says why, and no other target takes its place."""
    without(lacking)
    if lacking[1] == "PIP_NO_INDEX":
        without(("delenv", "PIP_FIND_LINKS", False))
    toolchain.missing.cache_clear()
    assert main(["explain", written(tmp_path, TINY), "--target", "reference", "--target", target]) == 2
    toolchain.missing.cache_clear()
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"mla_fx: target {target!r} cannot be used here: torch_npu is not installed; ")
    assert f". Without a device: {why}" in found.err


def test_a_release_that_is_not_known(tmp_path, capsys, without):
    without(("setenv", "PATH", ""))
    assert main(["explain", written(tmp_path, TINY), "--target", "ge", "--cann", "7.0.0"]) == 2
    names = "'8.5.0.alpha001', '8.5.0', '9.0.0', '9.1.0'"
    assert capsys.readouterr().err == f"mla_fx: option cann is '7.0.0'; it takes {names}\n"


def test_a_release_is_not_for_every_target(tmp_path, capsys):
    assert main(["explain", written(tmp_path, TINY), "--cann", "8.5.0"]) == 2
    assert "cann" in capsys.readouterr().err


def test_all_targets(monkeypatch):
    class Known:
        def __init__(self, reason=None):
            self.missing = lambda: reason

    known = {"ge": Known("no torch_npu"), "inductor": Known(), "reference": Known()}
    monkeypatch.setattr(explain.discovery, "targets", lambda: known)
    sentence = "target 'ge' cannot be used here: no torch_npu. --target ge checks its limits without the device."
    assert explain._usable(["all"]) == (["inductor", "reference"], {"ge": sentence})
    assert explain._usable(["inductor", "inductor", "abacus"]) == (["inductor", "abacus"], {})


@pytest.mark.slow
def test_the_first_layers(tmp_path, capsys):
    assert main(["explain", written(tmp_path, TINY), "--layers", "2", "--json"]) == 0
    found = told(capsys)
    assert list(found["targets"]["reference"]["layers"]) == ["model.layers.0", "model.layers.1"]
    assert found["costs"]["layers"] == 2


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("--layers", "5"), "--layers is 5; this model has 1 to 4."),
        (("--layers", "0"), "--layers is 0; this model has 1 to 4."),
    ],
)
def test_layers_that_are_not_there(tmp_path, capsys, given, complaint):
    assert main(["explain", written(tmp_path, TINY), *given]) == 2
    assert capsys.readouterr().err == f"mla_fx: {complaint}\n"


def test_layers_of_a_tiny_model(capsys):
    assert main(["explain", "deepseek_v3", "--layers", "1"]) == 2
    complaint = "--layers takes the first layers of a configuration, or of a model type with --full."
    assert capsys.readouterr().err == f"mla_fx: {complaint}\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read as JSON: "),
        ("[]", "has no model_type, so it is no configuration of a model."),
        ({"model_type": "deepseek_v99"}, "is of model type 'deepseek_v99', which transformers does not have; "),
        ({"model_type": "llama"}, "has no kv_lora_rank, so its model has no Multi-head Latent Attention."),
        ({**TINY, "hidden_size": "many"}, "transformers does not take "),
    ],
    ids=["no JSON", "no object", "unknown", "no MLA", "wrong type"],
)
def test_a_configuration_that_is_wrong_is_a_sentence(tmp_path, capsys, content, complaint):
    assert main(["explain", written(tmp_path, content)]) == 2
    message = capsys.readouterr().err
    assert complaint in message
    assert message.startswith("mla_fx: ") and message.count("\n") == 1


@pytest.mark.parametrize("given", ["missing.json", "."])
def test_a_configuration_that_is_not_there_is_a_sentence(tmp_path, capsys, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", given]) == 2
    name = "missing.json" if given != "." else "config.json"
    assert capsys.readouterr().err == f"mla_fx: {name} does not exist.\n"


@pytest.mark.parametrize(
    "flags", [("--batch", "0"), ("--tokens", "0"), ("--context", "0"), ("--bandwidth", "0"), ("--flops", "nan")]
)
def test_sizes_and_rates_are_checked(capsys, flags):
    assert main(["explain", "deepseek_v3", *flags]) == 2
    assert "take" in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"mla_fx {mla_fx.__version__}\n")


def test_the_exit_status_tells_unfused_mla():
    def missed(layer, *, looks_like_mla=True, by_design=False):
        return Miss("mla_attention", "no", "mm", "", f"layers.{layer}.attn", 3, looks_like_mla, by_design)

    fused = {"latent_attention": ["layers.0.attn"], "paged_attention": ["layers.2.attn"]}
    assert not explain.leaves_mla(Report(modules=fused))
    assert explain.leaves_mla(Report(modules=fused, misses=[missed(1)]))
    assert explain.leaves_mla(Report(hindrances=["dropout"]))
    for layer, is_part in ((0, True), (1, False), (2, False)):  # of MLA, of nothing, of other attention
        miss = missed(layer, looks_like_mla=False)
        assert explain.leaves_mla(Report(modules=fused, misses=[miss])) == is_part
        assert not explain.leaves_mla(Report(modules=fused, misses=[missed(layer, by_design=True)]))
    assert not explain.leaves_mla(Report(modules=fused, misses=[missed(2)]))  # fused otherwise
    prolog = Miss("mla_prolog", "no", "mm", "", "q_proj", 3)
    assert explain.leaves_mla(Report(misses=[missed(0, by_design=True), prolog]))


NEVER = "--option", "absorb=never"
UNABSORBED = "absorb: the query is not absorbed"


@pytest.mark.parametrize(
    ("layer", "flags", "status", "sentence"),
    [
        ("Layer", (), 0, "fused mla_prolog x1, latent_attention x1"),
        ("Layer", NEVER, 0, UNABSORBED),
        ("WeightedQuery", NEVER, 0, UNABSORBED),
        ("WeightedQuery", (), 1, "the query is multiplied by a tensor that differs from column to column"),
    ],
)
def test_the_exit_status_tells_what_a_program_keeps_from_fusing(tmp_path, capsys, layer, flags, status, sentence):
    (script := tmp_path / "script.py").write_text(
        f"from mla_fx import cases\ndef build(): return cases.{layer}().eval(), cases.inputs()"
    )
    assert main(["explain", str(script), *flags]) == status
    assert sentence in capsys.readouterr().out


UNFUSED = """
import torch
from mla_fx.cases import Layer, inputs

class Dropping(Layer):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), -1) @ key.mT + mask
        return torch.nn.functional.dropout(scores.softmax(-1), 0.5) @ value

def build():
    return Dropping().eval(), inputs()
"""


def test_a_model_whose_mla_does_not_fuse(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(UNFUSED)
    assert main(["explain", str(script)]) == 1
    assert "attention with dropout is not fused" in capsys.readouterr().out
