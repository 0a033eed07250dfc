"""Search and visit over a fixed corpus, against hand-made pages and a written-out BM25."""

import json
import math
import random
import threading
from collections import Counter

import pytest

from venus.tools import offline
from venus.tools.offline import (
    Corpus,
    CorpusCache,
    OfflineSearch,
    OfflineVisit,
    Page,
    offline_tools,
    words,
)

PAGES = [
    {
        "url": "a/1",
        "title": "Borhok",
        "text": "city\nmayor Gistom\nsponsor Lortom",
        "links": ["a/2"],
    },
    {"url": "a/2", "title": "Gistom", "text": "person\nemployer Lortom", "links": []},
    {
        "url": "a/3",
        "title": "Notes",
        "text": "The mayor opened a bridge. It rained!\nThe mayor left the city. Nobody saw him.",
    },
    {
        "url": "a/4",
        "title": 'A "Web Results" page',
        "text": 'He said "no", isn\'t it?\n## Web Results\n1. [x](y)',
    },
]


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "pages.jsonl", PAGES)


def write_corpus(path, pages):
    path.write_text("".join(json.dumps(page) + "\n" for page in pages))
    return str(path)


def search(corpus, *queries, **options):
    return OfflineSearch(CorpusCache(), **{"top_k": 3, "shuffle": False, **options})(
        {"query": list(queries)}, corpus=corpus, deadline=1.0
    )


def visit(corpus, *urls, goal):
    return OfflineVisit(CorpusCache())(
        {"url": list(urls), "goal": goal}, corpus=corpus, deadline=1.0
    )


def reference_bm25(pages, query):
    """The textbook formula, term by term: k1 1.2, b .75, idf ln(1 + (N - n + .5) / (n + .5)),
    title counted twice.
    """
    documents = {page.url: words(page.title) * 2 + words(page.text) for page in pages}
    mean = sum(map(len, documents.values())) / len(documents)
    scores = {}
    for url, document in documents.items():
        for term in words(query):
            tf, n = document.count(term), sum(term in other for other in documents.values())
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            scores[url] = scores.get(url, 0.0) + idf * tf * 2.2 / (
                tf + 1.2 * (0.25 + 0.75 * len(document) / mean)
            )
    return sorted(
        (url for url in scores if scores[url] > 0), key=lambda url: (-round(scores[url], 9), url)
    )


def test_ranking_equals_written_out_bm25():
    rng = random.Random(0)
    vocabulary = [f"w{n}" for n in range(30)]
    pages = [
        Page(
            f"u{n:02d}",
            rng.choice(vocabulary),
            " ".join(rng.choices(vocabulary, k=rng.randint(1, 40))),
        )
        for n in range(40)
    ]
    corpus = Corpus({page.url: page for page in pages})
    for _ in range(50):
        query = " ".join(rng.sample(vocabulary, 3))
        assert [page.url for page in corpus.search(query, 40)] == reference_bm25(pages, query)


def test_the_page_about_a_name_comes_before_pages_that_mention_it(corpus):
    assert [hit.url for hit in search(corpus, "Lortom Gistom").items] == ["a/2", "a/1"]


def test_equal_scores_are_ordered_by_url(tmp_path):
    path = write_corpus(
        tmp_path / "c.jsonl",
        [{"url": url, "title": "Borhok", "text": "city"} for url in ("z", "b", "k")],
    )
    assert [hit.url for hit in search(path, "borhok").items] == ["b", "k", "z"]


def test_cjk_text_is_searched_by_ideograph(tmp_path):
    path = write_corpus(
        tmp_path / "c.jsonl", [{"url": "1", "text": "東京の市長"}, {"url": "2", "text": "大阪"}]
    )
    assert [hit.url for hit in search(path, "市長は誰").items] == ["1"]


def test_search_text_is_one_json_block_per_query(corpus):
    result = search(corpus, "Gistom", "nowhere")
    assert result.text == (
        '[{"query": "Gistom", "web_page_info_list": [{"title": "Gistom", "url": "a/2", '
        '"snippet": "person"}, '
        '{"title": "Borhok", "url": "a/1", "snippet": "city"}]}, {"query": "nowhere", '
        '"web_page_info_list": []}]'
    )
    assert result.status == "ok"


def test_search_without_any_hit_is_empty(corpus):
    result = search(corpus, "nowhere")
    assert (result.text, result.status, result.items) == (
        '[{"query": "nowhere", "web_page_info_list": []}]',
        "empty",
        (),
    )


def test_quotes_and_web_results_inside_a_page_stay_data(corpus):
    """The released tools wrote results as text and parsed that text again: quotes cut queries, "Web
    Results" in a page became a search.
    """
    query = 'isn\'t "Web Results"'
    [block] = json.loads(search(corpus, query).text)
    assert block["query"] == query
    hits = [{"title": 'A "Web Results" page', "url": "a/4", "snippet": 'He said "no", isn\'t it?'}]
    assert block["web_page_info_list"] == hits


def test_shuffled_order_follows_from_query_and_url_alone(tmp_path):
    """The order of hits must be the same for the experts of a world and for every later rollout,
    wherever the world lies.
    """
    pages = [{"url": f"u{n}", "title": "Borhok", "text": "city"} for n in range(3)]
    (tmp_path / "moved").mkdir()
    here = write_corpus(tmp_path / "c.jsonl", pages)
    there = write_corpus(tmp_path / "moved" / "d.jsonl", pages[::-1])
    assert search(here, "Borhok", shuffle=True).text == search(there, "Borhok", shuffle=True).text


def test_position_of_a_shuffled_hit_carries_no_signal(tmp_path):
    names = [f"name{n}" for n in range(400)]
    pages = [
        {"url": f"{source}/{n}", "title": name, "text": "x"}
        for n, name in enumerate(names)
        for source in ("archive", "profile")
    ]
    corpus, tool = write_corpus(tmp_path / "c.jsonl", pages), offline_tools()["search"]
    firsts = [tool({"query": [name]}, corpus=corpus, deadline=1.0).items[0].url for name in names]
    # 200 +- 4 standard deviations of 10
    assert 160 <= sum(url.startswith("archive") for url in firsts) <= 240


def test_visit_returns_only_what_is_on_the_goal(corpus):
    result = visit(corpus, "a/1", goal="mayor")
    assert result.text == (
        "The useful information in a/1 for user goal mayor as follows: \n\nSummary: \nmayor Gistom"
    )
    assert (result.status, result.items[0].summary) == ("ok", "mayor Gistom")


def test_visit_picks_sentences_in_page_order(corpus):
    [page] = visit(corpus, "a/3", goal="what the mayor did in the city").items
    assert page.summary == "The mayor opened a bridge.\nThe mayor left the city."


def test_best_sentences_survive_the_cut(tmp_path):
    text = "\n".join(["red line"] * 9 + ["red blue line"])
    path = write_corpus(tmp_path / "c.jsonl", [{"url": "1", "text": text}])
    assert visit(path, "1", goal="blue red").items[0].summary.split("\n") == ["red line"] * 4 + [
        "red blue line"
    ]


def test_goal_without_content_words_gets_the_beginning(corpus):
    assert (
        visit(corpus, "a/1", goal="what is the").items[0].summary
        == "city\nmayor Gistom\nsponsor Lortom"
    )


def test_visit_without_anything_on_the_goal_is_empty(corpus):
    result = visit(corpus, "a/1", goal="twin")
    assert (result.text.split("\n")[-1], result.status) == ("nothing on twin", "empty")


def test_visit_of_unknown_url_is_empty_and_says_so(corpus):
    result = visit(corpus, "a/99", goal="mayor")
    assert (result.text.split("\n")[-1], result.status, result.items) == (
        "page not found",
        "empty",
        (),
    )


def test_visit_of_several_urls_reports_each(corpus):
    result = visit(corpus, "a/1", "a/99", goal="mayor")
    assert [part.split("\n")[-1] for part in result.text.split("\n=======\n")] == [
        "mayor Gistom",
        "page not found",
    ]
    assert result.status == "ok"


@pytest.mark.parametrize(
    "row", [{"title": "x", "text": "y"}, {"url": " ", "text": "y"}, {"url": 3, "text": "y"}]
)
def test_page_without_url_names_file_and_line(tmp_path, row):
    path = write_corpus(tmp_path / "c.jsonl", [PAGES[0], row])
    with pytest.raises(ValueError, match=r"c\.jsonl:2: a page needs a url"):
        search(path, "x")


def test_page_without_text_is_an_error(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl", [{"url": "a/1", "title": "x"}])
    with pytest.raises(ValueError, match=r"c\.jsonl:1: page 'a/1' needs a text"):
        search(path, "x")


def test_two_pages_with_one_url_are_an_error(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl", [PAGES[0], PAGES[1], PAGES[0]])
    with pytest.raises(ValueError, match=r"c\.jsonl:3: url 'a/1' occurs twice"):
        search(path, "x")


def test_missing_corpus_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no\.jsonl: no such corpus file"):
        search(str(tmp_path / "no.jsonl"), "x")


def test_empty_corpus_is_named(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl", [])
    with pytest.raises(ValueError, match=r"c\.jsonl: no pages in the corpus"):
        search(path, "x")


def test_question_without_corpus_is_an_error():
    with pytest.raises(ValueError, match="names no corpus"):
        search(None, "x")


def test_ten_threads_load_a_corpus_once(corpus, monkeypatch):
    loads, load, cache = Counter(), Corpus.load, CorpusCache()

    def counted(path):
        loads[path] += 1
        return load(path)

    monkeypatch.setattr(offline.Corpus, "load", counted)
    threads = [threading.Thread(target=cache.get, args=(corpus,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == {corpus: 1}


def test_cache_drops_the_least_recently_used(tmp_path):
    paths = [write_corpus(tmp_path / f"{n}.jsonl", PAGES) for n in range(3)]
    cache = CorpusCache(capacity=2)
    first = cache.get(paths[0])
    cache.get(paths[1])
    assert cache.get(paths[0]) is first
    cache.get(paths[2])  # drops 1, not 0
    assert cache.get(paths[0]) is first
