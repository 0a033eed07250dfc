"""`python -m venus.bench step`: one SFT step, forward and backward, against transformers with a
plain cross-entropy and the same weights.

Each side runs in processes of its own, in turn, so that one's memory is not the other's and a noisy
machine disturbs both. At the default length
transformers' side takes 16 GB. Shapes: B rows  S sequence.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from venus.cli import Options, option
from venus.curation.formats import encode_rows
from venus.model.qwen3 import RECOMPUTE, Qwen3, Qwen3Config, WeightedNLL, set_recompute
from venus.model.weights import load_model, save_model
from venus.runlog import machine
from venus.tokenizer import ChatTokenizer
from venus.train.backward import with_weights
from venus.train.batches import Document, pack
from venus.trajectory import span_mask

# the real vocabulary: where a small model's memory goes
STEP_SHAPE = Qwen3Config(151_936, 256, 768, 4, 4, 2, 64, 1e-6, 5e6, 262_144, True, "float32")
SIDES = ("venus", "transformers")
# of the gradients' norms, tensor by tensor: fp32 sums over 8 K tokens in two orders
TOLERANCE = 1e-4


@dataclass(frozen=True)
class StepConfig(Options):
    """What is trained on."""

    data: str | None = option(
        None,
        group="rows",
        help="SFT rows, the first two of which are taken; default: random ids with a released "
        "row's turns",
    )
    tokenizer: str = option(
        "tokenizer.json", help="tokenizer file or a directory with it; read for --data only"
    )
    length: int = option(4096, help="both rows are cut to this length", unit="tokens", least=2)
    recompute: str = option(
        "off", group="run", help="what our side does about activations", choices=RECOMPUTE
    )
    repeats: int = option(2, help="processes of every side", unit="runs", least=1)
    seed: int = option(0, help="seed of weights and ids", least=0)


def step(cfg: StepConfig, released_turns: tuple[int, tuple[tuple[int, int], ...]]) -> None:
    """Run both sides in turn; print seconds, memory and ratios. `released_turns`: prompt length and
    (turn, observation) lengths used without --data.
    """
    documents = with_weights(
        real_rows(cfg) if cfg.data else random_rows(cfg, *released_turns), "token"
    )
    model = Qwen3(STEP_SHAPE)
    model.init_weights(cfg.seed)
    tokens = sum(len(d.ids) for d in documents)
    trained = sum(int(d.per_token["mask"].sum()) for d in documents)
    print(f"{machine()}; {torch.get_num_threads()} threads")
    print(
        f"random Qwen3, {sum(p.numel() for p in model.parameters()):,} parameters, fp32; "
        f"{tokens:,} tokens, {trained:,} with loss; forward and backward"
    )
    results: dict[str, list[dict]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, directory)
        torch.save(
            [(d.ids, d.per_token["weights"]) for d in documents], Path(directory) / "rows.pt"
        )
        for side in SIDES * cfg.repeats:
            command = [sys.executable, "-m", "venus.bench.step", side, directory, cfg.recompute]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=Path(__file__).parents[2]
            )
            if done.returncode:
                sys.exit(f"error: the side {side} failed: {done.stderr.strip().splitlines()[-1]}")
            results[side].append(json.loads(done.stdout.splitlines()[-1]))
        ours, theirs = (load_file(Path(directory) / f"{side}.safetensors") for side in SIDES)
    for side, runs in results.items():
        print(
            f"{side:<14}{median(run['seconds'] for run in runs):8.2f} s, "
            f"{median(run['bytes'] for run in runs) / 2**20:8,.0f} MiB above the inputs"
        )
    for name, unit, goal in (("time", "seconds", 0.6), ("memory", "bytes", 0.4)):
        ratio = median(
            ours[unit] / theirs[unit] for ours, theirs in zip(*results.values(), strict=True)
        )
        print(
            f"{name}: {ratio:.2f}x of transformers' (goal {goal}x: "
            f"{'met' if ratio <= goal else 'missed'})"
        )
    check(ours, theirs, [runs[-1]["loss"] for runs in results.values()])


def check(ours: dict[str, Tensor], theirs: dict[str, Tensor], losses: list[float]) -> None:
    """Print how far the gradients are apart; exit 1 when that is too far for one tensor, or when
    the tensors are not the same.
    """
    if ours.keys() != theirs.keys():
        sys.exit(f"error: gradients of different tensors: {sorted(ours.keys() ^ theirs.keys())}")
    errors = {
        name: ((ours[name] - grad).norm() / grad.norm()).nan_to_num(nan=torch.inf).item()
        for name, grad in theirs.items()
    }
    worst = max(errors, key=errors.get)
    print(
        f"loss {losses[0]:.6f} and {losses[1]:.6f}; {len(errors)} gradients, the furthest "
        f"apart is {worst}: {errors[worst]:.1e} of its norm"
    )
    if errors[worst] > TOLERANCE:
        sys.exit(
            f"error: the gradients of {worst} differ by {errors[worst]:.1e} of their norm, "
            f"more than {TOLERANCE}"
        )


def real_rows(cfg: StepConfig) -> list[Document]:
    """The first two rows, cut; ValueError when there are fewer or one has no loss so early."""
    documents = []
    for _, encoded in encode_rows(cfg.data, ChatTokenizer(cfg.tokenizer)):
        documents.append(cut_row(cfg, encoded.ids, encoded.spans))
        if len(documents) == 2:
            return documents
    raise ValueError(f"{cfg.data}: {len(documents)} rows; two are needed")


def cut_row(cfg: StepConfig, ids: list[int], spans: list[tuple[int, int]]) -> Document:
    """A row of at most `length` tokens with loss on the spans."""
    mask = torch.tensor(span_mask(spans, len(ids)), dtype=torch.float32)
    return Document(ids[: cfg.length], {"mask": mask[: cfg.length]})


def random_rows(cfg: StepConfig, prompt: int, turns: tuple[tuple[int, int], ...]) -> list[Document]:
    """Two rows of random ids with loss on the turns."""
    starts = accumulate([prompt, *map(sum, turns)])
    spans = [(start, start + turn) for start, (turn, _) in zip(starts, turns, strict=False)]
    generator = torch.Generator().manual_seed(cfg.seed)
    size = (min(prompt + sum(map(sum, turns)), cfg.length),)
    ids = (torch.randint(STEP_SHAPE.vocab_size, size, generator=generator) for _ in range(2))
    return [cut_row(cfg, row.tolist(), spans) for row in ids]


# ---- in a process of its own


def venus_side(directory: str, documents: list[Document], recompute: str):
    """The model and a function that returns the loss of a forward over the rows, packed."""
    model = load_model(directory, dtype=torch.float32)
    set_recompute(model, recompute)
    packed = pack(documents)
    loss = WeightedNLL(packed.fields["weights"])
    return (
        model,
        lambda: (
            model.token_loss(
                packed.ids_1N,
                packed.targets_1N,
                loss=loss,
                positions_BS=packed.positions_1N,
                layout=packed.layout,
            ).loss
        ),
    )


def transformers_side(directory: str, documents: list[Document], _recompute: str):
    """The same of a padded batch: a causal model needs no mask for padding behind its rows, and a
    cross-entropy over all logits ignores it.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids_BS = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(document.ids) for document in documents], batch_first=True
    )
    weights_BS = torch.nn.utils.rnn.pad_sequence(
        [document.per_token["weights"] for document in documents], batch_first=True
    )
    targets = ids_BS[:, 1:].masked_fill(weights_BS[:, 1:] == 0, -100).flatten()
    return model, lambda: F.cross_entropy(
        model(ids_BS[:, :-1], use_cache=False).logits.flatten(0, 1), targets
    )


def child(side: str, directory: str, recompute: str) -> None:
    """Two steps, the first of which warms up; print the seconds of the second, the peak of the
    resident memory above the inputs and the loss.
    """
    documents = [
        Document(ids, {"weights": weights})
        for ids, weights in torch.load(Path(directory) / "rows.pt")
    ]
    model, forward = {"venus": venus_side, "transformers": transformers_side}[side](
        directory, documents, recompute
    )
    torch.randn(64, 64) @ torch.randn(64, 64)  # the library's own buffers are no part of any side
    status = Path("/proc/self/status")
    resident = lambda word: 1024 * int(status.read_text().split(word)[1].split()[0])  # noqa: E731
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    before = resident("VmRSS:")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        loss = forward()
        loss.backward()
        seconds = time.perf_counter() - started
    print(
        json.dumps({"seconds": seconds, "bytes": resident("VmHWM:") - before, "loss": loss.item()})
    )
    save_file(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        Path(directory) / f"{side}.safetensors",
    )


if __name__ == "__main__":
    child(*sys.argv[1:])
