"""A picture of what the benchmarks measured: time of one step against the context, and against the new tokens.

python benchmarks/decode.py --json decode.json
python benchmarks/query_tokens.py --json query_tokens.json
python benchmarks/plot.py decode.json query_tokens.json benchmarks/times.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot

# In the order of the legend; what is forced to one form is no way that a user would take.
STYLES = {
    "HF eager": {"color": "tab:gray"},
    "HF compiled": {"color": "tab:orange"},
    "by hand": {"color": "tab:blue"},
    "mla_fx": {"color": "tab:red", "linewidth": 2.5},
    "floor": {"color": "black", "linestyle": ":"},
}
LABELS = {
    "HF eager": "transformers, eager",
    "HF compiled": "transformers, Inductor",
    "by hand": "absorbed by hand, Inductor",
    "mla_fx": "mla_fx",
    "floor": "floor of the machine",
}


def draw(axes: Any, times: list[dict[str, Any]], along: str, title: str, label: str) -> None:
    for name, style in STYLES.items():
        points = sorted((time[along], time["milliseconds"]) for time in times if time["variant"] == name)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=LABELS[name], **style)
    axes.set(xscale="log", yscale="log", title=title, xlabel=label, ylabel="milliseconds")
    ticks = sorted({time[along] for time in times})
    axes.set_xticks(ticks, map(str, ticks), rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decode", type=Path, help="of decode.py")
    parser.add_argument("query_tokens", type=Path, help="of query_tokens.py")
    parser.add_argument("picture", type=Path, help="where to write it, in any format of matplotlib")
    given = parser.parse_args()
    decode, query_tokens = (json.loads(path.read_text(encoding="utf-8")) for path in (given.decode, given.query_tokens))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    single = [time for time in decode["times"] if time["batch"] == 1]
    draw(left, single, "context", "one new token", "tokens in the cache")
    draw(right, query_tokens["times"], "tokens", "4096 tokens in the cache", "new tokens")
    left.legend()
    figure.suptitle(f"One attention layer of DeepSeek-V3, bfloat16, batch 1\n{decode['machine']}", fontsize=10)
    figure.savefig(given.picture)


if __name__ == "__main__":
    main()
