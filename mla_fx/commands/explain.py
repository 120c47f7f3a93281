"""Reports what fuses in a model of transformers, or in a user's own."""

from __future__ import annotations

import json
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mla_fx.backend import explain
from mla_fx.errors import MlaWarning

from .demo import progress, require
from .tiny_models import mla_families, tiny_config

PROMPT, CONTEXT = 4, 16
BUILD = "It should return (callable, args) or (callable, args, kwargs)."

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class CommandError(Exception):
    """An invalid command line; the message is a sentence."""


def run_explain(model: str, target: str, *, is_full: bool = False, as_json: bool = False) -> None:
    """Print what fuses in a transformers model type, or in what a script builds."""
    is_script = model.endswith(".py")
    with progress() as announce, warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaWarning)  # the report says the same
        announce(f"building {model}")
        function, args, kwargs = script_call(Path(model)) if is_script else decode_call(model, is_full=is_full)
        announce(f"tracing {model}, and rewriting it for {target}")
        report = explain(function, target=target)(*args, **kwargs)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)


def script_call(script: Path) -> Call:
    """What a script's `build()` returns: a callable, its arguments, and optionally its keyword arguments."""
    if not script.is_file():
        raise CommandError(f"{script} is not a file.")
    build = runpy.run_path(str(script)).get("build")
    if not callable(build):
        raise CommandError(f"{script} defines no build(). {BUILD}")
    built = build()
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not callable(built[0]):
        raise CommandError(f"build() in {script} returned {type(built).__name__}. {BUILD}")
    return built[0], tuple(built[1]), dict(built[2]) if len(built) == 3 else {}


def decode_call(model_type: str, *, is_full: bool = False) -> Call:
    """One decode step on a StaticCache of a transformers model type: of a tiny random model, or of the full model on
    the meta device."""
    require("transformers")
    import torch
    from transformers import StaticCache
    from transformers.utils import logging

    quieten: Any = logging.set_verbosity_error
    quieten()
    config_class = _config_class(model_type)
    try:
        with torch.device("meta" if is_full else "cpu"), torch.no_grad():
            config = config_class() if is_full else tiny_config(config_class)
            dtype = torch.bfloat16 if is_full else torch.float32
            model = _model_class(config).from_config(config, dtype=dtype).eval()
            cache = StaticCache(config=config, max_cache_len=CONTEXT)
            model(torch.zeros(1, PROMPT, dtype=torch.long) + 3, past_key_values=cache)
            token = torch.tensor([[5]])
    except Exception as error:  # hundreds of model types fail in their own ways
        size = "full" if is_full else "tiny"
        raise CommandError(
            f"a {size} {model_type} cannot be built and prefilled ({type(error).__name__}: {error}); "
            "give a script with a build() that returns the model and its inputs instead."
        ) from error
    return model, (), {"input_ids": token, "past_key_values": cache}


def _config_class(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        families = ", ".join(mla_families())
        raise CommandError(
            f"transformers has no model type {model_type!r}; those with Multi-head Latent Attention are {families}."
        )
    config_class = CONFIG_MAPPING[model_type]
    return config_class.sub_configs.get("text_config", config_class)


def _model_class(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
