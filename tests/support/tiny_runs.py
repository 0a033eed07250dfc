"""A tiny world, a tiny model and the scripts as subprocesses, for the tests of training. Everything
is small enough for a second a step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from venus.curation.clean import CleanConfig, clean_row
from venus.files import read_jsonl, write_jsonl
from venus.grading.judge import match
from venus.world.build import WorldConfig, build

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SIZES |= {"layer_types": ["full_attention"] * 2, "max_window_layers": 2}
ROLLOUT = [
    *(
        "--system-prompt",
        "short",
        "--slots",
        "8",
        "--max-turns",
        "4",
        "--max-turn-tokens",
        "48",
        "--max-observation-tokens",
        "200",
    ),
    # cool enough for a model of 45,792 parameters to keep the format
    *("--max-context", "1024", "--temperature", "0.7"),
]

# One process for several runs, since importing torch is most of a short run. stderr is a file:
# torchrun's `record` wants a descriptor.
DRIVER = """
import contextlib, io, json, runpy, sys, tempfile
results = []
for argv in json.load(sys.stdin):
    out, code, sys.argv = io.StringIO(), 0, argv
    with tempfile.TemporaryFile("w+") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                start = runpy.run_path if argv[0].endswith(".py") else runpy.run_module
                start(argv[0], run_name="__main__")
            except SystemExit as error:
                code = error.code or 0
        err.seek(0)
        results.append({"code": code, "out": out.getvalue(), "err": err.read()})
print(json.dumps(results))
"""

# Every script in a process of its own, and importing torch once: this one has
# imported it, and forks.
FORKING = """
import json, os, runpy, sys, traceback
import venus.rollout.collect, venus.curation.formats, venus.rl.info_gain, venus.train.loop
for line in sys.stdin:
    argv, log = json.loads(line)
    child = os.fork()
    if not child:
        out, code, sys.argv = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 0, argv
        os.dup2(out, 1), os.dup2(out, 2)
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            code = traceback.print_exc() or 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forked:
    """Scripts one after the other, each in a fresh process that starts within milliseconds. `log`
    is where the last one writes. Use with `with`.
    """

    def __init__(self, directory: Path):
        self.log = directory / "forked.log"

    def __enter__(self):
        words = [sys.executable, "-c", FORKING]
        self.server = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        self.server.stdin.close()
        self.server.wait(timeout=60)
        self.server.stdout.close()

    def start(self, command: list) -> int:
        """Start a script, and return its process id."""
        self.server.stdin.write(json.dumps([[str(word) for word in command], str(self.log)]) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def wait(self) -> int:
        """The exit code of the script that was started, minus the signal when one ended it."""
        return int(self.server.stdout.readline())

    def run(self, command: list) -> str:
        """Run a script that must succeed; what it wrote."""
        self.start(command)
        code = self.wait()
        assert code == 0, f"exit code {code}\n{self.log.read_text()[-3000:]}"
        return self.log.read_text()


def tiny_world(tmp_path_factory) -> Path:
    """The directory of a world of one web a split, built once a session; its model has two
    layers and no weights.

    sft/few.jsonl and questions/few.jsonl hold the same six 1-hop questions: few enough to learn by
    heart within seconds.
    """
    world = tmp_path_factory.getbasetemp() / "tiny-world"
    if not world.exists():
        counts = {"train_questions": 8, "questions_per_split": 2, "sft_rows": 20}
        build(
            WorldConfig(
                out=str(world), train_webs=1, dev_webs=1, test_webs=1, long_webs=0, **counts
            )
        )
        config = CleanConfig(
            input=("in",), output="out", system_prompt="short", judge="match", validation=0.0
        )
        accounts = [
            clean_row(config, where, row)
            for where, row in read_jsonl(world / "raw" / "train.jsonl")
        ]
        rows = [
            json.loads(a.lines[0][1])
            for a in accounts
            if a.lines and not a.removed and match([a.case])[0].verdict == "correct"
        ]
        few = [row for row in rows if len(row["messages"]) == 7][:6]
        (world / "sft").mkdir()
        write_jsonl(world / "sft" / "few.jsonl", few)
        asked = [
            {"id": f"q{k}", "question": row["question"], "ground_truth": row["gt"]}
            for k, row in enumerate(few)
        ]
        write_jsonl(
            world / "questions" / "few.jsonl",
            [{**question, "corpus": "../corpora/train-000.jsonl"} for question in asked],
        )
        config = world / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | SIZES))
    return world


def run_all(*commands: list[str]) -> list[dict]:
    """Run scripts (or modules) one after the other in one process: [{code, out, err}]."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([[str(word) for word in command] for command in commands]),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def run_one(*command: object, code: int = 0) -> subprocess.CompletedProcess:
    """Run a python command line in a process of its own and check its exit code."""
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, (
        f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    )
    return done


def environment() -> dict:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
