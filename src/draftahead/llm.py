"""Text in, text out: the class most users meet."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from draftahead.backends.cpu.linear import quantize_model
from draftahead.core.detokenizer import no_text
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.core.types import Completion, Exact, Request, SequenceState, StreamChunk
from draftahead.drafters import registry
from draftahead.drafters.base import Drafter, DrafterContext
from draftahead.engine.engine import Engine
from draftahead.errors import ConfigError, ContextLengthError, DraftaheadError, PromptError, nearest
from draftahead.loader import embedded, generation_config, hub
from draftahead.loader.progress import ProgressCallback, no_progress
from draftahead.models.verifier import Verifier
from draftahead.sampling.accept import AcceptanceRule

NOT_LOSSLESS = "not lossless: guesses stay for being likely, so the text is not the target's own"

Message = Mapping[str, Any]
Load = Callable[[str], tuple[Any, Any]]  # name -> model, tokenizer
Prompt = str | Sequence[int] | Sequence[Message]  # text, token ids, or a conversation


class LLM:
    """A model that generates as it always did, sooner.

    model: an alias (`smollm2`), a hub id, a folder, a .gguf file, or a loaded PreTrainedModel.
    drafter: a name, a configuration with vLLM's `speculative_config` keys, or a Drafter.
    exact: "law" keeps the target's distribution; "replay" makes the tokens a function of seed
        and prompt alone, bit for bit the same for every drafter and whatever else is running.
    rule: how sampled drafts are accepted, "block" or "token"; both are exact.
    lossless: False keeps guesses that are merely typical of the target's law (Medusa's rule): more
        of them stay, and the text is no longer the target's. All reports say so.
    max_batch, max_context: rows and tokens of the key-value cache.
    quantize: "int8" rounds the weights (CPU). Speculation is exact with respect to that model.
    compile: on a GPU, torch.compile for the layers of models that our own kernels do not know:
        faster passes, for some seconds whenever a number of nodes is new.
    """

    def __init__(
        self,
        model: Any,
        drafter: str | Mapping[str, Any] | Drafter = "auto",
        *,
        tokenizer: Any = None,
        exact: Exact = "law",
        rule: AcceptanceRule = "block",
        lossless: bool = True,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_batch: int = 8,
        max_context: int | None = None,
        quantize: Literal["int8"] | None = None,
        compile: bool = False,
        trust_remote_code: bool = False,
        report: ProgressCallback = no_progress,
        _load: Load | None = None,
    ) -> None:
        if not isinstance(model, str | Path) and not hasattr(model, "config"):
            raise ConfigError(f"{model!r} is no model, and no name or path of one")
        _one_of("exact", exact, ("law", "replay"))
        _one_of("rule", rule, ("block", "token"))
        if not lossless and exact == "replay":
            raise ConfigError("lossless=False and exact='replay' exclude each other: leave one out")
        if quantize is not None:
            _one_of("quantize", quantize, ("int8",))
        if max_batch < 1:
            raise ConfigError(f"max_batch must be 1 or more, not {max_batch}")

        def load(name: str) -> tuple[Any, Any]:
            loaded, its_tokenizer = hub.load(
                name,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                progress=report,
            )
            if quantize is not None:
                report(f"rounding {name} to {quantize}")
                quantize_model(loaded)
            return loaded, its_tokenizer

        self._load: Load = _load or functools.cache(load)
        if isinstance(model, str | Path):
            model, own_tokenizer = self._load(str(model))
            tokenizer = tokenizer or own_tokenizer
        elif dtype is not None or device is not None or quantize is not None:
            raise ConfigError(
                "dtype, device and quantize are for models loaded by name; this one is as it is"
            )
        self.model, self.tokenizer = model, tokenizer
        report("preparing the kernels and the cache")  # compiled once, in about three seconds
        target = Verifier(
            model, max_batch=max_batch, max_context=max_context, exact=exact, compiled=compile
        )
        setting = DrafterContext(
            device=target.runner.device,
            dtype=model.dtype,
            vocabulary=target.vocabulary,
            tokenizer=tokenizer,
            max_batch=max_batch,
            max_context=target.max_context,
            load=self._load,
            successors=embedded.successors_of(model),
            head=embedded.head_of(model),
            target=target.runner,
        )
        generation_config.warn_unsupported(model)
        self.engine = Engine(
            target,
            registry.build(drafter, setting),
            no_text if tokenizer is None else self._decode,
            exact=exact,
            rule=rule,
            lossless=lossless,
        )

    def sibling(
        self,
        drafter: str | Mapping[str, Any] | Drafter,
        *,
        max_batch: int,
        max_context: int | None = None,
        lossless: bool = True,
    ) -> LLM:
        """The same model with another drafter and a cache of its own, as long as this one unless
        told; what one of them has loaded, the others need not load again."""
        return LLM(
            self.model,
            drafter,
            tokenizer=self.tokenizer,
            lossless=lossless,
            max_batch=max_batch,
            max_context=max_context or self.engine.target.max_context,
            _load=self._load,
        )

    # --------------------------------------------------------------------------- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Literal["raise", "return"] = "raise",
        scope: str | None = None,
    ) -> list[Completion]:
        """Continues prompts, in batches. One completion for each of a prompt's n samples, in
        order. A request that fails does not stop the others: its error is raised at the end,
        with all `completions` on it, or returned in its Completion with errors="return".
        `scope` says whose texts these are, to drafters that learn from earlier ones.
        """
        _one_of("errors", errors, ("raise", "return"))
        asked: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if asked and isinstance(asked[0], int | Mapping):
            asked = [asked]  # one prompt: ids, or a conversation
        settings = [sampling] * len(asked) if not isinstance(sampling, Sequence) else list(sampling)
        if len(settings) != len(asked):
            raise ConfigError(f"{len(settings)} samplings for {len(asked)} prompts")
        running: list[list[SequenceState] | DraftaheadError] = []
        try:
            for prompt, one in zip(asked, settings, strict=True):
                try:
                    running.append(
                        self.engine.add(self._request(prompt, one or SamplingParams(), scope=scope))
                    )
                except DraftaheadError as error:
                    running.append(error)
            while any(s.finish_reason is None for group in running for s in _live(group)):
                self.engine.step()
        finally:  # also when interrupted: nothing stays behind in the engine
            for group in running:
                for sequence in _live(group):
                    self.engine.release(sequence)
        completions = [c for i, group in enumerate(running) for c in self._completions(i, group)]
        failed = [c.error for c in completions if c.error is not None]
        if failed and errors == "raise":
            failed[0].completions = completions
            raise failed[0]
        return completions

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        scope: str | None = None,
    ) -> Completion:
        """The model's answer to a conversation, through its chat template."""
        if sampling is not None and sampling.n != 1:
            raise ConfigError("chat gives one answer; use generate([messages], ...) for n of them")
        return self.generate([messages], sampling, scope=scope)[0]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        reuse: bool = False,
        scope: str | None = None,
    ) -> Generator[StreamChunk, None, Completion]:
        """Yields the text as it settles. The generator's value (`yield from`) is the Completion.

        `reuse` starts from the keys that an earlier stream left in the cache, as far as the
        prompts agree: for conversations.
        """
        sampling = sampling or SamplingParams()
        if sampling.n != 1:
            raise ConfigError("stream gives one text; use generate for n of them")
        (sequence,) = self.engine.add(self._request(prompt, sampling, reuse=reuse, scope=scope))
        shown_tokens = shown_text = 0
        ended = False
        try:
            while not ended:
                if sequence.finish_reason is None:
                    self.engine.step()  # others' steps advance this sequence as well
                ended = sequence.finish_reason is not None
                for piece in _settled(sequence, shown_tokens, shown_text):
                    shown_tokens += len(piece.token_ids)
                    shown_text += len(piece.text)
                    yield piece
        finally:  # a stream that is dropped frees its row
            self.engine.release(sequence)
        if sequence.error is not None:
            raise sequence.error
        return self._completion(0, sequence)

    def explain(self) -> list[str]:
        """Why it drafted as it did, so far: a sentence each."""
        reasons = getattr(self.engine.drafter, "reasons", list)
        warning = [] if self.engine.lossless else [NOT_LOSSLESS]
        return [*warning, *self.engine.policy.reasons(), *reasons()]

    # ----------------------------------------------------------------------- requests, checked

    def encode(self, prompt: Prompt) -> list[int]:
        """Text, ids or a conversation to the ids of a prompt."""
        try:
            return self._encoded(prompt)
        except DraftaheadError:
            raise
        except Exception as failure:  # a template's own error, half a character, no ids at all
            said = f"{type(failure).__name__}: {failure}"
            raise PromptError(f"the prompt cannot be turned into tokens: {said}") from failure

    def _encoded(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            if self.tokenizer is None:
                raise ConfigError("a model without its tokenizer takes token ids; pass tokenizer=")
            if isinstance(prompt, str):
                return [int(i) for i in self.tokenizer(prompt).input_ids] if prompt else []
            if getattr(self.tokenizer, "chat_template", None) is None:
                raise ConfigError("this model has no chat template; give it plain text instead")
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in prompt],  # type: ignore[arg-type]
                add_generation_prompt=True,
                tokenize=False,
            )
            return [int(i) for i in self.tokenizer(text, add_special_tokens=False).input_ids]
        return [int(i) for i in prompt]  # type: ignore[arg-type]

    def _request(
        self,
        prompt: Prompt,
        asked: SamplingParams,
        *,
        reuse: bool = False,
        scope: str | None = None,
    ) -> Request:
        ids = self.encode(prompt)
        if not ids:
            raise PromptError("the prompt is empty: give at least one token to continue from")
        vocabulary, context = self.engine.target.vocabulary, self.engine.target.max_context
        if outside := [i for i in ids if not 0 <= i < vocabulary]:
            raise PromptError(f"token {outside[0]} is outside the vocabulary of {vocabulary}")
        if len(ids) >= context:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens and the context {context}: shorten it"
                + self._larger_context_hint()
            )
        with_text = self.tokenizer is not None
        sampling = generation_config.with_model_defaults(
            asked, self.model, context - len(ids), has_tokenizer=with_text
        )
        if len(ids) + (sampling.max_tokens or 0) > context:
            raise ContextLengthError(
                f"{len(ids)} prompt tokens and max_tokens={sampling.max_tokens} exceed the context "
                f"of {context}: ask for at most {context - len(ids)}" + self._larger_context_hint()
            )
        if sampling.stops and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; use stop_token_ids without one")
        banned = self._bad_word_ids(sampling.bad_words)
        ids_in = {
            "logit_bias": list(sampling.logit_bias or ()),
            "stop_token_ids": list(sampling.stop_token_ids),
            "bad_words": [token for word in banned for token in word],
        }
        for name, tokens in ids_in.items():
            for token in tokens:
                if not 0 <= token < vocabulary:
                    raise ConfigError(
                        f"{name}: token {token} is outside the vocabulary of {vocabulary}"
                    )
        return Request(
            prompt=tuple(ids),
            params=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            eos_token_ids=frozenset(
                i
                for i in generation_config.eos_token_ids(self.model, self.tokenizer)
                if i < vocabulary
            ),
            bad_word_ids=banned,
            reuse=reuse,
            scope=scope,
        )

    def _larger_context_hint(self) -> str:
        passes = self.engine.target.runner
        if passes.max_context < passes.limit:
            return f", or give the cache more room with max_context (at most {passes.limit})"
        return ""

    def _bad_word_ids(self, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """A word is banned at the start of a text and after a space alike."""
        found: list[tuple[int, ...]] = []
        for word in words:
            if not isinstance(word, str):
                found.append(tuple(word))
                continue
            if self.tokenizer is None:
                raise ConfigError("bad_words as text need a tokenizer; pass token ids instead")
            for spelled in (word, " " + word):
                ids = self.tokenizer(spelled, add_special_tokens=False).input_ids
                found.append(tuple(int(i) for i in ids))
        return tuple(dict.fromkeys(ids for ids in found if ids))

    # ------------------------------------------------------------------------------- results

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _completions(
        self, index: int, group: list[SequenceState] | DraftaheadError
    ) -> list[Completion]:
        if isinstance(group, DraftaheadError):
            return [Completion("", [], "error", None, Stats(), [], [], 0, index, 0, group)]
        return [self._completion(index, sequence) for sequence in group]

    def _completion(self, index: int, sequence: SequenceState) -> Completion:
        sequence.stats.tokens = sequence.generated
        return Completion(
            text=sequence.tail.text,
            token_ids=sequence.output,
            finish_reason=sequence.finish_reason or "error",
            logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
            stats=sequence.stats,
            prompt_token_ids=list(sequence.request.prompt),
            drafted=sequence.drafted,
            seed=sequence.request.seed,
            index=index,
            sample=sequence.sample,
            error=sequence.error,
            lossless=self.engine.lossless,
        )


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} cannot be {value!r}{nearest(str(value), known)}")


def _live(group: list[SequenceState] | DraftaheadError) -> list[SequenceState]:
    return [] if isinstance(group, DraftaheadError) else group


def _settled(sequence: SequenceState, tokens: int, text: int) -> Iterator[StreamChunk]:
    """What no stop string can take back any more, token by token where the text allows it."""
    ended, tail, output = sequence.finish_reason, sequence.tail, sequence.output
    settled = len(tail.text) if ended else tail.settled()
    start = tokens
    for index in range(tokens, len(output) - 1 if ended else len(output)):
        # A token's text ends where that of the next begins.
        end = tail.starts[index + 1] if index + 1 < len(tail.starts) else len(tail.text)
        if text < end <= settled or not tail.decodes:
            ids, drafted = output[start : index + 1], sequence.drafted[start : index + 1]
            yield StreamChunk(tail.text[text:end], ids, drafted)
            start, text = index + 1, end
    if ended:  # whatever is left, with the reason
        yield StreamChunk(tail.text[text:], output[start:], sequence.drafted[start:], ended)
