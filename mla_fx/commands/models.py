"""The call that `explain` traces: of a script, of a tiny model, or of a full model on the meta device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_fx.commands import CommandError
from mla_fx.debug.optional import require

from .configs import mla_families, tiny_config
from .costs import Step

PROMPT = 4
TINY_STEP = Step(context=16)
BUILD = "It should return (callable, args) or (callable, args, kwargs)."

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def script_call(script: Path) -> Call:
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


def tiny_call(model_type: str, device: str = "cpu") -> Call:
    """One decode step of a tiny random model of a transformers model type."""
    return _decode_call(tiny_config(config_class(model_type)), TINY_STEP, f"a tiny {model_type}", device=device)


def full_call(config: Any, step: Step) -> Call:
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


def _decode_call(config: Any, step: Step, name: str, *, device: str) -> Call:
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
