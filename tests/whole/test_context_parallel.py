"""The context on several processes: each fuses its part with the logarithms of its sums, and all merge them. The oracle
is the layer that has all heads and all rows, in eager mode."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lib.families import Recorder
from lib.zoo import parts, servers
from lib.zoo.servers import _dense
from lib.zoo.sizes import SMALL

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
GATHERED, SUMMED, EXCHANGED = "all_gather_into_tensor", "all_reduce", "all_to_all_single"
FUSED = {"mla_prolog": 1, "latent_attention": 1}
WAYS = (
    (parts.ContextParallel, FUSED, [GATHERED] * 3 + [SUMMED] * 2),
    (parts.ContextParallelByHeads, {**FUSED, "merge_attention": 1}, [GATHERED] * 2 + [EXCHANGED, SUMMED]),
)
LENGTH = 16
STEPS = (3, 1, 2, 1, 5)  # tokens; the first context is shorter than a group of four


@pytest.mark.slow
def test_two_processes(tmp_path):
    mp.spawn(on_each_rank, (tmp_path, 2, "reference", [False]), 2)


@pytest.mark.campaign
@pytest.mark.parametrize("ranks, target", [(2, "reference"), (4, "reference"), (2, "inductor")])
def test_other_processes(tmp_path, ranks, target):
    mp.spawn(on_each_rank, (tmp_path, ranks, target, [False, True]), ranks)


def on_each_rank(rank, folder, ranks, target, is_dynamic):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    with torch.no_grad():
        for way, dynamic in itertools.product(WAYS, is_dynamic):
            torch._dynamo.reset()
            check(way, rank, ranks, target, dynamic)
    dist.destroy_process_group()


def check(way, rank, ranks, target, dynamic):
    layer, fused, collectives = way
    recorder = Recorder(target=target)
    whole, part = servers.Drafts(), layer()
    run = torch.compile(part, backend=recorder, dynamic=dynamic, fullgraph=True)
    theirs, ours, start = caches(LENGTH), caches(LENGTH // ranks + 1), 0
    for number, tokens in enumerate(STEPS):
        x, positions = _dense(2, tokens, SMALL.hidden, seed=number), start + torch.arange(tokens).expand(2, -1)
        torch.testing.assert_close(run(x, positions, ours), whole(x, positions, theirs), **CLOSE)
        for own, all_rows in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own[:, :-1], all_rows[:, rank::ranks], **CLOSE)
        start += tokens
    assert all(report.fused == fused for report in recorder.reports), str(recorder.report)
    if target == "reference":
        ran = [operator for operator, _ in recorder.operators if operator.startswith("_c10d_functional.all")]
        assert ran == [f"_c10d_functional.{name}.default" for name in collectives]


def caches(length):
    return [torch.zeros(2, length, width) for width in (SMALL.kv_rank, SMALL.rope)]
