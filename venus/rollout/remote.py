"""A policy behind an OpenAI-compatible endpoint, with the sampler's interface: the agent does not
know whom it talks to.

A row keeps its ids as if they had been sampled here; for a turn they are split at the role markers
into messages, and the answer is encoded again. So the ids of a turn spell what the server said and
may not be those that it sampled. Log-probs are absent, and nobody may train on such records.
"""

import queue
import re
import sys
import threading

from tqdm import tqdm

from venus import protocol
from venus.rollout.sampler import Generation, SamplingParams
from venus.services.chat import ChatClient, ChatError, ChatRequestError, Completion
from venus.tokenizer import ChatTokenizer

# seconds that a step waits for an answer, so that finished tools are not kept
# waiting for a slow turn
POLL = 0.05
LEAST_TOKENS = 256  # of a turn that is worth asking for
TAGS = re.compile("(" + "|".join(map(re.escape, protocol.SPECIAL_TOKENS[3:])) + ")")


class RemoteSampler:
    """One request a busy row, in a thread of its own; `capacity`: tokens of a row. The noise is the
    server's: the key is sent as its seed.
    """

    def __init__(
        self,
        client: ChatClient,
        tokenizer: ChatTokenizer,
        params: SamplingParams,
        *,
        num_slots: int,
        capacity: int,
    ):
        self.client = client
        self.tokenizer = tokenizer
        self.params = params
        self.capacity = capacity
        self.rows: dict[int, int] = {}  # slots that wait for an answer -> budget
        self.free = list(range(num_slots))
        self.contexts: dict[int, list[int]] = {}
        self.done: queue.SimpleQueue = queue.SimpleQueue()

    def open(self) -> int:
        """Take a free slot with an empty row."""
        slot = self.free.pop(0)
        self.contexts[slot] = []
        return slot

    def fork(self, source: int, length: int) -> int:
        """Take a free slot with the first `length` ids of another row."""
        slot = self.open()
        self.contexts[slot] = self.contexts[source][:length]
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self.rows, f"slot {slot} is still generating"
        del self.contexts[slot]
        self.free = sorted([*self.free, slot])

    def length(self, slot: int) -> int:
        """Ids of a row so far, except the last one sampled."""
        return len(self.contexts[slot])

    def prefill(self, slot: int, ids: list[int]) -> None:
        """Append ids to a row."""
        self.contexts[slot] += ids

    def feed(self, slot: int, ids: list[int], *, budget: int, key: int) -> None:
        """Append `ids`, which end with the generation prompt, and ask for the turn, of
        up to `budget` tokens.
        """
        assert slot not in self.rows and ids and budget > 0, (
            f"feed slot {slot}: {len(ids)} ids, budget {budget}"
        )
        if self.length(slot) + len(ids) + budget - 1 > self.capacity:
            raise ValueError(
                f"{self.length(slot)} + {len(ids)} new ids + {budget} to sample exceed the "
                f"context of {self.capacity}"
            )
        self.contexts[slot] += ids
        self.rows[slot] = budget
        messages = messages_of(self.contexts[slot], self.tokenizer)
        request = {
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "max_tokens": budget,
            "seed": key % 2**31,
        }
        if self.params.top_k:  # not in OpenAI's own interface
            request["top_k"] = self.params.top_k
        threading.Thread(target=self._ask, args=(slot, messages, request), daemon=True).start()

    def step(self) -> list[Generation]:
        """Return the turns that have been answered, waiting POLL for the first; one without ids has
        failed after all its tries.

        ChatRefusedError when the server refuses us.
        """
        finished = []
        while self.rows:
            try:
                slot, outcome = self.done.get(timeout=0 if finished else POLL)
            except queue.Empty:
                break
            budget = self.rows.pop(slot)
            if isinstance(outcome, ChatError | ChatRequestError):
                too_long = isinstance(outcome, ChatRequestError) and outcome.too_long
                hint = "; lower --max-context" if too_long else ""
                tqdm.write(f"policy: {outcome}{hint}", file=sys.stderr)
                finished.append(Generation(slot))
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                finished.append(self._generation(slot, outcome, budget))
        return finished

    def _generation(self, slot: int, completion: Completion, budget: int) -> Generation:
        ids = encode_turn(turn_text(completion), self.tokenizer)
        if completion.finish_reason != "length" or not ids:
            ids.append(self.tokenizer.im_end_id)
        ids = ids[:budget]  # its tokens, counted by our tokenizer
        self.contexts[slot] += ids[:-1]  # the last one comes with the next feed
        return Generation(slot, ids, stopped=ids[-1] == self.tokenizer.im_end_id)

    def _ask(self, slot: int, messages: list[dict], request: dict) -> None:
        outcome = RuntimeError("a request died; its traceback stands above")
        try:
            outcome = self._complete(messages, request)
        except (ChatError, ValueError) as error:
            outcome = error
        finally:
            self.done.put((slot, outcome))

    def _complete(self, messages: list[dict], request: dict) -> Completion:
        """The answer. The server counts a few tokens more than we do, or has less context: while a
        row does not fit, half the turn is asked for.
        """
        while True:
            try:
                return self.client.complete(messages, **request)
            except ChatRequestError as error:
                if not error.too_long or request["max_tokens"] < 2 * LEAST_TOKENS:
                    raise
                request = request | {"max_tokens": request["max_tokens"] // 2}


def messages_of(ids: list[int], tokenizer: ChatTokenizer) -> list[dict]:
    """The messages of a row that ends with the generation prompt, which the server will write
    itself. Split by ids: text may spell role markers.
    """
    messages, start = [], None
    for position, token in enumerate(ids):
        if token == tokenizer.im_start_id:
            start = position + 1
        elif token == tokenizer.im_end_id:
            role, _, content = tokenizer.decode(ids[start:position]).partition("\n")
            messages.append({"role": role, "content": content})
    assert ids[start - 1 :] == tokenizer.generation_prompt_ids, (
        "the row does not end with the generation prompt"
    )
    return messages


def turn_text(completion: Completion) -> str:
    """A turn as it would stand after the generation prompt, which has opened the thoughts, in
    whatever way the server returned them.

    Thoughts kept apart, or written out with or without <think>; an answer without any has empty
    ones. Those that were cut off are not closed.
    """
    text, cut_off = completion.text, completion.finish_reason == "length"
    if completion.reasoning:
        rest = "" if cut_off and not text else f"\n{protocol.THINK_CLOSE}\n\n" + text.lstrip("\n")
        return completion.reasoning.strip("\n") + rest
    if text.lstrip().startswith(protocol.THINK_OPEN):
        return text.lstrip().removeprefix(protocol.THINK_OPEN).removeprefix("\n")
    if protocol.THINK_CLOSE in text or cut_off:
        return text
    return f"\n{protocol.THINK_CLOSE}\n\n{text}"


def encode_turn(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of a turn: tags are structure, as a model samples them; a role marker that the
    text spells stays text.
    """
    encoders = {True: tokenizer.encode, False: tokenizer.encode_untrusted}
    return [
        token
        for number, part in enumerate(TAGS.split(text))
        for token in encoders[number % 2 == 1](part)
    ]
