"""Memory formats of NPU tensors, simulated: a cast reorders the bytes of a CPU tensor and remembers the new format."""

from __future__ import annotations

import torch
from torch import Tensor

ND, FRACTAL_NZ = 2, 29

_formats: dict[int, tuple[int, torch.UntypedStorage]] = {}
"""The format of each storage by its address, and the storage itself, so that the address stays its own."""


def npu_format_cast(tensor: Tensor, acl_format: int, *, customize_dtype=None, input_dtype=None) -> Tensor:
    """A copy of the tensor in FRACTAL_NZ or ND, of the same shape."""
    if acl_format not in (ND, FRACTAL_NZ):
        raise ValueError(f"acl_format is {acl_format}; simulated are {ND} (ND) and {FRACTAL_NZ} (FRACTAL_NZ)")
    plain = from_nz(tensor) if get_npu_format(tensor) == FRACTAL_NZ else tensor
    cast = to_nz(plain) if acl_format == FRACTAL_NZ else plain.clone()
    storage = cast.untyped_storage()
    _formats[storage.data_ptr()] = acl_format, storage
    return cast


def get_npu_format(tensor: Tensor) -> int:
    return _formats.get(tensor.untyped_storage().data_ptr(), (ND, None))[0]


def to_nz(matrix: Tensor) -> Tensor:
    """[..., K, N] whose memory is that of [..., N/n0, K, n0], where n0 elements are 32 bytes. K is padded to a multiple
    of 16 and N to one of n0, so that more lies in memory than the shape says, as on a device."""
    rows, columns = matrix.shape[-2:]
    n0 = 32 // matrix.element_size()
    padded = torch.nn.functional.pad(matrix, (0, -columns % n0, 0, -rows % 16))
    memory = padded.unflatten(-1, (-1, n0)).transpose(-3, -2).contiguous()
    return memory.as_strided(matrix.shape, torch.empty(matrix.shape, device="meta").stride())


def from_nz(matrix: Tensor) -> Tensor:
    """The inverse of `to_nz`."""
    *batch, rows, columns = matrix.shape
    n0 = 32 // matrix.element_size()
    memory = torch.empty(0, dtype=matrix.dtype).set_(matrix.untyped_storage())
    blocks = memory.view(*batch, -(-columns // n0), -(-rows // 16) * 16, n0)
    return blocks.transpose(-3, -2).flatten(-2)[..., :rows, :columns].contiguous()


def register() -> None:
    """Makes torch_npu's two functions work on CPU tensors."""
    for name in ("npu::npu_format_cast", "npu::_npu_format_cast"):  # the second is the one that can be traced
        torch.library.impl(name, "CPU", npu_format_cast)
    torch.library.impl("npu::get_npu_format", "CPU", get_npu_format)


def clear() -> None:
    _formats.clear()
