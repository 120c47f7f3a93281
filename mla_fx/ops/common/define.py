"""Declares an operator from plain functions: its meaning, its checks, its fake kernel, its samples."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

Kernel = Callable[..., Any]
Record = TypeVar("Record")

NAMESPACE = "mla_fx"
Given = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keyword arguments of a call


class Sample(NamedTuple):
    """Arguments to try an operator with; `mode` names the part of its documentation that they exercise."""

    mode: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Samples = Callable[[torch.dtype], Iterator[Sample]]


@dataclass(frozen=True)
class Operator:
    """One operator: graphs call `overload`, which checks its arguments; `body` defines its result in plain PyTorch.

    `samples(dtype)` yields seeded dense `Sample`s, none for a dtype that the operator does not support. `inplace` is
    the form that writes its caches or outputs and returns the other results, or None. `host` and `inplace_host` are
    both forms with lengths as host lists, or None if there are no lengths.
    """

    name: str
    overload: OpOverload
    body: Kernel
    samples: Samples
    inplace: OpOverload | None
    host: OpOverload | None
    inplace_host: OpOverload | None


OPERATORS: dict[OpOverload, Operator] = {}  # those of this project and those of users


def define(
    name: str,
    record: type[Record],
    body: Callable[[Record], Any],
    *,
    returns: Sequence[str],
    check: Kernel,
    fake: Callable[[Record], Any],
    samples: Samples,
    in_place: Kernel | None = None,
    writes: Mapping[str, str] | None = None,
    optional: Sequence[str] = (),
    lengths: Sequence[str] = (),
    enumerators: Mapping[str, int] | None = None,
    kernel: Callable[[Record], Any] | None = None,
) -> Operator:
    """Register `mla_fx::name` with the arguments of `record`, a dataclass, and the result names `returns`. A call runs
    `kernel`, or `body` without one: the same in less memory.

    All functions except `samples` receive the record. `check` and `in_place` also receive, by name, outputs that only
    the in-place form `mla_fx::name_` has. `writes` maps each result that this form does not return to the argument that
    it writes: a cache among the arguments of `body`, or an output of its own, placed after the required arguments; an
    `optional` output may be left out. Overloads of both forms take other types: `host` takes lists for the tensors
    `lengths`; `enum` takes numbers for the `enumerators`, which otherwise are names, with the number of the default
    given; `host_enum` takes both. None for a required tensor raises a ValueError before `check` is called.
    """
    if "::" in name:
        raise ValueError(f"an operator has the name {name!r}; it must have no namespace, which is {NAMESPACE}.")
    fields: Any = record

    def checked(compute: Kernel) -> Kernel:
        def run(a: Record, **written: Tensor) -> Any:
            check(a, **written)
            return compute(a, **written)

        return on_arguments(run, fields)

    meaning = on_arguments(body, fields)
    signature, forms = inspect.signature(meaning), Overloads(lengths, enumerators or {})
    overload, host = _register(name, signature, checked(kernel or body), checked(fake), returns, (), forms)
    inplace = inplace_host = None
    if in_place is not None and writes is not None:
        outputs = [argument for argument in writes.values() if argument not in signature.parameters]
        kept = {position: result for position, result in enumerate(returns) if result not in writes}

        def fake_in_place(a: Record, **written: Tensor) -> Any:
            results = fake(a)
            return tuple(results[position] for position in kept) or None

        whole, kernels = _with_outputs(signature, outputs, optional), (checked(in_place), checked(fake_in_place))
        inplace, inplace_host = _register(
            f"{name}_", whole, *kernels, list(kept.values()), tuple(writes.values()), forms
        )
    OPERATORS[overload] = Operator(name, overload, meaning, samples, inplace, host, inplace_host)
    return OPERATORS[overload]


@functools.cache
def on_arguments(function: Kernel, record: Any, *first: Any) -> Kernel:
    """Turn `function`, which takes `first` and a record, into a function of the record's fields; other keywords are
    passed on. It is one function for all calls, so that equal calls are traced once."""
    results = inspect.signature(function).return_annotation
    signature = inspect.signature(record).replace(return_annotation=results)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        others = {name: kwargs.pop(name) for name in kwargs.keys() - signature.parameters.keys()}
        return function(*first, record(*args, **kwargs), **others)

    call.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature looks for
    return call


class Overloads(NamedTuple):
    """The arguments that are lengths, and the enumerators with the numbers of their defaults."""

    lengths: Sequence[str]
    enumerators: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        hosts = ["", "host"] if self.lengths else [""]
        return [*hosts, *(f"{host}_enum".strip("_") for host in hosts if self.enumerators)]

    def signature(self, form: str, signature: inspect.Signature) -> inspect.Signature:
        if "host" in form:
            signature = _with_lists(signature, self.lengths)
        if "enum" not in form:
            return signature
        numbers = {
            name: signature.parameters[name].replace(annotation=int, default=number)
            for name, number in self.enumerators.items()
        }
        return signature.replace(parameters=list((dict(signature.parameters) | numbers).values()))

    def reading(self, form: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel, which takes tensors and names, as a function of the form's arguments."""
        if not form:
            return kernel

        def call(**arguments: Any) -> Any:
            read: dict[str, Any] = {}
            if "host" in form:
                read |= {name: as_lengths(arguments[name]) for name in self.lengths}
            if "enum" in form:
                read |= {name: str(arguments[name]) for name in self.enumerators}
            return kernel(**(arguments | read))

        return call


def is_required(parameter: inspect.Parameter) -> bool:
    """Drop None as the default of a required tensor: a document may list optional arguments before it."""
    is_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    return not is_keyword and (parameter.annotation is Tensor or parameter.default is parameter.empty)


def _with_lists(signature: inspect.Signature, lengths: Sequence[str]) -> inspect.Signature:
    """The signature with lists of integers for the tensors `lengths`."""
    parameters = dict(signature.parameters)
    for name in lengths:
        has_default = parameters[name].default is not inspect.Parameter.empty
        wanted: Any = Sequence[int] | None if has_default else Sequence[int]
        parameters[name] = parameters[name].replace(annotation=wanted)
    return signature.replace(parameters=list(parameters.values()))


def as_lengths(values: Sequence[int] | None) -> Tensor | None:
    """A host list as an int64 tensor on the CPU; symbolic lengths leave only their count."""
    if values is None:
        return None
    if any(isinstance(value, torch.SymInt) for value in values):
        return torch.empty(len(values), dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64)


def _register(
    name: str,
    signature: inspect.Signature,
    run: Kernel,
    fake: Kernel,
    returns: Sequence[str],
    mutates: Sequence[str],
    forms: Overloads,
) -> tuple[OpOverload, OpOverload | None]:
    """Return the overload with lengths as tensors and, if there are lengths, the one with lengths as host lists."""
    required = [parameter.name for parameter in signature.parameters.values() if parameter.annotation is Tensor]
    overloads = {}
    for form in forms.names:
        whole_name = f"{name}.{form}" if form else name
        kernels = forms.reading(form, run), forms.reading(form, fake)
        changed = forms.signature(form, signature)
        overloads[form] = _register_overload(whole_name, changed, required, *kernels, returns, mutates)
    return overloads[""], overloads.get("host")


def _register_overload(
    name: str,
    signature: inspect.Signature,
    required: Sequence[str],
    run: Kernel,
    fake: Kernel,
    returns: Sequence[str],
    mutates: Sequence[str],
) -> OpOverload:
    def named(kernel: Kernel) -> Kernel:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            # PyTorch accepts None where a schema says Tensor.
            for argument in required:
                if bound.arguments[argument] is None:
                    raise ValueError(f"{argument} is None; it must be a tensor.")
            return kernel(**bound.arguments)

        return call

    prototype = named(run)
    prototype.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature looks for
    arguments, _ = torch.library.infer_schema(prototype, mutates_args=mutates).rsplit(" -> ", 1)
    results = ", ".join(f"Tensor {result}" for result in returns)
    schema = f"{arguments} -> ({results})"
    definition = torch.library.custom_op(f"{NAMESPACE}::{name}", prototype, mutates_args=mutates, schema=schema)
    definition.register_fake(named(fake))
    base, _, variant = name.partition(".")
    overload: OpOverload = getattr(getattr(getattr(torch.ops, NAMESPACE), base), variant or "default")
    return overload


def _with_outputs(signature: inspect.Signature, outputs: Sequence[str], optional: Sequence[str]) -> inspect.Signature:
    """The signature with tensors to write, after the required tensors and everything else that has no default."""
    parameters = list(signature.parameters.values())
    last = max(position for position, parameter in enumerate(parameters) if is_required(parameter))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = inspect.Parameter("output", kind, annotation=Tensor, default=parameters[last].default)
    left_out = required.replace(annotation=Tensor | None, default=None)
    added = [(left_out if output in optional else required).replace(name=output) for output in outputs]
    return signature.replace(parameters=[*parameters[: last + 1], *added, *parameters[last + 1 :]])
