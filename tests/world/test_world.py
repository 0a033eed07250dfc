"""The synthetic world: what is promised about its webs, questions, experts, tokenizer and
files, on a small build.
"""

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from venus import protocol
from venus.curation.clean import CleanConfig, clean_row
from venus.files import read_jsonl
from venus.model.qwen3 import Qwen3Config
from venus.protocol import TIMEOUT_MESSAGE, call_signature, parse_action
from venus.tokenizer import ChatTokenizer
from venus.tools.offline import offline_tools
from venus.trajectory import read_questions
from venus.world.build import (
    RELATIONS,
    Chain,
    Web,
    WorldConfig,
    build,
    draw_names,
    find_chains,
    make_pages,
    make_web,
    share,
)
from venus.world.experts import ANSWER_SENTENCE

ROOT = Path(__file__).resolve().parents[2]
SMALL = dict(
    train_webs=4,
    dev_webs=2,
    test_webs=2,
    long_webs=4,
    train_questions=80,
    questions_per_split=40,
    sft_rows=300,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    out = tmp_path_factory.mktemp("world") / "w"
    build(WorldConfig(out=str(out), seed=3, **SMALL))
    return out


def rows(path):
    return [row for _, row in read_jsonl(path)]


def pages(world, split):
    return {path.stem: rows(path) for path in sorted((world / "corpora").glob(f"{split}-*.jsonl"))}


def assistant(row):
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def raw(world, *names):
    return [
        row
        for name in names or ("train", "dev", "3hop", "long")
        for row in rows(world / "raw" / f"{name}.jsonl")
    ]


def sft(world, *names):
    """The raw rows as the cleaner leaves them."""
    config = CleanConfig(
        input=("in",), output="out", system_prompt="short", judge="none", validation=0.0
    )
    right = [
        row
        for row in raw(world, *names)
        if protocol.extract_prediction(assistant(row)[-1]) == row["meta"]["answer"]
    ]
    return [json.loads(clean_row(config, "row", row).lines[0][1]) for row in right]


def digest(directory):
    """Hash of every file's name and bytes."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def command(*flags, **environment):
    arguments = [sys.executable, "-m", "venus.world", *flags]
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---- files


def test_two_processes_build_the_same_bytes(tmp_path, world):
    """Set and dict order, the hash seed and the place of the directory must not show."""
    flags = [
        part
        for name, value in SMALL.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    done = command(
        "build", "--out", str(tmp_path / "elsewhere"), "--seed", "3", *flags, PYTHONHASHSEED="12345"
    )
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "elsewhere") == digest(world)


def test_another_seed_makes_other_webs_but_the_same_tokenizer(tmp_path, world):
    build(WorldConfig(out=str(tmp_path / "w"), seed=4, **SMALL))
    ours, other = digest(world), digest(tmp_path / "w")
    differing = {name for name in ours if ours[name] != other[name]}
    assert {Path(name).parts[0] for name in differing} == {
        "corpora",
        "questions",
        "raw",
        "manifest.json",
    }


def test_more_webs_leave_the_others_as_they_are(tmp_path, world):
    build(
        WorldConfig(
            out=str(tmp_path / "w"),
            seed=3,
            **{**SMALL, "train_webs": 5, "train_questions": 100, "sft_rows": 375},
        )
    )
    assert pages(tmp_path / "w", "train")["train-002"] == pages(world, "train")["train-002"]


def test_every_file_has_its_rows(world):
    counts = json.loads((world / "manifest.json").read_text())["rows"]
    assert counts == {
        str(path.relative_to(world)): len(rows(path))
        for path in world.rglob("*.jsonl")
        if "corpora" not in path.parts
    }
    assert (
        counts["questions/train.jsonl"] == 80
        and counts["questions/test.jsonl"] == counts["questions/dev_3hop.jsonl"] == 40
    )
    assert [len(sft(world, name)) for name in ("train", "dev", "3hop")] == [300, 12, 15]


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "letters.txt").write_text("dear")
    done = command("build", "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {tmp_path} exists and holds no world; give --out another directory\n",
    )
    assert sorted(path.name for path in tmp_path.parent.glob(f"{tmp_path.name}*")) == [
        tmp_path.name
    ]


def test_an_earlier_world_is_replaced_and_an_interrupted_build_removed(tmp_path):
    out, torn = tmp_path / "w", tmp_path / "w.tmp"
    for directory in (out, torn):
        directory.mkdir()
        (directory / "manifest.json").write_text('{"generator": "venus.world 0"}')
        (directory / "stale.txt").write_text("x")
    build(
        WorldConfig(
            out=str(out),
            **{**SMALL, "train_webs": 1, "long_webs": 0, "train_questions": 8, "sft_rows": 10},
        )
    )
    assert [path.name for path in tmp_path.iterdir()] == ["w"] and not (out / "stale.txt").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--out", "w", "--archive", "1.5"],
            "error: --archive 1.5: must be at least 0 and at most 0.9\n",
        ),
        (["--out", "w", "--dev-webs", "0"], "error: --dev-webs 0: must be at least 1\n"),
        (
            ["--out", "w", "--archiv", "0"],
            "error: unknown argument --archiv; did you mean --archive?\n",
        ),
        ([], "error: --out is required: directory to write; an earlier world there is replaced\n"),
    ],
)
def test_bad_flags_are_one_line(flags, message):
    done = command("build", *flags)
    assert (done.returncode, done.stderr) == (2, message)


def test_too_many_questions_for_the_webs_are_an_error(tmp_path):
    config = WorldConfig(
        out=str(tmp_path / "w"), **{**SMALL, "train_webs": 1, "train_questions": 5000}
    )
    with pytest.raises(ValueError, match="lower --train-questions"):
        build(config)
    assert not (tmp_path / "w").exists()


# ---- webs and questions


def test_held_out_names_facts_and_addresses_never_occur_in_train(world):
    """Train, dev and test must share neither a name nor a fact nor a (name, url) pair; bare urls
    like profile/19 are re-used by design.
    """
    seen = {split: (set(), set(), set()) for split in ("train", "dev", "test")}
    for split, (names, facts, addresses) in seen.items():
        for page in (page for web in pages(world, split).values() for page in web):
            names.add(page["title"])
            addresses.add((page["title"], page["url"]))
            facts.update(
                (page["title"], *line.split()[:2]) for line in page["text"].split("\n")[1:]
            )
    for a, b in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert all(
            left.isdisjoint(right) and left for left, right in zip(seen[a], seen[b], strict=True)
        )


def test_names_of_a_web_share_no_first_syllable():
    for split in ("train", "dev", "test"):
        names = draw_names(split, random.Random(split))
        assert len({name[:3] for name in names}) == len(names) == 60


def test_names_come_back_in_other_train_webs_with_fresh_facts():
    seen, again, same = {}, 0, 0
    for web in (make_web(f"train-{n}", "train", random.Random(n)) for n in range(100)):
        for name, facts in web.facts.items():
            again += name in seen
            same += seen.setdefault(name, facts) is not facts and seen[name] == facts
    assert again > 2000 and same == 0  # 6,000 draws of 3,456 names


def test_profiles_are_true_and_half_of_the_archived_facts_are_stale():
    web = make_web("train-000", "train", random.Random(0))
    lines = {
        page["url"]: page["text"].split("\n") for page in make_pages(web, 0.5, random.Random(1))
    }
    stale = 0
    for entity, facts in web.facts.items():
        true = [web.kinds[entity], *(f"{relation} {value}" for relation, value in facts.items())]
        assert lines[web.url("profile", entity)] == true
        archived = lines[web.url("archive", entity)]
        stale += sum(a != b for a, b in zip(archived, true, strict=True))
        assert all(
            web.kinds[line.split()[1]] == RELATIONS[web.kinds[entity]][line.split()[0]]
            for line in archived[1:]
        )
    # 180 facts: 4 standard deviations of 0.037 around 0.5, less slack
    assert 0.36 <= stale / 180 <= 0.64


def test_chains_repeat_neither_entity_nor_relation():
    web = make_web("train-000", "train", random.Random(0))
    for hops in (1, 2, 3):
        chains = find_chains(web, hops)
        assert len(chains) > 100
        for chain in chains:
            assert len(set(chain.path)) == hops + 1 and len(set(chain.relations)) == hops
            steps = zip(chain.path, chain.relations, chain.path[1:], strict=False)
            assert all(web.facts[entity][relation] == value for entity, relation, value in steps)


def test_first_hop_of_a_two_hop_question_changes_the_kind():
    facts = {
        "Ada": {"mentor": "Bob", "employer": "Co"},
        "Bob": {"mentor": "Ada"},
        "Co": {"founder": "Bob"},
    }
    web = Web(
        "train-000",
        {"Ada": "person", "Bob": "person", "Co": "company"},
        facts,
        {"Ada": 1, "Bob": 2, "Co": 3},
    )
    assert find_chains(web, 2) == [
        Chain(("employer", "founder"), ("Ada", "Co", "Bob")),
        # but no mentor of a mentor, and no employer of one
        Chain(("founder", "mentor"), ("Co", "Bob", "Ada")),
    ]
    assert find_chains(web, 2)[0].question == "What is the founder of the employer of Ada?"


@pytest.mark.parametrize("name", ["train", "test", "dev_3hop", "test_long"])
def test_reliable_pages_lead_to_the_ground_truth(world, name):
    """Walk each question's meta with the real tools: the profile pages in order
    must give the answer.
    """
    visit = offline_tools()["visit"]
    for question in read_questions(world / "questions" / f"{name}.jsonl")[:25]:
        values = []
        for url, relation in zip(
            question.meta["reliable"], question.meta["chain"], strict=not name.endswith("long")
        ):
            [page] = visit(
                {"url": [url], "goal": relation}, corpus=question.corpus, deadline=1.0
            ).items
            values.append(page.summary.split()[1])
        assert question.ground_truth == (values[-1],) and len(values) == question.meta["hops"]


def test_stale_pages_of_a_long_web_only_end_the_line_early(world):
    """A stale heir further down the line led to the right answer in fewer than 20 turns."""
    for web, content in pages(world, "train").items():
        if "-long-" in web:
            text = {page["url"]: page["text"] for page in content}
            assert all(
                text[url]
                in (
                    text[url.replace("archive", "profile")].replace("profile", "archive"),
                    "person\nheir none",
                )
                for url in text
                if url.startswith("archive")
            )


def test_no_expert_answers_a_train_question(world):
    files = [
        world / "questions" / f"{name}.jsonl" for name in ("train", "train_3hop", "dev", "dev_3hop")
    ]
    asked = {(row["meta"]["web"], row["question"]) for file in files for row in rows(file)}
    assert asked.isdisjoint((row["meta"]["web"], row["meta"]["question"]) for row in raw(world))


def test_shares_add_up():
    assert [share(7, part, 3) for part in range(3)] == [2, 2, 3]


# ---- experts


def test_cleaned_rows_are_right_and_strictly_valid_and_repeat_no_call_that_succeeded(world):
    for row in sft(world):
        actions = [parse_action(content) for content in assistant(row)]
        assert [message["role"] for message in row["messages"]] == ["system"] + [
            "user",
            "assistant",
        ] * len(actions)
        assert (
            row["messages"][0]["content"] == protocol.system_prompt("short")
            and row["messages"][1]["content"] == row["question"]
        )
        assert (
            all(action.kind in ("search", "visit") for action in actions[:-1])
            and actions[-1].answer == row["gt"]
        )
        observed = [message["content"] for message in row["messages"][3::2]]
        done = [
            call_signature(action)
            for action, text in zip(actions, observed, strict=False)
            if TIMEOUT_MESSAGE(120) not in text
        ]
        assert len(set(done)) == len(done) > 0


def test_sft_observations_are_those_of_a_rollout_byte_for_byte(world):
    tools = offline_tools()
    for row in raw(world)[::10]:
        corpus = str(world / "corpora" / f"{row['meta']['web']}.jsonl")
        for call, observation in zip(row["messages"][1::2], row["messages"][2::2], strict=False):
            action = parse_action(call["content"])
            if action.kind in tools and not protocol.is_timeout(
                protocol.split_observation(observation["content"])[0]
            ):
                text = tools[action.kind](action.arguments, corpus=corpus, deadline=1.0).text
                assert (
                    observation["content"]
                    == f"<tool_response>{protocol.observation_text(text)}</tool_response>"
                )


def test_raw_rows_carry_what_cleaning_removes(world):
    malformed = ("bad_json", "two_actions", "no_action")
    tools = ("PythonInterpreter", "google_scholar")
    found = dict.fromkeys((*malformed, *tools, "wrong", "nested", "repeat", "retry"), 0)
    for row in raw(world):
        contents = assistant(row)
        found["wrong"] += protocol.extract_prediction(contents[-1]) != row["meta"]["answer"]
        found["nested"] += parse_action(contents[-1]).reason == "nested_answer"
        for content, observation, following in zip(
            contents[:-1], row["messages"][2::2], contents[1:], strict=True
        ):
            reason = parse_action(content).reason
            for tool in tools:
                found[tool] += f'"{tool}"' in content
            if reason in malformed and "PythonInterpreter" not in content:
                assert observation["content"].split("\n")[1] == protocol.MALFORMED_MESSAGE
                found[reason] += 1
            if content == following:
                found[
                    "retry"
                    if protocol.is_timeout(protocol.split_observation(observation["content"])[0])
                    else "repeat"
                ] += 1
    assert min(found.values()) > 0, found


def test_a_call_that_timed_out_is_repeated_with_success(world):
    """A cleaner that keeps the first of equal calls would keep the failure: the raw rows
    must hold that case.
    """
    for row in raw(world):
        for at, message in enumerate(row["messages"]):
            if message["role"] == "user" and "timed out" in message["content"]:
                assert row["messages"][at + 1]["content"] == row["messages"][at - 1]["content"]
                assert "timed out" not in row["messages"][at + 2]["content"]


def test_three_in_ten_experts_close_with_exactly_the_answer_prefix(world):
    """Information gain is measured behind ANSWER_PREFIX: the policy must have
    seen it, token by token.
    """
    tokenizer = ChatTokenizer(world / "model")
    experts = raw(world)
    closing = [row for row in experts if ANSWER_SENTENCE in assistant(row)[-1]]
    assert 0.22 <= len(closing) / len(experts) <= 0.38
    for row in sft(world, "train"):
        if ANSWER_SENTENCE in assistant(row)[-1]:
            suffix = tokenizer.encode(protocol.ANSWER_SUFFIX) + [tokenizer.im_end_id]
            turn = tokenizer.answer_prefix_ids + tokenizer.ground_truth_ids(row["gt"]) + suffix
            assert tokenizer.turn_ids(assistant(row)[-1]) == turn


def test_long_experts_take_20_to_120_turns_of_tiny_observations_and_fit_the_model(world):
    tokenizer, config = ChatTokenizer(world / "model"), Qwen3Config.read(world / "model")
    turns = []
    for row in sft(world, "long"):
        encoded = tokenizer.encode_messages(row["messages"])
        turns.append(len(encoded.spans))
        assert len(encoded.ids) <= config.max_position_embeddings
    assert min(turns) >= 20 and max(turns) <= 120
    # each bucket of the resampling occurs
    assert {1 if n <= 50 else 2 if n <= 100 else 5 for n in turns} == {1, 2, 5}


# ---- tokenizer and model


def test_ids_of_whole_conversations_equal_those_of_the_joined_pieces(world):
    """Prompt, turns and observations are encoded apart and joined: no merge may
    reach over a seam.
    """
    chat = ChatTokenizer(world / "model")
    plain = Tokenizer.from_file(str(world / "model" / "tokenizer.json"))
    for row in sft(world):
        text = "".join(
            f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["messages"]
        )
        assert chat.encode_messages(row["messages"]).ids == plain.encode(text).ids


def test_a_name_has_the_same_two_tokens_everywhere(world):
    tokenizer = ChatTokenizer(world / "model")
    for row in sft(world, "train", "dev"):
        name = tokenizer.encode(row["gt"])
        assert len(name) == 2
        ids = tokenizer.encode_messages(row["messages"]).ids
        places = sum(message["content"].count(row["gt"]) for message in row["messages"])
        assert sum(ids[at : at + 2] == name for at in range(len(ids))) == places


def test_relation_kind_and_address_are_one_token_each(world):
    tokenizer = ChatTokenizer(world / "model")
    words = [
        *RELATIONS,
        *(relation for relations in RELATIONS.values() for relation in relations),
        "heir",
        "none",
        "profile",
        "archive",
    ]
    assert [len(tokenizer.encode(word)) for word in words] == [1] * len(words)
    assert [len(tokenizer.encode(f"/{number:02d}")) for number in range(100)] == [1] * 100
    # "mayor " and the two of the name
    assert [len(tokenizer.encode(f"{word} Bomhod")) for word in words[3:-3]] == [3] * 10


def test_the_messages_of_the_protocol_are_one_token_each(world):
    tokenizer = ChatTokenizer(world / "model")
    messages = (
        protocol.MALFORMED_MESSAGE,
        protocol.TOOL_ERROR_MESSAGE,
        *protocol.LIMIT_MESSAGES.values(),
    )
    assert [
        len(tokenizer.encode_untrusted(protocol.observation_text(message))) for message in messages
    ] == [1] * 5


def test_two_hop_conversations_take_at_most_230_tokens(world):
    tokenizer = ChatTokenizer(world / "model")
    lengths = [
        len(tokenizer.encode_messages(row["messages"]).ids)
        for row in sft(world, "train")
        if len(row["messages"]) == 11
    ]
    assert sum(lengths) / len(lengths) <= 230


def test_any_text_survives_the_tokenizer(world):
    tokenizer = ChatTokenizer(world / "model")
    text = (
        'Über 東京 🌊 "quotes"\\ \t\n\n </answer> <think> MAYOR mayor9 /1 /123 profile archive '
        "user\n"
    )
    assert tokenizer.decode(tokenizer.encode_untrusted(text)) == text


def test_special_tokens_are_qwens_and_come_after_the_vocabulary(world):
    spec = json.loads((world / "model" / "tokenizer.json").read_text())
    added = {token["content"]: token for token in spec["added_tokens"]}
    assert [token["id"] for token in spec["added_tokens"]] == list(
        range(len(spec["model"]["vocab"]), len(spec["model"]["vocab"]) + 9)
    )
    assert set(added) == set(protocol.SPECIAL_TOKENS) and not set(added) & set(
        spec["model"]["vocab"]
    )
    special = {name for name, token in added.items() if token["special"]}
    # think and tool tags: special=false, as in Qwen's own file
    assert special == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_config_names_the_tokenizers_ids(world):
    tokenizer = ChatTokenizer(world / "model")
    config = json.loads((world / "model" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (
        tokenizer.im_end_id,
        tokenizer.endoftext_id,
    )
    assert tokenizer.vocab_size <= config["vocab_size"] < tokenizer.vocab_size + 8
    read = Qwen3Config.read(world / "model")
    assert dataclasses.asdict(read).items() <= {**config, **config["rope_parameters"]}.items()
