"""One forward of a transformers model over new tokens, with our KV cache and our attention.

Any causal language model works unmodified: its own forward gets our cache object, position ids and
mask. What a model must not do is keep state that cannot be rolled back, or mask in a way that a 4-D
mask does not express; such models are refused by name, and an architecture that the project has not
tested is compared with its own forward once, at load.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.base import Backend, CacheSlice, DeviceTree
from draftahead.backends.cpu.kernels import NODES_PER_CALL
from draftahead.backends.cpu.linear import SmallBatchLinears
from draftahead.backends.cuda.compaction import GraphedCompaction
from draftahead.backends.cuda.hf_graph import GraphedPrefill
from draftahead.backends.cuda.padding import Padding
from draftahead.backends.fingerprint import ModelFingerprint
from draftahead.backends.modules import lock_of, patched_forwards
from draftahead.backends.own_code import autocast_of
from draftahead.backends.select import select_backend
from draftahead.core import tree
from draftahead.core.device import device_of
from draftahead.core.draft import DeviceDraft
from draftahead.core.types import ForwardOutput
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.kv import attention
from draftahead.kv.cache import CacheView, KVCache, KVShapeProbe
from draftahead.kv.formats import KV_CACHE_DTYPES
from draftahead.loader.stored import StoredLinear, stored_layers
from draftahead.models import support
from draftahead.models.layer_subset import LayerSubset, aux_hidden_states
from draftahead.models.support import text_config

# Prompt tokens of one forward. More would need more memory for activations and gain little: such a
# forward is bound by arithmetic.
PREFILL_CHUNK = 512
LOGITS_CHUNK = 128  # the same where their logits are wanted: [N, V] are large
PREFILL_TOKENS = 16384  # of all sequences of a forward that fills several slots


class ModelRunner:
    """A model and its KV cache."""

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        max_context: int | None,
        scratch_entries: int,
        compiled: bool = False,
        kv_cache_dtype: str | None = None,
    ) -> None:
        """`scratch_entries`: KV entries behind the context, for drafted nodes. `compiled`: on a
        GPU, layers of a model that our kernels do not support go through torch.compile.
        `kv_cache_dtype`: see kv/formats.py; None: as the model computes keys and values."""
        support.refuse_unsupported(model)
        self.model, self.compiled = model, compiled
        self.device: torch.device = model.device
        self._is_gpu = device_of(self.device).is_gpu
        self.vocab_size = int(text_config(model).vocab_size)
        self.model_context = support.context_limit(model)
        self.max_context = support.resolve_max_context(self.model_context, max_context)
        self.long_rope_threshold = support.long_rope_threshold(model)
        self.uses_attention_interface = bool(model._can_set_attn_implementation())
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._backend: Backend | None = None
        self.num_bindings = 0  # how often the model was found new or changed
        self._prefill: GraphedPrefill | None = None
        self._aux_layers: tuple[int, ...] = ()  # layers whose hidden states forwards store
        self._lock = lock_of(model)  # another engine's patches are not the owner's
        with self._lock:
            probe = self._probe()
            self._fingerprint = ModelFingerprint(model)
            num_entries = self.max_context + scratch_entries
            stored_dtype = None
            if kv_cache_dtype is not None:
                stored_dtype = self._stored_dtype(kv_cache_dtype)
            self.cache = KVCache(
                *(probe.shapes, max_batch, num_entries, probe.dtype, self.device),
                stored_dtype=stored_dtype,
            )
            if model.config.model_type not in support.TESTED:
                support.check_against_plain_forward(self)
            self._backend = self._choose_backend()

    def _stored_dtype(self, kv_cache_dtype: str) -> torch.dtype:
        if self._is_gpu:
            raise ConfigError(
                f"kv_cache_dtype {kv_cache_dtype!r} is for models on a CPU; on {self.device} the "
                "KV cache has the dtype of the model: leave it out"
            )
        return KV_CACHE_DTYPES[kv_cache_dtype]

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits are the same bits in every forward, whatever else is in it."""
        return self._backend is not None and self._backend.batch_invariant

    def synchronize(self) -> None:
        device_of(self.device).synchronize()

    # ------------------------------------------------------------------------------ a forward

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        *,
        first_slot: int = 0,
        parents: Tensor | DeviceTree | None = None,
        kv_len: int | None = None,
        with_logits: bool = True,
        num_context_tokens: int | Sequence[int] = 1,
        layers: LayerSubset | None = None,
        offset: int = 0,
    ) -> ForwardOutput:
        """Computes nodes [B, N] behind what slots [first_slot, first_slot + B) hold.

        Writes their KV entries behind each slot's length and leaves the length as it is:
        `cache.commit` moves it. `parents` [B, N]: of trees; None for chains; a DeviceTree where
        `supports_device_drafts`. `kv_len`: KV entries to read, by default as many as are needed.
        Without `with_logits` only the KV entries count. The first `num_context_tokens` nodes (one
        number, or one per sequence) are context; the others are drafted tokens or padding.
        `layers`: only some of the layers, for drafting; no hidden states are stored then, and
        logits are over its draft vocabulary. `offset`: nodes of earlier forwards that these follow
        as a chain, in the entries behind each slot's length.
        """
        self.cache.compact()
        batch, num_nodes = tokens.shape
        num_cached = [len(self.cache.tokens_in[first_slot + b]) + offset for b in range(batch)]
        end = max(num_cached) + num_nodes
        kv_len = end if kv_len is None else kv_len
        num_context_tokens = num_context_tokens if layers is None else 0
        threshold, long_rope = self.long_rope_threshold, self.cache.long_rope[first_slot]
        dummy = threshold is not None and long_rope and end <= threshold
        if max(kv_len, end + dummy) > self.cache.num_entries:
            raise ConfigError(f"{num_nodes} nodes do not fit behind {max(num_cached)} tokens")
        self.cache.note_writes(first_slot, batch, end + dummy)
        if not dummy and isinstance(num_context_tokens, int):
            last = self._last_position(first_slot)
            cache_slice = CacheSlice(first_slot, kv_len, last, num_context_tokens)
            output = self._backend_forward(
                tokens, num_cached, parents, cache_slice, with_logits, layers
            )
            if output is not None:
                return output
        if isinstance(parents, DeviceTree):  # its graph cannot be captured
            roots, sizes = list(parents.roots), [num_nodes] * batch
            draft, _ = DeviceDraft(roots, tokens, sizes, trees=parents.trees).to_host()
            tokens = draft.token_tensor.clamp(0, self.vocab_size - 1)  # rejected, but embedded
            parents = draft.parent_tensor
        tokens = F.pad(tokens.to(self.device), (0, int(dummy)))
        num_nodes, kv_len = num_nodes + dummy, max(kv_len, end + dummy)
        cached = torch.tensor(num_cached, device=self.device)
        index = torch.arange(num_nodes, device=self.device)
        if parents is None:
            ancestors, depths = None, index.expand(batch, num_nodes)
        else:
            ancestors = tree.ancestors(F.pad(parents.to(self.device), (0, int(dummy))))
            depths = ancestors.sum(-1) - 1
        # Padding may lie behind the last position of the model; its output is not used.
        positions = (cached[:, None] + depths).clamp(max=self._last_position(first_slot))
        if dummy:
            positions[:, -1] = threshold or 0
        mask = attention.distances(cached, depths, ancestors, kv_len)
        entries = cached[:, None] + index
        view = CacheView(self.cache, first_slot, entries, kv_len, num_context_tokens)
        logits = self._model_forward(tokens, positions, mask, view, with_logits, layers=layers)
        return ForwardOutput(logits[:, :-1] if dummy else logits)

    def _backend_forward(
        self,
        tokens: Tensor,
        num_cached: list[int],
        parents: Tensor | DeviceTree | None,
        cache_slice: CacheSlice,
        with_logits: bool,
        layers: LayerSubset | None,
    ) -> ForwardOutput | None:
        """The forward by a backend, if one supports it."""
        backend = self._backend if layers is None else layers.backend_for(self._backend)
        if backend is None or autocast_of(self.device.type) is not None:
            return None
        batch, num_nodes = tokens.shape
        if not self._is_gpu:
            if not backend.supports(batch, num_nodes, with_logits):
                return None
            lists = parents.tolist() if isinstance(parents, Tensor) else None
            return backend.forward(
                tokens, num_cached, lists, cache_slice=cache_slice, with_logits=with_logits
            )
        fixed = isinstance(parents, DeviceTree)
        padding = Padding.of(self.cache, cache_slice.first_slot, num_cached, num_nodes, fixed=fixed)
        if not backend.supports(*padding.size(batch, num_nodes), with_logits):
            padding = Padding()  # without it, it may be small enough
        if not backend.supports(*padding.size(batch, num_nodes), with_logits):
            return None
        idle = self.cache.tokens_in[cache_slice.first_slot + batch :][: padding.num_sequences]
        output = backend.forward(
            padding.tokens(tokens),
            num_cached + [len(tokens) for tokens in idle],
            padding.parents(parents),
            cache_slice=cache_slice._replace(kv_len=cache_slice.kv_len + padding.num_nodes),
            with_logits=with_logits,
        )
        if output is None:
            return None
        nodes = slice(batch), slice(num_nodes)  # without padding
        return ForwardOutput(
            output.logits[nodes],
            None if output.argmax is None else output.argmax[nodes],
            None if output.topk is None else output.topk[nodes],
        )

    def _model_forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Any,
        with_logits: bool,
        layers: LayerSubset | None = None,
        attention_calls: dict[int, dict[str, Any]] | None = None,
    ) -> Tensor:
        """The forward of transformers, with our cache, attention and linear layers in it, and the
        model as it was afterwards. `attention_calls` takes the options of each layer's attention.
        """
        aux_layers = self._aux_layers if layers is None else ()
        if not self.uses_attention_interface:
            mask = attention.additive(mask, self.model.dtype)
        extra = {} if with_logits or not self._has_logits_to_keep else {"logits_to_keep": 1}
        with (
            self._lock,
            attention.in_configs(self._configs, attention_calls),
            self._linears.torch_threads(tokens.numel()),
            self._linears.patched(),
            layers.patched() if layers else nullcontext(),
            aux_hidden_states(self.model, aux_layers) as hidden,
        ):
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **extra,
            )
        if aux_layers:
            cache.store_hidden(torch.stack([hidden[layer] for layer in aux_layers], 2))
        logits: Tensor = output.logits
        if with_logits and (overflows := getattr(cache, "overflows", None)) is not None:
            # The model's own logits for such a drafted token are not known, so it has none.
            logits = logits.masked_fill(overflows[:, -logits.shape[1] :, None], torch.nan)
        return logits

    # ---------------------------------------------------------------------------- long RoPE

    # transformers chooses the frequencies of longrope by the largest position in a forward: a
    # second set beyond `long_rope_threshold`. All entries of a slot must use one set. So positions
    # of padding are clamped below the threshold for short sequences, and a forward over the
    # beginning of a long one gets one dummy token beyond it, whose output is not used.

    def is_long_rope(self, length: int) -> bool:
        """Whether a sequence of so many tokens uses the second set of frequencies."""
        return self.long_rope_threshold is not None and length > self.long_rope_threshold

    def _last_position(self, first_slot: int) -> int:
        threshold = self.long_rope_threshold
        if threshold is None or self.cache.long_rope[first_slot]:
            return self.model_context - 1
        return min(self.model_context, threshold) - 1

    # -------------------------------------------------------------------------------- prefill

    @torch.inference_mode()
    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        chunk: int | None = None,
        kv_len: int | None = None,
        take_logits: Callable[[int, Tensor], None] | None = None,
    ) -> int:
        """Makes the slot hold exactly `tokens`; returns how many of them it held already.

        `chunk`: forwards cut and padded to this many tokens by position alone, nothing reused, so
        that the KV entries are the same bits whatever went before. `take_logits`: called for each
        forward with its first position and logits [N, V]; nothing is reused.
        """
        self.refresh(slot)
        held, long_rope = self.cache.tokens_in[slot], self.is_long_rope(len(tokens) + 1)  # + root
        if chunk or take_logits or self.cache.long_rope[slot] != long_rope:
            held.clear()
        self.cache.long_rope[slot] = long_rope
        reused = self.cache.matching_prefix(slot, tokens)
        del held[reused:]
        self.cache.give_back(slot, len(tokens))
        longest = PREFILL_CHUNK if take_logits is None else LOGITS_CHUNK
        size = chunk or (NODES_PER_CALL if self.batch_invariant else longest)
        for start in range(reused, len(tokens), size):
            part = list(tokens[start : start + size])
            if chunk or take_logits or not self._graphed_prefill(slot, part, start):
                padding = [0] * (chunk - len(part)) if chunk else []
                output = self.forward(
                    torch.tensor([part + padding]),
                    first_slot=slot,
                    kv_len=kv_len,
                    with_logits=take_logits is not None,
                    num_context_tokens=len(part),
                )
                if take_logits is not None:
                    take_logits(start, output.logits[0, : len(part)])
            held.extend(part)
        return reused

    def _graphed_prefill(self, slot: int, tokens: list[int], num_cached: int) -> bool:
        """A chunk of a prompt as a CUDA graph, where one was captured."""
        self.cache.compact()
        last = self._last_position(slot)
        return self._prefill is not None and self._prefill.run(slot, tokens, num_cached, last)

    def prefill_slots(self, first_slot: int, prompts: Sequence[Sequence[int]]) -> None:
        """Fills slots from `first_slot` on, several in one forward, reusing nothing."""
        slots = range(first_slot, first_slot + len(prompts))
        for slot in slots:
            self.cache.tokens_in[slot].clear()
        if self.batch_invariant or self.long_rope_threshold is not None or len(prompts) == 1:
            for slot, prompt in zip(slots, prompts, strict=True):
                self.prefill(slot, prompt)
            return
        self.refresh(first_slot)
        size = min(PREFILL_CHUNK, max(1, PREFILL_TOKENS // len(prompts)))
        for start in range(0, max(map(len, prompts)), size):
            parts = [list(prompt[start : start + size]) for prompt in prompts]
            width = max(map(len, parts))
            block = torch.tensor([part + [0] * (width - len(part)) for part in parts])
            counts = [len(part) for part in parts]
            self.forward(block, first_slot=first_slot, with_logits=False, num_context_tokens=counts)
            for slot, part in zip(slots, parts, strict=True):
                self.cache.tokens_in[slot].extend(part)

    # --------------------------------------------------------------------------- hidden states

    def add_aux_layers(self, layers: Sequence[int]) -> None:
        """From now on every forward stores the hidden states of its nodes after these layers (1:
        the first) in the cache; those after the last, which are normed, only with logits."""
        config = text_config(self.model)
        num_layers = int(config.num_hidden_layers)
        if not layers or not all(0 < layer <= num_layers for layer in layers):
            raise ConfigError(
                f"hidden states can be stored after layers 1 to {num_layers}, not {list(layers)}"
            )
        if set(layers) <= set(self._aux_layers):
            return
        self._aux_layers = tuple(sorted({*self._aux_layers, *layers}))
        self.cache.allocate_hidden(len(self._aux_layers) * int(config.hidden_size))
        if self._backend is not None:
            self._backend.set_aux_layers(self._aux_layers)
        if self._prefill is not None:
            self._prefill.graphs.forget()

    def hidden_states(self, layers: Sequence[int], slots: Tensor, entries: Tensor) -> Tensor:
        """Stored hidden states of the tokens in `entries` [B, N] of `slots` [B]: [B, N, W, H]."""
        assert self.cache.hidden is not None
        self.cache.compact()
        stored = self.cache.hidden[slots[:, None], 0, entries]
        found = stored.view(*entries.shape, len(self._aux_layers), -1)
        if tuple(layers) == self._aux_layers:
            return found
        # Not by a list of indices, which would be copied to the device: a capture forbids that.
        return torch.stack([found[:, :, index] for index in self.aux_indices(layers)], 2)

    def aux_indices(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Indices of these layers among those whose hidden states are stored."""
        return tuple(map(self._aux_layers.index, layers))

    def supports_device_drafts(self, batch: int, num_nodes: int) -> bool:
        """Whether a forward over so many nodes takes a DeviceTree."""
        backend = self._backend
        if backend is None or not backend.supports_device_drafts or self.long_rope_threshold:
            return False
        num_cached = [len(tokens) for tokens in self.cache.tokens_in[:batch]]
        padding = Padding.of(self.cache, 0, num_cached, num_nodes, fixed=True)
        return backend.supports(batch + padding.num_sequences, num_nodes, True)

    # --------------------------------------------------------------------------------- at load

    @torch.inference_mode()
    def _probe(self) -> KVShapeProbe:
        """One token through the model as it is now, to find out what its layers store, and with
        what options each of them calls its attention function."""
        self._configs = (
            support.attention_configs(self.model) if self.uses_attention_interface else []
        )
        self._linears = SmallBatchLinears(self.model)
        probe, calls = KVShapeProbe(), dict[int, dict[str, Any]]()
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            with (
                torch.autocast(self.device.type, enabled=False),  # the dtype without it
                patched_forwards(self._stored_products()),  # numbers do not count: it may be slow
            ):
                self._model_forward(
                    one, one, one[:, None, None], probe, False, attention_calls=calls
                )
        except Exception as problem:
            raise UnsupportedModelError(support.why_it_fails(self.model, one, problem)) from problem
        if not probe.shapes:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} stores no keys in the cache it is given; "
                "speculation cannot be exact for it"
            )
        self._attention_options = calls
        return probe

    def _stored_products(self) -> list[tuple[Any, Callable[..., Any]]]:
        """Layers that widen their weights in each forward, if no kernel runs them, beside what they
        return without the numbers."""
        layers = [layer for layer in stored_layers(self.model) if isinstance(layer, StoredLinear)]
        return [(layer, layer.zeros) for layer in layers if "forward" not in vars(layer)]

    @torch.inference_mode()
    def _choose_backend(self, slot: int = 0) -> Backend | None:
        """A faster way to run forwards, if there is one and it agrees with the model's own forward
        on a prompt and a tree."""
        self.num_bindings += 1
        self._prefill = None
        self._fingerprint = ModelFingerprint(self.model)
        backend, self.backend_choice = select_backend(
            self.model,
            self.cache,
            self._attention_options,
            self._model_forward,
            compiled=self.compiled,
            long_rope_threshold=self.long_rope_threshold,
            disagreement=partial(self._disagreement, slot),
        )
        if backend is not None and self._is_gpu:  # prefill and compaction are captured as well
            self._prefill = GraphedPrefill(
                type(self.model).__name__, self._model_forward, self.cache
            )
            self.cache.graphed_copy = GraphedCompaction(self.cache).run
        if backend is not None and self._aux_layers:
            backend.set_aux_layers(self._aux_layers)
        return backend

    def refresh(self, slot: int) -> None:
        """If the model was changed since the last prompt: its KV entries are another model's, and
        its backend is chosen anew. Called before each prompt."""
        with self._lock:
            if self._fingerprint.holds():
                return
            self._backend = None
            for held in self.cache.tokens_in:
                held.clear()
            support.refuse_unsupported(self.model)
            support.refuse_other_cache(self, self._probe())
            self._backend = self._choose_backend(slot)

    def _disagreement(self, slot: int, backend: Backend) -> str | None:
        """How a backend's logits differ from those of the model's own forward, or None."""
        count = min(self.max_context - 6, 24)
        if count < 1:
            return f"max_context {self.max_context} is too short to compare it with the model"
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(0, self.vocab_size, (count,), generator=generator).tolist()
        self.prefill(slot, prompt)
        nodes = torch.randint(0, self.vocab_size, (1, 6), generator=generator)
        parents = torch.tensor([[-1, 0, 0, 1, 3, 2]])
        try:
            self._linears.enabled = False  # theirs, not ours
            theirs = self.forward(nodes, first_slot=slot, parents=parents).logits.float()
            self._linears.enabled, self._backend = True, backend
            ours = self.forward(nodes, first_slot=slot, parents=parents).logits.float()
        finally:
            self._linears.enabled, self._backend = True, None
            self.cache.erase(slot, 0, count + tree.MAX_NODES)
        gap = float((theirs - ours).norm() / theirs.norm().clamp(min=1e-6))
        if not gap < backend.tolerance:
            return f"its logits differ from the model's own by {gap:.1e} (relative)"
        return None if backend.supports(1, 6, True) else "its first forward failed"
