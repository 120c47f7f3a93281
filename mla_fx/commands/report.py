"""Writes the pages of dumped graphs anew, and a page that lists them."""

from __future__ import annotations

import html
import json
from pathlib import Path

from mla_fx.commands import CommandError
from mla_fx.debug.dump import page


def run_report(folder: Path) -> Path:
    """Write `page.html` beside each `graph.json`, and `index.html` with a link to each. Raises CommandError."""
    found = sorted(folder.glob("graph_*/graph.json")) or [*folder.glob("graph.json")]
    if not found:
        raise CommandError(f"{folder} holds no dump; option dump or the variable MLA_FX_DUMP makes one.")
    items = []
    for path in found:
        data = json.loads(path.read_text(encoding="utf-8"))
        (file := path.with_name("page.html")).write_text(page(data), encoding="utf-8")
        link = html.escape(str(file.relative_to(folder)))
        items.append(f'<li><a href="{link}">{html.escape(path.parent.name)}</a>: {html.escape(data["outcome"])}</li>')
    index = folder / "index.html"
    lines = ['<!doctype html><html lang="en"><meta charset="utf-8"><title>mla_fx</title>', "<h1>Graphs</h1><ul>"]
    index.write_text("\n".join([*lines, *items, "</ul></html>", ""]), encoding="utf-8")
    print(index)
    return index
