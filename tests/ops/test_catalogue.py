"""Every operator and sample: schema, opcheck, fake kernel, in-place twin and host lengths."""

import inspect
import math

import pytest
import torch
from lib.operators.harness import (
    CATALOGUE,
    DTYPES,
    as_tuple,
    by_name,
    cases,
    fake_with_free_sizes,
    hints,
    mapped,
    result_names,
    same_tensors,
    samples,
    schema_names,
    twin_call,
    with_lists,
    written_names,
)

COMMON = (torch.bfloat16,)


@pytest.mark.parametrize("name", CATALOGUE)
def test_schema_mirrors_the_body(name):
    operator = CATALOGUE[name]
    assert operator.name == name
    base, _, form = name.partition(".")
    assert operator.overload is getattr(getattr(torch.ops.mla_fx, base), form or "default")
    parameters = inspect.signature(operator.body).parameters
    for overload in filter(None, (operator.overload, operator.inplace, operator.host, operator.inplace_host)):
        added = set(written_names(overload)) - set(parameters)
        arguments = [argument for argument in overload._schema.arguments if argument.name not in added]
        assert [argument.name for argument in arguments] == list(parameters)
        for argument, parameter in zip(arguments, parameters.values(), strict=True):
            assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
            if argument.has_default_value():
                assert argument.default_value == parameter.default


@pytest.mark.parametrize("name", CATALOGUE)
def test_only_the_twin_writes(name):
    operator = CATALOGUE[name]
    assert written_names(operator.overload) == []
    if operator.inplace is not None:
        written = [argument.removesuffix("_out") for argument in written_names(operator.inplace)]
        results, returned = (
            {result.removesuffix("_out") for result in result_names(overload)}
            for overload in (operator.overload, operator.inplace)
        )
        assert set(written) == results - returned


@pytest.mark.parametrize("name", CATALOGUE)
def test_takes_bfloat16_and_documents_itself(name):
    assert samples(name, torch.bfloat16)
    assert all(sample.mode for sample in samples(name, torch.bfloat16))
    documentation = inspect.getdoc(CATALOGUE[name].body) or ""
    assert "ValueError" in documentation
    assert [argument for argument in schema_names(CATALOGUE[name].overload) if argument not in documentation] == []


@pytest.mark.parametrize("name", CATALOGUE)
def test_none_for_a_required_tensor_is_refused_by_name(name):
    operator = CATALOGUE[name]
    _, args, kwargs = samples(name, torch.bfloat16)[0]
    functional = by_name(operator, args, kwargs)
    forms = [(operator.overload, functional)]
    if operator.inplace is not None:
        forms.append((operator.inplace, twin_call(operator, args, kwargs)[1]))
    for overload, arguments in forms:
        required = [argument.name for argument in overload._schema.arguments if str(argument.type) == "Tensor"]
        assert required or name == "merge_attention"  # lists, which PyTorch checks itself
        for missing in required:
            with pytest.raises(ValueError, match=f"^{missing} is None; it must be a tensor.$"):
                overload(**(arguments | {missing: None}))


def in_tiers(quick, slow, operators):
    """The first `quick` samples of each operator; those up to number `slow` are slow; with --campaign, all."""
    for name in operators:
        for number, case in enumerate(cases(COMMON, (name,))):
            marks = () if number < quick else pytest.mark.slow if number < slow else pytest.mark.campaign
            yield pytest.param(*case.values, id=case.id, marks=marks)


@pytest.mark.parametrize(("operator", "args", "kwargs"), [*in_tiers(2, 5, CATALOGUE)])
def test_opcheck(operator, args, kwargs):
    torch.library.opcheck(operator.overload, args, kwargs)
    if operator.host is not None:
        torch.library.opcheck(operator.host, (), with_lists(operator, operator.host, args, kwargs))


WITH_TWIN = [name for name in CATALOGUE if CATALOGUE[name].inplace is not None]  # which takes the same arguments


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "args", "kwargs"), [*in_tiers(2, 2, WITH_TWIN)])
def test_opcheck_in_place(operator, args, kwargs):
    _, arguments = twin_call(operator, args, kwargs)
    torch.library.opcheck(operator.inplace, (), arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES))
def test_functional_form_writes_nothing_and_takes_lists(operator, args, kwargs):
    arguments = by_name(operator, args, kwargs)
    before = mapped(torch.clone, arguments.values())
    results = as_tuple(operator.overload(*args, **kwargs))
    same_tensors(arguments.values(), before)
    if operator.host is not None:
        listed = as_tuple(operator.host(**with_lists(operator, operator.host, args, kwargs)))
        torch.testing.assert_close(listed, results, rtol=0, atol=0)


def twin_agrees(operator, args, kwargs):
    given = by_name(operator, args, kwargs)
    results = dict(zip(result_names(operator.overload), as_tuple(operator.overload(*args, **kwargs)), strict=True))
    returned, arguments = twin_call(operator, args, kwargs)
    written = {name.removesuffix("_out"): name for name in written_names(operator.inplace)}
    for name, wanted in results.items():
        if name in returned:
            torch.testing.assert_close(returned[name], wanted, rtol=0, atol=0, equal_nan=True)
            continue
        argument = written[name.removesuffix("_out")]
        actual = arguments[argument]
        kept = (actual == 77) & (argument not in given)
        torch.testing.assert_close(actual, torch.where(kept, actual, wanted), rtol=0, atol=0, equal_nan=True)
    unwritten = [name for name in given if name not in written.values()]
    same_tensors([arguments[name] for name in unwritten], [given[name] for name in unwritten])


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "args", "kwargs"), [case for case in cases(DTYPES) if case.values[0].inplace])
def test_twin_writes_what_the_functional_form_returns(operator, args, kwargs):
    """Bit by bit; an output that only the twin takes keeps what it held where the operator writes nothing."""
    twin_agrees(operator, args, kwargs)


def extremes(dtype):
    known = torch.finfo(dtype)
    return math.nan, math.inf, -math.inf, known.max, known.tiny / 4, -0.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["kv_rmsnorm_rope_cache", "mla_prolog"])
@pytest.mark.filterwarnings("ignore:npu_mla_prolog documents")
def test_twin_writes_the_same_of_extreme_values(name, dtype):
    """One number in the middle of each floating argument at a time, of the caches too."""
    operator, tried = CATALOGUE[name], 0
    for sample in samples(name, dtype):
        given = by_name(operator, sample.args, sample.kwargs)
        floating = [key for key, value in given.items() if torch.is_tensor(value) and value.is_floating_point()]
        for key, value in [(name, number) for name in floating for number in extremes(given[name].dtype)]:
            changed = given[key].clone(memory_format=torch.contiguous_format)
            changed.view(-1)[changed.numel() // 2 :][:1] = value
            twin_agrees(operator, (), {**given, key: changed})
            tried += 1
    assert tried > 200


@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(COMMON))
def test_fake_equals_real(operator, args, kwargs):
    real = as_tuple(operator.overload(*args, **kwargs))
    with torch._subclasses.FakeTensorMode() as mode:
        arguments = by_name(operator, mapped(mode.from_tensor, args), kwargs)
        arguments = dict(zip(arguments, mapped(mode.from_tensor, arguments.values()), strict=True))
        fakes = as_tuple(operator.overload(**arguments))
    for fake, result in zip(fakes, real, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (result.shape, result.stride(), result.dtype)


@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(COMMON))
def test_fake_is_exact_for_free_sizes(operator, args, kwargs):
    """Every size of a result is a number or an expression of the arguments' sizes, and no guard was needed for it."""
    fakes, guards = fake_with_free_sizes(operator, args, kwargs)
    assert guards == []
    for fake, result in zip(fakes, as_tuple(operator.overload(*args, **kwargs)), strict=True):
        assert (hints(fake.shape), fake.dtype) == (tuple(result.shape), result.dtype)


@pytest.mark.parametrize("name", CATALOGUE)
def test_meta_tensors_have_the_shapes_of_real_results(name):
    operator = CATALOGUE[name]
    _, args, kwargs = samples(name, torch.bfloat16)[0]
    arguments = by_name(operator, args, kwargs)
    wanted = as_tuple(operator.overload(**arguments))
    on_meta = mapped(lambda tensor: tensor.to("meta"), arguments.values())
    results = as_tuple(operator.overload(**dict(zip(arguments, on_meta, strict=True))))
    assert [(result.shape, result.dtype) for result in results] == [(want.shape, want.dtype) for want in wanted]
