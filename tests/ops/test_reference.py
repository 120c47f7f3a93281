"""The table of the operators' reference page is what is tested: counted from the tests that pytest collects here.

EXPECTTEST_ACCEPT=1 writes it anew.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from ops.harness import CATALOGUE

PAGE = Path(__file__).parents[2] / "mla_fx" / "ops" / "README.md"
BEGIN, END = "<!-- counted from the tests -->\n", "<!-- end -->\n"
DTYPES = ("float32", "bfloat16", "float16", "float64")
SAMPLE = rf"(?P<operator>[\w.]+)-(?P<dtype>{'|'.join(DTYPES)})-\d+-(?P<mode>.+)"
CASE = re.compile(rf"::(?P<test>\w+)\[(?P<sample>{SAMPLE})\]$")


@pytest.fixture(scope="module")
def samples():
    """By the name of each test that runs on samples: what samples."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", "--override-ini=addopts=-q", "--disable-warnings"]
    here = str(Path(__file__).parent)
    listing = subprocess.run([*collect, here], check=True, capture_output=True, text=True, cwd=PAGE.parents[2]).stdout
    tests = defaultdict(set)
    for match in filter(None, map(CASE.search, listing.splitlines())):
        tests[match["test"]].add(match["sample"])
    return tests


def table(samples):
    """Rows of operator and mode, with the number of samples in each dtype."""
    counts = defaultdict(lambda: dict.fromkeys(DTYPES, 0))
    for sample in samples:
        match = re.fullmatch(SAMPLE, sample)
        counts[match["operator"], match["mode"]][match["dtype"]] += 1
    yield "| operator | mode | " + " | ".join(DTYPES) + " |\n"
    yield "| --- | --- |" + " --- |" * len(DTYPES) + "\n"
    for (operator, mode), numbers in sorted(counts.items()):
        yield f"| `{operator}` | {mode} | {' | '.join(str(number or '') for number in numbers.values())} |\n"


def test_every_sample_is_tested_in_every_way(samples):
    compared = samples["test_sample_against_oracle"]
    assert {sample.split("-")[0] for sample in compared} == set(CATALOGUE)
    assert samples["test_functional_form_writes_nothing_and_takes_lists"] == compared
    traced = {sample for sample in compared if re.fullmatch(SAMPLE, sample)["dtype"] == "bfloat16"}
    assert samples["test_opcheck"] == samples["test_fake_is_exact_for_free_sizes"] == traced
    with_twin = {name for name, operator in CATALOGUE.items() if operator.inplace}
    assert samples["test_opcheck_in_place"] == {sample for sample in traced if sample.split("-")[0] in with_twin}


def test_the_page_counts_every_sample(samples):
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    current = before + BEGIN + "".join(table(samples["test_sample_against_oracle"])) + END + after
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        PAGE.write_text(current, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == current, "run this test with EXPECTTEST_ACCEPT=1 to count anew"


def test_every_decision_names_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 40
    assert [name for name in named if f"def {name}(" not in tests] == []
