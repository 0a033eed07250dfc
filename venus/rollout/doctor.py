"""Try everything that a run would use, with one cheap call each: what works, what fails, and
what to do about it.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch

from kernels.launch import architecture, choose_kernel
from venus.model.costs import num_parameters
from venus.model.weights import meta_model, read_weights
from venus.services.chat import ChatClient, ChatError, ChatRefusedError
from venus.services.http import CallError, RefusedError, TryError
from venus.tokenizer import ChatTokenizer
from venus.tools.cassette import Cassette
from venus.tools.options import Keys, ToolOptions
from venus.tools.pages import PageError
from venus.tools.web import Budget

PAGE = "https://example.com/"  # that a reader is tried on
SECONDS = 30.0  # for one call


def diagnose(
    model: str,
    options: ToolOptions,
    keys: Keys,
    policy: ChatClient | None,
    judge: ChatClient | None = None,
    *,
    page: str = PAGE,
) -> bool:
    """Print a line for each part that is configured, and return whether all of them work. policy
    None: the model in the directory samples; judge None: no model grades.
    """
    checks = _checks(model, options, keys, policy, judge, page)
    results = [_passes(*check) for check in checks]  # all of them: the first failure hides none
    return all(results)


def _checks(model, options, keys, policy, judge, page) -> Iterator[tuple]:
    """Yield (name, a function that tries it and says what it saw, the fix) of each part."""
    if policy is None:
        yield "model", lambda: _model(model), "copy the model's files anew"
        yield "kernels", _kernels, "use another GPU, or --kernel torch"
    yield (
        "tokenizer",
        lambda: f"{ChatTokenizer(model).vocab_size:,} ids, all structure tokens",
        "copy the tokenizer.json of a Qwen3",
    )
    if policy is not None:
        fix = "check POLICY_API_KEY or OPENAI_API_KEY, and --policy"
        yield "policy", lambda: _chat(policy, top_p=1.0, seed=0), fix
    if options.cassette == "replay":
        tape = options.cassette_file
        yield (
            "cassette",
            lambda: f"{len(Cassette(tape, record=False).results):,} recorded answers",
            "record it anew",
        )
    if options.live:
        fix = "check SERPER_API_KEY, its credits and --search-base"
        yield "search", lambda: _search(options, keys), fix
        fix = "check JINA_API_KEY, its balance and --reader-base, or use --reader fetch"
        yield "reader", lambda: _read(options, keys, page), fix
        fix = "check SUMMARY_API_KEY or OPENAI_API_KEY, and --summary"
        yield "summary", lambda: _chat(options.summary_client(keys)), fix
    if judge is not None:
        yield "judge", lambda: _chat(judge), "check JUDGE_API_KEY or OPENAI_API_KEY, and --judge"


def _passes(name: str, attempt: Callable[[], str], fix: str) -> bool:
    started = time.monotonic()
    try:
        seen = attempt()
    except (ValueError, OSError, CallError, TryError, PageError) as error:
        if isinstance(error, CallError | TryError | PageError):
            fix = "check the network, --proxy and the address, and try again"
        print(f"FAILS  {name:<10} {_kind(error)}: {' '.join(str(error).split())}\n{'':17} -> {fix}")
        return False
    print(f"works  {name:<10} {seen} ({time.monotonic() - started:.1f} s)")
    return True


def _kind(error: Exception) -> str:
    if isinstance(error, CallError | TryError):
        return "timeout" if error.timed_out else "unreachable or failing"
    return "refused" if isinstance(error, RefusedError) else "not usable"


def _model(directory: str) -> str:
    empty = meta_model(directory)
    config, _ = empty.config, next(read_weights(directory, empty))
    return (
        f"{num_parameters(config):,} parameters in {config.dtype}, "
        f"{config.max_position_embeddings:,} positions; names and shapes of the weights fit"
    )


def _kernels() -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = choose_kernel("auto", device)
    if kernel != "triton":
        return f"{kernel} on {device}"
    return f"{kernel} on {torch.cuda.get_device_name(device)} ({architecture(device)})"


def _search(options: ToolOptions, keys: Keys) -> str:
    hits = options.searcher(keys, Budget(None)).search("Venus", SECONDS)
    return f"{len(hits)} hits"


def _read(options: ToolOptions, keys: Keys, page: str) -> str:
    text = options.page_reader(keys)(page, SECONDS)
    return f"{len(text)} characters of {page} by {options.reader}"


def _chat(client: ChatClient, **parameters) -> str:
    client = dataclasses.replace(client, tries=1, timeout=SECONDS)
    try:
        answer = client.complete(
            [{"role": "user", "content": "Reply with: OK"}],
            max_tokens=16,
            temperature=0.0,
            **parameters,
        )
    except ChatRefusedError as error:
        raise RefusedError(f"{error}{_served(client)}") from None
    return f"{client.model} answers {answer.text[:20]!r}"


def _served(client: ChatClient) -> str:
    """Which models there are: the most frequent mistake is the name."""
    try:
        return f"; it serves {', '.join(client.models()[:10])}"
    except (ChatError, ChatRefusedError):
        return ""
