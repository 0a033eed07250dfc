"""Published benchmark files become questions. All rows are made up here and encrypted by the test;
no benchmark's text is in this repository.
"""

import base64
import csv
import hashlib
import io
import json

import pytest
from tiny_runs import run_one

from venus.grading.benchmarks import BENCHMARKS, decrypt
from venus.grading.verdicts import PROMPTS
from venus.tools.offline import Corpus

SECRET = "Which frobnicator hums in the attic of Zyx?"
ANSWERS = ("Glimpf", "北京", "None", "42", "A, B; C")


def encrypt(text, canary, scheme):
    key = hashlib.sha256(canary.encode()).digest() if scheme == "sha256" else canary.encode()
    return base64.b64encode(
        bytes(byte ^ key[k % len(key)] for k, byte in enumerate(text.encode()))
    ).decode()


def rows_for(name, count, canary=None):
    """Rows as that benchmark publishes them, every third answer from ANSWERS;
    canary None: one per row.
    """
    rows = []
    for k in range(count):
        asked = f"{SECRET} ({k})"
        answer = ANSWERS[k % len(ANSWERS)]
        word = canary or f"made-up canary {k}"
        rows.append(
            {
                "browsecomp": {
                    "problem": encrypt(asked, word, "sha256"),
                    "answer": encrypt(answer, word, "sha256"),
                    "problem_topic": "Art",
                    "canary": word,
                },
                "browsecomp-zh": {
                    "Topic": encrypt("t", word, "sha256"),
                    "Question": encrypt(asked, word, "sha256"),
                    "Answer": encrypt(answer, word, "sha256"),
                    "canary": word,
                },
                "browsecomp-plus": {
                    "query_id": str(k + 7),
                    "query": encrypt(asked, word, "sha256"),
                    "answer": encrypt(answer, word, "sha256"),
                    "gold_docs": [],
                },
                "gaia-text": {
                    "task_id": f"t{k}",
                    "Question": asked,
                    "Level": 1 + k % 3,
                    "answer": answer,
                    "file_name": "",
                },
                "xbench-ds-2505": {
                    "id": k,
                    "prompt": encrypt(asked, word, "canary"),
                    "answer": encrypt(answer, word, "canary"),
                    "reference_steps": encrypt("..", word, "canary"),
                    "canary": word,
                },
                "deepsearchqa": {
                    "problem": asked,
                    "problem_category": "Art",
                    "answer": answer,
                    "answer_type": "Set Answer",
                },
                "multi-hop": {
                    "_id": f"h{k}",
                    "question": asked,
                    "answer": answer,
                    "type": "bridge",
                    "context": [["T", ["One. ", " Two."]]],
                },
            }[name.replace("2510", "2505")]
        )
    return rows


def write(path, rows):
    if path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        path.write_text(text.getvalue(), encoding="utf-8-sig")
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (extra `parquet`)")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    else:
        path.write_text(
            json.dumps(rows)
            if path.suffix == ".json"
            else "".join(json.dumps(row) + "\n" for row in rows)
        )
    return str(path)


# Loading

PUBLISHED = {
    "browsecomp": (1266, ".csv"),
    "browsecomp-zh": (289, ".csv"),
    "browsecomp-plus": (830, ".parquet"),
    "gaia-text": (103, ".json"),
    "xbench-ds-2505": (100, ".csv"),
    "xbench-ds-2510": (100, ".csv"),
    "deepsearchqa": (900, ".csv"),
    "multi-hop": (12, ".json"),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_whole_file_is_read_decrypted_and_counted(tmp_path, name):
    count, suffix = PUBLISHED[name]
    canary = "one canary for all" if name == "browsecomp-plus" else None
    questions = BENCHMARKS[name].load(
        write(tmp_path / f"b{suffix}", rows_for(name, count, canary)), canary=canary
    )
    assert BENCHMARKS[name].count in (count, None)
    assert [q.question for q in questions] == [f"{SECRET} ({k})" for k in range(count)]
    # the word None is one of them
    assert [q.ground_truth for q in questions[:5]] == [(answer,) for answer in ANSWERS]
    assert len({q.id for q in questions}) == count and all(q.corpus is None for q in questions)


def test_ids_are_the_files_own_or_do_not_change_in_a_subset(tmp_path):
    """A row number for an id would compare one question with another as soon as
    one side ran a subset.
    """
    rows = rows_for("browsecomp", 3)
    all_of_them = BENCHMARKS["browsecomp"].load(write(tmp_path / "a.csv", rows), partial=True)
    some = BENCHMARKS["browsecomp"].load(write(tmp_path / "b.jsonl", rows[1:]), partial=True)
    assert [q.id for q in some] == [q.id for q in all_of_them[1:]]
    ids = {
        name: [
            q.id
            for q in BENCHMARKS[name].load(
                write(tmp_path / f"{name}.json", rows_for(name, 2, "c")), canary="c", partial=True
            )
        ]
        for name in ("browsecomp-plus", "gaia-text", "xbench-ds-2510", "multi-hop")
    }
    assert ids == {
        "browsecomp-plus": ["7", "8"],
        "gaia-text": ["t0", "t1"],
        "xbench-ds-2510": ["0", "1"],
        "multi-hop": ["h0", "h1"],
    }


def test_what_helps_to_analyse_is_kept_in_meta_and_not_in_the_question(tmp_path):
    """DeepSearchQA's answer_type must not be shown to the model, which sees
    Question.question only.
    """
    (first, *_) = BENCHMARKS["deepsearchqa"].load(
        write(tmp_path / "d.csv", rows_for("deepsearchqa", 900))
    )
    assert (
        first.meta == {"problem_category": "Art", "answer_type": "Set Answer"}
        and first.question == f"{SECRET} (0)"
    )
    (first,) = BENCHMARKS["browsecomp"].load(
        write(tmp_path / "b.csv", rows_for("browsecomp", 1)), partial=True
    )
    assert first.meta == {"problem_topic": "Art", "canary": "made-up canary 0"}


def test_all_questions_may_share_a_corpus(tmp_path):
    path = write(tmp_path / "p.jsonl", rows_for("browsecomp-plus", 2, "c"))
    questions = BENCHMARKS["browsecomp-plus"].load(
        path, canary="c", corpus=str(tmp_path / "x" / ".." / "corpus.jsonl"), partial=True
    )
    assert {q.corpus for q in questions} == {str(tmp_path / "corpus.jsonl")}


def test_gaia_of_hugging_face_loses_the_questions_about_attachments_and_is_told_from_the_text_list(
    tmp_path,
):
    rows = [
        {
            "task_id": f"t{k}",
            "Question": f"Q{k}?",
            "Level": 1,
            "Final answer": str(k),
            "file_name": "f.png" * (k % 4 == 0),
        }
        for k in range(165)
    ]
    path = write(tmp_path / "metadata.jsonl", rows)
    questions = BENCHMARKS["gaia-text"].load(
        write(tmp_path / "few.jsonl", rows[:130]), partial=True
    )
    assert len(questions) == 97 and questions[0].ground_truth == ("1",)
    with pytest.raises(
        ValueError,
        match="metadata.jsonl: 123 questions, gaia-text has 103; its 103 text-only questions are a "
        "list of their own",
    ):
        BENCHMARKS["gaia-text"].load(path, partial=True)


def test_multi_hop_aliases_are_accepted_answers(tmp_path):
    row = {
        "id": "2hop__1",
        "question": "Who?",
        "answer": "Bo",
        "answer_aliases": ["Bo A.", "Bo", " "],
        "answerable": True,
    }
    (question,) = BENCHMARKS["multi-hop"].load(write(tmp_path / "m.jsonl", [row]))
    assert question.id == "2hop__1" and question.ground_truth == ("Bo", "Bo A.")


def test_an_answer_of_a_spreadsheet_may_be_a_number(tmp_path):
    (question,) = BENCHMARKS["gaia-text"].load(
        write(tmp_path / "g.json", [{"task_id": "t", "Question": "How many?", "answer": 17}]),
        partial=True,
    )
    assert question.ground_truth == ("17",)


# What is refused, in words that give nothing away


@pytest.mark.parametrize("count", [99, 101])
def test_another_number_of_questions_is_refused(tmp_path, count):
    path = write(tmp_path / "x.csv", rows_for("xbench-ds-2505", count))
    with pytest.raises(
        ValueError,
        match=f"x.csv: {count} questions, xbench-ds-2505 has 100; for a subset, --partial",
    ):
        BENCHMARKS["xbench-ds-2505"].load(path)
    if count < 100:
        assert len(BENCHMARKS["xbench-ds-2505"].load(path, partial=True)) == 99


def refused(name, path, **how):
    with pytest.raises(ValueError) as caught:
        BENCHMARKS[name].load(str(path), **{"partial": True, **how})
    assert not any(word in str(caught.value) for word in ("frobnicator", "attic", "Glimpf", "北京"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("reader", "writer"), [("browsecomp", "xbench-ds-2505"), ("xbench-ds-2505", "browsecomp")]
)
def test_the_wrong_scheme_is_an_error_and_no_mojibake(tmp_path, reader, writer):
    """The two XOR schemes differ in a hash. Under the other one the bytes are no UTF-8."""
    names = {"prompt": "problem", "problem": "prompt"}
    rows = [
        {names.get(key, key): value for key, value in row.items()} for row in rows_for(writer, 1)
    ]
    assert "does not decrypt under the scheme" in refused(reader, write(tmp_path / "b.jsonl", rows))


def test_the_wrong_canary_and_decrypted_files_are_errors(tmp_path):
    (row,) = rows_for("browsecomp", 1)
    assert "another canary" in refused(
        "browsecomp", write(tmp_path / "a.csv", [{**row, "canary": "another"}])
    )
    assert "already decrypted" in refused(
        "browsecomp", write(tmp_path / "b.csv", [{**row, "problem": SECRET}])
    )
    plus = write(tmp_path / "c.jsonl", rows_for("browsecomp-plus", 1, "c"))
    assert "c.jsonl:1: field 'query' is encrypted and the row has no canary" in refused(
        "browsecomp-plus", plus
    )
    assert "c.jsonl:1: field 'query' does not decrypt" in refused(
        "browsecomp-plus", plus, canary="d"
    )


def test_a_lost_none_is_noticed(tmp_path):
    """Readers of tables take the literal answer None for a missing value."""
    (row,) = rows_for("deepsearchqa", 1)
    for answer in (None, "", " "):
        assert "field 'answer' is missing, empty or no text" in refused(
            "deepsearchqa", write(tmp_path / "d.jsonl", [{**row, "answer": answer}])
        )
    assert "field 'answer' is missing" in refused(
        "deepsearchqa", write(tmp_path / "e.jsonl", [{**row, "answer": float("nan")}])
    )


def test_files_that_are_something_else_are_one_line(tmp_path):
    (row,) = rows_for("deepsearchqa", 1)
    (tmp_path / "s.xlsx").write_bytes(b"PK")
    (tmp_path / "long.csv").write_text("problem,answer\na,b,c\n")
    (tmp_path / "latin.csv").write_bytes("problem,answer\nä,b\n".encode("latin-1"))
    (tmp_path / "open.csv").write_text('problem,answer\n"Glimpf,b\n')
    (tmp_path / "head.csv").write_text("problem,answer\n")
    assert "save its sheet as CSV" in refused("browsecomp-zh", tmp_path / "s.xlsx")
    assert "absent.csv: no such" in refused("deepsearchqa", tmp_path / "absent.csv")
    assert "long.csv:2: a row of another length" in refused("deepsearchqa", tmp_path / "long.csv")
    assert "not a CSV in UTF-8" in refused("deepsearchqa", tmp_path / "latin.csv")
    assert "not a CSV in UTF-8" in refused("deepsearchqa", tmp_path / "open.csv")
    assert "head.csv: no questions" in refused("deepsearchqa", tmp_path / "head.csv")
    assert "field 'Question' is missing" in refused("gaia-text", write(tmp_path / "d.jsonl", [row]))
    assert "occurs twice" in refused("deepsearchqa", write(tmp_path / "t.jsonl", [row, row]))
    assert "not an object" in refused("deepsearchqa", write(tmp_path / "l.json", [[1]]))


# Schemes and table


@pytest.mark.parametrize("scheme", ["sha256", "canary"])
@pytest.mark.parametrize("text", ["", "a", "北京 и Ω", "long " * 100])
def test_decrypting_undoes_encrypting_for_keys_shorter_and_longer_than_the_text(scheme, text):
    assert decrypt(encrypt(text, "cañary", scheme), "cañary", scheme) == text


def test_the_schemes_on_three_bytes_by_hand():
    """SHA-256("k") begins with 82 54 c3; "abc" XOR it is e3 36 a0. The other scheme XORs
    with "k", 6b: 0a 09 08.
    """
    assert decrypt(base64.b64encode(bytes.fromhex("e336a0")).decode(), "k", "sha256") == "abc"
    assert decrypt(base64.b64encode(bytes.fromhex("0a0908")).decode(), "k", "canary") == "abc"


def test_each_benchmark_names_a_prompt_a_metric_and_where_it_leaks():
    for name, benchmark in BENCHMARKS.items():
        assert (
            benchmark.name == name
            and benchmark.prompt in PROMPTS
            and benchmark.metric in ("accuracy", "gaia", "items", "em")
        )
        assert benchmark.leaks and all(
            leak == leak.lower() and len(leak) > 5 for leak in benchmark.leaks
        )
    assert {name: b.count for name, b in BENCHMARKS.items()} == {
        name: None if name == "multi-hop" else n for name, (n, _) in PUBLISHED.items()
    }


# Corpora


def test_documents_become_a_corpus_that_the_offline_tools_search(tmp_path):
    """BrowseComp-Plus's documents, one of them twice, two under one address; and the paragraphs of
    three multi-hop forms.
    """
    plus = [
        {
            "docid": "11",
            "text": "---\nsource: x\ntitle: 'On zephyrs'\n---\nA zephyr is a wind.",
            "url": "http://a/z",
        },
        {"docid": "12", "text": "Other wind."},
        {
            "docid": "11",
            "text": "---\nsource: x\ntitle: 'On zephyrs'\n---\nA zephyr is a wind.",
            "url": "http://a/z",
        },
        {"docid": "13", "text": "Later wind.", "url": "http://a/z"},
    ]
    hops = [
        {
            "context": [
                ["Oslo (city)", ["Oslo is in Norway.", " It is cold."]],
                ["Rome", ["Rome is warm."]],
            ]
        },
        {"context": {"title": ["Rome"], "sentences": [["Rome is warm."]]}},
        {"paragraphs": [{"title": "Bern", "paragraph_text": "Bern has bears."}]},
    ]
    output = tmp_path / "corpus.jsonl"
    run_one(
        "-m",
        "venus.benchmarks",
        "--data",
        write(tmp_path / "p.jsonl", plus),
        write(tmp_path / "h.json", hops),
        "--output",
        output,
    )
    corpus = Corpus.load(output)
    assert list(corpus.pages) == [
        "http://a/z",
        "doc://12",
        "http://a/z#2",
        "doc://Oslo%20%28city%29",
        "doc://Rome",
        "doc://Bern",
    ]
    assert (
        corpus.pages["http://a/z"].title == "On zephyrs"
        and corpus.pages["doc://Oslo%20%28city%29"].text == "Oslo is in Norway. It is cold."
    )
    assert [page.url for page in corpus.search("zephyr", 3)] == ["http://a/z"]


def test_a_file_without_documents_is_refused_and_leaves_nothing(tmp_path):
    path = write(tmp_path / "q.jsonl", rows_for("deepsearchqa", 1))
    done = run_one(
        "-m", "venus.benchmarks", "--data", path, "--output", tmp_path / "corpus.jsonl", code=2
    )
    assert (
        done.stderr.startswith("error: ")
        and "q.jsonl:1: no document" in done.stderr
        and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "corpus.jsonl").exists()
