"""One pass of a transformers model over new tokens, with our cache and our attention.

Any causal language model works unmodified: its own forward gets our cache object, position ids
and mask. What a model must not do is keep state that cannot be rolled back, or mask in a way
that a 4-D mask does not tell; such models are refused by name, and an architecture that the
project has not tested is compared with its own forward once, at load.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.base import Backend, CacheSlice, DeviceTree
from draftahead.backends.cpu.kernels import MAX_NODES
from draftahead.backends.cpu.linear import SmallBatchLinears
from draftahead.backends.cuda.compaction import GraphedCompaction
from draftahead.backends.cuda.hf_graph import GraphedPrefill
from draftahead.backends.cuda.padding import Padding
from draftahead.backends.fingerprint import WeightFingerprint
from draftahead.backends.select import select_backend
from draftahead.core import tree
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.kv import attention
from draftahead.kv.cache import CacheView, KVCache, KVShapeProbe
from draftahead.models import support
from draftahead.models.layer_subset import LayerSubset, shown
from draftahead.models.support import text_config

PREFILL_CHUNK = 512
PREFILL_TOKENS = 16384  # of all texts of a pass that fills several rows


class ModelRunner:
    """A model and its cache."""

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        max_context: int | None,
        spare: int,
        compiled: bool = False,
    ) -> None:
        """`spare`: slots behind the context for nodes that are scored and not kept. `compiled`:
        layers of a model that our kernels do not know go through torch.compile, on a GPU."""
        support.refuse_unsupported(model)
        self.model, self.compiled = model, compiled
        self.device: torch.device = model.device
        self.vocabulary = int(text_config(model).vocab_size)
        self.limit = support.context_limit(model)
        self.max_context = support.chosen_context(self.limit, max_context)
        self.switch = support.longrope_switch(model)
        self.uses_interface = bool(model._can_set_attn_implementation())
        self._configs = support.attention_configs(model) if self.uses_interface else []
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._linears = SmallBatchLinears(model)
        self._decoder: Backend | None = None
        self._fill: GraphedPrefill | None = None
        # [B, N] the first of the largest logits of the last pass, -1 where that is not finite;
        # None where the pass did not find it on its way.
        self.best: Tensor | None = None
        self.top: Tensor | None = None  # [B, N, 4] likewise, the largest few
        self._watched: tuple[int, ...] = ()
        probe = KVShapeProbe()
        calls = self._probe(probe)
        length = self.max_context + spare
        self.cache = KVCache(probe.shapes, max_batch, length, probe.dtype, self.device)
        if model.config.model_type not in support.TESTED:
            support.refuse_disagreeing(self)
        self._calls = calls
        self._decoder = self._recognised()

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits are the same bits in every pass, whatever else is in it."""
        return self._decoder is not None and self._decoder.batch_invariant

    def scores_device_drafts(self, texts: int, nodes: int) -> bool:
        """Whether a pass over so many nodes takes trees that the host has not seen."""
        held, decoder = [len(row) for row in self.cache.tokens_in[:texts]], self._decoder
        if decoder is None or not decoder.scores_device_drafts or self.switch is not None:
            return False
        more = Padding.of(self.cache, 0, held, nodes, fixed=True)
        return decoder.supports(texts + more.texts, nodes, True)

    def watch(self, depths: Sequence[int]) -> None:
        """From now on every pass leaves in the cache what its nodes were after so many layers;
        after all of them, behind the last norm (and only where it scores). See `states`."""
        config = text_config(self.model)
        layers = int(config.num_hidden_layers)
        if not depths or not all(0 < depth <= layers for depth in depths):
            raise ConfigError(f"states are there after 1 to {layers} layers, not {list(depths)}")
        if set(depths) <= set(self._watched):
            return
        self._watched = tuple(sorted({*self._watched, *depths}))
        self.cache.watch(len(self._watched) * int(config.hidden_size))
        if self._decoder is not None:
            self._decoder.capture_hidden(self._watched)
        if self._fill is not None:
            self._fill.graphs.forget()

    def states(self, depths: Sequence[int], rows: Tensor, slots: Tensor) -> Tensor:
        """What is in `slots` [B, N] of `rows` [B] was after so many layers, [B, N, W, H]."""
        assert self.cache.states is not None
        self.cache.settle()
        stored = self.cache.states[rows[:, None], 0, slots]
        found = stored.view(*slots.shape, len(self._watched), -1)
        return found if tuple(depths) == self._watched else found[:, :, [*self.places(depths)]]

    def places(self, depths: Sequence[int]) -> tuple[int, ...]:
        """Where these states stand among those that are stored of a token."""
        return tuple(self._watched.index(depth) for depth in depths)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ------------------------------------------------------------------------- the pass

    @torch.inference_mode()
    def run(
        self,
        tokens: Tensor,
        *,
        first: int = 0,
        parents: Tensor | DeviceTree | None = None,
        live: int | None = None,
        scored: bool = True,
        real: int | Sequence[int] = 1,
        part: LayerSubset | None = None,
        ahead: int = 0,
    ) -> Tensor:
        """Scores nodes [B, N] of rows [first, first + B), each after what its row holds.

        Writes their keys behind each row's length and leaves the length as it is: `cache.keep`
        moves it. `parents` [B, N] for trees, None for chains, ahead where `reads_ahead`. `live`:
        slots to read, by default as many as are needed. Returns logits [B, N, V], good until the
        next pass; without `scored` only the keys count, and what is returned does not. The first
        `real` nodes (of each row, if there are several numbers) belong to the text, the others are
        guesses or padding. `part`: only some of the layers, for guesses alone; nothing is watched,
        and logits are over its tokens. `ahead`: nodes of earlier passes that these follow as a
        chain, in the slots behind each row's length.
        """
        self.cache.settle()
        texts, width = tokens.shape
        held = [len(self.cache.tokens_in[first + b]) + ahead for b in range(texts)]
        end = max(held) + width
        live, real = end if live is None else live, real if part is None else 0
        beacon = self._needs_beacon(first, end)
        if max(live, end + beacon) > self.cache.length:
            raise ConfigError(f"a pass of {width} nodes does not fit behind {max(held)} tokens")
        if not beacon and isinstance(real, int):
            place = CacheSlice(first, live, self._last_position(first), real)
            found = self._by_kernels(tokens, held, parents, place, scored, part)
            if found is not None:
                return found
        assert not isinstance(parents, DeviceTree)
        self.best = self.top = None
        tokens = F.pad(tokens.to(self.device), (0, int(beacon)))
        width, live = width + beacon, max(live, end + beacon)
        lengths = torch.tensor(held, device=self.device)
        if parents is None:
            ancestors = None
            depths = torch.arange(width, device=self.device).expand(texts, width)
        else:
            ancestors = tree.ancestors(F.pad(parents.to(self.device), (0, int(beacon))))
            depths = ancestors.sum(-1) - 1
        # Padding may stand behind the last position there is; nobody reads it.
        positions = (lengths[:, None] + depths).clamp(max=self._last_position(first))
        if beacon:
            positions[:, -1] = self.switch or 0
        mask = attention.distances(lengths, depths, ancestors, live)
        slots = lengths[:, None] + torch.arange(width, device=self.device)
        window = CacheView(self.cache, first, slots, live, real)
        logits = self._forward(tokens, positions, mask, window, scored, part=part)
        return logits[:, :-1] if beacon else logits

    def _by_kernels(
        self,
        tokens: Tensor,
        held: list[int],
        parents: Tensor | DeviceTree | None,
        place: CacheSlice,
        scored: bool,
        part: LayerSubset | None,
    ) -> Tensor | None:
        """The pass in another way than by the model's own forward, if there is one for it."""
        texts, nodes = tokens.shape
        more = Padding.of(
            self.cache, place.first_slot, held, nodes, fixed=isinstance(parents, DeviceTree)
        )
        decoder = self._decoder if part is None else part.decoder(self._decoder)
        if decoder is not None and not decoder.supports(*more.size(texts, nodes), scored):
            more = Padding()  # without, it may still be few enough
        if decoder is None or not decoder.supports(*more.size(texts, nodes), scored):
            return None
        idle = self.cache.tokens_in[place.first_slot + texts :][: more.texts]
        found = decoder.forward(
            more.tokens(tokens),
            held + [len(row) for row in idle],
            more.parents(parents),
            cache_slice=place._replace(kv_len=place.kv_len + more.nodes),
            with_logits=scored,
        )
        if found is None:
            return None
        self.best = None if found.argmax is None else found.argmax[:texts, :nodes]
        self.top = None if found.topk is None else found.topk[:texts, :nodes]
        return found.logits[:texts, :nodes]

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
        scored: bool,
        attention_name: str = attention.NAME,
        part: LayerSubset | None = None,
    ) -> Tensor:
        watched = self._watched if part is None else ()
        if not self.uses_interface:
            mask = attention.additive(mask, self.model.dtype)
        extra = {} if scored or not self._keeps_last else {"logits_to_keep": 1}
        part_in_place = part.in_place() if part else nullcontext()
        with self._our_kernels(attention_name), part_in_place, shown(self.model, watched) as found:
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **extra,
            )
        if watched:
            cache.store(torch.stack([found[depth] for depth in watched], 2))
        logits: Tensor = out.logits
        return logits

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

    @torch.inference_mode()
    def prefill(
        self, row: int, tokens: Sequence[int], *, fixed: int | None = None, live: int | None = None
    ) -> int:
        """Makes the row hold exactly `tokens` and tells how many of them it already held.

        `fixed`: passes cut and padded to this many by position alone, nothing reused, so that
        the keys are the same bits whatever went before.
        """
        self._bind_anew(row)
        far = self.is_far(len(tokens) + 1)  # the root follows
        if fixed or self.cache.far[row] != far:
            self.cache.tokens_in[row].clear()
        self.cache.far[row] = far
        matched = self.cache.matched(row, tokens)
        del self.cache.tokens_in[row][matched:]
        chunk = fixed or (MAX_NODES if self.batch_invariant else PREFILL_CHUNK)
        for start in range(matched, len(tokens), chunk):
            part = list(tokens[start : start + chunk])
            if fixed or not self._filled(row, part, start):
                block = torch.tensor([part + [0] * (fixed - len(part) if fixed else 0)])
                self.run(block, first=row, live=live, scored=False, real=len(part))
            self.cache.tokens_in[row].extend(part)
        return matched

    def _filled(self, row: int, tokens: list[int], held: int) -> bool:
        """A part of a prompt by a recording, where there are some."""
        self.cache.settle()
        last = self._last_position(row)
        return self._fill is not None and self._fill.run(row, tokens, held, last)

    def prefill_slots(self, first: int, texts: Sequence[Sequence[int]]) -> None:
        """Fills rows from `first` on, several in a pass, reusing nothing."""
        alone = self.batch_invariant or self.switch is not None or len(texts) == 1
        for row in range(first, first + len(texts)):
            self.cache.tokens_in[row].clear()
            if alone:
                self.prefill(row, texts[row - first])
        if alone:
            return
        self._bind_anew(first)
        most = max(map(len, texts))
        chunk = min(PREFILL_CHUNK, max(1, PREFILL_TOKENS // len(texts)))
        for start in range(0, most, chunk):
            parts = [list(text[start : start + chunk]) for text in texts]
            width = max(map(len, parts))
            block = torch.tensor([part + [0] * (width - len(part)) for part in parts])
            self.run(block, first=first, scored=False, real=[len(part) for part in parts])
            for row, part in enumerate(parts, start=first):
                self.cache.tokens_in[row].extend(part)

    def _bind_anew(self, row: int) -> None:
        """If the model's weights have been moved or patched since the last text."""
        if self._decoder is not None and not self._binding.holds():
            self._decoder = None
            self._decoder = self._recognised(row)

    # --------------------------------------------------------------------------- at load

    @torch.inference_mode()
    def _probe(self, probe: KVShapeProbe) -> dict[int, dict[str, Any]]:
        """One token through the model, to learn what its layers store, and with what options
        each of them calls its attention function."""
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        calls: dict[int, dict[str, Any]] = {}
        name = attention.register(calls)
        try:
            self._forward(one, one, one[:, None, None], probe, False, name)
        except Exception as problem:
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
    def _recognised(self, row: int = 0) -> Backend | None:
        """Another way to run the model's passes, if there is one and it agrees with the model's own
        forward on a text and a tree."""
        self._binding = WeightFingerprint(self.model)
        self._fill = None
        found, self.backend_choice = select_backend(
            self.model,
            self.cache,
            self._calls,
            self._forward,
            compiled=self.compiled,
            long_rope_threshold=self.switch,
            disagreement=partial(self._disagreement, row),
        )
        # What can be recorded pass by pass can be for a prompt.
        if found is not None and self.device.type == "cuda":
            self._fill = GraphedPrefill(type(self.model).__name__, self._forward, self.cache)
            self.cache.mover = GraphedCompaction(self.cache).run
        if found is not None and self._watched:
            found.capture_hidden(self._watched)
        return found

    def _disagreement(self, row: int, backend: Backend) -> str | None:
        """Why a backend cannot be trusted with this model: one forward over a text and a tree, by
        it and by the model itself."""
        count = min(self.max_context - 6, 24)
        if count < 1:
            return f"max_context {self.max_context} is too short for a comparison"
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, self.vocabulary, (count,), generator=generator).tolist()
        self.prefill(row, text)
        nodes = torch.randint(0, self.vocabulary, (1, 6), generator=generator)
        parents = torch.tensor([[-1, 0, 0, 1, 3, 2]])
        self._linears.enabled = False  # the model's very own arithmetic
        theirs = self.run(nodes, first=row, parents=parents).float()
        self._linears.enabled = True
        self._decoder = backend
        ours = self.run(nodes, first=row, parents=parents).float()
        self._decoder = None
        self.cache.tokens_in[row].clear()
        gap = float((theirs - ours).norm() / theirs.norm().clamp(min=1e-6))
        if not gap < backend.tolerance:
            return f"its logits differ from the model's own forward by {gap:.1e}"
        if not backend.supports(1, 6, True):
            return "its first forward pass failed"
        return None
