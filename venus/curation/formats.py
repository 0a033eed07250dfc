"""SFT rows in the released form {question, gt, messages, weight?}: reading, converting, counting;
and question sets of others in our form.

    python -m venus.data stats PATH --tokenizer PATH
        per file, what the rows hold
    python -m venus.data questions PATH.. --output FILE
        {problem, answer}, the released RL schema or our JSONL -> our JSONL
"""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from venus import protocol
from venus.cli import Options, option
from venus.files import aliases_of, row_files, rows_of, write_jsonl
from venus.tokenizer import ChatTokenizer, Encoded
from venus.trajectory import Outcome, Question, Trajectory, Turn

MAX_LENGTH = 200_000  # tokens of an SFT row, as in the paper
COLUMNS = ("rows", "turns", "searches", "visits", "tokens", "loss tokens", "strict-valid")


def _checked(where: str, row: object) -> dict:
    """Return the row with `question` (default: the first user message) and `gt` (None = unlabelled)
    filled in; ValueError at `where`.
    """
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError(f"{where}: not an SFT row: no list 'messages'")
    messages = (m for m in row["messages"] if isinstance(m, dict) and m.get("role") == "user")
    row = {"question": next(messages, {}).get("content"), "gt": None, **row}
    weight = row.get("weight", 1.0)
    if not isinstance(row["question"], str) or not isinstance(row["gt"], str | list | None):
        raise ValueError(f"{where}: question must be a string and gt a string or a list of strings")
    if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
        raise ValueError(f"{where}: weight must be a number >= 0, not {weight!r}")
    return row


def encode_rows(
    path: str | os.PathLike, tokenizer: ChatTokenizer
) -> Iterator[tuple[dict, Encoded]]:
    """Yield the SFT rows of a file or directory (in name order) with their encodings; ValueError
    names file and line of a bad row.
    """
    for file in row_files(path):
        for where, raw in rows_of(file):
            row = _checked(where, raw)
            try:
                encoded = tokenizer.encode_messages(row["messages"])
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            yield row, encoded


def load_rows(path: str | os.PathLike) -> list[dict]:
    """Read SFT rows from a .json, .jsonl or .parquet file or a directory of them (in name order);
    ValueError names file and line.
    """
    return [_checked(where, row) for file in row_files(path) for where, row in rows_of(file)]


def from_messages(row: dict, tokenizer: ChatTokenizer) -> Trajectory:
    """Make a Trajectory of a released row, as if an agent had rolled it out; log_probs are absent,
    the outcome is not graded.

    tool_status is None except for recognisable time-outs; question_id is a hash of the question.
    ValueError for bad messages.
    """
    encoded = tokenizer.encode_messages(row["messages"])
    texts = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    # the first observation: [system,] question, turn, observation
    first = len(row["messages"]) - 2 * len(texts) + 2
    observations = [message["content"] for message in row["messages"][first::2]]
    prediction = protocol.extract_prediction(texts[-1])
    gt = row.get("gt") or []
    digest = hashlib.sha256(row["question"].encode("utf-8", "surrogatepass")).hexdigest()
    return Trajectory(
        run="released",
        question_id=digest[:12],
        sample=row.get("sample_idx", 0),
        seed=0,
        question=row["question"],
        ground_truth=(gt,) if isinstance(gt, str) else tuple(gt),
        prompt_len=encoded.prompt_len,
        token_ids=encoded.ids[: encoded.spans[-1][1]],
        log_probs=[],
        turns=_turns(encoded.spans, texts, [*observations, ""]),
        prediction=prediction,
        outcome=Outcome(None, "ok"),
        stop_reason="answered" if prediction else "no_answer",
        seconds={"model": 0.0, "tool": 0.0},
        manifest={"source": "released"},
    )


def _turns(
    spans: Sequence[tuple[int, int]], texts: Sequence[str], observations: Sequence[str]
) -> list[Turn]:
    """Make the turns of a row, as many as there are spans, texts and observations. A call is a
    duplicate when it was made before and did not time out.
    """
    turns, seen = [], set()
    obs_ends = [*(start for start, _ in spans[1:]), spans[-1][1]]  # nothing follows the last turn
    rows = zip(spans, obs_ends, texts, observations, strict=True)
    for (start, end), obs_end, text, observation in rows:
        action = protocol.parse_action(text)
        status, duplicate = None, False
        if action.kind in ("search", "visit"):
            body, *_ = protocol.split_observation(observation) or [""]
            signature = protocol.call_signature(action)
            duplicate = signature in seen
            if protocol.is_timeout(body):
                status = "timeout"
            else:
                seen.add(signature)
        call = action.kind, status, action.arguments, duplicate
        turns.append(Turn(start, end, obs_end, *call, format_ok=action.format_ok))
    return turns


# How DR-Venus's and Tongyi's runners name the end of a rollout. "No answer found after 2h30mins",
# of the latter, holds its limit and stands apart.
TERMINATIONS = {
    "answered": "answered",
    "answer": "answered",
    "answer not found": "no_answer",
    "max_steps": "turn_limit",
    "answered_max_steps": "turn_limit",
    "exceed available llm calls": "turn_limit",
    "token_limit_no_answer": "context_limit",
    "answered_token_limit": "context_limit",
    "generate an answer as token limit reached": "context_limit",
    "format error: generate an answer as token limit reached": "context_limit",
    "timeout": "time_limit",
    "llm_error": "model_error",
    "exception": "model_error",
}
# outcome.status of these stop reasons; else ok
ENDED_BY = {"time_limit": "cut_off", "straggler": "cut_off", "model_error": "tool_error"}


def read_rollouts(paths: Sequence[str], tokenizer: ChatTokenizer) -> list[Trajectory]:
    """Read trajectories from files, directories (of those with a trajectories.jsonl, as evaluations
    have, that file alone) and glob patterns: of our schema, or as other runners write them, mixed
    at will.

    DR-Venus: {request_id, sample_idx, messages, finished} in training, {question, messages,
    termination} else; Tongyi: {question, answer, messages, prediction, termination}. Their
    predictions are read anew from the last turn. A row without sample_idx gets the number of rows
    of its question before it. ValueError: no file, a bad row, an end that TERMINATIONS does not
    know.
    """
    trajectories, counts = [], Counter()
    names = [name for path in paths for name in sorted(glob.glob(str(path))) or [path]]
    for where, row in (found for name in names for found in _rollouts_of(Path(name))):
        if isinstance(row, dict) and "schema" in row:
            trajectories.append(Trajectory.from_json(row, where))
        else:
            trajectory = _converted(row, where, tokenizer)
            sample = row.get("sample_idx", counts[trajectory.question_id])
            counts[trajectory.question_id] += 1
            trajectories.append(replace(trajectory, sample=sample))
    return trajectories


def _rollouts_of(path: Path) -> Iterator[tuple[str, object]]:
    evaluation = path / "trajectories.jsonl"
    for file in row_files(evaluation if evaluation.is_file() else path):
        yield from rows_of(file)


def _converted(row: object, where: str, tokenizer: ChatTokenizer) -> Trajectory:
    """Make a Trajectory of another runner's row: an observation that no turn followed is left out,
    the end is theirs where they name one.
    """
    if isinstance(row, dict):
        row = {"gt": aliases_of(row.get("answer")), **row}
        if row.get("messages", ()) is None:
            row["messages"] = []
    row = _checked(where, row)
    stop_reason = _stop_reason(row, where)
    roles = [m.get("role") if isinstance(m, dict) else None for m in row["messages"]]
    has_turns = "assistant" in roles
    if has_turns:
        messages = row["messages"][: len(roles) - roles[::-1].index("assistant")]
    else:
        # a turn stands in where none was made, for the prompt before it
        turn = {"role": "assistant", "content": protocol.THINK_OPEN}
        messages = [{"role": "user", "content": row["question"]}, turn]
    try:
        made = from_messages({**row, "messages": messages}, tokenizer)
        stop_reason = stop_reason or made.stop_reason
        return replace(
            made,
            turns=made.turns if has_turns else [],
            token_ids=made.token_ids if has_turns else made.token_ids[: made.prompt_len],
            stop_reason=stop_reason,
            outcome=Outcome(None, ENDED_BY.get(stop_reason, "ok")),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _stop_reason(row: dict, where: str) -> str | None:
    """Translate the end that another runner names; None where it names none."""
    termination = row.get("termination")
    late = str(termination).startswith("No answer found after")
    if termination is not None and not late and termination not in TERMINATIONS:
        raise ValueError(
            f"{where}: termination {termination!r} is none of {', '.join(TERMINATIONS)}"
        )
    if row.get("error"):
        return "model_error"
    if row.get("finished") is False:
        return "straggler"
    return "time_limit" if late else TERMINATIONS.get(termination)


def to_messages(trajectory: Trajectory, tokenizer: ChatTokenizer) -> dict:
    """Return the released row {question, gt, messages} of a trajectory: its ids, decoded between
    the structure tokens.
    """
    ids = trajectory.token_ids
    messages = _read_messages(ids[: trajectory.prompt_len], tokenizer)
    for turn in trajectory.turns:
        end = turn.end - (ids[turn.end - 1] == tokenizer.im_end_id)
        text = f"{protocol.THINK_OPEN}\n{tokenizer.decode(ids[turn.start : end])}"
        messages.append({"role": "assistant", "content": text})
        messages += _read_messages(ids[turn.end : turn.obs_end], tokenizer)
    gt = list(trajectory.ground_truth)
    gt = gt[0] if len(gt) == 1 else gt
    return {"question": trajectory.question, "gt": gt, "messages": messages}


def _read_messages(ids: list[int], tokenizer: ChatTokenizer) -> list[dict]:
    """Decode the system and user messages in prompt or glue ids; <|im_start|> delimits, since no
    text of others holds its id.
    """
    starts = [k for k, i in enumerate(ids) if i == tokenizer.im_start_id]
    messages = []
    for start, end in pairwise([*starts, len(ids)]):
        role, _, text = tokenizer.decode(ids[start + 1 : end]).partition("\n")
        if role != "assistant":
            text = text.removesuffix("\n").removesuffix(protocol.IM_END)
            messages.append({"role": role, "content": text})
    return messages


@dataclass(frozen=True)
class StatsConfig(Options):
    """Which rows are counted."""

    path: str = option(
        help=".json, .jsonl or .parquet file of SFT rows, or a directory of them", positional=True
    )
    tokenizer: str = option(help="tokenizer.json or a directory with it")


def stats(cfg: StatsConfig) -> None:
    """Print the COLUMNS of every file and their sum."""
    files, tokenizer = row_files(cfg.path), ChatTokenizer(cfg.tokenizer)
    width = max(len(file.name) for file in files) + 2
    print("file".ljust(width) + "".join(name.rjust(14) for name in COLUMNS))
    totals = Counter()
    for file in files:
        counts = count_file(file, tokenizer)
        totals.update(counts)
        print(file.name.ljust(width) + "".join(f"{counts[name]:14,}" for name in COLUMNS))
    print("total".ljust(width) + "".join(f"{totals[name]:14,}" for name in COLUMNS))


def count_file(file: Path, tokenizer: ChatTokenizer) -> Counter[str]:
    """Return the COLUMNS of one file; ValueError names file and line of a bad row."""
    totals = Counter()
    for row, encoded in encode_rows(file, tokenizer):
        texts = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        kinds = Counter(protocol.parse_action(text).kind for text in texts)
        loss_tokens = sum(end - start for start, end in encoded.spans)
        calls = len(texts), kinds["search"], kinds["visit"]
        tokens = len(encoded.ids), loss_tokens
        counts = 1, *calls, *tokens, len(texts) - kinds["malformed"]
        totals.update(dict(zip(COLUMNS, counts, strict=True)))
    return totals


def to_question(row: object, where: str, name: str, source: Path, output: Path) -> Question:
    """Read a question of REDSearcher-RL (`problem`, `answer`; also `question`, `answer`), the
    released RL parquet, or ours; the rest is meta.

    name: the id of a question that has none. A corpus path, relative to the file it stands in, is
    made relative to the output file.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a question must be a JSON object, not {str(row)[:80]!r}")
    if "ground_truth" in row:
        row = {"id": name, **row}
        if isinstance(row.get("corpus"), str):
            row["corpus"] = os.path.relpath(source.parent / row["corpus"], output.parent)
        return Question.from_json(row, where)
    if "reward_model" in row:
        asked = [
            m["content"]
            for m in row.get("prompt") or ()
            if isinstance(m, dict) and m.get("role") == "user" and isinstance(m.get("content"), str)
        ]
        question = asked[-1] if asked else None
        answer = (row["reward_model"] or {}).get("ground_truth")
        used = {"prompt", "reward_model"}
    else:
        key = "problem" if "problem" in row else "question"
        question, answer = row.get(key), row.get("answer")
        used = {key, "answer", "id"}
    question = {
        "id": str(row.get("id", name)),
        "question": question,
        "ground_truth": aliases_of(answer) or answer,
        "meta": {k: v for k, v in row.items() if k not in used and v is not None},
    }
    return Question.from_json(question, where)


@dataclass(frozen=True)
class QuestionsConfig(Options):
    """Which questions are converted, and where to."""

    paths: tuple[str, ...] = option(
        help=".json, .jsonl or .parquet files of questions, and directories of them",
        positional=True,
    )
    output: str = option(help="the JSONL file to write")


def convert_questions(cfg: QuestionsConfig) -> None:
    """Write the questions of all files to `output` in our form. ValueError: a bad row, no row, an
    id that occurs twice.
    """
    questions: dict[str, Question] = {}
    for file in (file for path in cfg.paths for file in row_files(path)):
        for number, (where, row) in enumerate(rows_of(file)):
            name = f"{file.stem}-{number:05d}"
            question = to_question(row, where, name, file, Path(cfg.output))
            if questions.setdefault(question.id, question) is not question:
                raise ValueError(f"{where}: id {question.id!r} occurs twice; ids must be unique")
    if not questions:
        raise ValueError(f"no questions in the input {' '.join(cfg.paths)}")
    write_jsonl(cfg.output, (question.to_json() for question in questions.values()))
    num_answers = sum(len(question.ground_truth) for question in questions.values())
    print(f"{cfg.output}: {len(questions):,} questions, {num_answers:,} accepted answers")
