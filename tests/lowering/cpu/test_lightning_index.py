"""The choice of keys is a kernel that stores one score of a key for all heads, and a top-k."""

from dataclasses import replace

import pytest
from lib.index_calls import CALLS, call, check, check_not_a_number, check_rows_in_parts
from lib.kernels import compiled_call
from mla_fx.lowering.cpu import lightning_index as lowering

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted import lightning_index

pytestmark = pytest.mark.usefixtures("no_gradients")

KERNEL = "torch.ops.mla_fx.index_scores_in_rows.default"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, "many tokens"])
def test_compiled_code_calls_the_kernel(name):
    a = (CALLS | {"many tokens": call(70)})[name]
    found, code = compiled_call(lightning_index.operator, a)
    assert KERNEL in code
    check(found, a)


def test_rows_in_parts(monkeypatch):
    check_rows_in_parts(lowering, lowering.run, monkeypatch)


def test_not_a_number_is_chosen_first_unless_it_is_hidden():
    check_not_a_number(lowering.run)


def test_wrong_pages_are_refused():
    a = call(1, is_paged=True)
    a.block_table[1, 2] = len(a.key)
    with pytest.raises(ValueError, match=f"block_table holds {len(a.key)}; it must be below {len(a.key)}"):
        lowering.run(a)


def test_loops_choose_among_few_keys():
    few = replace(call(1), key=call(1).key[:, :32])
    with pytest.raises(NoMatch, match="loops are as fast for few keys"):
        lowering.lower(few)
