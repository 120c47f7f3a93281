"""Faults planted into the lowering, one at a time: each is caught, by the numbers or by a kernel's refusal."""

import pytest
import torch
from mla_fx.lowering.ascend import numbers_of_sizes

from npu import planted, user_calls
from npu.lowered import Call
from npu.planted import attention, key_side, prolog

TABLES = prolog, key_side, attention


def each(names_of):
    """A table and the name of an entry, for all entries."""
    return [pytest.param(table, name, id=f"{table.KERNEL}: {name}") for table in TABLES for name in names_of(table)]


@pytest.mark.parametrize("table, name", each(lambda table: table.CALLS))
def test_no_fault(converted, table, name):
    """A graph that torchair converts is right, and so are the operators one by one."""
    table.run(name, lambda call: call.on_npu(converted))
    assert converted.types(converted.graphs[0]).count(table.KERNEL) == 1
    table.run(name, Call.by_kernels)


@pytest.mark.parametrize("name", prolog.LAID_OUT)
def test_no_fault_where_weights_are_laid_out(name):
    prolog.run(name, Call.by_kernels)


@pytest.mark.parametrize("table, fault", each(lambda table: table.FAULTS))
def test_fault(monkeypatch, table, fault):
    name, plant, *sentence = table.FAULTS[fault]
    plant(monkeypatch)
    with planted.caught(*sentence):
        table.run(name, Call.by_kernels)


def test_sizes_are_read_from_caches_that_are_written(converted, monkeypatch):
    """Each then keeps the copy that it is written through: user_calls counts them."""
    monkeypatch.setattr(numbers_of_sizes, "read", lambda graph: None)
    with torch.no_grad(), pytest.raises(AssertionError, match=r"prologs and copies: \[1, 2\]"):
        user_calls.check_one_graph_for_pages_of_several_sizes(converted)
