"""Heads on two processes: each fuses like one alone, with its logits and caches, and sums once after attention."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lib.families import Recorder, cache_tensors, empty_cache, tiny_model, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.distributed import DistributedConfig

EXACT = {"rtol": 1e-4, "atol": 1e-5}
RANKS, HEADS, LENGTH = 2, 4, 37
PROMPT = {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}
DECODE = {"mla_prolog": 1, "latent_attention": 1}


def by_torch(model):
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        plan = {"q_b_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        parallelize_module(layer.self_attn, mesh, plan)


def by_transformers(model):
    """Its plan for DeepSeek-V3 shards everything except the attention, so that is added."""
    styles = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    plan = {f"model.layers.*.self_attn.{name}": style for name, style in styles.items()}
    config, _, meshes = model.prepare_distribute_model(DistributedConfig(tp_size=RANKS, tp_plan=plan))
    model.maybe_distribute_model(model, config, meshes)


@pytest.mark.slow
def test_reference(tmp_path):
    mp.spawn(on_each_rank, (tmp_path, "reference"), RANKS)


@pytest.mark.campaign
def test_inductor(tmp_path):
    mp.spawn(on_each_rank, (tmp_path, "inductor"), RANKS)


def on_each_rank(rank, folder, target):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    with torch.no_grad():
        whole = tiny_model("deepseek_v3", num_hidden_layers=1)
        check(whole, by_torch, target, sums=1)
        check(whole, by_transformers, target, sums=3)  # of the embedding and the feed-forward layer too
    dist.destroy_process_group()


def check(whole, shard, target, sums):
    """A prompt and two steps, sharded and compiled, compared with the whole model; with target "reference" also what
    ran."""
    sharded, recorder = copy.deepcopy(whole), Recorder(target=target)
    shard(sharded)
    compiled = torch.compile(sharded, backend=recorder, fullgraph=True)
    theirs = empty_cache(whole, "static", LENGTH)
    ours = copy.deepcopy(theirs)
    for count in (12, 1, 1):
        ids = tokens(2, count)
        expected = whole(ids, past_key_values=theirs).logits
        torch.testing.assert_close(compiled(ids, past_key_values=ours).logits, expected, **EXACT)
        torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), **EXACT)
    assert [report.fused for report in recorder.reports] == [PROMPT, DECODE]
    if target == "reference":
        ran = [operator for operator, _ in recorder.operators]
        assert ran.count("_c10d_functional.all_reduce.default") == sums
        (query,) = (args[0] for operator, args in recorder.operators if operator == "mla_fx.attention.default")
        assert query.shape[2] == HEADS // RANKS
