"""Public attributes of reports and the options change on purpose: public.json lists them, and the names that have gone.

`MLA_FX_ACCEPT=1 python -m pytest tests/project/test_public_names.py` writes the list. A name that has gone is added by
hand, with what replaces it, and needs a line in CHANGELOG.md."""

import dataclasses
import inspect
import json
import os

import pytest
from lib.sources import ROOT
from mla_fx.lowering import inductor

from mla_fx import Report
from mla_fx.debug.report import Miss
from mla_fx.driver import discovery
from mla_fx.options import OWN, Options

FILE = ROOT / "tests" / "project" / "public.json"
ACCEPTED = json.loads(FILE.read_text(encoding="utf-8"))


def attributes(kind):
    """The public attributes of a class: the types of fields and properties, and the signatures of methods."""
    found = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    for name in vars(kind).keys() - found.keys():
        value = inspect.getattr_static(kind, name)
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        is_property = isinstance(inspect.getattr_static(kind, name), property)
        if not name.startswith("_") and callable(value):
            signature = inspect.signature(value)
            found[name] = str(signature.return_annotation if is_property else signature)
    return found


def options():
    """This project's options with their defaults, and those that targets add. Inductor's own are torch's."""
    defaults = {option.name: repr(getattr(Options(), option.name)) for option in dataclasses.fields(Options)}
    targets = {name: sorted(target.accepts() - OWN) for name, target in discovery.targets().items()}
    return {**{name: defaults.get(name, "") for name in OWN}, **targets, "inductor": sorted(inductor.OWN)}


LISTS = {"Report": lambda: attributes(Report), "Miss": lambda: attributes(Miss), "options": options}


@pytest.mark.parametrize("name", LISTS)
def test_public_names_are_those_of_the_list(monkeypatch, name):
    for variable in ("MLA_FX_DUMP", "TORCH_COMPILE_DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    found = LISTS[name]()
    if os.environ.get("MLA_FX_ACCEPT"):
        ACCEPTED[name] = found
        FILE.write_text(json.dumps(ACCEPTED, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert found == ACCEPTED[name], "run with MLA_FX_ACCEPT=1 if this is on purpose, and write a line in CHANGELOG.md"


@pytest.mark.parametrize("gone", ACCEPTED["gone"])
def test_the_changelog_names_what_has_gone_and_what_replaces_it(gone):
    owner, _, name = gone.partition(".")
    now = ACCEPTED["gone"][gone]
    assert name not in ACCEPTED[owner] and now in ACCEPTED[owner]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    lines = [" ".join(line.split()) for line in changelog.split("\n- ")]
    assert any(f"`{gone}`" in line and f"`{now}`" in line for line in lines), f"CHANGELOG.md does not name {gone}"
