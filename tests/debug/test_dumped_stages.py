"""The stages of a model's dump: each runs by itself, computes what the model computes, and has equal layers once."""

import json
import re
import subprocess
import sys

import pytest
import torch
from lib.families import empty_cache, tiny_model
from transformers import AutoModelForCausalLM

import mla_fx
from mla_fx.commands.costs import LayerSizes, Step
from mla_fx.debug.stage import expanded, random_input
from mla_fx.debug.work import amount

LAYERS, LENGTH = 6, 16


@pytest.fixture(scope="module")
def model():
    return tiny_model("deepseek_v3", num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder, cache = tmp_path_factory.mktemp("dump"), empty_cache(model, "static", LENGTH)
    options = {"target": "reference", "dump": str(folder), "strict": True}
    with torch.no_grad():
        model(torch.tensor([[3, 1, 4]]), past_key_values=cache)
        step = torch.compile(model, backend=mla_fx.mla_backend, options=options)
        step(input_ids=torch.tensor([[5]]), past_key_values=cache)
    return folder / "graph_000"


def stages(folder):
    return sorted(folder.glob("*.py"))


def loaded(path):
    module = {"__name__": path.stem}
    exec(compile(path.read_text(), path, "exec"), module)
    return module


@torch.no_grad()
def of_the_model(model, inputs):
    """What the model computes from a stage's inputs, in float64, with its caches."""
    model = AutoModelForCausalLM.from_config(model.config).double().eval()
    state = {name: value for name, value in inputs.items() if name in model.state_dict()}
    model.load_state_dict(state | {"lm_head.weight": inputs["lm_head.weight"]}, strict=True)
    cache = empty_cache(model, "static", LENGTH)
    for number, layer in enumerate(cache.layers):
        keys, values, length = (inputs[f"past_key_values.layers[{number}].{name}"] for name in CACHES)
        layer.lazy_initialization(keys.double(), values.double())
        layer.keys.copy_(keys)
        layer.values.copy_(values)
        layer.cumulative_length.copy_(length)
    logits = model(input_ids=inputs["input_ids"], past_key_values=cache).logits
    return logits, [getattr(layer, name) for layer in cache.layers for name in CACHES]


CACHES = "keys", "values", "cumulative_length"


@pytest.mark.slow
def test_every_stage_computes_what_the_model_computes(model, folder):
    assert stages(folder)[0].stem == "00_captured" and len(stages(folder)) > 3
    for path in stages(folder):
        module = loaded(path)
        inputs = {name: random_input(name, type_, {}) for name, type_ in expanded(module["INPUTS"])}
        # Layers of one model share their length and its frequencies; random inputs would not.
        inputs["model.rotary_emb.inv_freq"].copy_(model.model.rotary_emb.inv_freq)
        for number in range(LAYERS):
            inputs[f"past_key_values.layers[{number}].cumulative_length"].fill_(7)
        logits, caches = of_the_model(model, inputs)
        with torch.no_grad():
            (found,) = module["graph"](inputs)
        written = [inputs[f"past_key_values.layers[{number}].{name}"] for number in range(LAYERS) for name in CACHES]
        torch.testing.assert_close(found.double(), logits, rtol=1e-4, atol=1e-5, msg=path.name)
        for mine, theirs in zip(written, caches, strict=True):
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-4, atol=1e-5, msg=path.name)


def test_equal_layers_are_one_function(folder):
    for path in stages(folder):
        text = path.read_text()
        assert "arg0_1" not in text
        layers = re.findall(r"^def (model_layers_\d+)\(", text, re.MULTILINE)
        assert len(layers) <= 3, f"{path.name}: {layers}"
        assert f'"model.layers.{{0-{LAYERS - 1}}}.self_attn.kv_b_proj.weight": "f32[112, 32]"' in text
        first = 0 if len(layers) == 1 else 1  # the first layer also makes what all need
        assert f"# model.layers.{{{first}-{LAYERS - 1}}}, {LAYERS - first} times" in text


def test_two_stages_differ_in_few_lines(folder):
    first, second = (set(stages(folder)[place].read_text().splitlines()) for place in (0, 1))
    assert len(first - second) < len(first) / 2


@pytest.mark.slow
def test_a_stage_runs_as_a_program(folder):
    run = subprocess.run([sys.executable, stages(folder)[-1]], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert re.fullmatch(r"output 0: f32\[1, 1, 128\] sum \S+, of magnitudes \S+", lines[0])
    assert {line.partition(":")[0] for line in lines[1:]} == {
        f"written past_key_values.layers[{number}].{name}" for number in range(LAYERS) for name in CACHES
    }


def test_the_cost_of_a_layer_is_that_of_its_projections_its_attention_and_its_mlp(model, folder):
    sizes, step = LayerSizes.of(model.config), Step(batch=1, tokens=1, context=LENGTH)
    mlp = 2 * 3 * model.config.hidden_size * model.config.intermediate_size
    data = json.loads((folder / "graph.json").read_text())
    assert sum(kind["count"] for kind in data["kinds"] if kind["path"].startswith("model.layers.")) == LAYERS
    for kind in data["kinds"]:
        if kind["path"].startswith("model.layers."):
            assert kind["work"]["before"]["flops"] == sizes.expanded(step).flops + mlp
            assert kind["work"]["after"]["flops"] == sizes.absorbed(step).flops + mlp
            assert kind["work"]["after"]["bytes"] < kind["work"]["before"]["bytes"]
    flops = next(row for row in data["cost"] if row[0] == "FLOPs")
    head = 2 * model.config.hidden_size * model.config.vocab_size
    assert flops[2] == amount(LAYERS * (sizes.absorbed(step).flops + mlp) + head, "FLOP")
