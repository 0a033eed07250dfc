"""Qwen3's ChatML in closed form: no template engine, linear time, thinking of every turn kept, ids
and spans made together.

Two encoders share one tokenizer.json. Text of ours (system prompt, structure) is trusted: added
tokens such as <tool_call> become their single ids. Text of others (questions, observations, and
everything a model wrote between its structure tags) is untrusted: encoded by a second Tokenizer
without added tokens, so that no role marker or tag inside it can become a real one.
`encode_special_tokens=True` would not do: <think>, <tool_call>, <tool_response> are added tokens
with special=false and would still become single ids.

A piece is the text between two structure tokens, encoded in one go: the newlines next to a tag
merge with the text they touch ("]" and newline are one token). At the generation prompt alone a
piece is cut, because there the model starts to write.
"""

import functools
import json
import os
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from venus import protocol


@dataclass
class Encoded:
    """A conversation: ids; spans [start, end) of the assistant turns, from after the generation
    prompt through <|im_end|>.
    """

    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        return self.spans[0][0]


class ChatTokenizer:
    """Encode and decode chats; ids of the structure tokens are attributes named after them
    (im_end_id, think_close_id, ...).
    """

    def __init__(self, path: str | os.PathLike):
        """Read tokenizer.json (the file, or a directory with it); ValueError: missing, unreadable,
        lacking a needed structure token.
        """
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            spec = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: cannot read the tokenizer: {error}") from None
        if not isinstance(spec, dict) or not {"vocab", "merges"} <= set(spec.get("model") or ()):
            raise ValueError(f"{file}: not a BPE tokenizer.json (no model with vocab and merges)")
        added = {token["content"]: token["id"] for token in spec.get("added_tokens") or ()}
        missing = [token for token in protocol.SPECIAL_TOKENS if token not in added]
        if missing:
            raise ValueError(
                f"{file}: added_tokens lacks {' '.join(missing)}; Venus needs a Qwen3 tokenizer"
            )
        bare = {**spec, "added_tokens": [], "post_processor": None}
        self._trusted, self._untrusted = (Tokenizer.from_str(json.dumps(s)) for s in (spec, bare))
        # tokenizer.json can carry both, and they would cut or fill pieces
        for tokenizer in (self._trusted, self._untrusted):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        # an observation is encoded to be measured and then again to be appended
        self._untrusted_ids = functools.lru_cache(maxsize=8)(
            lambda text: self._untrusted.encode(text, add_special_tokens=False).ids
        )
        leaking = [token for token in added if added[token] in self.encode_untrusted(token)]
        if leaking:
            raise ValueError(
                f"{file}: plain text can become the added token {leaking[0]}: it is in the "
                "BPE merges"
            )
        self.vocab_size = max(self._trusted.get_vocab(with_added_tokens=True).values()) + 1
        self.endoftext_id, self.im_start_id, self.im_end_id = (
            added[token] for token in protocol.SPECIAL_TOKENS[:3]
        )
        self.think_open_id = added[protocol.THINK_OPEN]
        self.think_close_id = added[protocol.THINK_CLOSE]
        self.call_open_id = added[protocol.CALL_OPEN]
        self.call_close_id = added[protocol.CALL_CLOSE]
        self.response_open_id = added[protocol.RESPONSE_OPEN]
        self.response_close_id = added[protocol.RESPONSE_CLOSE]
        self.generation_prompt_ids = self.encode(protocol.GENERATION_PROMPT)
        self.answer_prefix_ids = self.encode(protocol.ANSWER_PREFIX)
        self._newline_ids, self._user_word_ids = self.encode("\n"), self.encode("user")

    def check_fits(self, model_vocab_size: int) -> None:
        """ValueError for a model with fewer embeddings than there are ids."""
        if self.vocab_size > model_vocab_size:
            raise ValueError(
                f"the tokenizer has {self.vocab_size} ids, the model {model_vocab_size}: "
                "they do not belong together"
            )

    def encode(self, text: str) -> list[int]:
        """Encode trusted text: added tokens written in it become their ids."""
        return self._trusted.encode(text, add_special_tokens=False).ids

    def encode_untrusted(self, text: str) -> list[int]:
        """Encode others' text: no added token can arise. A lone surrogate (a broken JSON escape)
        has no bytes and becomes U+FFFD.
        """
        if not text.isascii():  # UTF-16 joins the halves of a pair that were escaped one by one
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return list(self._untrusted_ids(text))

    def decode(self, ids: list[int]) -> str:
        """Return the text, structure tokens included. Ids without a token (a model's padded
        vocabulary) and broken UTF-8 read U+FFFD.
        """
        parts = []
        for known, run in groupby(ids, key=lambda i: 0 <= i < self.vocab_size):
            run_ids = list(run)
            parts.append(
                self._trusted.decode(run_ids, skip_special_tokens=False)
                if known
                else "\ufffd" * len(run_ids)
            )
        return "".join(parts)

    def ground_truth_ids(self, text: str) -> list[int]:
        """Encode an answer on its own, to be joined to answer_prefix_ids: inside its context `D.C.`
        would lose its last token.
        """
        return self.encode_untrusted(text)

    def prompt_ids(self, system: str | None, question: str) -> list[int]:
        """Return the ids of system message (trusted; None = none), question (untrusted)
        and generation prompt.
        """
        return self._system_ids(system) + self._user_ids(question) + self.generation_prompt_ids

    def turn_ids(self, content: str) -> list[int]:
        """Return the ids of an assistant message AFTER the generation prompt, through <|im_end|>,
        as Qwen3's template renders it.

        </think> and the tags of a tool call that `parse_action` accepts are structure; the rest is
        plain text, whatever it spells. Where thoughts were opened and never closed nothing is
        closed for the model, unlike in the template.
        """
        if protocol.THINK_CLOSE not in content and content.startswith(protocol.THINK_OPEN):
            thoughts = content.removeprefix(protocol.THINK_OPEN).removeprefix("\n")
            return [*self.encode_untrusted(thoughts), self.im_end_id]
        reasoning, rest = protocol.split_think(content)
        ids = [*self.encode_untrusted(reasoning + "\n"), self.think_close_id]
        if protocol.parse_action(content).kind in ("search", "visit"):
            before, _, rest = rest.partition(protocol.CALL_OPEN)
            call, _, after = rest.partition(protocol.CALL_CLOSE)
            ids += [
                *self.encode_untrusted("\n\n" + before),
                self.call_open_id,
                *self.encode_untrusted(call),
                self.call_close_id,
            ]
            return [*ids, *self.encode_untrusted(after), self.im_end_id]
        return [*ids, *self.encode_untrusted("\n\n" + rest), self.im_end_id]

    def observation_ids(self, bodies: list[str], *, closed: bool) -> list[int]:
        """Return the ids between two turns: one user message with a <tool_response> per body
        (untrusted), then the generation prompt.

        closed: whether the turn before ended with a sampled <|im_end|>; if not, it is added here,
        where it is not trained.
        """
        ids = self._newline_ids if closed else [self.im_end_id, *self._newline_ids]
        return (
            ids
            + self._response_ids([protocol.observation_text(body) for body in bodies])
            + self.generation_prompt_ids
        )

    def encode_messages(self, messages: list[dict]) -> Encoded:
        """Encode [system,] user, assistant, user, .., assistant: the chat template's render of it
        all, in linear time.

        The ids up to the last <|im_end|> are those an agent would have appended (prompt_ids,
        turn_ids, observation_ids); a newline follows. ValueError for another order of roles and for
        contents that are no strings.
        """
        _check_messages(messages)
        encoded = Encoded()
        for message in messages:
            content = message["content"]
            if message["role"] == "system":
                encoded.ids += self._system_ids(content)
            elif message["role"] == "user":
                # the question is never an observation
                pieces = protocol.split_observation(content) if encoded.spans else None
                encoded.ids += (
                    self._user_ids(content) if pieces is None else self._response_ids(pieces)
                )
            else:
                start = len(encoded.ids) + len(self.generation_prompt_ids)
                encoded.ids += self.generation_prompt_ids + self.turn_ids(content)
                encoded.spans.append((start, len(encoded.ids)))
                encoded.ids += self._newline_ids
        return encoded

    def _close(self, ids: list[int]) -> list[int]:
        return [self.im_start_id, *ids, self.im_end_id, *self._newline_ids]

    def _system_ids(self, system: str | None) -> list[int]:
        return [] if system is None else self._close(self.encode("system\n" + system))

    def _user_ids(self, content: str) -> list[int]:
        return self._close(self.encode_untrusted("user\n" + content))

    def _response_ids(self, pieces: list[str]) -> list[int]:
        ids = list(self._user_word_ids)
        for piece in pieces:
            ids += [
                *self._newline_ids,
                self.response_open_id,
                *self.encode_untrusted(piece),
                self.response_close_id,
            ]
        return self._close(ids)


def _check_messages(messages: list[dict]) -> None:
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    start = 1 if roles[:1] == ["system"] else 0
    for k, role in enumerate(roles[start:]):
        wanted = ("user", "assistant")[k % 2]
        if role != wanted:
            raise ValueError(
                f"message {start + k}: role {role!r}, expected {wanted!r}; roles go "
                "[system,] user, assistant, user, .."
            )
        if not isinstance(messages[start + k].get("content"), str):
            raise ValueError(f"message {start + k}: content must be a string")
    if roles[-1:] != ["assistant"]:
        raise ValueError(
            f"{len(messages)} messages that end with {roles[-1] if roles else 'nothing'}; "
            "the last must be the assistant's"
        )
