"""The MLA families of transformers as tiny random models, built from each family's own configuration class."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, DynamicCache, StaticCache

import mla_fx
from mla_fx.driver.report_log import listening

# Small values for the fields that decide a model's size; a family takes those that it has.
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    "head_dim": 8,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "zero_expert_num": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "index_topk": 4,
    "index_kpool": 2,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What a family needs in addition. If real models have values as wide as queries, which is another attention in PyTorch,
# tiny ones do, too.
WIDE = {"v_head_dim": 24}
EXTRA = {
    "mistral4": WIDE,
    "mistral_large4": {**WIDE, "no_rope_layers": [1, 0]},
    "glm4_moe_lite": WIDE,
    "glm_moe_dsa": WIDE,
    "glm5_next": {"v_head_dim": 16, "qk_rope_head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 4},
    "hy_v4": WIDE,
    "dots3_note": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 48,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 12,
        "moe_shared_expert_intermediate_size": 32,
    },
}

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "mistral_large4",
    "youtu",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "glm5_next",
    "hy_v4",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "dots3_note",
)

# Their indexers count flags, which breaks the graph unless Dynamo captures operators with data-dependent sizes.
COUNTS_FLAGS = ("glm5_next",)


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A causal language model of the family with dense random weights, in eval mode.

    A family whose language model exists only inside a vision model gives its text model, which returns hidden
    states."""
    default = AutoConfig.for_model(family).get_text_config()
    wanted = {**SIZES, **EXTRA.get(family, {}), **overrides}
    known = {name: value for name, value in wanted.items() if _takes(default, name) or name in EXTRA.get(family, {})}
    layers = known["num_hidden_layers"] if "num_hidden_layers" in known else known["num_layers"]
    if getattr(default, "layer_types", None):
        known["layer_types"] = _layer_types(default.layer_types, layers)
    if getattr(default, "mlp_layer_types", None):
        known.setdefault("mlp_layer_types", ["dense", "sparse"][:layers])
    torch.manual_seed(0)
    model = _language_model(family)(type(default)(**known)).eval()
    randomise(model)
    return model.to(dtype)


def _takes(config: Any, name: str) -> bool:
    """Says if a configuration class has a field; asking an instance fails if layers differ."""
    return hasattr(type(config), name) or name in config.attribute_map


def _language_model(family: str) -> type:
    """The family's language model class; some families are not in the auto classes."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = ("ForCausalLM", "TextModel")
    return next(value for kind in kinds for name, value in vars(module).items() if name.endswith(kind))


def _layer_types(kinds: list[str], count: int) -> list[str]:
    """A short list with every kind of layer, the attention ones first."""
    unique = list(dict.fromkeys(sorted(kinds, key=lambda kind: "linear" in kind)))
    return (unique * count)[: max(count, 1)]


def randomise(model: torch.nn.Module) -> None:
    """Weights that hide nothing: linear ones at 1/sqrt(fan_in), norms around 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            is_norm = parameter.ndim == 1
            parameter.copy_(1 + 0.3 * noise if is_norm else noise * parameter.shape[-1] ** -0.5)


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    """Every tensor that a transformers cache holds, in a stable order."""
    tensors: list[torch.Tensor] = []
    for layer in cache.layers:
        for _, value in sorted(vars(layer).items()):
            values = value.values() if isinstance(value, dict) else [value]
            tensors += [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
    return tensors


def empty_cache(model: Any, kind: str, length: int = 32) -> Any:
    """A cache for the model: "static" with room for `length` tokens, "dynamic", or None."""
    kinds = {
        "static": lambda: StaticCache(config=model.config, max_cache_len=length),
        "dynamic": lambda: DynamicCache(config=model.config),
    }
    return kinds[kind]() if kind in kinds else None


def tokens(*shape: int) -> torch.Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, SIZES["vocab_size"], shape)


def mark_steps(ids: torch.Tensor, held: Any, most: int) -> None:
    """Say to Dynamo that a step has any number of tokens up to `most`, except one, and that a growing cache grows."""
    if ids.shape[1] > 1:
        torch._dynamo.mark_dynamic(ids, 1, min=2, max=most)
    for layer in held.layers if isinstance(held, DynamicCache) else ():
        torch._dynamo.mark_dynamic(layer.keys, 2)
        torch._dynamo.mark_dynamic(layer.values, 2)


class Recorder(TorchDispatchMode):
    """A backend that keeps the report of every graph, and the operators that its last call ran."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.backend = mla_fx.get_backend(**{"target": "reference", **options})
        self.reports: list[mla_fx.Report] = []
        self.operators: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        with warnings.catch_warnings(), listening() as reports:
            warnings.simplefilter("ignore", mla_fx.MlaWarning)
            compiled = self.backend(gm, example_inputs)
        self.reports += reports
        return self.around(compiled)

    def around(self, compiled: Any) -> Any:
        """Records each call."""

        def run(*inputs: Any) -> Any:
            self.operators.clear()
            with self:
                return compiled(*inputs)

        return run

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append((str(function), args))
        return function(*args, **(kwargs or {}))

    @property
    def report(self) -> mla_fx.Report:
        return mla_fx.Report.merged(self.reports)

    @property
    def fused(self) -> dict[str, int]:
        return self.report.fused


EXACT = {"rtol": 1e-4, "atol": 1e-5}


def check_same_caches(ours, theirs):
    torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), **EXACT)
