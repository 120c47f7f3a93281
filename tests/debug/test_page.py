"""The page of a dump, in a real browser: what a person asks, and how many clicks the answer takes."""

import json
import re
import shutil

import pytest
import torch
from lib.families import empty_cache, tiny_model
from torch import nn

import mla_fx
from mla_fx.__main__ import main

LAYERS, BROKEN = 5, 3
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The dump of a model whose layer 3 has another norm than RMSNorm, so its prolog does not fuse."""
    model = tiny_model("deepseek_v3", num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS)
    model.model.layers[BROKEN].self_attn.q_a_layernorm = nn.LayerNorm(48)
    model.model.layers[BROKEN].self_attn.kv_a_layernorm = nn.LayerNorm(32)
    folder, cache = tmp_path_factory.mktemp("dump"), empty_cache(model, "static", 16)
    with torch.no_grad():
        model(torch.tensor([[3, 1, 4]]), past_key_values=cache)
        step = torch.compile(model, backend=mla_fx.get_backend(target="reference", dump=folder))
        step(input_ids=torch.tensor([[5]]), past_key_values=cache)
    return folder


@pytest.mark.slow
def test_layers_with_another_outcome_are_a_kind_of_their_own(folder):
    data = json.loads((folder / "graph_000" / "graph.json").read_text())
    kinds = {kind["paths"]: kind for kind in data["kinds"]}
    assert f"model.layers.{BROKEN}" in kinds
    fused = {paths: {node["fused"] for node in kind["after"]} - {None} for paths, kind in kinds.items()}
    assert "mla_prolog" not in fused[f"model.layers.{BROKEN}"]
    assert sum(kind["count"] for paths, kind in kinds.items() if "mla_prolog" in fused[paths]) == LAYERS - 1
    fused_layer = next(kind for kind in data["kinds"] if "mla_prolog" in fused[kind["paths"]])
    names = {node["name"] for node in fused_layer["before"]}
    (prolog,) = (node for node in fused_layer["after"] if node["fused"] == "mla_prolog")
    assert len(names & set(prolog["replaced"])) > 30
    for kind in data["kinds"]:
        for side in ("before", "after"):
            assert len({node["name"] for node in kind[side]}) == len(kind[side])


def test_it_needs_nothing_else_and_holds_no_weight(folder):
    page = (folder / "graph_000" / "page.html").read_text()
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
    assert not re.search(r"<(link|img|script)[^>]+(src|href)", page)
    assert not re.search(r"\btensor\(", page)


def test_the_command_lists_the_pages(folder, capsys):
    (folder / "graph_000" / "page.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'index.html'}\n"
    assert 'href="graph_000/page.html"' in (folder / "index.html").read_text()
    assert "data of the graph" not in (folder / "graph_000" / "page.html").read_text()


def test_a_folder_without_a_dump_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"mla_fx: {tmp_path} holds no dump; option dump or the variable MLA_FX_DUMP makes one.\n"
    )


@pytest.fixture
def page(folder):
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((folder / "graph_000" / "page.html").as_uri())
        yield page
        assert errors == []
        browser.close()


@pytest.mark.slow
@needs_browser
class TestQuestions:
    def test_why_did_layer_3_not_fuse_takes_one_click(self, page):
        page.get_by_role("button", name=f"model.layers.{BROKEN}: ").click()
        answer = page.locator("#about").text_content()
        assert answer.startswith("Not fused here: ") and "mla_prolog: " in answer and "norm" in answer.lower()
        assert page.locator("#before .missed").count() >= 1

    def test_what_became_of_kv_b_proj_takes_a_word_and_a_key(self, page):
        page.get_by_role("searchbox").fill("kv_b_proj")
        assert "before" in page.locator("#found").text_content()
        page.keyboard.press("Enter")
        answer = page.locator("#about").text_content()
        assert "self_attn.kv_b_proj.weight" in answer
        assert "replaced by " in answer

    def test_which_pass_took_the_time_takes_no_click(self, page):
        widths = page.locator("#stages .bar").evaluate_all("bars => bars.map((bar) => bar.offsetWidth)")
        times = [float(cell) for cell in page.locator("#stages td:nth-child(2)").all_text_contents()]
        assert widths.index(max(widths)) == times.index(max(times))

    def test_a_fused_node_leads_to_what_it_replaced_and_to_the_models_line(self, page):
        page.locator("#after .fused", has_text="mla_prolog").click()
        assert page.locator("#before .linked").count() > 30
        assert "modeling_deepseek_v3.py:" in page.locator("#about").text_content()
        page.get_by_role("button", name="Before", exact=True).click()
        assert page.locator("#drawing .linked").count() > 30
        page.locator("#before .linked").first.click()
        assert "replaced by mla_prolog" in page.locator("#about").text_content()
        assert page.locator("#after .linked").count() == 1

    def test_the_drawing_answers_to_clicks_and_keys(self, page):
        page.locator("#drawing g:not(.folded)").first.click()
        first = page.locator("#before .chosen").text_content()
        page.locator("#before .chosen").focus()
        page.keyboard.press("ArrowDown")
        assert page.locator("#before .chosen").text_content() != first
        page.get_by_role("button", name="After", exact=True).click()
        assert "mla_prolog_" in page.locator("#drawing text").all_text_contents()  # in place

    def test_modules_that_no_pattern_matched_are_folded(self, page):
        def nodes():
            return page.locator("#drawing g:not(.folded)").count()

        def codes():
            return page.locator("#before button").count()

        def module(name):
            return page.get_by_role("button", name=re.compile(rf"^{name}, \d+ nodes$"))

        page.get_by_role("button", name="model.layers.1").or_(
            page.get_by_role("button", name="model.layers.{1-")
        ).click()
        before, hidden = nodes(), int(re.search(r", (\d+) nodes", module("mlp").get_attribute("aria-label"))[1])
        assert hidden > 5 and module("input_layernorm").count() == module("post_attention_layernorm").count() == 1
        assert before == page.locator("#drawing g rect[style*=fill]").count() + 2  # matched, and the layer's own sums
        module("mlp").click()
        assert nodes() == before + hidden and module("mlp").count() == 0
        assert "mlp: " in page.locator("#about").text_content()
        module("input_layernorm").focus()
        page.keyboard.press("Enter")
        assert module("input_layernorm").count() == 0 and nodes() > before + hidden
        page.keyboard.press("Enter")  # the first of its nodes has the focus
        assert page.locator("#before .chosen").count() == 1
        page.get_by_role("button", name="Unfold modules").click()
        assert nodes() == codes() and page.locator("#drawing .folded").count() == 0
        page.get_by_role("button", name="Fold modules").click()
        assert nodes() == before and module("mlp").count() == 1

    def test_a_line_of_a_folded_module_marks_its_box(self, page):
        page.locator("#before button", has_text="mlp.gate_proj").first.click()
        (label,) = page.locator("#drawing .chosen").evaluate_all("all => all.map((one) => one.ariaLabel)")
        assert label.startswith("mlp, ")

    def test_a_miss_is_never_folded_away(self, page):
        page.get_by_role("button", name=f"model.layers.{BROKEN}: ").click()
        assert page.locator("#drawing .missed").count() >= 1
        assert page.locator("#drawing .folded.missed").count() == 0

    def test_the_cost_of_the_graph_and_of_a_layer_is_shown(self, page):
        for table in ("#cost", "#kind_cost"):
            rows = page.locator(f"{table} tr").evaluate_all(
                "all => all.map((row) => [...row.cells].map((one) => one.textContent))"
            )
            costs = {what: cells for what, *cells in rows}
            assert costs[""] == ["before", "after"] and costs["FLOPs"][0].endswith(" kFLOP")
            assert {"moved", "temporaries"} < costs.keys()

    def test_it_is_readable_in_the_dark_and_on_paper(self, page):
        colours = "() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; }"
        light = page.evaluate(colours)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(colours) != light
        page.emulate_media(media="print")
        assert page.evaluate("() => getComputedStyle(document.body).display") == "block"
        assert not page.locator("#search").is_visible()
