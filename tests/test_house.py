"""The rules of the house: who may import whom, where the network and torch.distributed are touched,
and what is written nowhere.

The source is parsed, never imported. Each rule is a function from parsed source to its offences,
and is shown to find one.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_sft", "train_igpo", "rollout", "eval")
COMMANDS = tuple(f"venus.{name}" for name in ("demo", "clean", "data", "info_gain", "benchmarks"))
VOCABULARY = ("trajectory", "protocol", "tokenizer", "cli", "files", "runlog")

# A module imports from its own package and from what stands before it; nobody imports a script.
ORDER = (
    ("kernels",),
    ("venus.services",),
    tuple(f"venus.{name}" for name in VOCABULARY),
    *((f"venus.{package}",) for package in ("model", "tools", "rl", "train", "rollout")),
    *((f"venus.{package}",) for package in ("grading", "curation", "report", "world", "bench")),
    (*COMMANDS, *SCRIPTS),
)
# Narrower than their place: the sampler never learns about tools, rl is arithmetic.
WALLS = {
    "venus.rollout.sampler": (
        *("kernels", "venus.model", "venus.rollout.noise", "venus.rollout.decode_graph"),
    ),
    **dict.fromkeys(
        ("venus.rl.igpo", "venus.rl.rewards"), ("venus.trajectory", "venus.cli", "venus.rl")
    ),
}

# Code tokens at most; bench is what times and tunes.
CAPS = {"product": 105_400, "bench": 14_500, "tests": 176_800}
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
FORMATTER_OFF = "# fmt" + ":"  # in two parts, so that this line is none of them

# Functions that may pass the limit, each with its reason.
LONG = {
    "venus.grading.summary.summarise": "its docstring is the schema of summary.json",
}

NETWORK = (
    "requests",
    "urllib3",
    "urllib.request",
    "http",
    "socket",
    "ssl",
    "aiohttp",
    "httpx",
    "websockets",
    "ftplib",
    "smtplib",
)
MAY_USE_NETWORK = ("venus.services",)
MAY_USE_DISTRIBUTED = ("venus.train", *SCRIPTS)
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}  # of os
KERNEL_PACKAGES = {"torch", "triton"}
KERNEL_MEASUREMENT = ("kernels.bench", "kernels.tune")  # may import what they are compared with
# extras: imported where they are used, never on top of a module
OPTIONAL = {"pyarrow", "matplotlib", "transformers", "tensorboard"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files():
    return [ROOT / f"{name}.py" for name in SCRIPTS if (ROOT / f"{name}.py").exists()] + sorted(
        path for package in ("venus", "kernels") for path in (ROOT / package).rglob("*.py")
    )


FILES = {module_name(path): path for path in source_files()}
TREES = {
    name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in FILES.items()
}
MODULES = set(FILES)
# of other packages, which `from torch import distributed` reaches
SUBMODULES = {"torch.distributed", "urllib.request"}


def imports(name, tree):
    """List (full module name, line) of every import in the module, wherever it stands; `from a
    import b` is a.b when that is a module.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = (
                name.split(".")
                if FILES.get(name, Path()).name == "__init__.py"
                else name.split(".")[:-1]
            )
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append((full if full in MODULES or full in SUBMODULES else base, node.lineno))
    return found


def dotted(node):
    """Return 'a.b.c' for an attribute chain on a name, '' for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def within(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def is_main_guard(node):
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def place(name):
    """Number of the entry of ORDER that holds the module; None when none does."""
    return next((k for k, entry in enumerate(ORDER) if within(name, entry)), None)


def our_imports(name, tree):
    return [
        (target, line)
        for target, line in imports(name, tree)
        if within(target, ("venus", "kernels", *SCRIPTS))
    ]


def may_import(importer, target):
    """Whether `importer` may import `target`, both modules of this repository."""
    if within(target, (*COMMANDS, *SCRIPTS)):
        return False
    if importer in WALLS and not within(target, WALLS[importer]):
        return False
    here, there = place(importer), place(target)
    return here is not None and there is not None and there <= here


def order_offences(name, tree):
    """Imports of our own modules from further down the list, or through a wall."""
    return [
        f"{name}:{line} imports {target}"
        for target, line in our_imports(name, tree)
        if not may_import(name, target)
    ]


def circles(trees):
    """List the modules that reach themselves through imports, wherever those stand."""
    graph = {name: {target for target, _ in our_imports(name, trees[name])} for name in trees}
    found = []
    for start in graph:
        reached, front = set(), graph[start]
        while front:
            reached |= front
            front = set().union(*(graph.get(name, set()) for name in front)) - reached
        found += [start] if start in reached else []
    return found


def network_offences(name, tree):
    used = [(target, line) for target, line in imports(name, tree) if within(target, NETWORK)]
    return [
        f"{name}:{line} imports {target}"
        for target, line in used
        if not within(name, MAY_USE_NETWORK)
    ]


def distributed_offences(name, tree):
    """Imports of torch.distributed, and its use as an attribute of torch, which needs no import."""
    lines = [line for target, line in imports(name, tree) if within(target, ("torch.distributed",))]
    lines += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed"
    ]
    return [
        f"{name}:{line} uses torch.distributed"
        for line in sorted(set(lines))
        if not within(name, MAY_USE_DISTRIBUTED)
    ]


def environment_offences(name, tree):
    """Environment variables are no interface between modules: scripts read keys once and pass them
    on, and so does a module run as one.
    """
    if name in SCRIPTS:
        return []
    lines = []
    modules = [node for node in tree.body if not is_main_guard(node)]
    for node in (node for top in modules for node in ast.walk(top)):
        attribute = (
            isinstance(node, ast.Attribute)
            and node.attr in ENVIRONMENT
            and dotted(node.value) == "os"
        )
        imported = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and ENVIRONMENT & {alias.name for alias in node.names}
        )
        lines += [node.lineno] if attribute or imported else []
    return [f"{name}:{line} touches the environment" for line in lines]


def except_offences(name, tree):
    """Handlers that catch everything; they hide the error that nobody thought of."""
    offences = []
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)):
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in caught):
            offences.append(f"{name}:{node.lineno} catches everything")
    return offences


def functions(name, tree):
    """Yield (qualified name, node) of every function, methods as Class.method."""
    for node in ast.walk(tree):
        prefix = f"{name}.{node.name}." if isinstance(node, ast.ClassDef) else f"{name}."
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child


def length_offences(name, tree):
    """Functions over 50 lines, mains and kernels (triton.jit) over 110, decorators not counted.
    LONG names those that pass, with the reason; a reason that is no longer needed is an offence.
    """
    offences = []
    for full, node in functions(name, tree):
        is_kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
        limit = 110 if is_kernel or node.name == "main" else 50
        num_lines = node.end_lineno - node.lineno + 1
        if num_lines > limit and full not in LONG:
            offences.append(f"{full} has {num_lines} lines, the limit is {limit}")
        elif num_lines <= limit and full in LONG:
            offences.append(f"{full} has {num_lines} lines and needs no exception")
    return offences


def package_offences(name, tree):
    """Third-party imports that are no dependency, extras imported on top of a module, and anything
    but torch and triton in a kernel.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    runtime = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}
    extras = {
        re.match(r"[\w-]+", requirement)[0]
        for extra in project["optional-dependencies"].values()
        for requirement in extra
    }
    assert extras & OPTIONAL | {"tensorboard"} == OPTIONAL, (
        "OPTIONAL names a package that no extra installs"
    )
    on_top = {node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    offences = []
    for target, line in imports(name, tree):
        package = target.split(".")[0]
        if package in sys.stdlib_module_names or package in ("venus", "kernels", *SCRIPTS):
            continue
        if within(name, ("kernels",)):
            allowed = package in KERNEL_PACKAGES or name in KERNEL_MEASUREMENT
        else:
            allowed = package in runtime or (package in OPTIONAL and line not in on_top)
        if not allowed:
            offences.append(f"{name}:{line} imports {target}")
    return offences


RULES = (
    order_offences,
    network_offences,
    distributed_offences,
    environment_offences,
    except_offences,
    length_offences,
    package_offences,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule):
    assert "\n".join(offence for name, tree in TREES.items() for offence in rule(name, tree)) == ""


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (order_offences, "venus.services.chat", "import venus.trajectory"),
        (order_offences, "venus.services.http", "from venus.cli import option"),
        (order_offences, "venus.protocol", "from venus.model import cache"),
        (order_offences, "venus.model.weights", "from venus.rl.info_gain import score"),
        (order_offences, "venus.tools.web", "def f():\n    from venus.rollout import agent"),
        (order_offences, "venus.train.loop", "from venus.rollout.collect import collect"),
        (order_offences, "venus.grading.judge", "from venus.curation.clean import main"),
        (order_offences, "venus.rollout.sampler", "from venus.tools.base import Tool"),
        (order_offences, "venus.rollout.sampler", "from ..tools import base"),
        (order_offences, "venus.rl.igpo", "from venus.protocol import THINK_OPEN"),
        (order_offences, "venus.rl.rewards", "from venus.model.qwen3 import Qwen3"),
        (order_offences, "venus.rollout.collect", "import train_igpo"),
        (order_offences, "venus.rollout.collect", "from venus.demo import main"),
        (order_offences, "eval", "import rollout"),
        (order_offences, "kernels.cross_entropy", "from venus.model.qwen3 import Qwen3"),
        (order_offences, "venus.nowhere", "from venus import files"),
        (network_offences, "venus.tools.offline", "import requests"),
        (network_offences, "venus.grading.judge", "from urllib import request"),
        (network_offences, "venus.grading.judge", "import requests"),
        (network_offences, "eval", "from http.client import HTTPConnection"),
        (distributed_offences, "venus.model.qwen3", "import torch.distributed as dist"),
        (distributed_offences, "venus.curation.formats", "from torch import distributed"),
        (
            distributed_offences,
            "venus.curation.formats",
            "from torch.distributed.fsdp import fully_shard",
        ),
        (
            distributed_offences,
            "venus.runlog",
            "import torch\nrank = torch.distributed.get_rank()",
        ),
        (environment_offences, "venus.services.chat", "import os\nkey = os.environ['KEY']"),
        (
            environment_offences,
            "venus.curation.clean",
            "import os\ndef main():\n    os.getenv('KEY')\nif __name__ == '__main__':\n    main()",
        ),
        (environment_offences, "kernels.cross_entropy", "from os import getenv"),
        (except_offences, "eval", "try:\n    f()\nexcept:\n    pass"),
        (
            except_offences,
            "venus.grading.judge",
            "try:\n    f()\nexcept (ValueError, Exception):\n    pass",
        ),
        (length_offences, "eval", "def main():\n" + "    f()\n" * 110),
        (
            length_offences,
            "venus.rollout.agent",
            "class Agent:\n    def run():\n" + "        f()\n" * 50,
        ),
        (
            length_offences,
            "venus.grading.summary",
            "def summarise():\n    f()",
        ),  # needs no exception
        (
            length_offences,
            "kernels.cross_entropy",
            "@triton.jit\ndef kernel():\n" + "    f()\n" * 110,
        ),
        (package_offences, "venus.curation.formats", "import pandas"),
        (package_offences, "venus.bench.inference", "import transformers"),
        (package_offences, "kernels.cross_entropy", "import numpy"),
    ],
)
def test_a_breach_of_the_rule_is_found(rule, name, source):
    assert len(rule(name, ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "venus.model.attention",
            "from kernels import cross_entropy\nfrom venus.model.cache import KVCache",
        ),
        ("venus.rl.info_gain", "from venus.model.weights import load_model"),
        ("venus.services.http", "import requests\nimport socket"),
        ("venus.tools.web", "from venus.tools.base import Tool\nfrom venus.services import chat"),
        (
            "venus.train.parallel",
            "import torch.distributed as dist\nfrom urllib.parse import quote",
        ),
        (
            "venus.curation.clean",
            "import os\nif __name__ == '__main__':\n    run(main, os.environ['KEY'])",
        ),
        ("train_igpo", "import os\nkey = os.environ['KEY']\nfrom venus.rl.igpo import advantages"),
        ("venus.bench.inference", "def generate():\n    import transformers"),
        ("kernels.bench", "import liger_kernel\nfrom kernels.cross_entropy import token_stats"),
        ("venus.services.chat", "try:\n    f()\nexcept (ValueError, OSError):\n    raise"),
    ],
)
def test_what_the_rules_allow_is_no_offence(name, source):
    assert [offence for rule in RULES for offence in rule(name, ast.parse(source))] == []


def test_every_module_has_a_place():
    assert [name for name in FILES if place(name) is None and name != "venus"] == []


def test_no_imports_form_a_circle():
    assert circles(TREES) == []


def test_a_circle_is_found():
    """Also one that an import inside a function closes, which Python would let pass."""
    sources = {
        "venus.model.cache": "from venus.model import ragged",
        "venus.model.ragged": "def f():\n    from venus.model.decode import g",
        "venus.model.decode": "import venus.model.cache",
        "venus.model.attention": "from venus.model import cache",
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    assert circles(trees) == ["venus.model.cache", "venus.model.ragged", "venus.model.decode"]


def code_tokens(source):
    """Number of Python tokens without comments, docstrings, newlines and indents."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = sum(
        isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for node in ast.walk(ast.parse(source))
    )
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in NO_CODE for token in tokens) - docstrings


def test_comments_docstrings_and_line_breaks_are_no_code():
    source = '"""A module."""\n\n# a comment\ndef f(x):\n    """A function."""\n    return x\n'
    assert code_tokens(source) == len(["def", "f", "(", "x", ")", ":", "return", "x"])


def test_the_code_does_not_grow_unnoticed(capsys):
    """Tokens and not lines: the formatter rules the width, and a cap on lines only buys density.
    What times and tunes is counted apart. A cap is raised with the reason in the commit.
    """
    counts = Counter()
    for path in [*FILES.values(), *(ROOT / "tests").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        measures = "bench" in parts or re.fullmatch("bench(_.*)?|tune", parts[-1])
        package = "/".join(parts[:-1][:2]) or "scripts"
        group = "tests" if parts[0] == "tests" else "bench" if measures else "product"
        counts[group, package] += code_tokens(path.read_text(encoding="utf-8"))
    totals = {group: sum(n for (g, _), n in counts.items() if g == group) for group in CAPS}
    with capsys.disabled():
        print("\n\ncode tokens")
        for group, cap in CAPS.items():
            print(f"  {group:22} {totals[group]:>8,} of at most {cap:,}")
            for (_, package), tokens in sorted(
                item for item in counts.items() if item[0][0] == group
            ):
                print(f"    {package:20} {tokens:>8,}")
    assert {group: total for group, total in totals.items() if total > CAPS[group]} == {}


def test_few_lines_are_kept_from_the_formatter():
    """Width is ruff's business, which `make lint` checks; what stays by hand says why."""
    skips = [
        path.name
        for path in (*FILES.values(), *(ROOT / "tests").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if FORMATTER_OFF in line
    ]
    assert len(skips) <= 10


def test_no_test_imports_a_script_or_another_test():
    """Tests start the four scripts as a user does; an imported script grows an interface that
    others come to need. What tests share lies in tests/support.
    """
    found = [
        (path.name, target)
        for path in (ROOT / "tests").rglob("*.py")
        for target, _ in imports(path.stem, ast.parse(path.read_text(encoding="utf-8")))
        if target in SCRIPTS or target.startswith("test_")
    ]
    assert found == []


def test_make_help_lists_every_target():
    """Each target has a ## comment, which is all that `make` prints."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(
        re.search(r"^\.PHONY: (.*?) \$\(SCRIPTS\) FORCE$", makefile, re.M)[1].split()
    ) | set(SCRIPTS)
    assert targets == set(re.findall(r"^([a-z_]+):.*## ", makefile, re.M))
