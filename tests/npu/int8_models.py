"""Models of Hugging Face with int8 projections, as the vendor quantises them."""

from lib.quantised import Stored, by_rows
from torch import nn
from torch.nn.functional import linear

from npu import models

V32, R1, KEYS = ("q_b_proj",), ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"), ("kv_b_proj",)


class Int8(nn.Module):
    """A projection of int8: tokens are quantised as npu_dynamic_quant does, integers are multiplied."""

    def __init__(self, plain, smallest):
        super().__init__()
        self.smallest = smallest
        for name, value in vars(by_rows(plain.weight.data.float())).items():
            self.register_buffer(name, value)

    def forward(self, x):
        w, wide = Stored(self.codes, self.scales), x.float()
        scales = wide.abs().amax(-1, keepdim=True).clamp_min(self.smallest) / 127
        codes = (wide / scales).round().clamp(-128, 127)
        return (linear(codes, w.codes.float()) * scales * w.scales).to(x.dtype)


def model_of(names, layers=1):
    model = models.model(layers=layers)
    for layer in model.layers:
        for name in names:
            smallest = 1e-7 if name in KEYS else 0  # rows of an empty cache are zero
            setattr(layer.self_attn, name, Int8(getattr(layer.self_attn, name), smallest))
    return model
