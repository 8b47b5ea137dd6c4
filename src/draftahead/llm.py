"""Text in, text out: the class most users meet."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

from draftahead.backends.cpu.linear import choose_arithmetic, quantize_model
from draftahead.config import LLMConfig
from draftahead.core.checks import FUNCTION, choice
from draftahead.core.detokenizer import byte_tokens, decoder_of, no_text
from draftahead.core.sampling_params import GivenParams, SamplingParams, params_of
from draftahead.core.stats import Stats
from draftahead.core.types import Completion, Request, SequenceState, StreamChunk
from draftahead.drafters import registry
from draftahead.drafters.base import Drafter, DrafterContext
from draftahead.drafters.none import NoDrafter
from draftahead.engine.engine import Engine
from draftahead.engine.shared import SharedEngine
from draftahead.errors import ConfigError, DraftaheadError
from draftahead.inputs import Conversation, Inputs, Prompt, as_conversations, as_prompts
from draftahead.loader import embedded, hub
from draftahead.loader.progress import ProgressCallback, no_progress
from draftahead.loader.stored import ACTIVATIONS, StoredLinear, stored_layers
from draftahead.models.verifier import Verifier
from draftahead.outputs import Stream, TokenTexts

NOT_LOSSLESS = "not lossless: typical acceptance, so the output does not follow the target exactly"


class Loader:
    """Loads models by name, each once, as a configuration asks."""

    def __init__(self, config: LLMConfig, report: ProgressCallback) -> None:
        self._config, self._report = config, report
        self._loaded: dict[str, tuple[Any, Any]] = {}

    def __call__(self, name: str) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        if name not in self._loaded:
            config, dtype = self._config, self._config.dtype
            if config.quantize is not None and dtype is None:  # from float weights
                dtype = hub.resolve_dtype(None, hub.resolve_device(config.device))
            model, tokenizer = hub.load(
                name,
                dtype=dtype,
                device=config.device,
                revision=config.revision if name == str(config.model) else None,
                trust_remote_code=config.trust_remote_code,
                progress=self._report,
            )
            if config.quantize is not None:
                self._report(f"quantizing {name} to {config.quantize}")
                quantize_model(model)
            choose_arithmetic(model, config.activations, self._report)
            self._loaded[name] = model, tokenizer
        return self._loaded[name]


class LLM:
    """A target model with a drafter: generates what the model alone would, faster. For the options
    see LLMConfig."""

    def __init__(
        self,
        model: Any,
        drafter: str | Mapping[str, Any] | Drafter | None = "auto",
        *,
        report: ProgressCallback = no_progress,
        **options: Any,
    ) -> None:
        """`report` is called with a line of text when something takes a while."""
        self._load(LLMConfig.of(model, drafter, options), report)

    @classmethod
    def from_config(cls, config: LLMConfig, *, report: ProgressCallback = no_progress) -> LLM:
        llm = cls.__new__(cls)
        llm._load(config, report)
        return llm

    def _load(self, config: LLMConfig, report: ProgressCallback) -> None:
        self._loader = Loader(config, FUNCTION.of("report", report))
        self.model, self.tokenizer = config.model, config.tokenizer
        trusted = config.trust_remote_code
        if isinstance(self.tokenizer, str | Path):
            self.tokenizer = hub.load_tokenizer(self.tokenizer, trust_remote_code=trusted)
        if config.is_named:
            self.model, tokenizer = self._loader(str(config.model))
            self.tokenizer = tokenizer if self.tokenizer is None else self.tokenizer
        elif self.tokenizer is None:
            self.tokenizer = hub.tokenizer_of(self.model, trust_remote_code=trusted)
        self._build(config, report)

    def with_drafter(
        self, drafter: str | Mapping[str, Any] | Drafter | None, **changes: Any
    ) -> LLM:
        """The same weights and options with another drafter, and a KV cache of its own. `changes`:
        options of LLMConfig that differ."""
        changes.setdefault("max_context", self.engine.verifier.max_context)
        llm = type(self).__new__(type(self))
        llm._loader, llm.model, llm.tokenizer = self._loader, self.model, self.tokenizer
        config = dataclasses.replace(self.config, drafter=drafter, **changes)
        llm._build(config, no_progress)
        return llm

    def _build(self, config: LLMConfig, report: ProgressCallback) -> None:
        self.config = config
        report("preparing the kernels and the cache")  # compiled once, in about three seconds
        verifier = Verifier(
            self.model,
            max_batch=config.max_batch,
            max_context=config.max_context,
            exact=config.exact,
            compiled=config.compile,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        context = DrafterContext(
            device=verifier.runner.device,
            dtype=self.model.dtype,
            vocab_size=verifier.vocab_size,
            tokenizer=self.tokenizer,
            max_batch=config.max_batch,
            max_context=verifier.max_context,
            load=self._loader,
            successors=embedded.successors_of(self.model),
            head=embedded.head_of(self.model),
            target=verifier.runner,
        )
        follow_model = config.generation_config is not None
        self._inputs = Inputs(self.model, self.tokenizer, verifier.runner, follow_model)
        self._token_texts = TokenTexts(self.tokenizer)
        drafter = registry.build(config.drafter, context)
        if config.lossless and not isinstance(drafter, NoDrafter):
            verifier.require_independent_rows()
        engine = Engine(
            verifier,
            drafter,
            no_text if self.tokenizer is None else decoder_of(self.tokenizer),
            frozenset() if self.tokenizer is None else byte_tokens(self.tokenizer),
            exact=config.exact,
            rule=config.rule,
            lossless=config.lossless,
        )
        self._shared = SharedEngine(engine)

    @property
    def engine(self) -> Engine:
        return self._shared.engine

    def close(self) -> None:
        """Frees the KV cache, and the model unless another holds it. Threads that wait for this LLM
        get an error; so does any later call. `with LLM(...) as llm:` closes it at the end."""
        if not self._shared.closed:
            self._shared.close()
            del self._loader, self._inputs
            self.model = self.tokenizer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: GivenParams | Sequence[GivenParams] = None,
        *,
        errors: Literal["raise", "return"] = "raise",
        namespace: str | None = None,
        **named: Any,
    ) -> list[Completion]:
        """Continues prompts, in batches. One completion for each of a prompt's n samples, in
        order. A request that fails does not stop the others: its error is raised at the end,
        with all `completions` on it, or returned in its Completion with errors="return".
        `namespace`: requests of one namespace may draft from each other's outputs. `named`:
        parameters of SamplingParams by name, instead of sampling_params.
        """
        self._shared.check_open()
        choice("raise", "return").of("errors", errors)
        given = as_prompts(prompts)
        params = params_of(sampling_params, named, len(given))
        requests = [
            self._request(prompt, one, namespace) for prompt, one in zip(given, params, strict=True)
        ]
        sequences: list[SequenceState] = []
        try:
            groups = iter(self._shared.add([one for one in requests if isinstance(one, Request)]))
            results = [next(groups) if isinstance(one, Request) else one for one in requests]
            sequences = [one for group in results if isinstance(group, list) for one in group]
            running = deque(sequences)
            self._shared.run_until(lambda: _have_ended(running))
        finally:  # also when interrupted: nothing stays behind in the engine
            self._shared.release(sequences)
        completions = [c for i, group in enumerate(results) for c in self._completions(i, group)]
        failed = [c.error for c in completions if c.error is not None]
        if failed and errors == "raise":
            failed[0].completions = completions
            raise failed[0]
        return completions

    @overload
    def chat(
        self, messages: str | Conversation, sampling_params: GivenParams = None, **options: Any
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[str | Conversation],
        sampling_params: GivenParams | Sequence[GivenParams] = None,
        **options: Any,
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: str | Conversation | Sequence[str | Conversation],
        sampling_params: GivenParams | Sequence[GivenParams] = None,
        *,
        namespace: str | None = None,
        **named: Any,
    ) -> Completion | list[Completion]:
        """The model's answer to a conversation, through its chat template; of a list of
        conversations, a list of answers. Text is the message of a user. For the rest see
        generate."""
        conversations, is_one = as_conversations(messages)
        params = params_of(sampling_params, named, len(conversations))
        if any(one.n != 1 for one in params):
            raise ConfigError("chat gives one answer; use generate([messages], ...) for n of them")
        found = self.generate(conversations, params, namespace=namespace)
        return found[0] if is_one else found

    def stream(
        self,
        prompt: Prompt,
        sampling_params: GivenParams = None,
        *,
        reuse: bool = False,
        namespace: str | None = None,
        **named: Any,
    ) -> Stream:
        """The text as it settles, chunk by chunk; at its end, `completion` of the stream is the
        Completion.

        `reuse` starts from the KV entries that an earlier stream left in the cache, as far as the
        prompts agree: for conversations.
        """
        self._shared.check_open()
        (params,) = params_of(sampling_params, named, 1)
        if params.n != 1:
            raise ConfigError("stream gives one text; use generate for n of them")
        request = self._inputs.request(prompt, params, reuse=reuse, namespace=namespace)
        return Stream(self._stream(request))

    def _stream(self, request: Request) -> Generator[StreamChunk, None, Completion]:
        ((sequence,),) = self._shared.add([request])
        shown_tokens = shown_text = 0
        chunks: list[StreamChunk] = []

        def has_chunks() -> bool:
            chunks[:] = _stable_chunks(sequence, shown_tokens, shown_text)
            return bool(chunks)

        try:
            while not chunks or chunks[-1].finish_reason is None:
                self._shared.run_until(has_chunks)
                for chunk in chunks:
                    shown_tokens += len(chunk.token_ids)
                    shown_text += len(chunk.text)
                    yield chunk
        finally:  # a stream that is dropped frees its slot
            self._shared.release([sequence])
        if sequence.error is not None:
            raise sequence.error
        return self._completion(0, sequence)

    def __repr__(self) -> str:
        if self._shared.closed:
            return "LLM(closed)"
        dtype = self.config.quantize or str(self.model.dtype).removeprefix("torch.")
        drafter = type(self.engine.drafter).__name__
        device = self.engine.verifier.runner.device
        return f"LLM({type(self.model).__name__}, drafter={drafter}, {dtype} on {device})"

    def describe(self) -> list[str]:
        """What runs: the model, the backend and why it was chosen, the drafter, the KV cache; and
        what would be faster."""
        config, runner = self.config, self.engine.verifier.runner
        choice, cache = runner.backend_choice, runner.cache
        dtype = str(self.model.dtype).removeprefix("torch.")
        if kinds := sorted({layer.kind for layer in stored_layers(self.model)}):
            dtype += f" over weights as stored ({', '.join(kinds)})"
        drafter = "adaptive" if self.engine.adaptive else "fixed size"
        arithmetics = {
            layer.activations
            for layer in stored_layers(self.model)
            if isinstance(layer, StoredLinear) and layer.kind.startswith("Q")
        }
        found = [
            f"model: {type(self.model).__name__}, {config.quantize or dtype} on {runner.device}",
            *(f"activations: {name} ({ACTIVATIONS[name]})" for name in sorted(arithmetics)),
            f"backend: {choice.name} ({choice.reason})",
            *(f"faster: {hint}" for hint in choice.faster),
            f"drafter: {type(self.engine.drafter).__name__}, {drafter}; exact: {config.exact}",
            f"KV cache: {config.kv_cache_dtype or str(cache.dtype).removeprefix('torch.')}, "
            f"{cache.num_slots} slots of {runner.max_context} tokens, "
            f"{cache.used_bytes / 2**30:.2f} GiB used, {cache.bytes / 2**30:.2f} GiB at most",
        ]
        return found if config.lossless else [*found, NOT_LOSSLESS]

    def explain(self) -> list[str]:
        """Why it drafted as it did so far, a sentence each."""
        warning = [] if self.config.lossless else [NOT_LOSSLESS]
        return [*warning, *self._shared.between_steps(self.engine.explain)]

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        self._shared.check_open()
        return list(self._inputs.encode(prompt).ids)

    # ------------------------------------------------------------------------------- results

    def _request(
        self, prompt: Prompt, params: SamplingParams, namespace: str | None
    ) -> Request | DraftaheadError:
        """The checked request, or why there is none."""
        try:
            return self._inputs.request(prompt, params, namespace=namespace)
        except DraftaheadError as error:
            return error

    def _completions(
        self, index: int, group: list[SequenceState] | DraftaheadError
    ) -> list[Completion]:
        if isinstance(group, DraftaheadError):
            return [Completion("", [], "error", None, Stats(), [], [], 0, index, 0, group)]
        return [self._completion(index, sequence) for sequence in group]

    def _completion(self, index: int, sequence: SequenceState) -> Completion:
        sequence.stats.tokens, texts = sequence.num_generated, self._token_texts
        of_prompt = sequence.prompt_logprobs
        return Completion(
            text=sequence.detokenizer.text,
            token_ids=sequence.output,
            finish_reason=sequence.finish_reason or "error",
            logprobs=None if sequence.params.logprobs is None else texts.beside(sequence.logprobs),
            stats=sequence.stats,
            prompt=sequence.request.prompt_text,
            prompt_token_ids=list(sequence.request.prompt),
            drafted=sequence.drafted,
            seed=sequence.request.seed,
            index=index,
            sample=sequence.sample,
            error=sequence.error,
            lossless=self.config.lossless,
            stop_reason=sequence.stop_reason,
            prompt_logprobs=None if of_prompt is None else texts.beside([None, *of_prompt]),
        )


def _have_ended(running: deque[SequenceState]) -> bool:
    """Whether all have; those that have are taken out."""
    while running and running[0].finish_reason is not None:
        running.popleft()
    return not running


def _stable_chunks(sequence: SequenceState, tokens: int, text: int) -> Iterator[StreamChunk]:
    """The text that can no longer become part of a stop string, by token where possible; `tokens`
    tokens and `text` characters were shown before."""
    ended, detokenizer, output = sequence.finish_reason, sequence.detokenizer, sequence.output
    stable = len(detokenizer.text) if ended else detokenizer.num_stable_chars()
    start = tokens
    for index in range(tokens, len(output) - 1 if ended else len(output)):
        starts = detokenizer.starts  # other streams may add tokens meanwhile
        # A token's text ends where that of the next begins.
        end = starts[index + 1] if index + 1 < len(starts) else len(detokenizer.text)
        if text < end <= stable or not detokenizer.has_text:
            ids, drafted = output[start : index + 1], sequence.drafted[start : index + 1]
            yield StreamChunk(detokenizer.text[text:end], ids, drafted)
            start, text = index + 1, end
    if ended:  # whatever is left, with the reason
        rest = detokenizer.text[text:]
        yield StreamChunk(rest, output[start:], sequence.drafted[start:], ended)
