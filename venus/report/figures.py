"""The figures of evaluations as HTML: tables with a column a run, plots, the paired comparison, how
it was made. All text is escaped here.
"""

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

from venus.grading.stats import RESAMPLES
from venus.grading.summary import FREE, difference, unlike
from venus.protocol import SPECIAL_TOKENS
from venus.report.plot_svg import Curve, svg_curves
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Trajectory

BINS = 40  # of the histogram of turns, at most
MARKS = {"correct": "✓", "incorrect": "✗", "error": "!"}


@dataclass(frozen=True)
class Run:
    """One evaluation, or trajectories alone. `name` stands in tables and in links
    (#name/question/sample); each run has another.
    """

    name: str
    trajectories: Sequence[Trajectory]
    tokenizer: ChatTokenizer
    verdicts: Sequence[dict] = ()
    summary: dict | None = None

    @cached_property
    def structure_ids(self) -> frozenset[int]:
        """The ids of the structure tokens."""
        return frozenset(token for text in SPECIAL_TOKENS for token in self.tokenizer.encode(text))

    @cached_property
    def verdict_of(self) -> dict[tuple, dict]:
        """The verdict rows by (run, question_id, sample)."""
        return {(row["run"], row["question_id"], row["sample"]): row for row in self.verdicts}

    def link(self, question_id: str, sample: int) -> str:
        """The address of a trajectory within the report."""
        return "#" + "/".join(
            quote(part, safe="", errors="surrogatepass")
            for part in (self.name, question_id, str(sample))
        )


class Html(str):
    """Text that is HTML already."""


def cell(value: object) -> str:
    """A value of a table; None is a dash."""
    if isinstance(value, Html):
        return value
    if value is None:
        return "–"
    return html.escape(f"{value:,}" if isinstance(value, int) else str(value))


def percent(value: float) -> str:
    """A share of 1 in percent."""
    return f"{100 * value:.1f} %"


def interval(found: dict) -> Html:
    """A mean in percent with its interval."""
    low, high = 100 * found["low"], 100 * found["high"]
    return Html(f"{percent(found['mean'])} <small>[{low:.1f}, {high:.1f}]</small>")


def mean(value: float) -> str:
    """A mean of counts."""
    return f"{value:.2f}"


def clock(seconds: float) -> str | None:
    """Seconds; 0 is what trajectories have that others made."""
    return f"{seconds:,.1f}" if seconds else None


def table(caption: str, columns: Sequence[str], rows: Sequence[tuple], kind: str = "n") -> str:
    """A table; the first cell of a row is its head, the others are numbers (kind n) or text that
    wraps (long). Without the rows that hold nothing, and empty when none is left.
    """
    rows = [row for row in rows if any(value is not None for value in row[1:])]
    if not rows:
        return ""
    heads = "".join(f'<th class="{kind}">{cell(name)}</th>' for name in columns)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td class={kind}>{cell(value)}</td>" for value in rest)
        body += f"<tr><th>{cell(first)}</th>{cells}</tr>\n"
    title = f"<h3>{cell(caption)}</h3>" if caption else ""
    return (
        f'<div class="wide">{title}<table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


# tables of `summary.summarise`: what a row says -> where it stands there, how it is written
SUCCESS = {
    "success": ("success", interval),
    "of those graded": ("success_graded", interval),
}
MAJORITY = {"majority vote": ("majority", interval)}
FIGURES: dict[str, dict[str, tuple[str, Callable]]] = {
    "What counts": {
        "questions": ("questions", int),
        "trajectories": ("trajectories", int),
        "graded": ("graded", int),
        "judge errors, counted as wrong": ("judge_errors", int),
        "cut off by the clock": ("cut_off", int),
        "service down": ("tool_error", int),
        "no ground truth": ("no_ground_truth", int),
        "leak suspected": ("leaks.suspected", cell),
        "success without those": ("leaks.success", interval),
    },
    "Tool use: visits / (visits + searches)": {
        f"{label}, {which}": (f"tool_use.{which}.{key}", percent)
        for which in ("overall", "correct", "wrong")
        for key, label in (
            ("browse", "by call"),
            ("browse_macro", "mean of trajectories"),
            ("browse_items", "by item"),
        )
    },
    "Effort": {
        "turns, mean over questions": ("turns.mean", mean),
        "sampled tokens, mean": ("tokens.sampled.mean", round),
        "context at the end, median": ("tokens.context.median", int),
        "context at the end, most": ("tokens.context.most", int),
        "calls made before": ("duplicate_calls.share", percent),
        "format-valid turns": ("format_valid_share", percent),
        "reliable sources": ("reliable_share", percent),
        "seconds, model": ("seconds.model", clock),
        "seconds, tools": ("seconds.tool", clock),
    },
}


def figure(run: Run, path: str) -> object:
    """The figure at a dotted path of a summary; None below None. ValueError: a
    summary of another version.
    """
    found = run.summary
    for name in path.split("."):
        if found is None:
            return None
        if name not in found:
            raise ValueError(f"the summary of {run.name} holds no {path}: evaluate again")
        found = found[name]
    return found


def figures(title: str, runs: Sequence[Run], baseline: str | None) -> str:
    """All of the page above the browser."""
    evaluated = [run for run in runs if run.summary]
    about = " · ".join(f"{run.name}: {len(run.trajectories):,} trajectories" for run in runs)
    parts = [f'<h1>{html.escape(title)}</h1>\n<p class="soft">{html.escape(about)}</p>']
    if evaluated:
        cards, drawn = "\n".join(tables(evaluated)), "\n".join(plots(evaluated))
        parts.append(f'<h2 id="figures">Figures</h2>\n<div class="cards">{cards}</div>')
        parts.append(f'<div class="plots">{drawn}</div>')
    if baseline:
        parts.append(comparison(runs[0], next(run for run in runs if run.name == baseline)))
    if evaluated:
        parts.append(
            '<details class="fold"><summary>How it was made: settings, versions, '
            f"commands</summary>{manifests(evaluated)}</details>"
        )
    return "\n".join(parts)


def tables(runs: Sequence[Run]) -> list[str]:
    """The figures of the evaluations, a column a run."""
    names = [run.name for run in runs]
    success = rows_of(runs, SUCCESS) + keyed(runs, "scores", "{}") + rows_of(runs, MAJORITY)
    samples = keyed(runs, "pass_at", "pass@{}, unbiased")
    samples += keyed(runs, "any_of_first", "any of the first {}")
    return [
        table("Success, with 95 % intervals over questions", names, success),
        table("Success by number of samples", names, samples),
        *(table(caption, names, rows_of(runs, rows)) for caption, rows in FIGURES.items()),
        counts("Why the wrong ones failed", runs, "failures"),
        counts("Stop reasons", runs, "stop_reasons"),
        counts("Tool calls by status", runs, "tool_status"),
        counts("Strings of the leak guard that were seen", runs, "leaks.strings"),
    ]


def rows_of(runs: Sequence[Run], wanted: dict[str, tuple[str, Callable]]) -> list[tuple]:
    """The rows of a table of figures."""
    return [
        (label, *(None if x is None else text(x) for x in (figure(run, path) for run in runs)))
        for label, (path, text) in wanted.items()
    ]


def keyed(runs: Sequence[Run], path: str, label: str) -> list[tuple]:
    """A row for each key of an object of intervals that some run has at `path`."""
    columns = [figure(run, path) or {} for run in runs]
    return [
        (
            label.format(key),
            *(interval(column[key]) if key in column else None for column in columns),
        )
        for key in dict.fromkeys(key for column in columns for key in column)
    ]


def counts(caption: str, runs: Sequence[Run], path: str) -> str:
    """A table of counts, or counts by kind, and their shares by name, a column a run; what nowhere
    occurs is left out.
    """
    columns = [figure(run, path) or {} for run in runs]
    if path == "tool_status":
        columns = [
            {
                f"{kind}, {name}": n
                for kind, of_kind in column.items()
                for name, n in of_kind.items()
            }
            for column in columns
        ]
    rows = []
    occurring = (name for column in columns for name, number in column.items() if number)
    for name in dict.fromkeys(occurring):
        cells = []
        for column in columns:
            number, total = column.get(name, 0), sum(column.values()) or 1
            cells.append(Html(f"{number:,} <small>{percent(number / total)}</small>"))
        rows.append((name.replace("_", " "), *cells))
    return table(caption, [run.name for run in runs], rows)


def plots(runs: Sequence[Run]) -> list[str]:
    """pass@k by both estimators, and the share of trajectories by number of turns."""
    samples, turns = [], []
    longest = max(int(n) for run in runs for n in figure(run, "turn_histogram"))
    width = -(-longest // BINS) or 1
    for color, run in enumerate(runs):
        for key, label, dashed in (
            ("pass_at", "pass@k, unbiased", False),
            ("any_of_first", "any of the first k", True),
        ):
            found = figure(run, key) or {}
            if len(found) > 1:
                shares = [100 * success["mean"] for success in found.values()]
                name = f"{run.name}: {label}"
                samples.append(Curve([*map(int, found)], shares, name, color, dashed))
        turns.append(histogram(run, width, color))
    drawn = [svg_curves(turns, "Turns", "turns", "% of trajectories")]
    if samples:
        title, y_label = "Success by number of samples", "% of questions"
        drawn.insert(0, svg_curves(samples, title, "samples k", y_label, y_range=(0, 100)))
    return drawn


def histogram(run: Run, width: int, color: int) -> Curve:
    """The outline of the shares of trajectories by number of turns, in bins of `width`."""
    counts = {int(n): count for n, count in figure(run, "turn_histogram").items()}
    bins = range(min(counts) // width, max(counts) // width + 1)
    totals = [sum(counts.get(b * width + k, 0) for k in range(width)) for b in bins]
    shares = [100 * total / sum(totals) for total in totals]
    edges = [b * width - 0.5 for b in (*bins, bins.stop)]
    xs = [x for x in edges for _ in range(2)]
    ys = [0, *(share for share in shares for _ in range(2)), 0]
    return Curve(xs, ys, run.name, color, filled=True)


def comparison(first: Run, second: Run) -> str:
    """The difference in success, paired by question, and the questions that flipped, with links
    to their trajectories.
    """
    # the numbers of summary.json
    config = (
        first.summary["run"]["config"] if first.summary else {"seed": 0, "resamples": RESAMPLES}
    )
    seed, resamples = config["seed"], config["resamples"]
    found = difference(first.verdicts, second.verdicts, second.name, seed=seed, resamples=resamples)
    equal = found["questions"] - len(found["gained"]) - len(found["lost"])
    text = (
        f"Success of {first.name} minus {second.name}: {100 * found['mean']:+.1f} points "
        f"[{100 * found['low']:+.1f}, {100 * found['high']:+.1f}], 95 %, paired over "
        f"{found['questions']:,} questions, {equal:,} of them equal."
    )
    parts = [f'<h2 id="comparison">Comparison</h2>\n<p>{html.escape(text)}</p>']
    if first.summary and second.summary:
        fields = unlike(figure(first, "manifest"), figure(second, "manifest"), FREE)
        if fields:
            parts.append(
                '<p class="error">Made under different settings, which may be the cause: '
                f"{html.escape(', '.join(fields))}.</p>"
            )
    asked = {t.question_id: t.question for run in (first, second) for t in run.trajectories}
    for name, word in (("gained", "rose"), ("lost", "fell")):
        rows = [
            (asked.get(question, question), marks(second, question), marks(first, question))
            for question in found[name]
        ]
        flips = table("", [second.name, first.name], rows, "long")
        parts.append(
            f'<details class="fold"><summary>{len(rows):,} questions whose success '
            f"{word}</summary>{flips}</details>"
        )
    return "\n".join(parts)


def marks(run: Run, question: str) -> Html:
    """The samples of a question, each a mark that links to its trajectory where the
    report has it.
    """
    known, links = {t.key for t in run.trajectories}, []
    for key, row in sorted(run.verdict_of.items(), key=lambda item: item[1]["sample"]):
        if row["question_id"] == question:
            verdict, sample = row["verdict"], row["sample"]
            href = f' href="{run.link(question, sample)}"' if key in known else ""
            links.append(
                f'<a class="verdict {verdict}"{href} title="{verdict}, sample {sample}">'
                f"{MARKS[verdict]}</a>"
            )
    return Html(" ".join(links))


def manifests(runs: Sequence[Run]) -> str:
    """Manifest, versions, commit and command of each run, a row a field."""
    made = []
    for run in runs:
        record = figure(run, "run")
        git = record["git"] or {"commit": "", "dirty": False}
        made.append(
            {
                **figure(run, "manifest"),
                "commit": git["commit"][:12] + (" with changes" if git["dirty"] else ""),
                **record["versions"],
                "machine": " · ".join(map(str, record["platform"].values())),
                "command": " ".join(record["argv"]),
            }
        )
    names = dict.fromkeys(name for fields in made for name in fields)
    rows = [(name, *(as_text(fields.get(name)) for fields in made)) for name in names]
    return table("", [run.name for run in runs], rows, "long")


def as_text(value: object) -> str | None:
    """A JSON value as text."""
    return value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
