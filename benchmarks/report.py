"""Writes the numbers of the benchmarks, from their JSON, into docs/measuring.md: tables and pictures.

for name in decode query_tokens pages prefill memory compile_time graphs overhead sparse grid; do
    python benchmarks/$name.py --json results/$name.json
done
python benchmarks/report.py results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from results import Row

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->\n"

# In the order of the legend, without the variants with a forced form, which users would not run.
STYLES = {
    "HF eager": {"label": "transformers, eager", "color": "tab:gray"},
    "HF compiled": {"label": "transformers, Inductor", "color": "tab:orange"},
    "by hand": {"label": "absorbed by hand, Inductor", "color": "tab:blue"},
    "mla_fx, all keys": {"label": "mla_fx, attention to all keys", "color": "tab:purple"},
    "mla_fx": {"label": "mla_fx", "color": "tab:red", "linewidth": 2.5},
    "floor": {"label": "floor of the machine", "color": "black", "linestyle": ":"},
}

Found = dict[str, Any]


def lines(found: dict[str, Found]) -> Iterator[str]:
    """Each benchmark's rows, with its notes on the machine."""
    for name, results in found.items():
        yield f"**{name.replace('_', ' ')}**: {'; '.join([*results['notes'], results['machine']])}\n"
        yield "| | measured | must | goal | |\n| --- | --- | --- | --- | --- |"
        yield from (f"| {' | '.join(Row(**row).cells())} |" for row in results["rows"])
        yield ""


def write(text: str) -> None:
    page = DOCS / "measuring.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def draw(axes: Any, times: list[Found], along: str, **titles: str) -> None:
    for name, style in STYLES.items():
        points = sorted((time[along], time["milliseconds"]) for time in times if time["variant"] == name)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
    axes.set(xscale="log", yscale="log", ylabel="milliseconds", **titles)
    ticks = sorted({time[along] for time in times})
    axes.set_xticks(ticks, map(str, ticks), rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def picture(decode: Found, query_tokens: Found) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    single = [time for time in decode["times"] if time["batch"] == 1]
    draw(left, single, "context", title="one new token", xlabel="tokens in the cache")
    draw(right, query_tokens["times"], "tokens", title="4096 tokens in the cache", xlabel="new tokens")
    left.legend()
    figure.suptitle(f"One attention layer of DeepSeek-V3, bfloat16, batch 1\n{decode['machine']}", fontsize=10)
    figure.savefig(DOCS / "times.svg", metadata={"Date": None})


def picture_of_sparse(sparse: Found) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    draw(axes, sparse["times"], "context", xlabel="tokens in the cache")
    axes.legend()
    figure.suptitle(f"One attention layer of DeepSeek-V3.2, bfloat16, batch 1\n{sparse['machine']}", fontsize=9)
    figure.savefig(DOCS / "sparse.svg", metadata={"Date": None})


def main() -> None:
    pyplot.rcParams["svg.hashsalt"] = "mla_fx"  # otherwise names in the file are random
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the JSON files; some may be missing")
    files = sorted(parser.parse_args().folder.glob("*.json"))
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    write("\n".join(lines(found)))
    if {"decode", "query_tokens"} <= found.keys():
        picture(found["decode"], found["query_tokens"])
    if "sparse" in found:
        picture_of_sparse(found["sparse"])


if __name__ == "__main__":
    main()
