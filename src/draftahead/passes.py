"""One pass of a transformers model over new tokens, with our cache and our attention.

Any causal language model works unmodified: its own forward gets our cache object, position ids
and mask. What a model must not do is keep state that cannot be rolled back, or mask in a way
that a 4-D mask does not tell; such models are refused by name, and an architecture that the
project has not tested is compared with its own forward once, at load.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead import attention, tree
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.kvcache import CacheWindow, KVCache, ShapeProbe
from draftahead.runtime.decoder import MOST_ROWS, Decoder, NotThisShapeError
from draftahead.runtime.linear import SmallRowLinears

# Held to transformers' own generate, token by token, in tests/test_parity.py.
TESTED = frozenset(
    {"cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox"}
    | {"gpt_oss", "gptj", "granite", "llama", "mistral", "mixtral", "olmo2", "olmo3", "opt"}
    | {"phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
PREFILL_CHUNK = 512
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})


class CachedModel:
    """A model and its cache."""

    def __init__(self, model: Any, *, max_batch: int, max_context: int | None, spare: int) -> None:
        """`spare`: slots behind the context for nodes that are scored and not kept."""
        _refuse_unsupported(model)
        self.model = model
        self.device: torch.device = model.device
        self.vocabulary = int(_text_config(model).vocab_size)
        self.limit = _context_limit(model)
        self.max_context = self._chosen_context(max_context)
        self.switch = _longrope_switch(model)
        self._uses_interface = bool(model._can_set_attn_implementation())
        self._configs = _configs_of(model) if self._uses_interface else []
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._linears = SmallRowLinears(model)
        self._decoder: Decoder | None = None
        probe = ShapeProbe()
        calls = self._probe(probe)
        length = self.max_context + spare
        self.cache = KVCache(probe.shapes, max_batch, length, probe.dtype, self.device)
        if model.config.model_type not in TESTED:
            self._compare_with_own_forward()
        self._decoder = self._recognised(calls)

    def _chosen_context(self, wanted: int | None) -> int:
        if wanted is None:
            return min(self.limit, 8192)  # a cache for more is asked for, not assumed
        if not 1 <= wanted <= self.limit:
            raise ConfigError(f"max_context must be 1 to {self.limit} for this model, not {wanted}")
        return wanted

    # ------------------------------------------------------------------------- the pass

    @torch.inference_mode()
    def run(
        self,
        tokens: Tensor,
        *,
        first: int = 0,
        parents: Tensor | None = None,
        live: int | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Scores nodes [B, N] of rows [first, first + B), each after what its row holds.

        Writes their keys behind each row's length and leaves the length as it is: `cache.keep`
        moves it. `parents` [B, N] for trees, None for chains. `live`: slots to read, by default
        as many as are needed. Returns logits [B, N, V], or [B, 1, V] with `last_only`.
        """
        held = [len(self.cache.contents[first + b]) for b in range(tokens.shape[0])]
        beacon = self._needs_beacon(first, max(held) + tokens.shape[1])
        tokens = F.pad(tokens.to(self.device), (0, int(beacon)))
        rows, width = tokens.shape
        lengths = torch.tensor(held, device=self.device)
        if parents is None:
            ancestors = None
            depths = torch.arange(width, device=self.device).expand(rows, width)
        else:
            ancestors = tree.ancestors(parents.to(self.device))
            depths = ancestors.sum(-1) - 1
        live = max(held) + width if live is None else live
        if max(live, max(held) + width) > self.cache.length:
            raise ConfigError(f"a pass of {width} nodes does not fit behind {max(held)} tokens")
        # Padding may stand behind the last position there is; nobody reads it.
        positions = (lengths[:, None] + depths).clamp(max=self._last_position(first))
        if beacon:
            positions[:, -1] = self.switch or 0
        elif self._decoder is not None and rows * width <= MOST_ROWS:
            above = None if parents is None else parents.tolist()
            logits = self._decoder.run(tokens, positions, lengths, above, first)
            return logits[:, -1:] if last_only else logits
        mask = attention.distances(lengths, depths, ancestors, live)
        slots = lengths[:, None] + torch.arange(width, device=self.device)
        window = CacheWindow(self.cache, first, slots, live)
        logits = self._forward(tokens, positions, mask, window, last_only)
        return logits[:, :-1] if beacon and not last_only else logits

    # longrope chooses its frequencies by the largest position in the pass: another set once a
    # text is longer than `switch`. A text is rotated alike from end to end (`cache.far`), so
    # padding must not cross the switch too early, and a pass over the head of a far text needs
    # one node past it, a beacon, that nobody reads.

    def _last_position(self, first: int) -> int:
        far = self.switch is None or self.cache.far[first]
        return self.limit - 1 if far else min(self.limit, self.switch or 0) - 1

    def _needs_beacon(self, first: int, end: int) -> bool:
        return self.switch is not None and self.cache.far[first] and end <= self.switch

    def is_far(self, length: int) -> bool:
        """Whether a text of so many tokens takes longrope's far frequencies."""
        return self.switch is not None and length > self.switch

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Any,
        last_only: bool,
        attention_name: str = attention.NAME,
    ) -> Tensor:
        if not self._uses_interface:
            mask = attention.additive(mask, self.model.dtype)
        extra = {"logits_to_keep": 1} if last_only and self._keeps_last else {}
        with self._our_kernels(attention_name):
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **extra,
            )
        logits: Tensor = out.logits
        return logits[:, -1:] if last_only else logits

    @contextmanager
    def _our_kernels(self, name: str = attention.NAME) -> Iterator[None]:
        """The user's model is theirs: outside a pass it is as they gave it."""
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation_internal = name
            with self._linears:
                yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name

    def prefill(
        self, row: int, tokens: Seq[int], *, fixed: int | None = None, live: int | None = None
    ) -> int:
        """Makes the row hold exactly `tokens` and tells how many of them it already held.

        `fixed`: passes cut and padded to this many by position alone, nothing reused, so that
        the keys are the same bits whatever went before.
        """
        far = self.is_far(len(tokens) + 1)  # the root follows
        if fixed or self.cache.far[row] != far:
            self.cache.contents[row].clear()
        self.cache.far[row] = far
        matched = self.cache.matched(row, tokens)
        del self.cache.contents[row][matched:]
        chunk = fixed or PREFILL_CHUNK
        for start in range(matched, len(tokens), chunk):
            part = list(tokens[start : start + chunk])
            block = torch.tensor([part + [0] * (fixed - len(part) if fixed else 0)])
            self.run(block, first=row, live=live, last_only=True)
            self.cache.contents[row].extend(part)
        return matched

    # --------------------------------------------------------------------------- at load

    @torch.inference_mode()
    def _probe(self, probe: ShapeProbe) -> dict[int, dict[str, Any]]:
        """One token through the model, to learn what its layers store, and with what options
        each of them calls its attention function."""
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        calls: dict[int, dict[str, Any]] = {}
        name = attention.register(calls)
        try:
            self._forward(one, one, one[:, None, None], probe, True, name)
        except (AttributeError, TypeError, AssertionError, NotImplementedError) as problem:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not run with a cache that can be rolled back "
                f"({problem}); speculation cannot be exact for it"
            ) from problem
        if not probe.found:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} stores no keys in the cache it is given; "
                "speculation cannot be exact for it"
            )
        return calls

    @torch.inference_mode()
    def _recognised(self, calls: dict[int, dict[str, Any]]) -> Decoder | None:
        """The kernels' own pass for this model, if it is of a shape they know and agrees with the
        model's forward on a text, a tree and a batch."""
        try:
            decoder = Decoder(self.model, self.cache, calls)
        except (NotThisShapeError, AttributeError):
            return None
        generator = torch.Generator().manual_seed(0)
        count = min(self.max_context, 24) - 8
        if self.limit < 24:
            return None
        text = torch.randint(0, self.vocabulary, (count,), generator=generator).tolist()
        self.prefill(0, text)
        nodes = torch.randint(0, self.vocabulary, (1, 6), generator=generator)
        parents = torch.tensor([[-1, 0, 0, 1, 3, 2]])
        theirs = self.run(nodes, parents=parents)
        self._decoder = decoder
        ours = self.run(nodes, parents=parents)
        self._decoder = None
        self.cache.contents[0].clear()
        gap = (theirs - ours).abs().max() / theirs.abs().max().clamp(min=1e-6)
        return decoder if gap < 1e-3 else None

    @torch.inference_mode()
    def _compare_with_own_forward(self) -> None:
        """An architecture nobody tested here must agree with itself: chunked and through our
        cache and mask as well as in one plain forward."""
        generator = torch.Generator().manual_seed(0)
        count = min(48, self.max_context)
        ids = torch.randint(0, self.vocabulary, (1, count), generator=generator)
        own = self.model(input_ids=ids.to(self.device), use_cache=False).logits.float()
        half = count // 2
        self.prefill(0, ids[0, :half].tolist())
        ours = self.run(ids[:, half:]).float()
        self.cache.contents[0].clear()
        gap = (own[:, half:] - ours).abs().max() / own.abs().max().clamp(min=1e-6)
        bound = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 0.1
        if not gap <= bound:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives other logits with our cache and mask than by "
                f"itself (by {float(gap):.1e} of their size): its attention is not one we know"
            )


# ------------------------------------------------------------------------- what a model is


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _configs_of(model: Any) -> list[Any]:
    """Every configuration object that some layer reads its attention's name from."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]


def _refuse_unsupported(model: Any) -> None:
    name, config = type(model).__name__, _text_config(model)
    why = None
    if getattr(model, "_is_stateful", False):
        why = "keeps a recurrent state that cannot be rolled back"
    elif getattr(model.config, "is_encoder_decoder", False):
        why = "is an encoder-decoder model"
    elif config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        why = "uses ALiBi, whose biases do not follow our positions"
    elif unknown := set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS:
        why = f"has layers of a kind that we cannot mask: {', '.join(sorted(unknown))}"
    if why:
        raise UnsupportedModelError(f"{name} {why}; speculation cannot be exact for it")
    if model.training:
        raise ConfigError(f"{name} is in training mode: call model.eval() first")


def _rope(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _context_limit(model: Any) -> int:
    """How many positions the model can take. Beyond a dynamic RoPE's own length every pass
    changes the frequencies, and with them what a draft or a batch mate may not touch."""
    return int(getattr(_text_config(model), "max_position_embeddings", None) or 8192)


def _longrope_switch(model: Any) -> int | None:
    """The length beyond which longrope takes its other set of frequencies."""
    for rope in _rope(_text_config(model)):
        if rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None
