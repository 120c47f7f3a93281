"""The rig itself: what torchair converts runs and returns what eager PyTorch does, inputs that it writes included."""

import pytest
import torch
import torchair
from lib.comparing import check_same
from lib.families import cache_tensors, empty_cache, tiny_model, tokens

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_operators_of_atb_are_declared_too():
    assert "cache_mode" in str(torch.ops.atb.npu_multi_head_latent_attention.default._schema)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(*sizes) for sizes in [(16, 32), (16, 32), (32, 16)])

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x)), x.shape[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_mlp_of_several_lengths(converted, dynamic):
    torch.manual_seed(0)
    model = Mlp()
    run = converted.compiled(model, dynamic=dynamic)
    for length in (3, 3, 5):
        check_same(model, [torch.randn(2, length, 16)], run)
    assert len(converted.graphs) == (1 if dynamic else 2)


def slice_written(x, index, cache):
    cache[:, 1:2] = x.exp()
    return cache.sum(1)


def scattered(x, index, cache):
    cache.scatter_(1, index[..., None].expand_as(x), x.exp())
    return cache.sum(1)


def kept_and_replaced(x, index, cache):
    old = cache.clone()
    cache.copy_(cache.flip(1) * x)
    return old


def scattered_nd(x, index, cache):
    rows = torch.stack([torch.arange(3), index[:, 0]], -1)
    torch.ops.npu.npu_scatter_nd_update_(cache, rows, x[:, 0])
    return cache.sum(1)


@pytest.mark.parametrize("function", [slice_written, scattered, kept_and_replaced])
def test_a_cache_that_is_written(converted, function):
    torch.manual_seed(0)
    run = converted.compiled(function)
    for _ in range(2):
        check_same(function, [torch.randn(3, 1, 8), torch.tensor([[3], [0], [4]]), torch.randn(3, 5, 8)], run)
    assert len(converted.graphs) == 1


def test_two_caches_that_change_places(converted):
    def swap(left, right):
        kept = left.clone()
        left.copy_(right)
        right.copy_(kept)
        return left + right

    check_same(swap, [torch.randn(3, 5), torch.randn(3, 5)], converted.compiled(swap))


def test_the_vendors_own_scatter(converted):
    torch.manual_seed(0)
    x, index, cache = torch.randn(3, 1, 8), torch.tensor([[3], [0], [4]]), torch.randn(3, 5, 8)
    expected = cache.clone()
    expected[torch.arange(3), index[:, 0]] = x[:, 0]
    total = converted.compiled(scattered_nd)(x, index, cache)
    torch.testing.assert_close((total, cache), (expected.sum(1), expected))


def transposed_and_reshaped(x):
    part, _ = x.view(2, 3, 4, 14).transpose(1, 2).split([8, 6], -1)
    return part.transpose(0, 1).reshape(4, 6, 8).exp()


@pytest.mark.parametrize("is_optimised", [False, True])
def test_views_are_right_unless_torchair_optimises_them(converted, is_optimised):
    """A bug of torchair 2.13, on by default: where a tensor's strides allow a reshape of its transposition as a view,
    the transposition is lost. A graph that is to be right on a device has no such reshape, or another config."""
    torch.manual_seed(0)
    config = torchair.CompilerConfig()
    config.experimental_config.enable_view_optimize = is_optimised
    x = torch.randn(2, 3, 56)
    found = converted.compiled(transposed_and_reshaped, compiler_config=config)(x)
    assert torch.equal(found, transposed_and_reshaped(x)) == (not is_optimised)
    assert converted.types(converted.graphs[0]).count("Transpose") == (1 if is_optimised else 2)


@pytest.mark.parametrize(
    ("dynamic", "dtype", "layers"),
    [(False, torch.float32, 2), pytest.param(True, torch.bfloat16, 1, marks=pytest.mark.campaign)],
)
def test_a_deepseek_v3_model_step_by_step(converted, dynamic, dtype, layers):
    """The second layer has experts; of the ways to run them torchair converts this one."""
    torch.manual_seed(0)
    model = tiny_model("deepseek_v3", dtype=dtype, num_hidden_layers=layers)
    model.set_experts_implementation("batched_mm")
    run = converted.compiled(model, dynamic=dynamic)
    theirs, ours = empty_cache(model, "dynamic"), empty_cache(model, "dynamic")
    for length in (5, 1, 1):
        ids = tokens(2, length)
        expected = model(ids, past_key_values=theirs).logits
        torch.testing.assert_close(run(ids, past_key_values=ours).logits, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), rtol=1e-4, atol=1e-5)
    assert len(converted.graphs) == (2 if dynamic else 3)
