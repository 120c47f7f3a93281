"""Setup of every test: one thread, nothing compiled before, its own caches; slower tiers on request."""

import collections
import gc
import os
import tempfile
import zlib
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # each process would first try the C++ compiler for seconds

import pytest
import torch
import torch._functorch.config
from functorch.compile import make_boxed_func
from lib import layers, outcomes
from lib.sources import ROOT
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE

from mla_fx.comparing import plans, region
from mla_fx.ops.common import machine
from mla_fx.passes import prove

TIERS = {"slow": "takes seconds, and runs in CI", "campaign": "takes minutes"}
MANY = 6  # slow cases of one test; if there are more, a quarter of them runs
QUARTER = (0, 3, 6)  # of twelve
ABOUT_GRAPHS = ("patterns", "readings", "soundness")  # folders of tests
IS_STARTED_BY_A_TEST = "PYTEST_CURRENT_TEST" in os.environ


def pytest_addoption(parser):
    for tier, what in TIERS.items():
        parser.addoption(f"--{tier}", action="store_true", help=f"run tests marked {tier}, too: each {what}")
    parser.addoption("--every", action="store_true", help=f"run every slow case, also of tests with more than {MANY}")
    parser.addoption("--sweep", type=int, default=4, help="how many models test_sweep.py draws")
    parser.addoption("--real-sizes", type=int, default=4, help="how many layers test_real_sizes.py draws")
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="fuzz with N mutants, not one of each layer")
    parser.addoption("--fuzz-seed", type=int, default=0, metavar="S", help="the seed from which mutants are drawn")


def pytest_configure(config):
    for found in map(find_spec, ("mla_fx.patterns", "mla_fx.lowering")):  # None where nothing is installed
        for folder in found.submodule_search_locations if found is not None else ():
            if ROOT not in Path(folder).parents:  # the install of another checkout
                raise pytest.UsageError(f"{folder} is not of {ROOT}: run `pip install -e .` there")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Dynamo times the guards of each graph, and flushes the processor's caches before that, which takes 20 ms
    torch._dynamo.guards.profile_guard_manager = lambda *given: 0.0


def pytest_collection_modifyitems(config, items):
    left_out = [tier for tier in TIERS if not config.getoption(tier)]
    dropped = {item for item in items if any(item.get_closest_marker(tier) for tier in left_out)}
    if not config.getoption("--every") and not config.getoption("--campaign"):
        dropped |= three_quarters_of_many(item for item in items if item not in dropped)
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def three_quarters_of_many(items):
    """The slow cases that do not run of each test with many. Their names decide, so the same run every time."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("every"):
            cases[item.nodeid.partition("[")[0]].append(item)
    large = [case for each in cases.values() if len(each) > MANY for case in each]
    return {case for case in large if zlib.crc32(case.nodeid.encode()) % 12 not in QUARTER}


def pytest_collection_finish():
    gc.freeze()  # the tests and what they import stay: a million objects that each full collection would visit


def pytest_unconfigure():
    gc.unfreeze()  # Triton complains of what is left when Python ends


@pytest.fixture(scope="session", autouse=True)
def inductor_cache(tmp_path_factory):
    """One cache folder for all processes of a run: nothing compiled earlier by other code is found in it."""
    with pytest.MonkeyPatch.context() as patch:
        if not IS_STARTED_BY_A_TEST:
            folder = tmp_path_factory.getbasetemp()
            run = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(run / "inductor"))
        # its key is a hash of sources, and does not change when a test patches the compiler
        patch.setattr(torch._functorch.config, "enable_autograd_cache", False)
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fast_bfloat16(monkeypatch):
    """What a call is lowered to is the same on all machines."""
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: True)


@pytest.fixture(autouse=True)
def interpreted(request, monkeypatch):
    """Tests of what is in a graph run Inductor's, lowered, operator by operator: its C++ compiler would take most of
    their time. These are the tests of some folders and those marked `interpreted`, but those marked `compiled`; with
    --campaign, all compile."""
    has_mark = request.node.get_closest_marker
    layers.Rewritten.compiles = bool(has_mark("compiled")) or request.config.getoption("--campaign")
    is_about_graphs = request.path.parent.name in ABOUT_GRAPHS or has_mark("interpreted")
    if is_about_graphs and not has_mark("compiled") and not request.config.getoption("--campaign"):
        from mla_fx.lowering import inductor

        monkeypatch.setattr(inductor, "compile_fx_inner", lambda gm, inputs, **_: make_boxed_func(gm.forward))


@pytest.fixture(autouse=True)
def refuted(request, monkeypatch):
    """Rewrites that the option prove found wrong, and errors in it. That fails a test, if it is not about them."""
    found = []

    def difference(plan):
        try:
            result = plans.difference(plan)
        except region.UncheckedError:
            raise
        except Exception as error:
            found.append(error)
            raise
        found.extend([] if result is None else [result])
        return result

    monkeypatch.setattr(prove, "difference", difference)
    yield found
    assert request.node.get_closest_marker("refutes") or not found, found


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def own_temporary_folder(monkeypatch, tmp_path):
    """Reproducers without a dump folder are written where pytest cleans up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def decode():
    """A layer of latent attention and the arguments of a decode step."""
    return Entry(DEFAULT).build(), Entry(DEFAULT).arguments(DECODE)


@pytest.fixture
def outcome(request):
    """Compares what fused, and why the rest did not, with what was accepted for this test."""
    test = request.node.nodeid.removeprefix("tests/")
    return lambda report: outcomes.check(test, report)
