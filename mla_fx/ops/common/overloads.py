"""The overloads of an operator: lengths as tensors or as host lists, enumerators by name or by number."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
