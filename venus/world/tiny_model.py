"""The tiny model's directory: a byte-level BPE over the synthetic world's formats and a
Qwen3 config, no weights.

As in Qwen, the special tokens are no part of the BPE vocabulary but come after it, and `<answer>`
is ordinary text. The pre-tokenizer is the world's own: Qwen's glues a quote or a space to the name
that follows, and a name that has other tokens in the question, the query, the page and the answer
cannot be copied by a small model.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from venus import protocol
from venus.files import write_json
from venus.protocol import (
    SPECIAL_TOKENS,
    SearchHit,
    assistant_text,
    format_answer,
    format_search,
    format_tool_call,
    format_visit,
)

# A name is two pieces, "Bor" and "hok"; "mayor " keeps its space only before a name; "/19" is one
# piece; all else are single characters, so that no piece can reach over the seams at which ids are
# joined.
PIECES = r"[A-Z][a-z]{2}|[a-z]+ (?=[A-Z])|[a-z]+|/?[0-9]{2}|\s|[^a-z\s]"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "layer_types": ["full_attention"] * 3,
    "max_window_layers": 3,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_cache": True,
    # transformers 4, 5
    "rope_theta": 100.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "torch_dtype": "float32",
    "dtype": "float32",
}


def glue_strings(templates: Iterable[str]) -> set[str]:
    """List the fixed strings between the slots (§: names, relations, urls) of the protocol's
    formats and of `templates`.
    """
    slot = "§"
    hit = SearchHit(slot, slot, slot)
    tags = "|".join(re.escape(tag) for tag in protocol.SPECIAL_TOKENS)
    calls = [
        format_tool_call("search", {"query": [slot]}),
        format_tool_call("visit", {"url": [slot], "goal": slot}),
    ]
    # "user" and its newline stay apart, since a newline goes before each of several responses
    formats = [
        f"<|im_start|>system\n{slot}<|im_end|>\n<|im_start|>user{slot}\n{slot}<|im_end|>\n"
        + protocol.GENERATION_PROMPT,
        protocol.system_prompt("short"),
        *(assistant_text(slot, body) for body in (*calls, format_answer(slot))),
        *(protocol.observation_text(format_search([(slot, hits)])) for hits in ([], [hit, hit])),
        protocol.observation_text(format_visit([(slot, slot, slot, None)])),
    ]
    messages = (
        protocol.MALFORMED_MESSAGE,
        protocol.TOOL_ERROR_MESSAGE,
        protocol.TIMEOUT_MESSAGE(120),
        *protocol.LIMIT_MESSAGES.values(),
    )
    pieces = {
        piece
        for template in (*formats, *templates)
        for piece in re.split(f"{slot}|{tags}", template)
        if piece
    }
    return pieces | {protocol.observation_text(message) for message in messages}


def train_tokenizer(texts: Iterable[str], glue: Iterable[str]) -> Tokenizer:
    """Train the BPE on texts, in order; each string of `glue` becomes one token of its own, matched
    before anything else, longest first.

    Glue is put into the vocabulary whole (`ignore_merges`): building `", "web_page_info_list":
    [{"title": "` by merges would add forty entries that occur nowhere. Everything is in byte-level
    form, so every text has an encoding.
    """
    glue = sorted(set(glue), key=lambda text: (-len(text), text))
    fixed = Regex("|".join(re.escape(text) for text in (*SPECIAL_TOKENS, *glue)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(fixed, "removed"),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            byte_level,
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=4096, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"]
    for text in glue:
        [(piece, _)] = byte_level.pre_tokenize_str(text)
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(vocab, [tuple(pair) for pair in model["merges"]], ignore_merges=True)
    )
    tokenizer.normalizer = normalizers.NFC()
    pieces = Regex("|".join(re.escape(text) for text in glue) + "|" + PIECES)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), byte_level]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    first_tag = SPECIAL_TOKENS.index(protocol.THINK_OPEN)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS[:first_tag]))
    # think and tool tags: added tokens, but special=false, as in Qwen
    tokenizer.add_tokens(list(SPECIAL_TOKENS[first_tag:]))
    return tokenizer


def write_model_dir(directory: Path, tokenizer: Tokenizer) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json."""
    directory.mkdir()
    vocab_size = -(-tokenizer.get_vocab_size() // 8) * 8
    end, pad = "<|im_end|>", "<|endoftext|>"
    config = {
        **CONFIG,
        "vocab_size": vocab_size,
        "bos_token_id": tokenizer.token_to_id(pad),
        "eos_token_id": tokenizer.token_to_id(end),
        "pad_token_id": tokenizer.token_to_id(pad),
    }
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer_config.json", names)
