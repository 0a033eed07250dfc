"""`python -m venus.bench ig`, second part: what information gain takes of an IGPO step, scored
after the rollout in packed passes or during it.

The step is played: turns and observations have the lengths given, their contents are drawn by a
random model. Its parts are the real ones.
"""

import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

import torch

from venus.model.qwen3 import Qwen3, WeightedNLL
from venus.rl.info_gain import Cuts, score_ground_truth
from venus.rollout.noise import noise_key
from venus.rollout.sampler import Sampler, SamplingParams
from venus.train.backward import with_weights
from venus.train.batches import Document, pack

REPEATS = 3


def print_share(
    model: Qwen3,
    prompt: int,
    turns: Sequence[tuple[int, int]],
    prefix: int,
    answer: int,
    *,
    rows: int,
    seed: int,
    tolerance: float,
) -> None:
    """Play a step of `rows` trajectories both ways; print the seconds of every part and the share
    of information gain; exit 1 when values disagree.

    `turns`: tokens of each turn and its observation; prefix and answer in tokens, too. Scored at
    the question and after every turn but the last.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        return torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()

    observations = [observation for _, observation in turns]
    texts = [[draw(length) for length in (prompt, *observations)] for _ in range(rows)]
    scored_ids = draw(prefix), draw(answer)
    cuts = list(accumulate([prompt, *map(sum, turns[:-1])]))
    seconds: dict[str, list[float]] = {
        name: [] for name in ("rollout", "gain at rollout", "packed gain", "update")
    }
    for _ in range(REPEATS):
        documents, _, plain_steps, _ = roll_out(model, texts, turns, None)
        scored, at_rollout, steps, is_scoring = roll_out(model, texts, turns, scored_ids)
        seconds["rollout"].append(sum(plain_steps))
        seconds["gain at rollout"].append(extra_seconds(plain_steps, steps, is_scoring))
        items = [Cuts(document.ids, cuts, *scored_ids) for document in scored]
        packed = timed(seconds["packed gain"], score_ground_truth, model, items)
        timed(seconds["update"], update, model, with_weights(scored, "sequence"))
    if [d.ids for d in documents] != [d.ids for d in scored]:
        sys.exit("error: scoring during the rollout changed the ids that were sampled")
    print_parts(
        f"an IGPO step of {rows} trajectories, {len(turns)} turns, {len(scored[0].ids):,} tokens",
        {name: median(values) for name, values in seconds.items()},
    )
    error = (torch.tensor(at_rollout) - torch.tensor(packed)).abs().max().item()
    print(f"max |difference| {error:.1e} nats")
    if not error <= tolerance:
        sys.exit(
            f"error: values at rollout time differ from packed ones by {error} nats, more "
            f"than {tolerance}"
        )


def extra_seconds(plain: list[float], steps: list[float], is_scoring: list[bool]) -> float:
    """Sum how much longer the steps took that scored. They are those of `plain` but for the answers
    in some, and only these are compared: over all of them, noise would hide what is looked for.
    """
    pairs = zip(plain, steps, is_scoring, strict=True)
    return sum(scored - without for without, scored, scores in pairs if scores)


def print_parts(title: str, seconds: dict[str, float]) -> None:
    """Print the seconds of rollout and update, and the share of information gain in their step."""
    rollout, update = seconds["rollout"], seconds["update"]
    print(f"{title}; CPU seconds: rollout {rollout:.2f}, update {update:.2f}")
    for name, gain in (
        ("packed", seconds["packed gain"]),
        ("at rollout", seconds["gain at rollout"]),
    ):
        share = gain / (rollout + gain + update)
        goal = ""
        if name == "at rollout":
            goal = f" (goal 5 %: {'met' if share <= 0.05 else 'missed'})"
        print(f"information gain, {name:<11}{gain:7.2f} s {100 * share:5.1f} % of the step{goal}")


def timed(seconds: list[float], part, *args):
    """Append the CPU seconds of part(*args), and return its result. Of the wall's seconds a busy
    machine would take more than the gain does.
    """
    started = time.process_time()
    result = part(*args)
    seconds.append(time.process_time() - started)
    return result


def roll_out(
    model: Qwen3,
    texts: list[list[list[int]]],
    turns: Sequence[tuple[int, int]],
    scored: tuple[list[int], list[int]] | None,
) -> tuple[list[Document], list[list[float]], list[float], list[bool]]:
    """Sample all trajectories together: texts[row] are its prompt and observations. With `scored`,
    (prefix, answer), also the value at every cut.

    Returns trajectories, values, the CPU seconds of every step of the sampler
    and whether it scored.
    """
    capacity = sum(map(len, texts[0])) + sum(turn for turn, _ in turns)
    capacity += sum(map(len, scored or ()))
    sampler = Sampler(model, SamplingParams(()), num_slots=len(texts), capacity=capacity)
    ids, masks, values = ([[] for _ in texts] for _ in range(3))
    seconds, is_scoring = [], []

    def feed(slot: int, text: list[int], number: int) -> None:
        fed = ids[slot][-1:] + text
        ids[slot] += text
        masks[slot] += [0.0] * len(text)
        key = noise_key("share", slot, number)
        sampler.feed(slot, fed, budget=turns[number][0], key=key)
        if scored:
            sampler.score(slot, scored[0], [scored[1]], values[slot].extend)

    number = [0] * len(texts)
    for text in texts:
        feed(sampler.open(), text[0], 0)
    while sampler.rows:
        num_scored = sampler.num_scored
        generations = timed(seconds, sampler.step)
        is_scoring.append(sampler.num_scored > num_scored)
        for generation in generations:
            slot = generation.slot
            ids[slot] += generation.ids
            masks[slot] += [1.0] * len(generation.ids)
            number[slot] += 1
            if number[slot] < len(turns):
                feed(slot, texts[slot][number[slot]], number[slot])
    documents = [Document(row, {"mask": mask}) for row, mask in zip(ids, masks, strict=True)]
    return documents, values, seconds, is_scoring


def update(model: Qwen3, documents: list[Document]) -> None:
    """Forward and backward over every trajectory."""
    model.requires_grad_(True)
    for document in documents:
        packed = pack([document])
        loss = WeightedNLL(packed.fields["weights"])
        model.token_loss(
            packed.ids_1N,
            packed.targets_1N,
            loss=loss,
            positions_BS=packed.positions_1N,
            layout=packed.layout,
        ).loss.backward()
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
