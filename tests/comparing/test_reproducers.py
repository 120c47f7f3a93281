"""Programs that show a difference without the user's model: what they hold, and that they show it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lib.comparing import Stack, compiled
from lib.plants import FAULTS, plant, plant_in_lowering
from lib.zoo.entries import DEFAULT, ENTRIES, Entry
from lib.zoo.sizes import DECODE
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fx
from mla_fx import cases
from mla_fx.comparing import culprit, reproduce, reproducer, verify
from mla_fx.comparing.reproduce import Like, like
from mla_fx.comparing.verify import Verification

pytestmark = pytest.mark.usefixtures("no_gradients", "own_temporary_folder")


def told(module, arguments, **options):
    """What verify says, and the reproducer that it names."""
    with pytest.raises(mla_fx.VerificationError) as caught:
        compiled(module, verify="first", **options)(*arguments)
    message = str(caught.value)
    return message, Path(re.search(r"`python (\S+)`", message)[1])


def status(file):
    """The exit status of a reproducer in this process."""
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(file), run_name="__main__")
    return end.value.code


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rule_shows_with_random_inputs(monkeypatch, capsys, tmp_path, fault):
    plant(monkeypatch, fault)
    message, file = told(Entry(DEFAULT).build(), Entry(DEFAULT).arguments(DECODE))
    assert message.endswith("shows the difference with random inputs")
    assert file.is_relative_to(tmp_path) and [*file.parent.iterdir()] == [file]
    monkeypatch.undo()
    assert status(file) == 1
    assert capsys.readouterr().out.startswith("what replaces ")


def test_the_sentence_and_the_program_are_about_one_layer(monkeypatch, tmp_path):
    plant(monkeypatch, "scale 1 % off", ".layers.1.")
    model = Stack(*(cases.Layer() for _ in range(3)))
    message, file = told(model, cases.inputs(), dump=tmp_path / "dump")
    assert re.search(
        r"call 1: in float64, where hardly anything rounds, output 0 of the fused graph is \d\S+ away from that of the "
        r"unfused one, relative to its largest element \(2 other results are wrong, too\); the limit is 1e-06\. The "
        r"first value to differ, by \d\S+, replaces bmm_3 \(\S+cases\.py:\d+\); it is computed by latent_attention in "
        r"layers\.1, mla_prolog in layers\.1, added by mla_attention, absorb, mla_prolog\. `python ",
        message,
    )
    assert file == tmp_path / "dump" / "reproducer_000" / "reproduce.py"
    text = file.read_text()
    assert text.count("mla_fx.attention(") == 1 and "# layers.1.kv_cache" in text
    assert not re.search(r"layers\.[02]\.\w+\n", text)
    weights = [f"{number:.9g}" for weight in model.state_dict().values() for number in weight.flatten().tolist()]
    assert not any(number in text for number in weights)


@pytest.mark.slow
def test_a_program_needs_only_its_folder_and_the_package(monkeypatch, tmp_path):
    plant(monkeypatch, "scale 5 % off")
    _, file = told(cases.Layer(), cases.inputs())
    (alone := tmp_path / "alone").mkdir()
    file.rename(alone / file.name)
    done = subprocess.run([sys.executable, file.name], cwd=alone, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.fullmatch(
        r"what replaces bmm_1: fused and unfused are 0\.0\d+ apart in float64, relative to the largest element\n"
        r"The limit is 1e-06\.\n",
        done.stdout,
    )


@pytest.mark.slow
def test_a_wrong_lowering_shows_where_it_is_compiled(monkeypatch, capsys):
    plant_in_lowering(monkeypatch)
    message, file = told(cases.Layer(), cases.inputs(), target="inductor")
    assert "lowered or compiled to, the nearest first: latent_attention, mla_prolog. `python" in message
    torch._dynamo.reset()
    assert status(file) == 1
    assert "output 0 of the compiled graph is" in capsys.readouterr().out
    monkeypatch.undo()
    torch._dynamo.reset()
    assert status(file) == 0
    assert reproduce.AGREE in capsys.readouterr().out


def test_a_difference_of_certain_numbers_does_not_show(capsys):
    """Both graphs are equal on all numbers but one, which random numbers do not hit."""
    given = torch.tensor([1.0, 2.0, 3.0])
    unfused = make_fx(lambda x: (x + 0,))(given)
    fused = make_fx(lambda x: (torch.where(x == 2, 0.0, x),))(given)
    with pytest.raises(mla_fx.VerificationError) as caught:
        Verification(unfused, fused, [], once=True).around(fused)(given)
    file = re.search(r"`python (\S+)` finds no difference with random inputs", str(caught.value))[1]
    assert status(file) == 0
    assert reproduce.AGREE in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_leaves_the_difference(monkeypatch, tmp_path):
    plant(monkeypatch, "scale 5 % off")
    (tmp_path / "file").touch()
    with pytest.raises(mla_fx.VerificationError, match=r"added by .* No reproducer could be written: \w+: "):
        monkeypatch.setattr(reproducer, "_new_folder", lambda dump: tmp_path / "file")
        compiled(cases.Layer(), verify="first")(*cases.inputs())


@pytest.mark.slow
@pytest.mark.parametrize("place", range(0, len(ENTRIES), 16))
def test_parts_of_right_graphs_agree_on_random_inputs(monkeypatch, place):
    """For each replaced value, what computes it in both graphs: no part leaves out what belongs together."""
    errors = []

    def checked(self, inputs):
        agreeing = {}
        for new, old in culprit._pairs(self.unfused, self.fused).items():
            found = culprit.Culprit(self.unfused, self.fused, new, old, 0.0, dict(agreeing))
            made = reproducer.of_rule("", [(*found.parts(), ["value"])], verify._values(inputs))
            unfused, fused = made.functions.values()
            errors.extend(reproduce.distances(unfused, fused, reproduce.drawn(made.inputs)))
            agreeing[new] = old
        return check_rules(self, inputs)

    check_rules = Verification._check_rules
    monkeypatch.setattr(Verification, "_check_rules", checked)
    entry = ENTRIES[place]
    compiled(entry.build(), verify="first")(*entry.arguments(entry.steps[-1]))
    assert errors and max(errors) < 1e-9


# --- random inputs ---------------------------------------------------------------------------------------------------

FLOATS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
TENSORS = {
    "weights": FLOATS,
    "transposed": FLOATS.T.bfloat16(),
    "expanded": FLOATS[:, :1].expand(4, 6),
    "number": torch.tensor(0.125),
    "scales": FLOATS.abs() + 1,
    "mask": FLOATS.masked_fill(FLOATS > 0, -torch.inf),
    "lowest": FLOATS.half().masked_fill(FLOATS > 0, torch.finfo(torch.float16).min),
    "complex": torch.polar(torch.ones(4, 6), FLOATS),
    "flags": FLOATS > 0,
    "positions": torch.arange(5, 9),
    "slots": torch.tensor([7, 3, 11, 5], dtype=torch.int32),
    "lengths": torch.tensor([0, 3, 3, 9]),
    "codes": (FLOATS * 40).to(torch.int8),
    "empty": FLOATS[:0],
}


def drawn(tensor):
    described = like(tensor)
    assert eval(repr(described), {"Like": Like, "torch": torch}) == described
    return described.draw(torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TENSORS)
def test_a_random_tensor_has_the_layout_of_the_other(name):
    tensor = TENSORS[name]
    new = drawn(tensor)
    assert (new.shape, new.stride(), new.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(new, tensor) == (name in ("number", "positions", "empty"))


def test_random_numbers_are_like_the_others():
    assert drawn(TENSORS["scales"]).min() >= 1
    assert 0 < drawn(TENSORS["mask"]).isinf().sum() < 24
    assert 0 < (drawn(TENSORS["lowest"]) == torch.finfo(torch.float16).min).sum() < 24
    assert drawn(TENSORS["slots"]).unique().numel() == 4
    assert drawn(TENSORS["slots"]).min() >= 3 and drawn(TENSORS["slots"]).max() <= 11
    assert drawn(TENSORS["lengths"]).diff().min() >= 0
    assert 0 < drawn(TENSORS["flags"]).sum() < 24


def test_numbers_that_are_no_tensors_are_kept():
    assert [like(value) for value in (3, 0.5, None)] == [3, 0.5, None]
