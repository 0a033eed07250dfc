"""Raw agent trajectories to SFT rows in four steps, with a reason for every turn and row that goes.

    python -m venus.clean --input RAW.jsonl --output DIR --judge match --tokenizer MODEL_DIR

1 alignment    roles, calls and observations in our protocol (`align`); turns the strict checker
               rejects go, the last answer is repaired
2 pruning      turns with other tools, and repeats of a search or visit that has succeeded before
3 correctness  the final answer against the ground truth: a model, the offline matcher, or none;
               rows without verdict lie apart
4 resampling   long trajectories several times an epoch, as a `weight`; the validation split is by
               question and comes before it

Between 2 and 3 rows are measured with the tokenizer. Everything that went is a line of
removed.jsonl: {row, lost: row | turn, turn, reason}. Rows: not_json no_messages bad_message
bad_role no_question second_question question_mismatch no_turns ends_with_user answer_before_end
no_final_answer no_ground_truth disallowed_tool overlong incorrect judge_error, or what the checker
says of the last turn. Turns: disallowed_tool duplicate no_observation orphan_observation overlong,
or what the checker says (`protocol.parse_action`).
"""

import functools
import hashlib
import json
import os
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

from tqdm import tqdm

from venus import protocol
from venus.cli import option
from venus.curation.align import RefusedError, Step, align
from venus.curation.formats import MAX_LENGTH
from venus.curation.pipeline import STATE, Journal, in_order
from venus.curation.prune import Account, drop, keep_valid, prune
from venus.files import aliases_of, count_lines, decode, raw_rows, row_files, write_json
from venus.grading.judge import Case, Judge, JudgeOptions, open_judge, parse_judge
from venus.grading.verdicts import PROMPTS, Verdict
from venus.protocol import ProtocolOptions
from venus.runlog import save_run
from venus.tokenizer import ChatTokenizer
from venus.tools.options import Keys

STEPS = ("read", "aligned", "pruned", "fitting", "correct")
# and what was mended
LOSSES = (
    "dropped_rows",
    "dropped_turns",
    "dropped_observations",
    "pruned_calls",
    "duplicates",
    "repairs",
)
FILES = ("train.jsonl", "validation.jsonl", "removed.jsonl", "judge_errors.jsonl")
# while a pass runs: what --materialise appends to train.jsonl at its end
COPIES = "copies-{}.jsonl"
CHUNK = 16  # rows that a worker gets at a time


@dataclass(frozen=True)
class CleanConfig(ProtocolOptions, JudgeOptions):
    """What is cleaned, and how."""

    input: tuple[str, ...] = option(
        help="raw trajectories: .json, .jsonl and .parquet files and directories of them"
    )
    output: str = option(
        help="directory to write: train.jsonl, validation.jsonl, removed.jsonl, "
        "judge_errors.jsonl, stats.json, run.json"
    )
    disallowed: str = option(
        "drop-turn",
        group="pruning",
        help="what goes with another tool than search and visit",
        choices=("drop-turn", "drop-trajectory"),
    )
    goal_in_signature: bool = option(
        False, help="a visit to the same page with another goal is no duplicate"
    )
    tokenizer: str | None = option(
        None,
        group="length",
        help="tokenizer.json or a directory with it; without one, lengths are neither counted nor "
        "limited",
    )
    max_length: int = option(MAX_LENGTH, help="longest row kept", unit="tokens", least=1)
    overlong: str = option(
        "drop",
        help="longer rows: drop, or cut the last turns before the answer",
        choices=("drop", "cut"),
    )
    judge: str = option(
        "match",
        group="correctness",
        help="openai:BASE_URL:MODEL (key: JUDGE_API_KEY or OPENAI_API_KEY), match (offline: "
        "equal, or contained), em (equal) or none",
    )
    verdicts: str | None = option(
        None, help="file of the cached verdicts (absent: OUTPUT.verdicts.jsonl)"
    )
    turn_limits: tuple[int, ...] = option(
        (50, 100),
        group="resampling and split",
        help="most turns of each bucket but the last",
        unit="turns",
    )
    copies: tuple[int, ...] = option(
        (1, 2, 5), help="how often a row of each bucket stands in an epoch"
    )
    materialise: bool = option(
        False, help="write the copies into train.jsonl, in as many passes, instead of a weight"
    )
    validation: float = option(
        0.02,
        help="share of the questions that go to validation.jsonl, once each",
        least=0,
        below=1,
    )
    seed: int = option(0, help="seed of the split", least=0)
    workers: int = option(0, group="run", help="processes; 0: one per core", least=0)

    def validate(self) -> None:
        """ValueError for settings that fit no data or each other."""
        super().validate()
        parse_judge(self.judge)
        if not self.input:
            raise ValueError("--input: give a file or a directory")
        if (
            len(self.copies) != len(self.turn_limits) + 1
            or sorted(set(self.turn_limits)) != list(self.turn_limits)
            or min(self.copies) < 1
        ):
            raise ValueError(
                f"turn_limits {self.turn_limits} must rise, and copies {self.copies} be one "
                "more, each at least 1"
            )


def clean_chunk(cfg: CleanConfig, chunk: Sequence[tuple[str, object]]) -> list[Account]:
    """Clean rows, (place, row or its undecoded bytes) each, all but the judge's part. No content
    of a row is an error.
    """
    return [clean_row(cfg, where, row) for where, row in chunk]


def clean_row(cfg: CleanConfig, where: str, row: object) -> Account:
    """Take one row through all steps but the judge; a row that falls out has no lines."""
    account = Account(where)
    account.reach("read", 0)
    try:
        row = decode_row(row)
        account.counts["turns/read"] = sum(
            isinstance(message, dict) and message.get("role") == "assistant"
            for message in row["messages"]
        )
        conversation = align(row)
        steps = keep_valid(conversation, account)
        account.reach("aligned", len(steps))
        steps = prune(
            steps,
            account,
            drop_trajectory=cfg.disallowed == "drop-trajectory",
            with_goal=cfg.goal_in_signature,
        )
        account.reach("pruned", len(steps))
        aliases = tuple(aliases_of(conversation.gt))
        if cfg.judge != "none" and not aliases:
            raise RefusedError("no_ground_truth")
        if cfg.tokenizer:
            steps = measure(cfg, conversation.question, steps, account)
        account.reach("fitting", len(steps))
    except RefusedError as refusal:
        account.lose("row", refusal.turn, refusal.reason)
        return account
    question = conversation.question
    messages = to_messages(cfg, question, steps)
    clean = {"question": question, "gt": conversation.gt, "messages": messages}
    resample(cfg, account, clean, len(steps), row.get("copy"))
    if cfg.judge != "none":
        account.case = Case(question, aliases, steps[-1].action.answer)
    return account


def decode_row(row: object) -> dict:
    """Return a row with a list of messages, parsed if need be."""
    try:
        row = decode(row, "row") if isinstance(row, bytes) else row
    except ValueError:
        raise RefusedError("not_json") from None
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise RefusedError("no_messages")
    return row


def to_messages(cfg: CleanConfig, question: str, steps: Sequence[Step]) -> list[dict]:
    """Write the conversation in our protocol: [system, question, turn, observation,
    .., last turn].
    """
    messages = [
        {"role": "system", "content": protocol.system_prompt(cfg.system_prompt, cfg.date)},
        {"role": "user", "content": question},
    ]
    for step in steps:
        responses = "\n".join(
            protocol.RESPONSE_OPEN + protocol.observation_text(body) + protocol.RESPONSE_CLOSE
            for body in (step.body, step.notice)
            if body is not None
        )
        messages.append({"role": "assistant", "content": step.content})
        messages.append({"role": "user", "content": responses})
    return messages[:-1]


load_tokenizer = functools.cache(ChatTokenizer)  # once per process


def measure(cfg: CleanConfig, question: str, steps: list[Step], account: Account) -> list[Step]:
    """Count the tokens of a row. One that is too long is refused, or loses so many of the turns
    before its answer that it fits.
    """
    encoded = load_tokenizer(cfg.tokenizer).encode_messages(to_messages(cfg, question, steps))
    num_tokens, spans = len(encoded.ids), encoded.spans
    if num_tokens > cfg.max_length:
        answer = num_tokens - spans[-1][0]  # a turn's place depends on what lies before it only
        fitting = [k for k in range(1, len(steps)) if spans[k][0] + answer <= cfg.max_length]
        if cfg.overlong == "drop" or not fitting:
            raise RefusedError("overlong")
        last = fitting[-1]
        num_tokens = spans[last][0] + answer
        for step in steps[last:-1]:
            drop(step, (), account, "overlong")
        steps, spans = [*steps[:last], steps[-1]], [*spans[:last], spans[-1]]
    num_loss = sum(end - start for start, end in spans)
    account.kept_counts.update({"tokens/all": num_tokens, "tokens/loss": num_loss})
    return steps


def resample(cfg: CleanConfig, account: Account, row: dict, num_turns: int, copy: object) -> None:
    """Note the lines of a row that has passed all but the judge, and its weight, in place. A copy
    made by an earlier run (`copy` is its number) stays one copy.
    """
    digest = hashlib.sha256(f"{cfg.seed}\n{row['question']}".encode()).digest()
    split = "validation" if int.from_bytes(digest[:8]) < cfg.validation * 2**64 else "train"
    bucket = bisect_left(cfg.turn_limits, num_turns)
    is_copy = type(copy) is int
    weight = 1 if split == "validation" or is_copy else cfg.copies[bucket]
    if cfg.materialise and split == "train" and not is_copy:
        names = ["train.jsonl", *map(COPIES.format, range(1, weight))]
        account.lines = [(name, _line({**row, "copy": k})) for k, name in enumerate(names)]
    else:
        row = {**row, "copy": copy} if is_copy else {**row, "weight": weight}
        account.lines = [(f"{split}.jsonl", _line(row))]
    account.kept_counts.update(
        {
            "rows/correct": 1,
            "turns/correct": num_turns,
            f"{split}/rows": 1,
            f"{split}/instances": weight,
            f"buckets_before/{bucket}": 1,
            f"buckets_after/{bucket}": weight,
        }
    )


def _line(obj: dict) -> str:
    return json.dumps(obj, ensure_ascii=False) + "\n"


def main(cfg: CleanConfig, keys: Keys) -> None:
    """Clean all rows of the input in one pass, or go on with an interrupted one, and put the
    result in place whole.
    """
    out, partial = Path(cfg.output), Path(f"{cfg.output}.partial")
    files = [file for path in cfg.input for file in row_files(path)]
    settings = asdict(cfg)
    for name in ("output", "workers", "judge_calls", "verdicts"):
        del settings[name]  # they change no row
    settings["files"] = [
        [str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files
    ]
    if out.exists() and any(out.iterdir()):
        raise ValueError(
            f"{out} is not empty: an earlier result, or something else; give another "
            "--output or remove it"
        )
    if cfg.tokenizer:
        load_tokenizer(cfg.tokenizer)  # a wrong path fails here, in one line
    copies = [COPIES.format(k) for k in range(1, max(cfg.copies))] if cfg.materialise else []
    verdicts = Path(cfg.verdicts or f"{cfg.output}.verdicts.jsonl")
    with (
        open_judge(cfg.judge, keys.judge, verdicts, cfg.judge_calls) as judge,
        closing(Journal(partial, [*FILES, *copies], settings)) as journal,
    ):
        clean_files(cfg, files, judge, journal)
        stats = summary(cfg, journal)
    for name in copies:
        with open(partial / "train.jsonl", "ab") as train, open(partial / name, "rb") as more:
            shutil.copyfileobj(more, train)
    write_json(partial / "stats.json", stats)
    save_run(cfg, partial, judge=stats["judge"], files=settings["files"], rows=stats["rows"])
    for name in (STATE, *copies):
        (partial / name).unlink()
    if out.exists():
        out.rmdir()  # it is empty, see above
    os.replace(partial, out)
    print_table(stats)


def clean_files(cfg: CleanConfig, files: Sequence[Path], judge: Judge, journal: Journal) -> None:
    """Clean the rows that the journal does not have yet: workers do the steps, this process asks
    the judge and writes, in order.
    """
    rows = islice(chain.from_iterable(map(raw_rows, files)), journal.done, None)
    chunks = iter(lambda: list(islice(rows, CHUNK)), [])
    total, num_workers = sum(map(count_lines, files)), cfg.workers or os.cpu_count() or 1
    with tqdm(desc="clean", unit="row", total=total, initial=journal.done, disable=None) as bar:
        for chunk in in_order(functools.partial(clean_chunk, cfg), chunks, num_workers):
            verdicts = iter(judge([account.case for account in chunk if account.case]))
            for account in chunk:
                record(journal, account, next(verdicts) if account.case else None)
            journal.done += len(chunk)
            journal.save(every=1.0)
            bar.update(len(chunk))
    journal.save()


def record(journal: Journal, account: Account, verdict: Verdict | None) -> None:
    """Step 3: write a row where its verdict (None: not judged) sends it, and what went."""
    if verdict is not None and verdict.verdict != "correct":
        if verdict.verdict == "error":
            account.lose("row", None, "judge_error", error=verdict.error)
            account.lines = [("judge_errors.jsonl", account.lines[0][1])]
        else:
            account.lose("row", None, "incorrect")
            account.lines = []
        account.kept_counts.clear()
    journal.counts.update(account.counts + account.kept_counts)
    for name, line in account.lines:
        journal.write(name, line)
    for removed in account.removed:
        journal.write("removed.jsonl", _line(removed))


def summary(cfg: CleanConfig, journal: Journal) -> dict:
    """Make stats.json of the counts, which account for every row exactly once."""
    tables: dict[str, dict[str, int]] = {}
    for key, count in sorted(journal.counts.items()):
        table, _, name = key.partition("/")
        tables.setdefault(table, {})[name] = count
    assert (
        journal.done
        == journal.counts["rows/read"]
        == journal.counts["rows/correct"] + sum(tables.get("dropped_rows", {}).values())
    )
    limits = cfg.turn_limits
    labels = [f"{low + 1}-{high}" for low, high in zip((0, *limits), limits, strict=False)]
    labels.append(f">{limits[-1]}" if limits else "all")
    buckets = {
        when: {label: journal.counts[f"buckets_{when}/{k}"] for k, label in enumerate(labels)}
        for when in ("before", "after")
    }
    judge = {"name": cfg.judge}
    if endpoint := parse_judge(cfg.judge):
        base_url, model = endpoint
        prompt_hash = PROMPTS["browsecomp"].hash
        judge = dict(name="openai", base_url=base_url, model=model, prompt_hash=prompt_hash)
    return {
        "rows": {step: journal.counts[f"rows/{step}"] for step in STEPS},
        "turns": {step: journal.counts[f"turns/{step}"] for step in STEPS},
        **{name: tables.get(name, {}) for name in LOSSES},
        "turn_buckets": buckets,
        "train": tables.get("train", {"rows": 0, "instances": 0}),
        "validation": tables.get("validation", {"rows": 0, "instances": 0}),
        "tokens": tables.get("tokens") if cfg.tokenizer else None,
        "judge": judge,
        "seconds": journal.seconds,
    }


def print_table(stats: dict) -> None:
    """Print what stats.json holds."""
    print(f"{'':12}{'rows':>12}{'turns':>12}")
    for step in STEPS:
        print(f"{step:12}{stats['rows'][step]:12,}{stats['turns'][step]:12,}")
    for name in LOSSES:
        losses = ", ".join(f"{reason} {count:,}" for reason, count in stats[name].items())
        print(f"{name.replace('_', ' ')}: {losses or 'none'}")
    for when, buckets in stats["turn_buckets"].items():
        rows = ", ".join(f"{label}: {count:,}" for label, count in buckets.items())
        print(f"rows by turns {when} resampling: {rows}")
    train, validation = stats["train"], stats["validation"]
    tokens = "tokens not counted"
    if counts := stats["tokens"]:
        tokens = f"{counts['all']:,} tokens, {counts['loss']:,} of them loss tokens"
    print(
        f"train {train['rows']:,} rows, {train['instances']:,} an epoch; "
        f"validation {validation['rows']:,} rows"
    )
    print(f"{tokens}; judge {stats['judge']['name']}; {stats['seconds']:.1f} s")
