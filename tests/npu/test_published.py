"""`python -m mla_fx explain` for published configurations at their own sizes: what each release of CANN says, and the
graphs that torchair makes."""

import json
import resource
from pathlib import Path

import pytest

from mla_fx.__main__ import main

CONFIGS = Path(__file__).parents[1] / "configs"
RELEASES = ("8.5.0.alpha001", "8.5.0", "9.0.0", "9.1.0")
WHOLE = {"mla_prolog": 1, "latent_attention": 1}
KEY_SIDE = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
ATTENTION = {"latent_attention": 1}
HIDDEN = "weight_dq has He = {}; MlaPrologV3 of CANN {} takes {}"
RANK = "weight_dq has Hcq = 768; MlaPrologV3 of CANN {} takes {}"
OLD, NEW = "6144, 7168 or 7680", "1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680 or 8192"
GIB = 2**30


def explained(capsys, name, *flags):
    assert main(["explain", str(CONFIGS / f"{name}.json"), "--layers", "1", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "fused", "refused", "heads"),
    [
        ("deepseek_v3", WHOLE, {}, None),
        (
            "glm_4_7_flash",
            KEY_SIDE,
            {
                "8.5.0.alpha001": HIDDEN.format(2048, "8.5.0.alpha001", OLD),
                "8.5.0": RANK.format("8.5.0", "1536"),
                "9.0.0": RANK.format("9.0.0", "1536"),
                "9.1.0": RANK.format("9.1.0", "1536 or 2048"),
            },
            20,
        ),
        (
            "minicpm3",
            ATTENTION,
            {release: HIDDEN.format(2560, release, OLD if "alpha" in release else NEW) for release in RELEASES},
            40,
        ),
    ],
    ids=["DeepSeek-V3", "GLM-4.7-Flash", "MiniCPM3"],
)
def test_what_each_release_says(capsys, name, fused, refused, heads):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = json.loads(explained(capsys, name, "--target", "ge", "--json"))["targets"]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < GIB, "weights of several GiB were allocated"
    assert list(found) == [f"ge {release}" for release in RELEASES]
    for release in RELEASES:
        report = found[f"ge {release}"]
        assert report["fused"] == fused
        misses = [miss["reason"] for miss in report["misses"] if miss["pattern"] == "mla_prolog"]
        assert misses == ([f"target 'ge': {refused[release]}"] if refused else [])
        body = f"latent_attention becomes its body: query has N = {heads}; FusedInferAttentionScore takes"
        assert any(note.startswith(body) for note in report["notes"]) == (heads is not None)
        (graph,) = report["compiled"].values()
        assert ("= MlaPrologV3(" in graph) == ("mla_prolog" in fused)
        assert ("= KvRmsNormRopeCache(" in graph) == ("kv_rmsnorm_rope_cache" in fused)
        assert ("= FusedInferAttentionScore(" in graph) == (heads is None)


def test_what_is_alike_is_printed_once(capsys):
    text = explained(capsys, "deepseek_v3", "--target", "ge")
    listed = ", ".join(RELEASES)
    assert text.count("mla_fx on ge") == text.count("compiled for ge") == 1
    assert text.startswith(f"mla_fx on ge, CANN {listed}: fused mla_prolog x1, latent_attention x1")
    assert f"\n\n# compiled for ge, CANN {listed}: " in text
    assert "\nmodel.layers.0.self_attn.o_proj.weight: bfloat16[7168, 16384]\n" in text


def test_what_differs_is_printed_with_its_releases(capsys):
    text = explained(capsys, "glm_4_7_flash", "--target", "ge")
    assert [line.partition(":")[0] for line in text.splitlines() if line.startswith(("mla_fx on", "# compiled"))] == [
        "mla_fx on ge, CANN 8.5.0.alpha001",
        "mla_fx on ge, CANN 8.5.0, 9.0.0",
        "mla_fx on ge, CANN 9.1.0",
        f"# compiled for ge, CANN {', '.join(RELEASES)}",
    ]
    assert "MlaPrologV3 of CANN 8.5.0, 9.0.0 takes 1536 (" in text


def test_one_release(capsys):
    text = explained(capsys, "deepseek_v3", "--target", "aclgraph", "--cann", "9.0.0")
    assert text.startswith("mla_fx on aclgraph, CANN 9.0.0: fused mla_prolog x1")
    assert "# compiled for aclgraph, CANN 9.0.0: " in text and "npu.npu_mla_prolog_v3" in text


def test_a_graph_that_torchair_does_not_convert(capsys):
    """The report is whole, and says which operator keeps the graph from being compiled, and what leaves it out."""
    assert main(["explain", str(CONFIGS / "glm_4_7_flash.json"), "--target", "ge", "--cann", "8.5.0"]) == 0
    text = capsys.readouterr().out
    assert "fused kv_rmsnorm_rope_cache x47, latent_attention x47" in text
    assert "\n  ge does not compile this graph: " in text and "aten.histc.default" in text
    assert "--layers 1 compiles the first layer alone" in text
    assert "# compiled for" not in text


SCRIPT = """
from mla_fx.cases import Layer, inputs

def build():
    return Layer().eval(), inputs()
"""


def test_a_script_whose_tensors_are_on_the_cpu(tmp_path, capsys):
    """Its graph is compiled, and what runs is the graph as it was."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    main(["explain", str(script), "--target", "ge", "--cann", "8.5.0"])
    assert "# compiled for ge, CANN 8.5.0: " in capsys.readouterr().out
