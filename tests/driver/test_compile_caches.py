"""Compiled graphs in PyTorch's caches: a later process finds them, with the report, if nothing changed."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lib.comparing import ALL, check_same
from lib.start_anew import counted
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE
from torch._functorch import config as functorch_config

import mla_fx
from mla_fx.debug.memory import MemoryUse
from mla_fx.debug.report import Miss, PassRecord, Report
from mla_fx.driver import compilation, compile_caches
from mla_fx.graph.torch_compilers import cache_folder

ROOT = Path(__file__).parents[2]
HIT = {"autograd_cache_hit": 1, "fxgraph_cache_hit": 1}
MISS = {"autograd_cache_miss": 1}


def start(cache, *arguments):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "lib.start_anew", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    """With other weights; and no longer after the source of a rule has changed, here one of the user's own. Inductor
    still compiles nothing, because its input did not change."""
    cache, rule = tmp_path / "cache", tmp_path / "rules" / "add_a_pattern.py"
    rule.parent.mkdir()
    shutil.copy(ROOT / "examples" / "add_a_pattern.py", rule)
    first, second = start(cache, 1, rule.parent), start(cache, 2, rule.parent)
    assert (first["counted"], second["counted"]) == (MISS, HIT)
    assert first["fused"] == second["fused"] == {**ALL, "latent_output": 1}
    headline, _, *before, note = first["told"].splitlines()  # the second line says when it was compiled
    found, _, *after = second["told"].splitlines()
    assert [found, *after] == [headline, *before, f"  {compile_caches.FROM_CACHE}", note]
    rule.write_text(f"# Changed.\n{rule.read_text()}")
    changed = start(cache, 3, rule.parent)
    assert (changed["counted"], changed["fused"]) == ({**MISS, "fxgraph_cache_hit": 1}, first["fused"])
    assert compile_caches.FROM_CACHE not in changed["told"]


# --- in one process, which forgets ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def own_caches(tmp_path_factory):
    """No other process finds what is compiled here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture
def kept():
    counted()
    with functorch_config.patch(enable_autograd_cache=True):
        yield


@pytest.fixture(scope="module")
def layer():
    """One for all tests, so that it is compiled once."""
    return Entry(DEFAULT).build(), Entry(DEFAULT).arguments(DECODE)


def anew(layer, *, dynamic=False, **options):
    """What the caches counted while a layer was compiled again and gave eager's results."""
    module, arguments = layer
    torch._dynamo.reset()
    with torch.no_grad():
        check_same(module, arguments, torch.compile(module, backend="mla", dynamic=dynamic, options=options))
    return counted()


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_expectations_and_reports_hold_for_what_comes_from_the_cache(layer):
    anew(layer)
    with mla_fx.expecting(mla_prolog=1, latent_attention=1):
        assert anew(layer) == HIT
    assert mla_fx.last_report().fused == ALL
    with pytest.raises(mla_fx.FusionError, match=r"expected \{'mla_prolog': 2\}, fused \{'mla_prolog': 1"):  # noqa: SIM117
        with mla_fx.expecting(mla_prolog=2):
            anew(layer)


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_options_that_decide_are_part_of_the_key(layer):
    anew(layer)
    assert "autograd_cache_miss" in anew(layer, disable="mla_prolog")
    assert mla_fx.last_report().fused == {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
    assert anew(layer) == HIT
    assert mla_fx.last_report().fused == ALL


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_who_watches_sees_it_compiled(layer, tmp_path):
    """Only the passes can write a dump, or the texts of `explain`."""
    anew(layer)
    assert anew(layer, dump=str(tmp_path)) == {"fxgraph_cache_hit": 1}
    assert list(tmp_path.rglob("00_captured.py"))
    report = mla_fx.explain(layer[0])(*copy.deepcopy(layer[1]))
    assert counted() == {"fxgraph_cache_hit": 1}
    assert report.fused == ALL and "captured" in report.graphs


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_what_is_verified_is_fused_anew(layer):
    """Both graphs are needed for the comparison; Inductor's own cache still has the fused one."""
    anew(layer)
    assert anew(layer, verify="first") == {"fxgraph_cache_hit": 1}
    assert len(mla_fx.last_report().verified) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_what_failed_is_tried_again(layer, monkeypatch):
    def fail(run, passes):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(compile_caches, "source_hash", lambda: "of this test")
    with monkeypatch.context() as planted, pytest.warns(mla_fx.MlaWarning, match="ZeroDivisionError: a bug"):
        planted.setattr(compilation, "run_pipeline", fail)
        assert "autograd_cache_miss" in anew(layer)
    assert "autograd_cache_miss" in anew(layer)
    assert mla_fx.last_report().fused == ALL
    assert anew(layer) == HIT


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("text", [None, "{", "{}", '{"misses": 1}'])
def test_without_a_report_a_graph_is_compiled_anew(layer, text):
    """`torch.compiler.load_cache_artifacts` leaves this: it knows no reports. The report is then saved again."""
    anew(layer)
    for saved in (cache_folder() / "mla_fx").iterdir():
        saved.unlink() if text is None else saved.write_text(text)
    assert anew(layer) == {"autograd_cache_hit": 1, "fxgraph_cache_hit": 2}
    assert mla_fx.last_report().fused == ALL
    assert compile_caches.FROM_CACHE not in mla_fx.last_report().notes
    assert anew(layer) == HIT
    assert compile_caches.FROM_CACHE in mla_fx.last_report().notes


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_a_folder_that_cannot_be_written_costs_time_alone(layer, monkeypatch):
    def refuse(self, text):
        raise PermissionError(self)

    monkeypatch.setattr(compile_caches, "source_hash", lambda: "of a read-only folder")
    monkeypatch.setattr(Path, "write_text", refuse)
    anew(layer)
    assert anew(layer)["autograd_cache_hit"] == 1
    assert mla_fx.last_report().fused == ALL


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_dynamic_sizes(layer):
    module = layer[0]
    for found in ("autograd_cache_miss", "autograd_cache_hit"):
        run = torch.compile(module, backend="mla", dynamic=True)
        torch._dynamo.reset()
        counted()
        for batch in (2, 3):
            with torch.no_grad():
                check_same(module, Entry(DEFAULT).arguments(replace(DECODE, batch=batch)), run)
        assert found in counted()
        assert mla_fx.last_report().fused == ALL


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_a_training_graph_is_warned_of_again(layer):
    for found in ("autograd_cache_miss", "autograd_cache_hit"):
        torch._dynamo.reset()
        with pytest.warns(mla_fx.MlaWarning, match="fuses inference only"):
            torch.compile(torch.nn.Linear(2, 2), backend="mla")(torch.ones(1, 2)).sum().backward()
        assert found in counted()


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_inputs_in_one_memory(order):
    """PyTorch's own key does not distinguish these, and returns the wrong graph."""

    def step(written, read):
        written.add_(1)
        return written * 2 + read

    for is_shared in order:
        torch._dynamo.reset()
        one, other = torch.zeros(8), torch.zeros(8)
        read = (one if is_shared else other)[:4]
        with torch.no_grad():
            found = torch.compile(step, backend="mla")(one[:4], read)
        assert found.tolist() == [3.0 if is_shared else 2.0] * 4


def test_reports_are_kept_whole():
    def reported(**parts):
        miss = Miss("mla_prolog", "no", "mm", "model.py:1", "layers.0", 3, looks_like_mla=True)
        record = PassRecord("lower", 1.5, 4, 5, Counter(mla_prolog=1))
        memory = MemoryUse(1, None, 2, 3, 4, 0)
        return Report({"mla_prolog": 1}, {"rope": 2}, [miss], [record], target="inductor", memory=[memory], **parts)

    kept = compile_caches.from_text(compile_caches.as_text(reported(hindrances=["training"], is_training=True)))
    assert kept == reported(notes=[compile_caches.FROM_CACHE], hindrances=["training"], is_training=True)
    assert str(kept.passes[0].fired) == "Counter({'mla_prolog': 1})"


# --- Inductor's cache below a pass, which is not called for what is found there ---------------------------------------


def with_pass(graph_pass, layer):
    """Compiles a layer again with a pass, and checks its results; whether Inductor found it in its cache."""
    module, arguments = layer
    torch._dynamo.reset()
    counted()
    with torch.no_grad(), torch._inductor.config.patch(post_grad_custom_pre_pass=graph_pass):
        check_same(module, arguments, torch.compile(module))
    return counted().get("fxgraph_cache_hit", 0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("has_both_caches", [False, True], ids=["inductor", "autograd"])
def test_a_pass_reports_what_comes_from_a_cache(layer, has_both_caches, monkeypatch):
    """Once for each compilation, and for all who count."""
    monkeypatch.setattr(compile_caches, "source_hash", lambda: f"of this test, {has_both_caches}")
    first, second = mla_fx.MlaPass(), mla_fx.MlaPass()
    with functorch_config.patch(enable_autograd_cache=has_both_caches):
        assert not with_pass(first, layer)
        for _ in range(2):
            with mla_fx.expecting(mla_prolog=1, latent_attention=1), mla_fx.report() as report:
                assert with_pass(second, layer)
            notes = [compile_caches.FROM_CACHE, *first.report.notes]
            assert report.fused == second.report.fused == mla_fx.last_report().fused == ALL
            assert report.notes == second.report.notes == notes
    with pytest.raises(mla_fx.FusionError, match=r"expected \{'mla_prolog': 2\}"), mla_fx.expecting(mla_prolog=2):
        assert with_pass(second, layer)


@pytest.mark.slow
def test_a_pass_says_that_a_report_is_lost(layer, monkeypatch):
    monkeypatch.setattr(compile_caches, "source_hash", lambda: "of a lost report")
    graph_pass = mla_fx.MlaPass()
    assert not with_pass(graph_pass, layer)
    for saved in (cache_folder() / "mla_fx").iterdir():
        saved.unlink()
    assert with_pass(graph_pass, layer)
    assert (graph_pass.report.fused, graph_pass.report.notes) == ({}, [compile_caches.LOST])


def test_a_pass_warns_again(monkeypatch):
    monkeypatch.setattr(compile_caches, "source_hash", lambda: "of a training graph")
    for is_found in (0, 1):
        torch._dynamo.reset()
        counted()
        patch = torch._inductor.config.patch(post_grad_custom_pre_pass=mla_fx.MlaPass())
        with patch, pytest.warns(mla_fx.MlaWarning, match="fuses inference only"):
            torch.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2))
        assert counted().get("fxgraph_cache_hit", 0) == is_found
