"""The lines of both tables as Markdown: what is the same in all variants is said once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .outcome import TARGETS
from .rows import STEPS, Found

SHORT = {
    "mla_prolog": "prolog",
    "kv_rmsnorm_rope_cache": "key side",
    "latent_attention": "attention",
    "mla_attention": "attention",
}

FAMILIES_HEAD = ("family", *STEPS, "what keeps it from more")
ZOO_HEAD = ("what is varied", "spellings", "fuse whole", "less, and why")

Results = Mapping[str, Sequence[Found]]


def rendered(families: Mapping[str, Results], axes: Mapping[str, Results]) -> str:
    """Both tables: of families by step, and of the zoo by axis and spelling."""
    lines = [_row(FAMILIES_HEAD), _rule(FAMILIES_HEAD)]
    lines += [family_line(family, steps) for family, steps in families.items()]
    lines += ["", _row(ZOO_HEAD), _rule(ZOO_HEAD)]
    lines += [zoo_line(axis, spellings) for axis, spellings in axes.items()]
    return "\n".join(lines) + "\n"


def family_line(family: str, steps: Results) -> str:
    reasons = dict.fromkeys(reason for found in steps.values() for one in found for reason in one.outcome.reasons)
    return _row((family, *(_alike(found) for found in steps.values()), "; ".join(reasons)))


def zoo_line(axis: str, spellings: Results) -> str:
    lacking = {name: less for name, found in spellings.items() if (less := _less(found))}
    whole = len(spellings) - len(lacking)
    return _row((axis, len(spellings), whole, "; ".join(f"`{name}`: {less}" for name, less in lacking.items())))


def _less(found: Sequence[Found]) -> str:
    """The variants in which less fuses than should, or an empty string."""
    lacking = [one for one in found if one.outcome.fused != one.expected]
    if not lacking:
        return ""
    reasons = dict.fromkeys(reason for one in lacking for reason in one.outcome.reasons)
    return f"{_apart(lacking)}, because {'; '.join(reasons)}"


def _alike(found: Sequence[Found]) -> str:
    """What fused: once if it is the same in all variants, else with the variants in which it did."""
    texts = {_text(one) for one in found}
    return texts.pop() if len(texts) == 1 else _apart(found)


def _apart(found: Sequence[Found]) -> str:
    by_text: dict[str, list[Found]] = {}
    for one in found:
        by_text.setdefault(_text(one), []).append(one)
    return ", ".join(f"{text} ({_variants(ones)})" for text, ones in by_text.items())


def _text(one: Found) -> str:
    counts: dict[str, int] = {}
    for name, count in one.outcome.fused.items():
        counts[SHORT[name]] = counts.get(SHORT[name], 0) + count
    words = [f"{count} {name}" for name, count in counts.items()]
    words += [f"{one.outcome.unfused} as it came"] if one.outcome.unfused else []
    return " + ".join(words) or "nothing"


def _variants(found: Iterable[Found]) -> str:
    targets: dict[str, list[str]] = {}
    for one in found:
        targets.setdefault(one.variant, []).append(one.target)
    return "; ".join(variant if len(on) == len(TARGETS) else f"{variant} on {on[0]}" for variant, on in targets.items())


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _rule(head: Sequence[str]) -> str:
    return _row(["---"] * len(head))
