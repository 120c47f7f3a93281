"""A layer of latent attention whose pieces tests override, and its comparison with itself compiled."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

import mla_fx
from mla_fx.driver.compilation import Compilation
from mla_fx.driver.report_log import listening

FUSED = {"mla_prolog": 1, "latent_attention": 1}
CLOSE = {"rtol": 1e-6, "atol": 1e-7, "equal_nan": True}  # of float64: a value that went through bfloat16 is not
QUIET = ("ignore::mla_fx.MlaWarning", "error:.*failed:mla_fx.MlaWarning")
"""Marks for tests in which no pass may fail; a refused layer may warn."""


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    tokens: int = 3
    context: int = 16
    heads: int = 4
    hidden: int = 32
    query_rank: int = 24
    rank: int = 20
    nope: int = 8
    rope: int = 6
    value: int = 10

    @property
    def query(self) -> int:
        return self.nope + self.rope


class Layer(nn.Module):
    """Multi-head Latent Attention with caches [B,1,T,width] as arguments, written in place."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        z = self.sizes = sizes or Sizes()
        generator = torch.Generator().manual_seed(0)

        def weight(out: int, inner: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(out, inner, generator=generator, dtype=torch.float64) * inner**-0.5)

        def gamma(size: int) -> nn.Parameter:
            return nn.Parameter(1 + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64))

        self.q_a, self.q_b = weight(z.query_rank, z.hidden), weight(z.heads * z.query, z.query_rank)
        self.kv_a = weight(z.rank + z.rope, z.hidden)
        self.kv_b = weight(z.heads * (z.nope + z.value), z.rank)
        self.o = weight(z.hidden, z.heads * z.value)
        self.q_gamma, self.kv_gamma = gamma(z.query_rank), gamma(z.rank)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], position: Tensor, caches: tuple[Tensor, Tensor]) -> Any:
        out = self.attended(x, tables, position, caches)
        return out.transpose(1, 2).flatten(2) @ self.o.T

    def attended(
        self, x: Tensor, tables: tuple[Tensor, ...], position: Tensor, caches: tuple[Tensor, Tensor]
    ) -> Tensor:
        z = self.sizes
        q_nope, q_rope = self.query(x).split([z.nope, z.rope], dim=-1)
        latent, k_rope = self.rows(x)
        q_rope, k_rope = self.rotate(q_rope, *tables), self.rotate_key(k_rope, *tables)
        latent, k_rope = self.store(latent, k_rope, position, *caches)
        return self.attend(q_nope, q_rope, latent, k_rope, self.mask(position))

    def query(self, x: Tensor) -> Tensor:
        """[B,N,S,D+Dr]."""
        q = self.norm(x @ self.q_a.T, self.q_gamma) @ self.q_b.T
        return q.unflatten(-1, (self.sizes.heads, self.sizes.query)).transpose(1, 2)

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B,1,S,R] and [B,1,S,Dr]."""
        latent, k_rope = (x @ self.kv_a.T).split([self.sizes.rank, self.sizes.rope], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def rotate_key(self, x: Tensor, *tables: Tensor) -> Tensor:
        return self.rotate(x, *tables)

    def store(
        self, latent: Tensor, k_rope: Tensor, position: Tensor, kv_cache: Tensor, kr_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        kv_cache.index_copy_(2, position, latent)
        kr_cache.index_copy_(2, position, k_rope)
        return kv_cache, kr_cache

    def mask(self, position: Tensor) -> Tensor:
        """Added to the scores, [S,T]."""
        later = torch.arange(self.sizes.context) > position[:, None]
        return torch.zeros(later.shape, dtype=self.o.dtype).masked_fill(later, -torch.inf)

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        return self.combine(self.scores(torch.cat((q_nope, q_rope), dim=-1), key) + mask, value)

    def keys(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        z = self.sizes
        expanded = (latent.squeeze(1) @ self.kv_b.T).unflatten(-1, (z.heads, z.nope + z.value)).transpose(1, 2)
        k_nope, value = expanded.split([z.nope, z.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, z.heads, -1, -1)), dim=-1), value

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) * self.sizes.query**-0.5

    def combine(self, scores: Tensor, value: Tensor) -> Tensor:
        return scores.softmax(-1) @ value


def variant(name: str, kind: type = Layer, **parts: Any) -> Any:
    """A kind of layer with other methods or numbers."""
    return type(name, (kind,), parts)


class Complex(Layer):
    """DeepSeek's own rotation: tables are complex numbers, pairs are read and written interleaved."""

    def rotate(self, x: Tensor, freqs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turned(freqs)).flatten(-2)

    def turned(self, freqs: Tensor) -> Tensor:
        return freqs


class Absorbed(Layer):
    """DeepSeek's inference code: one key and one value for all heads."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        z = self.sizes
        weight = self.kv_b.unflatten(0, (z.heads, -1))
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, : z.nope])
        out = self.over_latents(torch.cat((query, q_rope), -1), torch.cat((latent, k_rope), -1), latent, mask)
        return torch.einsum("bnsc,nvc->bnsv", out, weight[:, z.nope :])

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Tensor) -> Tensor:
        return self.combine(self.scores(query, key) + mask, latent)


class LeftPadded(Layer):
    """Two of three tokens of the first sequence see nothing at all."""

    def mask(self, position):
        z = self.sizes
        later = torch.arange(z.context) > position[:, None]
        blind = torch.arange(z.batch * z.tokens).view(z.batch, 1, z.tokens, 1) < 2
        return later | blind


def angles(sizes: Sizes) -> Tensor:
    """[S, Dr / 2]."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(sizes.tokens, sizes.rope // 2, generator=generator, dtype=torch.float64) * 6


def arguments(sizes: Sizes | None = None, *, is_complex: bool = False, first: int | None = None) -> tuple[Any, ...]:
    """x, tables, positions counted from `first`, caches."""
    z = sizes or Sizes()
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    angle = angles(z)
    whole = torch.cat((angle, angle), dim=-1)
    tables = (torch.polar(torch.ones_like(angle), angle),) if is_complex else (whole.cos(), whole.sin())
    start = z.context - z.tokens - 2 if first is None else first
    caches = normal(z.batch, 1, z.context, z.rank), normal(z.batch, 1, z.context, z.rope)
    return normal(z.batch, z.tokens, z.hidden), tables, torch.arange(start, start + z.tokens), caches


def arguments_of(layer: Layer) -> tuple[Any, ...]:
    return arguments(layer.sizes, is_complex=isinstance(layer, Complex))


class Reporting:
    """A backend that keeps the report of each graph."""

    def __init__(self, *, keep_text: bool = False, **options: Any) -> None:
        self.options, self.keep_text = {"target": "reference", **options}, keep_text
        self.backend = mla_fx.get_backend(**self.options)
        self.reports: list[mla_fx.Report] = []

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        with listening() as reports:
            if self.keep_text:
                compilation = Compilation.prepare(example_inputs, self.options, keep_text=True)
                compiled = compilation.compile(gm, example_inputs)
            else:
                compiled = self.backend(gm, example_inputs)
        self.reports += reports
        return compiled

    @property
    def report(self) -> mla_fx.Report:
        return self.reports[0] if len(self.reports) == 1 else mla_fx.Report.merged(self.reports)


class Rewritten:
    """A module, called as it is, whose operators are traced and rewritten by the passes at the first call.

    Dynamo and AOTAutograd, which take several times as long as the passes, are left out. They compile the module with
    --campaign, and for what they alone do: sizes that are symbols, inputs that share memory, tensors made of numbers,
    and other targets."""

    compiles = False

    def __init__(
        self, module: nn.Module, *, dynamic: bool | None = None, keep_text: bool = False, **options: Any
    ) -> None:
        self.module, self.dynamic, self.options = module, dynamic, {"target": "reference", **options}
        self.keep_text = keep_text
        self.run: Any = None
        self.reported: Any = None

    @property
    def report(self) -> mla_fx.Report:
        return self.reported.report if isinstance(self.reported, Reporting) else self.reported

    def __call__(self, *given: Any) -> Any:
        if self.run is None:
            self.run = self.traced(given) or self.compiled()
        return self.run(*given)

    def compiled(self) -> Any:
        self.reported = Reporting(keep_text=self.keep_text, **self.options)
        return torch.compile(self.module, backend=self.reported, dynamic=self.dynamic)

    def traced(self, given: Any) -> Any:
        """The rewritten graph as a function; None if the module is to be compiled."""
        if self.compiles or self.dynamic or self.options["target"] != "reference" or "dump" in self.options:
            return None
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        named, spec = tree_flatten_with_path((state, given))
        places = [place for place, (_, leaf) in enumerate(named) if isinstance(leaf, Tensor)]
        inputs = [named[place][1] for place in places]
        if len({value.untyped_storage().data_ptr() for value in inputs}) < len(inputs):
            return None
        spec_of_results = []

        def flat(*tensors: Tensor) -> Any:
            leaves = [leaf for _, leaf in named]
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor
            own, arguments = tree_unflatten(leaves, spec)
            results, found = tree_flatten(functional_call(self.module, own, arguments))
            spec_of_results.append(found)
            return results

        graph = make_fx(functionalize(flat), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        graph.graph.eliminate_dead_code()
        if graph.graph.find_nodes(op="get_attr"):
            return None
        compilation = Compilation.prepare(inputs, self.options, keep_text=self.keep_text)
        compilation.input_names = tuple(self.name(*named[place][0]) for place in places)
        compilation.rewrite(graph)
        self.reported = compilation.report

        def run(*given: Any) -> Any:
            leaves = tree_flatten((state, given))[0]
            assert len(leaves) == len(named), "traced for other arguments"
            return tree_unflatten(graph(*(leaves[place] for place in places)), spec_of_results[-1])

        return run

    def name(self, argument: Any, first: Any, *rest: Any) -> str:
        """What a user calls an input."""
        if argument.idx == 0:
            return first.key
        names = [*inspect.signature(self.module.forward).parameters]
        return "".join(map(str, (names[first.idx] if first.idx < len(names) else names[-1], *rest)))


def check(module: nn.Module, given: Any = None, *, dynamic: bool | None = None, **options: Any) -> mla_fx.Report:
    """Compare outputs and everything that was written with eager mode; return the report. Does not check what fused."""
    given = arguments_of(module) if given is None else given
    theirs, ours = copy.deepcopy(given), copy.deepcopy(given)
    with torch.no_grad():
        expected = module(*theirs)
        run = Rewritten(module, dynamic=dynamic, **options)
        found = run(*ours)
    torch.testing.assert_close((found, ours), (expected, theirs), **CLOSE)
    return run.report


def in_type(value: Any, dtype: torch.dtype) -> Any:
    """Arguments with their floating tensors in another dtype."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()

    return tree_map_only(Tensor, cast, value)


def check_no_further(module: nn.Module, given: Any, **options: Any) -> mla_fx.Report:
    """Check that results and caches are at most twice as far from a float64 run as eager's."""
    exact, theirs, ours = in_type(given, torch.float64), copy.deepcopy(given), copy.deepcopy(given)
    with torch.no_grad():
        truth = tree_leaves((copy.deepcopy(module).double()(*exact), exact))
        eager = tree_leaves((module(*theirs), theirs))
        run = Rewritten(module, **options)
        found = tree_leaves((run(*ours), ours))
    for true, near, own in zip(truth, eager, found, strict=True):
        assert own.dtype == near.dtype
        allowed = 2 * float((near.double() - true).norm()) + 1e-6
        assert float((own.double() - true).norm()) <= allowed
    return run.report
