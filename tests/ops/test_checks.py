"""The checks that all operators share."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fx.ops
from mla_fx.ops.common.check import check_devices, readable
from mla_fx.ops.common.define import define


def test_values_on_a_device_are_read_only_when_asked():
    host, device = torch.zeros(1), SimpleNamespace(device=torch.device("cuda"), is_meta=False)
    assert readable(host)
    assert not readable(device)
    with mla_fx.ops.check_values():
        assert readable(device)
        with FakeTensorMode() as mode:
            assert not readable(mode.from_tensor(host))
        assert not readable(torch.zeros(1, device="meta"))
    assert not readable(device)


def test_tensors_share_a_device_but_lengths_may_lie_elsewhere():
    tensors = {"query": torch.zeros(1), "lens": torch.zeros(1, device="meta"), "scale": 0.5, "mask": None}
    check_devices(tensors, lengths=("lens",))
    with pytest.raises(ValueError, match="lens is on meta; it must be on cpu, the device of query"):
        check_devices(tensors)


def test_an_operator_has_the_namespace_of_the_project():
    with pytest.raises(ValueError, match="the name 'my::norm'; it must have no namespace, which is mla_fx"):
        define("my::norm", object, abs, returns=("out",), check=abs, fake=abs, samples=abs)
