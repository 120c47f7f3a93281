"""`python -m mla_fx`: `demo` compares a stock and a fused decode step, `explain` says what fuses in a model."""

from __future__ import annotations

import argparse
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import FusionError, MlaWarning, OptionError

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
"""Sizes under every name that transformers has for them; a model type takes those it knows."""
TINY_IF_USED = {"q_lora_rank": 48, "qk_rope_head_dim": 8}
"""Sizes that a model type may do without, and then must."""
MOST_LAYERS = 8
PROMPT, CONTEXT = 4, 16
BUILD = "It should return (callable, args) or (callable, args, kwargs)."

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class CommandError(Exception):
    """The command line asks for something that does not work; the message is a sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (CommandError, FusionError, ModuleNotFoundError, OptionError) as error:
        # What comes through Dynamo has its advice on reporting Dynamo's bugs appended.
        print("mla_fx:", str(error).partition("\n\nSet TORCHDYNAMO")[0], file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mla_fx", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="compare a decode step of DeepSeek-V3's attention, stock and fused")
    demo.add_argument("--context", type=int, default=4096, help="tokens in the cache (%(default)s)")
    demo.add_argument("--layers", type=int, default=1, help="decoder layers (%(default)s)")
    demo.set_defaults(run=_demo)
    explain = commands.add_parser("explain", help="say what fuses in a model, what nearly does, and why not")
    explain.add_argument(
        "model", metavar="MODEL_OR_SCRIPT", help="a transformers model type, or a .py file with a build()"
    )
    # The passes are the same for every target, and this one compiles in seconds.
    explain.add_argument("--target", default="reference", help="where the graph goes (%(default)s)")
    explain.set_defaults(run=_explain)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from .demo import run_demo

    if options.context < 2 or options.layers < 1:
        raise CommandError("--context takes two tokens or more and --layers one or more.")
    return 0 if run_demo(options.context, options.layers).agree else 1


def _explain(options: argparse.Namespace) -> int:
    from .backend import explain

    is_script = options.model.endswith(".py")
    function, args, kwargs = script_call(Path(options.model)) if is_script else decode_call(options.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaWarning)  # the report says the same
        report = explain(function, target=options.target)(*args, **kwargs)
    print(report)
    return 0


def script_call(script: Path) -> Call:
    """What a script's `build()` returns: a callable, its arguments, and perhaps its keyword arguments."""
    if not script.is_file():
        raise CommandError(f"{script} is not a file.")
    build = runpy.run_path(str(script)).get("build")
    if not callable(build):
        raise CommandError(f"{script} defines no build(). {BUILD}")
    built = build()
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not callable(built[0]):
        raise CommandError(f"build() in {script} returned {type(built).__name__}. {BUILD}")
    return built[0], tuple(built[1]), dict(built[2]) if len(built) == 3 else {}


def decode_call(model_type: str) -> Call:
    """One decode step on a StaticCache of a tiny random model of a transformers model type."""
    from .demo import require

    require("transformers")
    import torch
    from transformers import StaticCache
    from transformers.utils import logging

    quieten: Any = logging.set_verbosity_error
    quieten()
    config_class = _config_class(model_type)
    try:
        config = tiny_config(config_class)
        model = _model_class(config).from_config(config).eval()
        cache = StaticCache(config=config, max_cache_len=CONTEXT)
        with torch.no_grad():
            model(torch.zeros(1, PROMPT, dtype=torch.long) + 3, past_key_values=cache)
    except Exception as error:  # any of hundreds of model types, each with demands of its own
        raise CommandError(
            f"a tiny {model_type} cannot be built and prefilled ({type(error).__name__}: {error}); "
            "give a script with a build() that returns the model and its inputs instead."
        ) from error
    return model, (), {"input_ids": torch.tensor([[5]]), "past_key_values": cache}


def _config_class(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        families = ", ".join(mla_families())
        raise CommandError(
            f"transformers knows no model type {model_type!r}; those with Multi-head Latent Attention are {families}."
        )
    config_class = CONFIG_MAPPING[model_type]
    return config_class.sub_configs.get("text_config", config_class)


def mla_families() -> list[str]:
    """The model types in transformers whose configuration has a `kv_lora_rank`."""
    from transformers import CONFIG_MAPPING

    return sorted(name for name in CONFIG_MAPPING if hasattr(CONFIG_MAPPING[name], "kv_lora_rank"))


def tiny_config(config_class: Any) -> Any:
    """A small configuration with two layers, or as many as it takes until a hybrid has one with softmax attention."""
    sizes = {name: size for name, size in TINY.items() if hasattr(config_class, name)}
    sizes |= {name: size for name, size in TINY_IF_USED.items() if getattr(config_class, name, None)}
    count = "num_layers" if hasattr(config_class, "num_layers") else "num_hidden_layers"
    configs = (config_class(**sizes, **{count: layers}) for layers in range(2, MOST_LAYERS + 1))
    for config in configs:
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"linear_attention"}:
            break
    return config


def _model_class(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel


if __name__ == "__main__":
    sys.exit(main())
