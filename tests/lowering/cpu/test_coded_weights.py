"""Whole layers whose projections are stored as codes: products read them, and outputs and caches are right.

The layer is a toy. What counts is how its products are written; near twins are right, too."""

import copy

import pytest
import torch
from lib.kernels import compiled, draw
from mla_fx.lowering.cpu import few_coded_rows
from torch import nn
from torch.nn.functional import linear

import mla_fx

pytestmark = pytest.mark.usefixtures("no_gradients")

HEADS, NOPE, ROPE, LATENT, WIDTH, OUT = 4, 64, 128, 256, 1024, 1056
GROUP, BLOCK = 32, 128


def to_int8(weight, scales):
    return (weight / scales).round().clamp(-128, 127).to(torch.int8)


class Coded(nn.Module):
    """A projection whose weight [N, K] is stored as codes, `multiply` says how."""

    def __init__(self, multiply, weight):
        super().__init__()
        self.multiply, self.bias = multiply, None
        for name, value in STORED[multiply](weight).items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.multiply(self, x)


def scaled_behind(w, x):
    """torchao's int8."""
    return linear(x, w.codes.to(x.dtype)) * w.scales.view(-1).to(x.dtype)


def scaled_in_float32(w, x):
    """torchao's float8."""
    return linear(x, (w.codes.float() * w.scales).to(x.dtype), w.bias)


def in_groups(w, x):
    """torchao's groups."""
    codes = w.codes.unflatten(-1, (-1, GROUP)).to(x.dtype) - w.zeros.unsqueeze(-1).to(x.dtype)
    return linear(x, (codes * w.scales.to(x.dtype).unsqueeze(-1)).flatten(-2))


def in_blocks(w, x):
    """DeepSeek's blocks; the weight is no multiple of them."""
    weight = (w.codes.float() * w.scales).to(x.dtype).flatten(0, 1).flatten(1, 2)
    return linear(x, weight[: w.rows, : x.shape[-1]])


def by_rows(weight):
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"codes": to_int8(weight, scales), "scales": scales}


def by_rows_in_float8(weight):
    scales = weight.abs().amax(1, keepdim=True) / 448
    return {"codes": (weight / scales).to(torch.float8_e4m3fn), "scales": scales}


def by_groups(weight):
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).bfloat16().float()
    zeros = (-8 - low / scales).round().clamp(-128, 127)
    codes = (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(-8, 7)
    return {"codes": codes.flatten(1).to(torch.int8), "scales": scales, "zeros": zeros.to(torch.int8)}


def by_blocks(weight):
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    wide = torch.zeros(rows * BLOCK, columns * BLOCK)
    wide[: weight.shape[0], : weight.shape[1]] = weight
    blocks = wide.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-6) / 448
    return {"codes": (blocks / scales).to(torch.float8_e4m3fn), "scales": scales}


# Near twins, each with how many of the five products of a layer read codes.


def scaled_along_inputs(w, x):
    return linear(x, (w.codes.float() * w.scales.view(1, -1)).to(x.dtype))


def by_columns_of_inputs(weight):
    scales = weight.abs().amax(0, keepdim=True) / 448
    return {"codes": (weight / scales).to(torch.float8_e4m3fn), "scales": scales}


def scaled_by_tokens(w, x):
    """The scale of the weight depends on the input."""
    return linear(x, (w.codes.float() * (w.scales * x.float().abs().mean())).to(x.dtype))


def computed_codes(w, x):
    codes = (w.codes.float() * 0.5).to(torch.float8_e4m3fn)
    return linear(x, (codes.float() * w.scales).to(x.dtype))


def rounded_twice(w, x):
    return linear(x, (w.codes.half() * w.scales.half()).to(x.dtype))


def shifted_behind(w, x):
    """The zero point is subtracted from the number, not from the code."""
    numbers = w.codes.unflatten(-1, (-1, GROUP)).to(x.dtype) * w.scales.to(x.dtype).unsqueeze(-1)
    return linear(x, (numbers - w.zeros.unsqueeze(-1).to(x.dtype) * 2**-10).flatten(-2))


def in_reversed_groups(w, x):
    codes = w.codes.unflatten(-1, (-1, GROUP)).to(x.dtype) - w.zeros.flip(-1).unsqueeze(-1).to(x.dtype)
    return linear(x, (codes * w.scales.to(x.dtype).flip(-1).unsqueeze(-1)).flatten(-2))


def interleaved_groups(w, x):
    """Neighbouring codes belong to different groups."""
    codes = w.codes.unflatten(-1, (GROUP, -1)).to(x.dtype) - w.zeros.unsqueeze(-2).to(x.dtype)
    return linear(x, (codes * w.scales.to(x.dtype).unsqueeze(-2)).flatten(-2))


STORED = {scaled_behind: by_rows, scaled_in_float32: by_rows_in_float8, in_groups: by_groups, in_blocks: by_blocks}
KNOWN = tuple(STORED)
TWINS = {
    scaled_along_inputs: by_columns_of_inputs,
    scaled_by_tokens: by_rows_in_float8,
    computed_codes: by_rows_in_float8,
    rounded_twice: by_rows_in_float8,
    shifted_behind: by_groups,
    in_reversed_groups: by_groups,
    interleaved_groups: by_groups,
}
STORED |= TWINS
READ = {scaled_by_tokens, in_reversed_groups}


class Layer(nn.Module):
    """Latent attention over a cache that it writes. All its projections are codes, and so is an output head."""

    def __init__(self, multiply):
        super().__init__()
        sizes = {"query": (HEADS * (NOPE + ROPE), WIDTH), "down": (LATENT + ROPE, WIDTH)}
        sizes |= {"up": (HEADS * 2 * NOPE, LATENT), "out": (OUT, HEADS * NOPE)}
        for name, (rows, columns) in sizes.items():
            part = Coded(multiply, draw(rows, columns) * columns**-0.5)
            part.rows = rows
            self.add_module(name, part)
        self.out.bias = nn.Parameter(draw(OUT), requires_grad=False)
        self.register_buffer("cache", draw(2, 40, LATENT + ROPE))

    def forward(self, x, position):
        heads = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        self.cache.index_copy_(1, position, self.down(x))
        latent, rope = self.cache.split([LATENT, ROPE], -1)
        keys, value = self.up(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2).split(NOPE, -1)
        key = torch.cat((keys, rope.unsqueeze(1).expand(-1, HEADS, -1, -1)), -1)
        weights = (heads @ key.mT * (NOPE + ROPE) ** -0.5).float().softmax(-1).to(x.dtype)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


def in_dtype(layer, dtype):
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        for name, value in module.named_buffers(recurse=False):
            is_rounded = name == "cache" or (dtype == torch.float64 and name == "scales")
            setattr(module, name, value.to(dtype) if is_rounded else value)
    layer.out.bias.data = layer.out.bias.to(dtype)
    return layer


def read():
    """How many products read codes."""
    notes = [note for note in mla_fx.last_report().notes if "computed as few_coded_rows" in note]
    return sum(int(note.partition("(")[2].partition(" ")[0] or 1) for note in notes)


def check(multiply, step, monkeypatch):
    monkeypatch.setattr(few_coded_rows, "FOR_SEVERAL", 2**15)
    exact = Layer(multiply)
    ours, eager = (in_dtype(exact, torch.bfloat16) for _ in range(2))
    x, position = draw(2, 1, WIDTH).bfloat16(), torch.tensor([39])
    wide = in_dtype(exact, torch.float64)
    meant, plain = wide(x.double(), position), eager(x, position)
    found = step(ours, x, position)
    assert mla_fx.last_report().fused, str(mla_fx.last_report())
    for one, two, three in ((found, plain, meant), (ours.cache, eager.cache, wide.cache)):
        error, allowed = ((part.double() - three).norm() for part in (one, two))
        assert error <= 2 * allowed


def name(function):
    return function.__name__


@pytest.mark.slow
@pytest.mark.parametrize("multiply", KNOWN, ids=name)
@pytest.mark.parametrize("dynamic", [False, True])
def test_products_read_codes(multiply, dynamic, monkeypatch):
    check(multiply, lambda *given: compiled(*given, dynamic=dynamic)[0], monkeypatch)
    assert read() == 5, str(mla_fx.last_report())


@pytest.mark.interpreted
@pytest.mark.parametrize("multiply", [*KNOWN, *TWINS], ids=name)
def test_near_twins_are_right(multiply, monkeypatch):
    check(multiply, lambda layer, *given: torch.compile(layer, backend="mla")(*given), monkeypatch)
    if multiply in TWINS:
        assert (read() > 0) == (multiply in READ), str(mla_fx.last_report())
