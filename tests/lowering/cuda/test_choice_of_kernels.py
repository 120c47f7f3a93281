"""The option `kernels`: which calls on a CUDA device go to a user's library, with the reason for those that do not.

Tensors are fake: their device is known, and nothing runs."""

import itertools
import sys

import pytest
import torch
from lib.kernels import compiled_call
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fx
from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.target import Instead, modules_of_operators

pytest.importorskip("triton")
from mla_fx.lowering import cuda
from mla_fx.lowering.cuda import flash_mla, flashinfer

from . import stand_ins

LIBRARIES = {"flash_mla": flash_mla, "flashinfer": flashinfer}


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch):
    """A device of sm_90, and both libraries."""
    stand_ins.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = {entry.overload: module for entry, module in modules_of_operators("mla_fx.lowering.cuda")}
    monkeypatch.setattr(cuda, "LOWERINGS", found)


def empty(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.empty(*shape, dtype=dtype, device=device)


def caches(page=64, rank=512, rope=64, pages=8, **kind):
    """They have the strides of views of one cache, which PyTorch without CUDA does not make."""
    strides = page * (rank + rope), rank + rope, 1
    return [torch.empty_strided((pages, page, width), strides, **kind) for width in (rank, rope)]


def table(device="cuda"):
    return empty(2, 4, dtype=torch.int32, device=device)


def latent(heads=64, tokens=1, dtype=torch.bfloat16, device="cuda", given=None, **sizes):
    """`given` replaces operands."""
    kind = {"dtype": dtype, "device": device}
    rank, rope = sizes.get("rank", 512), sizes.get("rope", 64)
    operands = empty(2, tokens, heads, rank, **kind), empty(2, tokens, heads, rope, **kind), *caches(**sizes, **kind)
    options = {"block_table": table(device), "scale": 0.1, **(given or {})}
    names = "query", "query_rope", "kv_cache", "kr_cache"
    return {**dict(zip(names, operands, strict=True)), **options}


def plain(heads=64, tokens=1, dtype=torch.bfloat16, absorbed=128):
    kind = {"dtype": dtype, "device": "cuda"}
    operands = empty(2, tokens, heads, 128, **kind), empty(2, tokens, heads, 64, **kind), *caches(**kind)
    names = "query", "query_rope", "kv_cache", "kr_cache"
    up = empty(heads, 128, 512, **kind)
    options = {"block_table": table(), "weight_uk": up, "weight_uv": up, "scale": 0.1, "max_absorbed_tokens": absorbed}
    return {**dict(zip(names, operands, strict=True)), **options}


def other(*args, **kwargs):
    """The lowering of other devices."""
    return other


def lowered(kernels, arguments):
    others = dict.fromkeys(cuda.LOWERINGS, other)
    return cuda.lowerings(others, kernels)[attention.operator.overload](**arguments)


def calls(function, name):
    """Whether a lowering is that of a file."""
    return function.__wrapped__.__module__.endswith(f".{name}")


@pytest.mark.parametrize("heads", flash_mla.HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_auto_takes_flash_mla_where_its_limits_hold(heads, dtype, fake):
    taken = {"auto": "flash_mla", "flash_mla": "flash_mla", "triton": "split_keys", "flashinfer": "flashinfer"}
    for tokens, return_lse, kernels in itertools.product((1, 16), (False, True), taken):
        a = latent(heads, tokens, dtype) | {"return_lse": return_lse}
        assert calls(lowered(kernels, a), taken[kernels])


def test_absorbed_queries_go_to_a_library_too(fake):
    module = cuda.LOWERINGS[attention.operator.overload]
    for kernels, library in LIBRARIES.items():
        function = module.lower_to(library, attention.Arguments(**plain()))
        assert function is module.lower_to(library, attention.Arguments(**plain())), "equal calls are traced once"
        assert not isinstance(lowered(kernels, plain()), Instead)


def test_no_library_if_the_number_of_tokens_is_a_symbol(fake):
    tokens = fake.shape_env.create_unbacked_symint()
    torch._check(tokens >= 2)
    module = cuda.LOWERINGS[attention.operator.overload]
    with pytest.raises(NoMatch, match="it chooses its form by the number of query tokens of each call"):
        module.lower_to(flash_mla, attention.Arguments(**plain(tokens=tokens)))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_what_is_traced(library, mode):
    """A call of the library, also for sizes that are symbols. PyTorch without CUDA cannot trace it on a CUDA device."""
    a = latent(tokens=2, device="cpu", given={"context_lens": torch.tensor([100, 7])})
    tensors = {name: value for name, value in a.items() if isinstance(value, torch.Tensor)}

    def traced(given):
        return LIBRARIES[library].attend(attention.Arguments(**{**a, **given}, return_lse=True))

    out, lse = make_fx(traced, tracing_mode=mode)(tensors).graph.find_nodes(op="output")[0].args[0]
    assert out.meta["val"].shape == (2, 2, 64, 512) and lse.meta["val"].shape == (2, 2, 64)
    targets = [str(node.target) for node in out.graph.nodes]
    assert targets.count(f"mla_fx.attention_by_{library}.default") == 1


def mask():
    return {"mask": empty(1, 256, dtype=torch.bool)}


REFUSED = {  # by what was asked for
    "flash_mla": {
        "query has N = 24; flash_mla takes 16, 32, 64 or 128": lambda: latent(heads=24),
        "kv_cache has BlockSize = 16; flash_mla takes 64": lambda: latent(page=16),
        "the stride of rows of kv_cache = 512; flash_mla takes 576": lambda: latent(
            given={"kv_cache": empty(8, 64, 512)}
        ),
        "the stride of rows of kr_cache = 64; flash_mla takes 576": lambda: latent(
            given={"kr_cache": empty(8, 64, 64)}
        ),
        "block_table is None; flash_mla takes pages": lambda: latent(pages=2, given={"block_table": None}),
    },
    "flashinfer": {},
}
REFUSED_BY_BOTH = {
    "the device is cpu; {} takes cuda": lambda: latent(device="cpu"),
    "mask is given; {} takes none": lambda: latent(given=mask()),
    "sinks are given; {} takes none": lambda: latent(given={"sinks": empty(64)}),
    "fill is given; {} takes none": lambda: latent(given={"fill": -1.5}),
    "kr_cache is None; {} takes latents with a rotary part": lambda: latent(
        given={"query_rope": None, "kr_cache": None}
    ),
    "kv_cache is in FRACTAL_NZ; {} takes rows": lambda: latent(given={"kv_cache": empty(8, 32, 64, 16)}),
    r"kv_cache has dtype torch\.float32; {} takes torch\.bfloat16 or": lambda: latent(dtype=torch.float32),
    "kv_cache has Hckv = 256; {} takes 512": lambda: latent(rank=256),
    "kr_cache has Dr = 32; {} takes 64": lambda: latent(rope=32),
    "kr_cache has BlockNum = 9; {} takes 8": lambda: latent(given={"kr_cache": empty(9, 64, 64)}),
    "query has S = 17; {} takes 1 to 16": lambda: latent(tokens=17),
}
SENTENCES = [
    (name, sentence.format(name), made)
    for name in LIBRARIES
    for sentence, made in {**REFUSED_BY_BOTH, **REFUSED[name]}.items()
]


@pytest.mark.parametrize(("kernels", "sentence", "made"), SENTENCES, ids=[sentence for _, sentence, _ in SENTENCES])
def test_refused(kernels, sentence, made, fake):
    arguments = made()
    with pytest.raises(NoMatch, match=f"^{sentence}"):
        LIBRARIES[kernels].check(attention.Arguments(**arguments))
    asked = lowered(kernels, arguments)
    assert isinstance(asked, Instead) and asked.reason.startswith(f"it does not go to {kernels}: ")
    assert not isinstance(lowered("auto", arguments), Instead), "nothing was asked for"


def test_prompts_and_absorbed_queries_of_float16(fake):
    """Absorbed queries of float16 are float32, whose range they need."""
    found = lowered("flash_mla", plain(absorbed=0))
    assert found.reason == "it does not go to flash_mla: it takes absorbed queries"
    found = lowered("flash_mla", plain(dtype=torch.float16))
    assert "query has dtype torch.float32; flash_mla takes torch.float16" in found.reason


CHIPS = {(8, 0): ["flashinfer"], (9, 0): ["flash_mla", "flashinfer"], (10, 0): ["flashinfer"], (7, 5): []}


@pytest.mark.parametrize("chip", CHIPS)
def test_chips(chip, fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)
    taken = [name for name in LIBRARIES if not isinstance(lowered(name, latent()), Instead)]
    assert taken == CHIPS[chip]
    if "flash_mla" not in taken:
        reason = lowered("flash_mla", latent()).reason
        assert reason.endswith(f"the device's sm is {chip[0]}{chip[1]}; flash_mla takes 90")


def test_libraries_that_cannot_be_used(fake, monkeypatch):
    def reason():
        return lowered("flash_mla", latent()).reason.removeprefix("it does not go to flash_mla: ")

    stand_ins.install(monkeypatch, **stand_ins.OF_SGL)
    assert calls(lowered("auto", latent()), "flash_mla")
    stand_ins.install(monkeypatch, **{**stand_ins.OF_SGL, "has_legacy": lambda: False})
    assert reason() == "flash_mla was built without dense decoding"
    stand_ins.install(monkeypatch, **stand_ins.WITHOUT_DENSE)
    assert reason() == "this release of flash_mla has no dense decoding"
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert reason().startswith("flash_mla cannot be imported: ")
    assert calls(lowered("auto", latent()), "split_keys")


def test_a_call_that_nothing_takes_has_both_reasons(fake):
    def refuses(*args, **kwargs):
        raise NoMatch("it reads pages")

    entry = attention.operator.overload
    others = dict.fromkeys(cuda.LOWERINGS, refuses)
    with pytest.raises(NoMatch, match=r"^it reads pages; it does not go to flash_mla: query has S = 17"):
        cuda.lowerings(others, "flash_mla")[entry](**latent(tokens=17))


@pytest.mark.slow
def test_the_report_says_why_a_call_does_not_go_to_the_library():
    a = attention.Arguments(**latent(device="cpu", heads=2, given={"block_table": table("cpu").zero_()}))
    for kernels, wanted in (("flash_mla", True), ("auto", False), ("triton", False)):
        with mla_fx.report() as report:
            compiled_call(attention.operator, a, kernels=kernels)
        sentence = "latent_attention: it does not go to flash_mla: the device is cpu; flash_mla takes cuda"
        assert (sentence in str(report)) is wanted
