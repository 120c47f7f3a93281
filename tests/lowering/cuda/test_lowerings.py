"""Which calls on a CUDA device are lowered to the Triton kernels, with the reason for those that are not.

Tensors are fake: their device is known, and nothing runs."""

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted import lightning_index
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention.codes import CODES
from mla_fx.target import first_of, modules_of_operators

pytest.importorskip("triton")
from mla_fx.lowering.cuda import split_keys

KERNELS = "attention_over_split_keys", "index_scores_in_tiles"
OPERATORS = dict.fromkeys(("latent_attention", "mla_attention"), "attention")  # of forms
TOKENS, CHOSEN = 1, 32


def modules():
    return {entry.name: module for entry, module in modules_of_operators("mla_fx.lowering.cuda")}


def module_of(name):
    return modules()[OPERATORS.get(name.partition(",")[0], name)]


def empty(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.empty(*shape, dtype=dtype, device=device)


def latent(tokens=TOKENS, rank=512, **kind):
    operands = empty(2, tokens, 16, rank, **kind), empty(2, tokens, 16, 64, **kind)
    return attention.Arguments(*operands, *caches(rank, **kind), None, scale=0.1)


def caches(rank=512, **kind):
    return empty(2, 64, rank, **kind), empty(2, 64, 64, **kind)


def plain(tokens=TOKENS, rank=512, absorbed=128, **kind):
    operands = empty(2, tokens, 16, 128, **kind), empty(2, tokens, 16, 64, **kind), *caches(rank, **kind)
    up = empty(16, 128, rank, **kind)
    return attention.Arguments(*operands, weight_uk=up, weight_uv=up, scale=0.1, max_absorbed_tokens=absorbed)


def sparse(tokens=TOKENS, **kind):
    a, indices = latent(tokens, **kind), empty(2, tokens, 1, CHOSEN, dtype=torch.int32)
    return replace(a, indices=indices)


def index(tokens=TOKENS, **kind):
    operands = empty(2, tokens, 64, 128, **kind), empty(2, 64, 128, **kind), empty(2, tokens, 64, **kind)
    return lightning_index.Arguments(*operands, sparse_count=CHOSEN)


def with_lse(made):
    return lambda *given, **options: replace(made(*given, **options), return_lse=True)


CALLS = {
    "latent_attention": (latent, [1, 16]),
    "latent_attention, return_lse": (with_lse(latent), [1, 16]),
    "mla_attention": (plain, [1, 16]),
    "mla_attention, return_lse": (with_lse(plain), [1, 16]),
    "latent_attention, chosen keys": (sparse, [1, 64]),
    "latent_attention, return_lse, chosen keys": (with_lse(sparse), [1, 64]),
    "lightning_index": (index, [1, 64]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", split_keys.DTYPES, ids=str)
def test_lowered_to_a_kernel(name, dtype, fake):
    made, tokens = CALLS[name]
    for count in tokens:
        lowered = module_of(name).lower(made(count, dtype=dtype))
        assert calls_of(lowered, made(count, dtype=dtype, device="cpu")) == 1


@pytest.mark.parametrize("name", [name for name in CALLS if name != "lightning_index"])
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_codes_are_lowered_to_a_kernel(name, codes, fake):
    made, (tokens, *_) = CALLS[name]
    call, traced = (coded(made(tokens, device=device), codes) for device in ("cuda", "cpu"))
    assert calls_of(module_of(name).lower(call), traced) == 1


def coded(a, codes):
    return replace(a, kv_cache=a.kv_cache.to(codes), kv_scales=empty(2, 64, 4, device=a.kv_cache.device))


def calls_of(lowered, a):
    """How many kernels a traced lowering calls. PyTorch without CUDA cannot trace all of it on a CUDA device."""
    tensors = {field: value for field, value in vars(a).items() if isinstance(value, torch.Tensor)}
    graph = make_fx(lambda given: lowered(type(a)(**{**vars(a), **given})))(tensors).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return sum(kernel in target for kernel in KERNELS for target in targets)


def test_every_lowering_is_tested():
    assert set(modules()) == {OPERATORS.get(name.partition(",")[0], name) for name in CALLS}


LATENT = "latent_attention", "latent_attention, return_lse", "mla_attention", "mla_attention, return_lse"
REFUSED = {
    "the kernel is for CUDA devices": ({"device": "cpu"}, CALLS),
    "at most 32 bits": ({"dtype": torch.float64}, CALLS),
    "the kernel is for at most 512 columns of a latent": ({"rank": 1024}, LATENT),
    "the kernel is for at most 16 new tokens of a sequence": ({"tokens": 17}, LATENT),
    "parts are for more than 268435456": ({"absorbed": 0}, ["mla_attention"]),
    "it takes absorbed queries": ({"absorbed": 0}, ["mla_attention, return_lse"]),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(sentence, fake):
    options, names = REFUSED[sentence]
    for name in names:
        with pytest.raises(NoMatch, match=sentence):
            module_of(name).lower(CALLS[name][0](**options))


def test_few_tokens_are_absorbed_if_their_number_is_a_symbol(fake):
    """Both forms are traced, and the absorbed one is the kernel's."""
    tokens = fake.shape_env.create_unbacked_symint()
    torch._check(tokens >= 2)
    lowered = modules()["attention"].lower(plain(tokens))
    assert lowered.__name__ == "chosen"
    with pytest.raises(NoMatch, match="it chooses its form by the number of query tokens of each call"):
        modules()["attention"].lower(with_lse(plain)(tokens))


def test_other_calls_have_the_lowering_of_other_devices(fake):
    lower = first_of(modules()["attention"], lambda *given, **options: "other")
    a = latent(tokens=32)
    assert lower(a.query, a.query_rope, a.kv_cache, a.kr_cache, None, scale=0.1) == "other"


def test_nothing_is_imported_without_a_device():
    from mla_fx.lowering import cuda

    assert bool(cuda.LOWERINGS) == cuda.IS_NVIDIA
    others = {torch.ops.mla_fx.attention.default: lambda *given: "other"}
    if not cuda.IS_NVIDIA:
        assert cuda.lowerings(others, "flash_mla") == others
