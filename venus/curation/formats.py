"""SFT rows in the released form {question, gt, messages, weight?}: reading, converting, counting;
and question sets of others in our form.

    python -m venus.data stats PATH --tokenizer PATH
        per file, what the rows hold
    python -m venus.data questions PATH.. --output FILE
        {problem, answer}, the released RL schema or our JSONL -> our JSONL
"""

import argparse
import glob
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from venus import protocol
from venus.files import aliases_of, row_files, rows_of, write_jsonl
from venus.tokenizer import ChatTokenizer, Encoded
from venus.trajectory import Outcome, Question, Trajectory, Turn

COLUMNS = ("rows", "turns", "searches", "visits", "tokens", "loss tokens", "strict-valid")


def _checked(where: str, row: object) -> dict:
    """Return the row with `question` (default: the first user message) and `gt` (None = unlabelled)
    filled in; ValueError at `where`.
    """
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError(f"{where}: not an SFT row: no list 'messages'")
    asked = [
        m.get("content") for m in row["messages"] if isinstance(m, dict) and m.get("role") == "user"
    ]
    row = {"question": asked[0] if asked else None, "gt": None, **row}
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
    turns, seen = [], set()
    for k, (start, end) in enumerate(encoded.spans):
        action = protocol.parse_action(texts[k])
        calls = action.kind in ("search", "visit")
        body = (
            (protocol.split_observation(observations[k]) or [""])[0]
            if k < len(observations)
            else ""
        )
        status = "timeout" if calls and protocol.is_timeout(body) else None
        duplicate = calls and protocol.call_signature(action) in seen
        seen |= {protocol.call_signature(action)} if calls and status is None else set()
        # what follows the last turn was never appended
        obs_end = encoded.spans[k + 1][0] if k + 1 < len(encoded.spans) else end
        turns.append(
            Turn(
                start,
                end,
                obs_end,
                action.kind,
                status,
                action.arguments,
                duplicate=duplicate,
                format_ok=action.format_ok,
            )
        )
    prediction = protocol.extract_prediction(texts[-1])
    gt = row.get("gt") or []
    question_id = hashlib.sha256(row["question"].encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return Trajectory(
        run="released",
        question_id=question_id,
        sample=row.get("sample_idx", 0),
        seed=0,
        question=row["question"],
        ground_truth=(gt,) if isinstance(gt, str) else tuple(gt),
        prompt_len=encoded.prompt_len,
        token_ids=encoded.ids[: encoded.spans[-1][1]],
        log_probs=[],
        turns=turns,
        prediction=prediction,
        outcome=Outcome(None, "ok"),
        stop_reason="answered" if prediction else "no_answer",
        seconds={"model": 0.0, "tool": 0.0},
        manifest={"source": "released"},
    )


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
    found = [Path(name) for path in paths for name in (sorted(glob.glob(str(path))) or [path])]
    found = [
        path / "trajectories.jsonl" if (path / "trajectories.jsonl").is_file() else path
        for path in found
    ]
    for file in (file for path in found for file in row_files(path)):
        for where, row in rows_of(file):
            if isinstance(row, dict) and "schema" in row:
                trajectories.append(Trajectory.from_json(row, where))
            else:
                trajectory = _converted(row, where, tokenizer)
                sample = row.get("sample_idx", counts[trajectory.question_id])
                counts[trajectory.question_id] += 1
                trajectories.append(replace(trajectory, sample=sample))
    return trajectories


def _converted(row: object, where: str, tokenizer: ChatTokenizer) -> Trajectory:
    """Make a Trajectory of another runner's row: an observation that no turn followed is left out,
    the end is theirs where they name one.
    """
    if isinstance(row, dict):
        row = {"gt": aliases_of(row.get("answer")), **row} | (
            {"messages": []} if row.get("messages", ...) is None else {}
        )
    row = _checked(where, row)
    said = row.get("termination")
    roles = [
        message.get("role") if isinstance(message, dict) else None for message in row["messages"]
    ]
    reason = (
        "time_limit" if str(said).startswith("No answer found after") else TERMINATIONS.get(said)
    )
    if said is not None and reason is None:
        raise ValueError(f"{where}: termination {said!r} is none of {', '.join(TERMINATIONS)}")
    reason = (
        "model_error"
        if row.get("error")
        else "straggler"
        if row.get("finished") is False
        else reason
    )
    unstarted = "assistant" not in roles
    # stands in where none was made, for the prompt before it
    turn = {"role": "assistant", "content": protocol.THINK_OPEN}
    messages = (
        [{"role": "user", "content": row["question"]}, turn]
        if unstarted
        else row["messages"][: len(roles) - roles[::-1].index("assistant")]
    )
    try:
        made = from_messages({**row, "messages": messages}, tokenizer)
        changes = {"turns": [], "token_ids": made.token_ids[: made.prompt_len]} if unstarted else {}
        reason = reason or made.stop_reason
        return replace(
            made, stop_reason=reason, outcome=Outcome(None, ENDED_BY.get(reason, "ok")), **changes
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def to_messages(trajectory: Trajectory, tokenizer: ChatTokenizer) -> dict:
    """Return the released row {question, gt, messages} of a trajectory: its ids, decoded between
    the structure tokens.
    """
    ids = trajectory.token_ids
    messages = _read_messages(ids[: trajectory.prompt_len], tokenizer)
    for turn in trajectory.turns:
        end = turn.end - (ids[turn.end - 1] == tokenizer.im_end_id)
        messages.append(
            {
                "role": "assistant",
                "content": f"{protocol.THINK_OPEN}\n{tokenizer.decode(ids[turn.start : end])}",
            }
        )
        messages += _read_messages(ids[turn.end : turn.obs_end], tokenizer)
    gt = (
        trajectory.ground_truth[0]
        if len(trajectory.ground_truth) == 1
        else list(trajectory.ground_truth)
    )
    return {"question": trajectory.question, "gt": gt, "messages": messages}


def _read_messages(ids: list[int], tokenizer: ChatTokenizer) -> list[dict]:
    """Decode the system and user messages in prompt or glue ids; <|im_start|> delimits, since no
    text of others holds its id.
    """
    starts = [k for k, i in enumerate(ids) if i == tokenizer.im_start_id] + [len(ids)]
    texts = [
        tokenizer.decode(ids[a + 1 : b]).partition("\n")
        for a, b in zip(starts, starts[1:], strict=False)
    ]
    texts = [
        (role, text.removesuffix("\n").removesuffix(protocol.IM_END)) for role, _, text in texts
    ]
    return [{"role": role, "content": text} for role, text in texts if role != "assistant"]


def count_file(file: Path, tokenizer: ChatTokenizer) -> Counter[str]:
    """Return the COLUMNS of one file; ValueError names file and line of a bad row."""
    totals = Counter()
    for row, encoded in encode_rows(file, tokenizer):
        kinds = Counter(
            protocol.parse_action(m["content"]).kind
            for m in row["messages"]
            if m["role"] == "assistant"
        )
        totals.update(
            {
                "rows": 1,
                "turns": kinds.total(),
                "searches": kinds["search"],
                "visits": kinds["visit"],
            }
        )
        totals.update(
            {
                "tokens": len(encoded.ids),
                "loss tokens": sum(end - start for start, end in encoded.spans),
            }
        )
        totals["strict-valid"] += kinds.total() - kinds["malformed"]
    return totals


def stats(path: str, tokenizer_path: str) -> None:
    """Print the COLUMNS of every file under `path` and their sum."""
    files, tokenizer = row_files(path), ChatTokenizer(tokenizer_path)
    width = max(len(file.name) for file in files) + 2
    print("file".ljust(width) + "".join(name.rjust(14) for name in COLUMNS))
    totals = Counter()
    for file in files:
        counts = count_file(file, tokenizer)
        totals.update(counts)
        print(file.name.ljust(width) + "".join(f"{counts[name]:14,}" for name in COLUMNS))
    print("total".ljust(width) + "".join(f"{totals[name]:14,}" for name in COLUMNS))


def to_question(row: object, where: str, name: str, source: Path, output: Path) -> Question:
    """Read a question of REDSearcher-RL (`problem`, `answer`; also `question`, `answer`), the
    released RL parquet, or ours; the rest is meta.

    name: the id of a question that has none. A corpus path, relative to the file it stands in, is
    made relative to the output file.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a question must be a JSON object, not {str(row)[:80]!r}")
    if "ground_truth" in row:
        corpus = (
            {"corpus": os.path.relpath(source.parent / row["corpus"], output.parent)}
            if isinstance(row.get("corpus"), str)
            else {}
        )
        return Question.from_json({"id": name, **row, **corpus}, where)
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
        question, answer, used = row.get(key), row.get("answer"), {key, "answer", "id"}
    meta = {key: value for key, value in row.items() if key not in used and value is not None}
    return Question.from_json(
        {
            "id": str(row.get("id", name)),
            "question": question,
            "ground_truth": aliases_of(answer) or answer,
            "meta": meta,
        },
        where,
    )


def convert_questions(paths: list[str], output: str) -> None:
    """Write the questions of all files to `output` in our form. ValueError: a bad row, no row, an
    id that occurs twice.
    """
    questions: dict[str, Question] = {}
    for file in (file for path in paths for file in row_files(path)):
        for number, (where, row) in enumerate(rows_of(file)):
            question = to_question(row, where, f"{file.stem}-{number:05d}", file, Path(output))
            if questions.setdefault(question.id, question) is not question:
                raise ValueError(f"{where}: id {question.id!r} occurs twice; ids must be unique")
    if not questions:
        raise ValueError(f"{paths[0]}: no questions in the input")
    write_jsonl(output, (question.to_json() for question in questions.values()))
    print(
        f"{output}: {len(questions):,} questions, "
        f"{sum(len(q.ground_truth) for q in questions.values()):,} accepted answers"
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"error: {message}\n")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; bad input ends in one line and exit code 2."""
    parser = _Parser(
        prog="python -m venus.data", description="SFT rows and RL questions", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "stats", help="count turns, tool calls, tokens, loss tokens and strict-valid turns per file"
    )
    command.add_argument(
        "path",
        metavar="PATH",
        help=".json, .jsonl or .parquet file of SFT rows, or a directory of them",
    )
    command.add_argument(
        "--tokenizer", required=True, metavar="PATH", help="tokenizer.json or a directory with it"
    )
    command = commands.add_parser(
        "questions",
        help="write question sets of other forms as our JSONL {id, question, ground_truth, meta}",
    )
    command.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help=".json, .jsonl or .parquet file of questions, or a directory of them",
    )
    command.add_argument("--output", required=True, metavar="FILE", help="the JSONL file to write")
    args = parser.parse_args(argv)
    try:
        if args.command == "stats":
            stats(args.path, args.tokenizer)
        else:
            convert_questions(args.paths, args.output)
    except (ValueError, OSError) as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)
