"""Tensor parallel: a small DeepSeek-V3 with its attention heads split over two processes; each fuses like one alone.

pip install 'mla_fx[demo]' && torchrun --nproc-per-node 2 examples/tensor_parallel.py  # or ... transformers
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache
from transformers.distributed.configuration_utils import DistributedConfig

import mla_fx

HEADS, KEY, VALUE = 8, 32, 32
CONFIG = DeepseekV3Config(
    hidden_size=256,
    intermediate_size=512,
    vocab_size=512,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=KEY,
    qk_rope_head_dim=16,
    v_head_dim=VALUE,
    initializer_range=0.1,
)


def by_torch(model: Any) -> None:
    """PyTorch's own plan: each process projects to its heads, and the output projections are summed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"q_b_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, plan)


def by_transformers(model: Any) -> None:
    """The plan of transformers, which shards everything in DeepSeek-V3 except the attention, so that is added.

    A model from a checkpoint is sharded as it is read: `from_pretrained(..., distributed_config=...)`."""
    styles = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    plan = {f"model.layers.*.self_attn.{name}": style for name, style in styles.items()}
    config, _, meshes = model.prepare_distribute_model(DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan))
    model.maybe_distribute_model(model, config, meshes)


def check(shard: Callable[[Any], None]) -> str:
    """One step of the whole model in eager mode, and of the sharded, compiled one: what fused, and how far they
    differ."""
    torch.manual_seed(0)  # every process makes the same model
    whole: Any = DeepseekV3ForCausalLM(CONFIG).eval()  # type: ignore[no-untyped-call]  # transformers does not type it
    sharded = copy.deepcopy(whole)
    shard(sharded)
    theirs: Any = StaticCache(config=CONFIG, max_cache_len=128)
    prompt, token = torch.randint(512, (2, 100)), torch.randint(512, (2, 1))
    whole(prompt, past_key_values=theirs)
    ours = copy.deepcopy(theirs)  # latents are common to all heads, so each process has all of them

    expected = whole(token, past_key_values=theirs).logits
    fused: Any = torch.compile(sharded, backend=mla_fx.get_backend(strict=True))
    found = fused(token, past_key_values=ours).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys, rtol=1e-4, atol=1e-4)

    heads = sharded.model.layers[0].self_attn.kv_b_proj.weight.to_local().shape[0] // (KEY + VALUE)
    apart = float((found - expected).abs().max())
    report: Any = mla_fx.last_report()
    return f"{heads} of {HEADS} heads, fused {report.fused}, {apart:.1e} apart"


def main() -> None:
    dist.init_process_group("gloo")
    shard = by_transformers if sys.argv[1:] == ["transformers"] else by_torch
    lines = [""] * dist.get_world_size()
    with torch.no_grad():
        dist.all_gather_object(lines, check(shard))
    if dist.get_rank() == 0:
        print(*(f"{shard.__name__}, rank {rank}: {line}" for rank, line in enumerate(lines)), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
