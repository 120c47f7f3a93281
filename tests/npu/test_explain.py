"""`python -m mla_fx explain` for NPU targets, on the meta device: what the vendor refuses, without a device."""

import json

import pytest

from mla_fx.__main__ import main

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 128,
}
FUSED = {"graphs": [0], "fused": {"mla_prolog": 1, "latent_attention": 1}, "missed": None}


def reports(tmp_path, capsys, *flags, **sizes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v3", **SIZES, **sizes}))
    chosen = "--target", "ge", "--target", "aclgraph", "--option", "soc=Ascend910B3", "--json"
    assert main(["explain", str(path), *chosen, *flags]) == 0
    return json.loads(capsys.readouterr().out)["targets"]


def test_a_configuration_within_the_vendors_limits(tmp_path, capsys):
    found = reports(tmp_path, capsys, "--batch", "2", "--cann", "8.5.0")
    for target in ("ge", "aclgraph"):
        assert found[target]["layers"] == {f"model.layers.{layer}": [FUSED] for layer in range(3)}


@pytest.mark.parametrize(
    ("sizes", "flags", "reason"),
    [
        ({"hidden_size": 1536}, ("--cann", "8.5.0"), "weight_dq has He = 1536; MlaPrologV3 of CANN 8.5.0 takes 1024"),
        ({"q_lora_rank": 2048}, ("--option", "cann=9.0.0"), "CANN 9.0.0"),
    ],
    ids=["hidden size", "release"],
)
def test_what_the_vendor_refuses(tmp_path, capsys, sizes, flags, reason):
    found = reports(tmp_path, capsys, *flags, **sizes)
    for target in ("ge", "aclgraph"):
        layers = found[target]["layers"]
        assert list(layers) == [f"model.layers.{layer}" for layer in range(3)]
        for (outcome,) in layers.values():
            assert outcome["missed"]["pattern"] == "mla_prolog"
            assert f"target '{target}': " in outcome["missed"]["reason"] and reason in outcome["missed"]["reason"]
