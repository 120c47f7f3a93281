"""Options as the vendor's enumerators."""

from collections.abc import Mapping, Sequence


def enumerator(
    argument: str, value: str, prefix: str, choices: Sequence[str], second_names: Mapping[str, str] | None = None
) -> str:
    """Return the one of `choices`, listed in the order of their numbers, that `value` names or numbers.

    A name may have any case, with or without `prefix`; `second_names` maps other names to choices.
    """
    if value.isdecimal() and int(value) < len(choices):
        return choices[int(value)]
    names = {choice: choice for choice in choices} | dict(second_names or {})
    for name, choice in names.items():
        if value.lower() in (name, prefix + name, name.removeprefix(prefix)):
            return choice
    allowed = ", ".join(map(repr, choices))
    raise ValueError(f"{argument} is {value!r}; allowed: {allowed}, or their numbers '0' to '{len(choices) - 1}'.")
