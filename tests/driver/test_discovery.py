"""A user's own patterns: registered folders, entry points, a clone that is not installed; and files that cannot be
used."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from lib.comparing import ALL, with_backend
from lib.own_rules import EXAMPLE, ROOT, forget
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE

import mla_fx
from mla_fx.driver import compile_caches, discovery
from mla_fx.passes.pipeline import PIPELINE
from mla_fx.rule import Rule, Stage

RULE = """
from mla_fx.rule import Rule, ValuePattern, var
from .stages import STAGE

class Own(Rule):
    stage = STAGE
    targets = ()
    pattern = ValuePattern(var("x"), "t e")
"""


@pytest.fixture(autouse=True)
def forget_what_a_test_registers(monkeypatch):
    monkeypatch.setattr(discovery, "_registered", [])
    yield
    forget()


def folder_of(path, **files):
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return path


def names():
    return [rule.name for rule in discovery.rules()]


def fused(**options):
    module, arguments = Entry(DEFAULT).build(), Entry(DEFAULT).arguments(DECODE)
    with torch.no_grad():
        with_backend(module, **options)(*arguments)
    return mla_fx.last_report()


def told_while(compile):
    """The one warning that compiling gives, and the report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", mla_fx.MlaWarning)
        report = compile()
    (told,) = (str(warning.message) for warning in caught if issubclass(warning.category, mla_fx.MlaWarning))
    return told, report


# --- a folder --------------------------------------------------------------------------------------------------------


def test_the_rules_of_a_registered_folder_are_applied_and_can_be_disabled(tmp_path):
    before, plain = compile_caches.source_hash(), names()
    mla_fx.register_patterns(folder_of(tmp_path / "mine", stages="STAGE = 'cache'", own_rule=RULE))
    assert sorted(names()) == sorted([*plain, "own_rule"])
    mine = compile_caches.source_hash()
    mla_fx.register_patterns(str(tmp_path / "mine"))
    assert (sorted(names()), compile_caches.source_hash()) == (sorted([*plain, "own_rule"]), mine)
    assert mine != before
    mla_fx.get_backend(disable="own_rule")


@pytest.mark.slow
def test_a_registered_rule_fuses(tmp_path):
    (tmp_path / "mine").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "mine" / "own_output.py")
    text = (tmp_path / "mine" / "own_output.py").read_text()
    (tmp_path / "mine" / "own_output.py").write_text(text.replace('"latent_output"', '"own_output"'))
    graph_pass = mla_fx.MlaPass()
    before = graph_pass.uuid()
    assert fused().fused == ALL
    mla_fx.register_patterns(tmp_path / "mine")
    assert graph_pass.uuid() != before
    torch._dynamo.reset()
    assert fused().fused == {**ALL, "own_output": 1}
    torch._dynamo.reset()
    assert fused(disable="own_output").fused == ALL


def test_files_that_are_added_are_found_when_the_folder_is_registered_again(tmp_path):
    folder = folder_of(tmp_path / "mine", stages="STAGE = 'cache'")
    mla_fx.register_patterns(folder)
    before = compile_caches.source_hash()
    folder_of(folder, own_rule=RULE)
    mla_fx.register_patterns(folder)
    assert "own_rule" in names()
    assert compile_caches.source_hash() != before


def test_two_folders_may_each_have_a_file_of_that_name_to_share(tmp_path):
    """Each rule gets the stage from the file next to it."""
    for stage in ("cache", "prolog"):
        rule = {f"own_{stage}": RULE}
        mla_fx.register_patterns(folder_of(tmp_path / stage, stages=f"STAGE = {stage!r}", **rule))
    found = {rule.name: rule.stage for rule in discovery.rules() if rule.name.startswith("own_")}
    assert found == {"own_cache": "cache", "own_prolog": "prolog"}


def test_a_rule_comes_behind_those_that_it_names(tmp_path):
    """Names of missing rules, and a circle, keep no rule from being tried."""
    after = {"own_a": ("own_c", "nothing"), "own_b": ("own_b",), "own_c": ("own_d",), "own_d": ("own_a",)}
    rules = {name: f"{RULE}    after = {names}" for name, names in after.items()}
    mla_fx.register_patterns(folder_of(tmp_path / "mine", stages="STAGE = 'cache'", **rules))
    assert [name for name in names() if name in after] == ["own_d", "own_c", "own_a", "own_b"]
    assert names().index("mla_attention") < names().index("paged_attention")


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(mla_fx.OptionError, match=r"there is no folder '.*nowhere' to register patterns from"):
        mla_fx.register_patterns(tmp_path / "nowhere")


def test_two_rules_may_not_have_one_name(tmp_path):
    mla_fx.register_patterns(folder_of(tmp_path / "mine", stages="STAGE = 'cache'", rope=RULE))
    told, report = told_while(fused)
    assert "rope.py cannot be used and is skipped: NameError: another rule is called 'rope'" in told
    assert report.fused == ALL


def test_a_rule_may_name_itself(tmp_path):
    """Then its file holds several, and its name is as much in use as that of a file."""
    two = f"{RULE}\nclass Other(Own):\n    name = 'own_other'\n"
    mla_fx.register_patterns(folder_of(tmp_path / "mine", stages="STAGE = 'cache'", own_rule=two))
    assert {"own_rule", "own_other"} <= {*names()}
    mla_fx.get_backend(disable="own_other")
    mla_fx.register_patterns(folder_of(tmp_path / "others", stages="STAGE = 'cache'", own_other=RULE))
    (fault,) = discovery.found_rules().faults
    assert fault.name == "own_other" and "another rule is called 'own_other'" in str(fault)


# --- an entry point ---------------------------------------------------------------------------------------------------


def installed(path, value):
    info = path / "own_rules-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mla_fx.patterns]\nmine = {value}\n")


@pytest.mark.slow
@pytest.mark.parametrize("value", ["own_rules", "own_rules.own_entry"])
def test_an_entry_point_names_a_package_or_a_module(tmp_path, value):
    """In its own process, with the package installed."""
    installed(tmp_path, value)
    folder_of(tmp_path / "own_rules", __init__="", stages="STAGE = 'cache'", own_entry=RULE)
    code = "from mla_fx.driver import discovery; print([rule.name for rule in discovery.rules()])"
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {code}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "'own_entry'" in told and "'mla_prolog'" in told


def test_an_entry_point_that_leads_nowhere_is_told_of(tmp_path, monkeypatch):
    installed(tmp_path, "own_rules_that_are_gone")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    told, report = told_while(fused)
    assert "module 'own_rules_that_are_gone' cannot be used and is skipped: ModuleNotFoundError" in told
    assert report.fused == ALL


# --- faults -----------------------------------------------------------------------------------------------------------

FAULTS = {
    "stage": (
        {"stages": "STAGE = 'cash'", "at_fault": RULE},
        "TypeError: rule Own has stage = 'cash'; it takes 'attention', 'context', 'prolog', 'cache', 'piece'",
    ),
    "no stage": (
        {"stages": "STAGE = None", "at_fault": RULE.replace("    stage = STAGE\n", "")},
        "TypeError: rule Own has stage = None; it takes 'attention', ",
    ),
    "import": ({"at_fault": "import nothing_of_that_name"}, "ModuleNotFoundError: No module named 'nothing_of_that_na"),
    "syntax": ({"at_fault": "class Own(:"}, "SyntaxError: invalid syntax (at_fault.py, line 1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("files", "cause"), FAULTS.values(), ids=FAULTS)
def test_a_file_at_fault_is_named_once_and_the_others_go_on(tmp_path, files, cause):

    folder = folder_of(tmp_path / "mine", **files)
    mla_fx.register_patterns(folder)
    told, report = told_while(fused)
    assert told.startswith(f"mla_fx: {folder / 'at_fault.py'} cannot be used and is skipped: {cause}")
    assert report.fused == ALL
    assert told.removeprefix("mla_fx: ") in report.notes
    torch._dynamo.reset()
    with pytest.raises(mla_fx.FusionError, match=r"at_fault\.py cannot be used"):
        fused(strict=True)
    torch._dynamo.reset()
    assert fused(strict=True, disable="at_fault").fused == ALL


def test_a_file_at_fault_in_the_folder_of_patterns_is_named(tmp_path, monkeypatch):
    import mla_fx.patterns

    folder = folder_of(tmp_path / "more", at_fault="import nothing_of_that_name")
    monkeypatch.setattr(mla_fx.patterns, "__path__", [*mla_fx.patterns.__path__, str(folder)])
    forget()
    told, report = told_while(fused)
    assert told.startswith(f"mla_fx: {folder / 'at_fault.py'} cannot be used and is skipped: ModuleNotFoundError")
    assert report.fused == ALL


def test_a_target_at_fault_is_named(tmp_path, monkeypatch):
    import mla_fx.lowering

    folder = folder_of(tmp_path / "more", at_fault="import nothing_of_that_name")
    monkeypatch.setattr(mla_fx.lowering, "__path__", [*mla_fx.lowering.__path__, str(folder)])
    forget()
    told, report = told_while(fused)
    assert told.startswith(f"mla_fx: {folder / 'at_fault.py'} cannot be used")
    assert report.fused == ALL
    with pytest.raises(mla_fx.OptionError, match=r"at_fault\.py cannot be used and is skipped: ModuleNotFound"):
        mla_fx.get_backend(target="at_fault")


def test_what_is_kept_is_not_what_was_compiled_with_a_file_at_fault(tmp_path):
    """The file is the same; what it imports exists the next time."""
    folder = folder_of(tmp_path / "mine", stages="STAGE = 'cache'", own_rule=f"import own_dependency\n{RULE}")
    mla_fx.register_patterns(folder)
    before = compile_caches.source_hash()
    sys.modules["own_dependency"] = warnings
    try:
        mla_fx.register_patterns(folder)
        assert "own_rule" in names()
    finally:
        del sys.modules["own_dependency"]
    assert compile_caches.source_hash() != before


def test_a_rule_is_refused_where_it_is_made():
    class Own(Rule):
        stage = "cash"

    with pytest.raises(TypeError, match="rule Own has stage = 'cash'; it takes 'attention', 'context'"):
        Own()


def test_every_stage_is_a_pass():
    passes = [step.name.removeprefix("recognise ") for step in PIPELINE if step.name.startswith("recognise ")]
    assert [*passes[:-1], passes[-1].removesuffix("s")] == list(Stage)


# --- a clone ----------------------------------------------------------------------------------------------------------

BUILD = """
from mla_fx import cases

def build():
    return cases.Layer().eval(), cases.inputs()
"""


@pytest.mark.slow
def test_a_clone_that_is_not_installed_compiles(tmp_path):
    """The clone hides an installed wheel in the same way: `-m` looks in the clone's root first. `-S` leaves out what an
    editable install adds to the path, so the folders of all dependencies are passed explicitly."""
    script = folder_of(tmp_path, script=BUILD) / "script.py"
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*packages, str(Path(torch.__file__).parents[1])])}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-S", "-m", "mla_fx", "explain", str(script), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["targets"]["reference"]["fused"] == ALL
