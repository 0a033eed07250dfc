"""The synthetic offline world: many small webs, multi-hop questions, scripted expert trajectories,
a tiny tokenizer and model config.

    python -m venus.world build --out DIR --seed 0

A web has 60 entities with two pages each that share a number: `profile/NN` is true, each fact of
`archive/NN` is stale with p = 0.5. "What is the sponsor of the mayor of Borhok?" takes two hops of
search and visit. Names are re-used across train webs with fresh facts, so that memorising a web is
useless; dev and test webs have names of their own. A long web knows one relation: to follow a line
of heirs to its end takes 20 to 120 turns. Everything follows from the seed, byte for byte, and the
tokenizer is the same for every seed.
"""

import itertools
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from venus import protocol
from venus.cli import Options, option
from venus.files import write_json, write_jsonl
from venus.tools.offline import NOT_FOUND, offline_tools
from venus.trajectory import Question
from venus.world.experts import HEIR, NOBODY, SOURCES, THOUGHTS, Expert, Habits
from venus.world.tiny_model import glue_strings, train_tokenizer, write_model_dir

GENERATOR = "venus.world 1"
SPLITS = ("train", "dev", "test")
RELATIONS = {
    "person": {"employer": "company", "birthplace": "city", "mentor": "person"},
    "company": {"founder": "person", "base": "city", "rival": "company"},
    "city": {"mayor": "person", "sponsor": "company", "twin": "city"},
}
# persons in the first line of long webs 0, 1, 2, and again
LONG_LINES = ((50, 58), (20, 24), (25, 36))
LONG_QUESTION = "Who is the last heir of {}?"
# fixed text around slots
TEMPLATES = ("What is the § of the § of §?", LONG_QUESTION.format("§"), "nothing on §", NOT_FOUND)
FIRST = [
    c + v + "rnlmskt"[(4 * i + j) % 7]
    for i, c in enumerate("BDFGHJKLMNPRSTVZ")
    for j, v in enumerate("aeio")
]
SECOND = [
    c + v + "dnlpmrs"[(3 * i + j) % 7]
    for i, c in enumerate("bdfghjklmnprstvz")
    for j, v in enumerate("aiou")
]


@dataclass(frozen=True)
class WorldConfig(Options):
    """What is built. Shares and probabilities are fractions of 1, and below it: else no expert
    might ever be right, and the build would not end.
    """

    out: str = option(help="directory to write; an earlier world there is replaced")
    seed: int = option(
        0, group="webs", help="everything but the tokenizer follows from it", least=0
    )
    train_webs: int = option(100, help="train webs of 60 entities", least=1)
    dev_webs: int = option(12, help="dev webs", least=1)
    test_webs: int = option(12, help="test webs", least=1)
    long_webs: int = option(
        32,
        help="long webs for train; a quarter as many each for dev and test; 0: no long split",
        least=0,
    )
    train_questions: int = option(
        2400,
        group="questions and experts",
        help="2-hop train questions, none of which an expert answers; a quarter as many 3-hop",
        least=1,
    )
    questions_per_split: int = option(
        200, help="dev and test questions, 2-hop and 3-hop each", least=1
    )
    sft_rows: int = option(
        5500,
        help="right 1-hop and 2-hop expert trajectories; 4 % as many for dev, 5 % as many 3-hop",
        least=1,
    )
    one_hop: float = option(0.4, help="share of 1-hop rows among them", least=0, most=0.9)
    stale: float = option(
        0.5,
        group="habits",
        help="probability that a fact of an archive page is wrong",
        least=0,
        most=0.9,
    )
    archive: float = option(
        0.7, help="probability that an expert opens the archive page", least=0, most=0.9
    )
    early: float = option(
        0.1,
        help="probability that an expert answers after the first of several hops",
        least=0,
        most=0.9,
    )
    closing: float = option(
        0.3,
        help="probability that an expert closes with the sentence of ANSWER_PREFIX",
        least=0,
        most=0.9,
    )
    dirt: float = option(
        0.25,
        help="expected number of slips (disallowed tool, duplicate, time-out, malformed turn) in "
        "a raw trajectory",
        least=0,
        most=0.9,
    )


@dataclass(frozen=True)
class Web:
    """kinds: entity -> person | company | city; facts: entity -> relation -> value; numbers: entity
    -> the NN of its two urls.
    """

    name: str
    kinds: dict[str, str]
    facts: dict[str, dict[str, str]]
    numbers: dict[str, int]

    def url(self, source: str, entity: str) -> str:
        return f"{source}/{self.numbers[entity]:02d}"


def draw_names(split: str, rng: random.Random) -> list[str]:
    """Draw the 60 names of one web: no first syllable twice, and second ones apart where possible,
    or parts of names would collide.

    Of the 64 x 64 combinations five residues of (i + j) mod 64 belong to dev, five to
    test, the rest to train.
    """
    residues = {"dev": range(5), "test": range(5, 10), "train": range(10, 64)}[split]
    names, taken = [], set()
    for i in rng.sample(range(64), 60):
        own = [(r - i) % 64 for r in residues]
        j = rng.choice([j for j in own if j not in taken] or own)
        taken.add(j)
        names.append(FIRST[i] + SECOND[j])
    return names


def draw_numbers(names: list[str], rng: random.Random) -> dict[str, int]:
    """Draw the number in the urls of every entity."""
    return dict(zip(names, rng.sample(range(100), len(names)), strict=True))


def make_web(name: str, split: str, rng: random.Random) -> Web:
    """Make a web of 20 persons, 20 companies and 20 cities; every relation holds a random
    other entity of its kind.
    """
    names = draw_names(split, rng)
    kinds = dict(zip(names, itertools.cycle(RELATIONS), strict=False))
    facts = {e: {} for e in names}
    for e in names:
        for relation, kind in RELATIONS[kinds[e]].items():
            facts[e][relation] = rng.choice([v for v in names if kinds[v] == kind and v != e])
    return Web(name, kinds, facts, draw_numbers(names, rng))


def make_long_web(name: str, split: str, rng: random.Random, *, lengths: tuple[int, int]) -> Web:
    """Make a web of two lines of heirs: one of so many persons, and one of those left."""
    names = draw_names(split, rng)
    length = rng.randint(*lengths)
    facts = {
        e: {HEIR: heir}
        for line in (names[:length], names[length:])
        for e, heir in zip(line, [*line[1:], NOBODY], strict=True)
    }
    return Web(name, dict.fromkeys(names, "person"), facts, draw_numbers(names, rng))


def make_pages(web: Web, stale: float, rng: random.Random) -> list[dict]:
    """Write both pages of every entity: its kind, then a line per fact in fixed order (in a long
    web with the url of the heir's page).
    """
    pages = []
    for source, (entity, facts) in itertools.product(SOURCES, web.facts.items()):
        lines, links = [web.kinds[entity]], []
        for relation, value in facts.items():
            if source == "archive" and value != NOBODY and rng.random() < stale:
                kind = web.kinds[value]
                others = [e for e in web.kinds if web.kinds[e] == kind and e not in (entity, value)]
                # any other heir could be a short cut to the right answer
                value = NOBODY if relation == HEIR else rng.choice(others)
            line = f"{relation} {value}"
            if value != NOBODY:
                links.append(web.url(source, value))
                line += f" {links[-1]}" if relation == HEIR else ""
            lines.append(line)
        url, text = web.url(source, entity), "\n".join(lines)
        pages.append({"url": url, "title": entity, "text": text, "links": links})
    return pages


@dataclass(frozen=True)
class Chain:
    """The way to an answer: path[k + 1] is the relations[k] of path[k]."""

    relations: tuple[str, ...]
    path: tuple[str, ...]

    @property
    def question(self) -> str:
        if self.relations[0] == HEIR:
            return LONG_QUESTION.format(self.path[0])
        return f"What is the {' of the '.join(reversed(self.relations))} of {self.path[0]}?"


def find_chains(web: Web, hops: int) -> list[Chain]:
    """List all chains of so many hops, with no entity twice and the asked entities of different
    kinds, so that no relation occurs twice.
    """
    chains = [Chain((), (entity,)) for entity in web.kinds]
    for hop in range(hops):
        chains = [
            Chain((*chain.relations, relation), (*chain.path, value))
            for chain in chains
            for relation, value in web.facts[chain.path[-1]].items()
            if value not in chain.path
            and (hop == hops - 1 or web.kinds[value] not in {web.kinds[e] for e in chain.path})
        ]
    return chains


def find_lines(web: Web) -> list[Chain]:
    """List the lines of heirs of 18 to 58 persons (20 to 117 turns) from each of the
    first three of a line.
    """
    heirs, chains = {facts[HEIR] for facts in web.facts.values()}, []
    for path in ([entity] for entity in web.facts if entity not in heirs):
        while (heir := web.facts[path[-1]][HEIR]) != NOBODY:
            path.append(heir)
        tails = [path[skip:] for skip in range(3) if len(path) - skip >= 18]
        chains += [Chain((HEIR,) * (len(tail) - 1), tuple(tail)) for tail in tails]
    return chains


def make_question(web: Web, chain: Chain, number: int) -> Question:
    """Make the question of a chain; meta.reliable lists the profile pages on the way, for the share
    of visits to reliable sources.
    """
    long, hops = chain.relations[0] == HEIR, len(chain.relations)
    # the page of the last heir is opened too: only it says "none"
    opened = chain.path if long else chain.path[:-1]
    meta = {"hops": hops, "web": web.name, "chain": list(chain.relations)}
    meta["reliable"] = [web.url("profile", entity) for entity in opened]
    name = f"{web.name}-{'long' if long else f'{hops}hop'}-{number:03d}"
    corpus = f"../corpora/{web.name}.jsonl"
    return Question(name, chain.question, (chain.path[-1],), corpus, meta)


def share(total: int, part: int, parts: int) -> int:
    """Return how many of `total` fall to part number `part` of `parts`: of 7 in 3 parts 2, 2, 3."""
    return total * (part + 1) // parts - total * part // parts


class Builder:
    """Collects the rows of a world's files, web by web. Each web has a random stream of its own:
    more webs leave the others as they are.
    """

    def __init__(self, config: WorldConfig, root: Path):
        self.config, self.root = config, root
        self.tools = offline_tools()
        self.rows: dict[str, list[dict]] = {}  # path of a JSONL file in `root` -> its rows

    def add_web(self, split: str, number: int) -> None:
        """Add a web's pages and 2-hop and 3-hop questions, and expert rows on its other
        chains (train and dev).
        """
        config = self.config
        name = f"{split}-{number:03d}"
        rng = random.Random(f"{config.seed}/{name}")
        web = make_web(name, split, rng)
        habits = Habits(config.archive, config.early, config.closing, config.dirt)
        expert = Expert(habits, self.tools, self._write_pages(web, rng), rng)
        one, two, three = (
            rng.sample(chains, len(chains))
            for chains in (find_chains(web, hops) for hops in (1, 2, 3))
        )

        def part(total: int) -> int:
            return share(total, number, getattr(config, f"{split}_webs"))

        num_two = num_three = config.questions_per_split
        if split == "train":
            num_two, num_three = config.train_questions, config.train_questions // 4
        num_two, num_three = part(num_two), part(num_three)
        self._add_questions(split, web, two[:num_two])
        self._add_questions(f"{split}_3hop", web, three[:num_three])
        num_rows = {"train": config.sft_rows, "dev": -(-config.sft_rows // 25), "test": 0}[split]
        num_one = round(num_rows * config.one_hop)
        self._add_experts(split, one, part(num_one), expert)
        self._add_experts(split, two[num_two:], part(num_rows - num_one), expert)
        if split == "train":
            self._add_experts("3hop", three[num_three:], part(-(-num_rows // 20)), expert)

    def add_long_web(self, split: str, number: int) -> None:
        """Add a long web's pages and questions and, for train, two right expert rows per
        question on average.
        """
        config, name = self.config, f"{split}-long-{number:03d}"
        rng = random.Random(f"{config.seed}/{name}")
        web = make_long_web(name, split, rng, lengths=LONG_LINES[number % len(LONG_LINES)])
        corpus, lines = self._write_pages(web, rng), find_lines(web)
        self._add_questions(f"{split}_long", web, lines)
        if split == "train":
            # one stale page in fifty ends the line too early, so these experts hardly ever open
            # the archive
            habits = Habits(config.archive / 70, 0.0, config.closing, config.dirt)
            expert = Expert(habits, self.tools, corpus, rng)
            self._add_experts("long", lines, 2 * len(lines), expert)

    def _write_pages(self, web: Web, rng: random.Random) -> str:
        path = self.root / "corpora" / f"{web.name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_jsonl(path, make_pages(web, self.config.stale, rng))
        return str(path)

    def _add_questions(self, name: str, web: Web, chains: list[Chain]) -> None:
        made = (make_question(web, chain, number).to_json() for number, chain in enumerate(chains))
        self.rows.setdefault(f"questions/{name}.jsonl", []).extend(made)

    def _add_experts(self, name: str, chains: list[Chain], count: int, expert: Expert) -> None:
        """Run the expert on the chains, over again if need be, until `count` answers were right: so
        many rows will be left by cleaning.

        Every run is a raw row, and like the released ones: no system message, `meta` holds
        question and answer.
        """
        if not count:
            return
        if not chains:
            raise ValueError(
                f"all chains of a web became questions, none is left for {name} experts; "
                "lower --train-questions"
            )
        raw = self.rows.setdefault(f"raw/{name}.jsonl", [])
        for chain in itertools.cycle(chains):
            if count == 0:
                return
            question, answer = chain.question, chain.path[-1]
            messages = expert.run(question, chain.path[0], chain.relations)
            meta = {"question": question, "answer": answer}
            meta |= {"hops": len(chain.relations), "web": Path(expert.corpus).stem}
            raw.append({"messages": messages, "meta": meta})
            count -= protocol.extract_prediction(messages[-1]["content"]) == answer

    def write(self) -> None:
        """Write the collected files, the model directory and, last, the manifest
        of a complete world.
        """
        for path, rows in self.rows.items():
            (self.root / path).parent.mkdir(exist_ok=True)
            write_jsonl(self.root / path, rows)
        glue = glue_strings((*TEMPLATES, *THOUGHTS))
        write_model_dir(self.root / "model", train_tokenizer(tokenizer_texts(), glue))
        settings = {name: value for name, value in asdict(self.config).items() if name != "out"}
        counts = {path: len(rows) for path, rows in sorted(self.rows.items())}
        write_manifest(self.root, complete=True, config=settings, rows=counts)


def tokenizer_texts() -> list[str]:
    """Every name, relation, kind and url in the surroundings in which the formats have them,
    whatever the seed draws.
    """
    words = [*(r for relations in RELATIONS.values() for r in relations), HEIR]
    facts = [f"{relation} {name}\n{relation}" for relation in words for name in FIRST]
    urls = [f"{source}/{number:02d}" for source in SOURCES for number in range(100)]
    return [*facts, *urls, *(a + b for a in FIRST for b in SECOND), *[*RELATIONS, NOBODY] * 64]


def write_manifest(root: Path, **entries: object) -> None:
    """Write manifest.json; its first entry marks the directory as ours."""
    write_json(root / "manifest.json", {"generator": GENERATOR, **entries})


def check_replaceable(directory: Path) -> None:
    """ValueError unless the directory is absent, empty, or from an earlier
    (perhaps interrupted) build.
    """
    manifest = directory / "manifest.json"
    if manifest.is_file() and "venus.world" in manifest.read_text(encoding="utf-8"):
        return
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"{directory} exists and holds no world; give --out another directory")


def build(config: WorldConfig) -> None:
    """Build the world in `out`.tmp and rename it: a directory named `out` is always complete."""
    out = Path(config.out)
    temporary, old = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old")
    for directory in (out, temporary, old):
        check_replaceable(directory)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_manifest(temporary, complete=False)
    builder = Builder(config, temporary)
    jobs = [
        (builder.add_web, split, number)
        for split in SPLITS
        for number in range(getattr(config, f"{split}_webs"))
    ]
    for split in SPLITS:
        num_long = config.long_webs if split == "train" else -(-config.long_webs // 4)
        jobs += [(builder.add_long_web, split, number) for number in range(num_long)]
    for add, split, number in tqdm(jobs, desc="world", unit="web"):
        add(split, number)
    builder.write()
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(temporary, out)
    shutil.rmtree(old, ignore_errors=True)
    counts = (f"{len(rows)} {path}" for path, rows in sorted(builder.rows.items()))
    print(f"{out}: {', '.join(counts)}")
