"""The call that `explain` traces: of a script, of a tiny model, or of a full model on the meta device. A full model has
a configuration as model hubs publish it, a `config.json`, or a folder that has one; nothing is downloaded. A tiny one
has a small configuration, of any model type in transformers that has Multi-head Latent Attention."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_fx.commands import CommandError
from mla_fx.debug import require
from mla_fx.errors import first_line

from .costs import Step

PROMPT = 4
TINY_STEP = Step(context=16)
BUILD = "It should return (callable, args) or (callable, args, kwargs)."

Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
FILE = "config.json"
TINY = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "head_dim": 8,
    "first_k_dense_replace": 8,
    "layer_group_size": 2,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""Sizes under every name that transformers uses; a model type takes those that it has."""
TINY_IF_USED = {"q_lora_rank": 48, "qk_rope_head_dim": 8}
"""Optional sizes, left out if a model type does not need them."""
MOST_LAYERS = 8


def script_call(script: Path) -> Program:
    """What a script's `build()` returns: a callable, its arguments, and optionally its keyword arguments."""
    if not script.is_file():
        raise CommandError(f"{script} is not a file.")
    build = getattr(_imported(script), "build", None)
    if not callable(build):
        raise CommandError(f"{script} defines no build(). {BUILD}")
    built = build()
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not callable(built[0]):
        raise CommandError(f"build() in {script} returned {type(built).__name__}. {BUILD}")
    return built[0], tuple(built[1]), dict(built[2]) if len(built) == 3 else {}


def _imported(script: Path) -> ModuleType:
    """The script as a module that can be found by its name: Dynamo looks functions up there."""
    spec = importlib.util.spec_from_file_location(f"{script.stem}_to_explain", script)
    assert spec is not None and spec.loader is not None, "a file that ends in .py can be imported"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_call(model_type: str, device: str = "cpu") -> Program:
    """One decode step of a tiny random model of a transformers model type."""
    return _decode_call(tiny_config(config_class(model_type)), TINY_STEP, f"a tiny {model_type}", device=device)


def full_call(config: Any, step: Step) -> Program:
    """One step of the full model, on the meta device and in bfloat16."""
    return _decode_call(config, step, f"a full {config.model_type}", device="meta")


def config_class(model_type: str) -> Any:
    """The class of a model type's configuration, or of its text model's."""
    require("transformers")
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        families = ", ".join(mla_families())
        raise CommandError(
            f"transformers has no model type {model_type!r}; those with Multi-head Latent Attention are {families}."
        )
    found = CONFIG_MAPPING[model_type]
    return found.sub_configs.get("text_config", found)


def _decode_call(config: Any, step: Step, name: str, *, device: str) -> Program:
    """A model with a StaticCache that a prompt went through, and the tokens of a step."""
    import torch
    from transformers import StaticCache
    from transformers.utils import logging

    quieten: Any = logging.set_verbosity_error
    quieten()
    dtype = torch.bfloat16 if device == "meta" else torch.float32
    try:
        with torch.device(device), torch.no_grad():
            model = _model_class(config).from_config(config, dtype=dtype).eval()
            cache = StaticCache(config=config, max_cache_len=step.context)
            prompt = min(PROMPT, step.context)
            model(torch.zeros(step.batch, prompt, dtype=torch.long) + 3, past_key_values=cache)
            tokens = torch.zeros(step.batch, step.tokens, dtype=torch.long) + 5
    except Exception as error:  # hundreds of model types fail in their own ways
        raise CommandError(
            f"{name} cannot be built and prefilled ({type(error).__name__}: {error}); "
            "give a script with a build() that returns the model and its inputs instead."
        ) from error
    return model, (), {"input_ids": tokens, "past_key_values": cache}


def _model_class(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel


def is_config(given: str) -> bool:
    """Whether this names a configuration, and not a model type or a script."""
    return given.endswith(".json") or Path(given).is_dir()


def read_config(given: str) -> Any:
    """The configuration of the text model, from local files alone, without running code that comes with them."""
    require("transformers")
    path = Path(given) / FILE if Path(given).is_dir() else Path(given)
    model_type = _model_type(path)
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers checks sizes in its own ways
        why = first_line(error).rstrip(".")
        raise CommandError(f"transformers does not take {path} as a {model_type}: {why}") from error
    config = config.get_text_config()
    if not getattr(config, "kv_lora_rank", None):
        raise CommandError(f"{path} has no kv_lora_rank, so its model has no Multi-head Latent Attention.")
    return config


def with_layers(config: Any, count: int) -> Any:
    known = int(config.num_hidden_layers)
    if not 1 <= count <= known:
        raise CommandError(f"--layers is {count}; this model has 1 to {known}.")
    config.num_hidden_layers = count
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == known:  # the kind of each layer
            setattr(config, name, value[:count])
    return config


def attention_layers(config: Any) -> int:
    """How many layers have latent attention; hybrids list the kind of each."""
    kinds = getattr(config, "layer_types", None)
    if kinds and "linear_attention" in kinds:
        return sum(kind != "linear_attention" for kind in kinds)
    return int(config.num_hidden_layers)


def _model_type(path: Path) -> str:
    from transformers import CONFIG_MAPPING

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read as JSON: {first_line(error).rstrip('.')}.") from error
    model_type = found.get("model_type") if isinstance(found, dict) else None
    if not model_type:
        raise CommandError(f"{path} has no model_type, so it is no configuration of a model.")
    if model_type not in CONFIG_MAPPING:
        families = ", ".join(mla_families())
        raise CommandError(
            f"{path} is of model type {model_type!r}, which transformers does not have; those with Multi-head Latent "
            f"Attention are {families}."
        )
    return str(model_type)


def mla_families() -> list[str]:
    """The model types in transformers whose configuration has a `kv_lora_rank`."""
    from transformers import CONFIG_MAPPING

    return sorted(name for name in CONFIG_MAPPING if hasattr(CONFIG_MAPPING[name], "kv_lora_rank"))


def tiny_config(config_class: Any) -> Any:
    """A small configuration with two layers, or as many as a hybrid needs to have one with softmax attention."""
    sizes = {name: size for name, size in TINY.items() if hasattr(config_class, name)}
    sizes |= {name: size for name, size in TINY_IF_USED.items() if getattr(config_class, name, None)}
    count = "num_layers" if hasattr(config_class, "num_layers") else "num_hidden_layers"
    configs = (config_class(**sizes, **{count: layers}) for layers in range(2, MOST_LAYERS + 1))
    for config in configs:
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"linear_attention"}:
            break
    return config
