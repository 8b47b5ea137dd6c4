"""Batches: every token to learn comes once per epoch, with the target's own hidden states."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from draftahead.errors import ConfigError
from draftahead.train.batches import TrainBatch, TrainBatches
from draftahead.train.dataset import Dataset

AUX_LAYERS = (1, 3)


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.tiny("llama", dtype=torch.float32)


def numbered_data(count: int = 40, seed: int = 0) -> Dataset:
    """Texts that begin with their number in two tokens: no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        sizes = torch.randint(1, 14, (2,), generator=generator).tolist()
        ids = torch.randint(0, zoo.VOCABULARY, (sum(sizes),), generator=generator).tolist()
        found.append(([number // 90, number % 90, *ids[: sizes[0]]], ids[sizes[0] :]))
    return Dataset.of(found)


def learned_in(batch: TrainBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every text of a batch, with the positions of its tokens to learn."""
    found = []
    for tokens, mask, learned in zip(
        batch.tokens, batch.attention_mask, batch.loss_mask, strict=True
    ):
        assert not learned[~mask].any()
        text = tuple(tokens[mask].tolist())
        found.append((text, tuple(learned[mask].nonzero()[:, 0].tolist())))
    return found


def expected_of(data: Dataset, most: int = 10**6) -> list[Any]:
    found = []
    for index, prompt in enumerate(data.prompt_lengths.tolist()):
        text = data.text(index).tolist()
        cut = max(0, len(text) - most)
        first = max(1, prompt - cut)  # the first token that is left cannot be predicted
        found.append((tuple(text[cut:]), tuple(range(first, len(text) - cut))))
    return found


def test_every_token_to_learn_comes_once_per_epoch(model: Any) -> None:
    data = numbered_data()
    batches = TrainBatches(data, model, AUX_LAYERS, tokens=100)
    stream = batches.from_step(0)
    orders = []
    for epoch in range(3):
        count = len(batches._epoch(epoch))
        assert count > 5
        group = [next(stream) for _ in range(count)]
        seen = [entry for batch in group for entry in learned_in(batch)]
        assert sorted(seen) == sorted(expected_of(data))
        assert sum(len(places) for _, places in seen) == data.num_learned
        orders.append(seen)
        for batch in group:
            assert batch.tokens.numel() <= 100
            edge = batch.tokens.shape[1] - batch.window
            assert not batch.loss_mask[:, :edge].any()
            assert batch.loss_mask[:, edge].any()
    assert orders[0] != orders[1] != orders[2]


def test_long_texts_keep_their_end(model: Any) -> None:
    data = numbered_data()
    for tokens, longest, most in ((1000, 8, 8), (9, None, 9), (9, 20, 9)):
        batches = TrainBatches(data, model, AUX_LAYERS, tokens=tokens, max_length=longest)
        seen = [entry for batch in batches for entry in learned_in(batch)]
        assert max(len(text) for text, _ in seen) == most
        assert sorted(seen) == sorted(expected_of(data, most))


@torch.no_grad()
def test_hidden_states_are_the_targets_own(model: Any) -> None:
    for batch in TrainBatches(numbered_data(12), model, AUX_LAYERS, tokens=100):
        for row in range(len(batch.tokens)):
            mask = batch.attention_mask[row]
            text = batch.tokens[row][mask]
            assert batch.position_ids[row][mask].tolist() == list(range(len(text)))
            hidden_states = model(text[None], output_hidden_states=True).hidden_states
            for at, depth in enumerate(AUX_LAYERS):
                assert torch.allclose(
                    batch.aux_hidden[row, mask, at], hidden_states[depth][0], atol=1e-4
                )
            assert torch.allclose(batch.last_hidden[row, mask], hidden_states[-1][0], atol=1e-4)


class Counted:
    """A decoder that counts its forward passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.forwards = 0
        real = model.get_decoder()

        def decoder(**given: Any) -> Any:
            self.forwards += 1
            return real(**given)

        monkeypatch.setattr(model, "get_decoder", lambda: decoder)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_cached_hidden_states_equal_recomputed_ones(
    model: Any, on_disk: bool, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = numbered_data(20)
    room = round(share * len(data.tokens) * (len(AUX_LAYERS) + 1) * 32 * 4)
    folder = tmp_path / "states" if on_disk else None
    anew = TrainBatches(data, model, AUX_LAYERS, tokens=60).from_step(0)
    counted = Counted(monkeypatch, model)
    kept = TrainBatches(data, model, AUX_LAYERS, tokens=60, cache_bytes=room, cache_folder=folder)
    count, stream = len(kept), kept.from_step(0)
    stored = kept._hidden._store
    assert 0 < stored.numel() * 4 <= room
    if folder is not None:
        assert not list(folder.iterdir())  # its file has no name, and goes with the process
    for epoch in range(3):
        before = counted.forwards
        for _ in range(len(kept._epoch(epoch))):
            mine, other = next(stream), next(anew)
            mask = mine.attention_mask
            assert torch.equal(mine.tokens, other.tokens)
            assert torch.allclose(mine.aux_hidden[mask], other.aux_hidden[mask], atol=1e-4)
            assert torch.allclose(mine.last_hidden[mask], other.last_hidden[mask], atol=1e-4)
            assert mine.aux_hidden.isfinite().all()
        # `anew` runs the model as well, through the decoder that counts.
        mine_alone = counted.forwards - before - len(kept._epoch(epoch))
        if epoch == 0:
            assert mine_alone == count
        else:
            assert mine_alone == 0 if share == 1.0 else mine_alone > 0


def test_uninitialised_memory_is_never_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text's padding reads the entries before it, of a text that may not be computed yet."""

    def dirty(*size: Any, **given: Any) -> torch.Tensor:
        return torch.full(size, torch.nan, **given)

    monkeypatch.setattr(torch, "empty", dirty)
    data = numbered_data(20)
    batches = TrainBatches(data, model, AUX_LAYERS, tokens=60, cache_bytes=10**7)
    monkeypatch.undo()
    group = sorted(range(len(data)), key=lambda i: int(data.lengths[i]))
    short, long = next(i for i in group if i > 2), group[-1]
    for index in (short, long):
        batches._batch([index])
    assert batches._batch([short, long]).aux_hidden.isfinite().all()


def test_a_full_disk_is_reported_before_the_training(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(ConfigError, match=r"no room for 0\.00 GB of hidden states .*No space left"):
        TrainBatches(
            numbered_data(), model, AUX_LAYERS, tokens=60, cache_bytes=10**6, cache_folder=tmp_path
        )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another folder"):
        TrainBatches(
            numbered_data(),
            model,
            AUX_LAYERS,
            tokens=60,
            cache_bytes=10**6,
            cache_folder=tmp_path / "file",
        )


def test_processes_split_the_texts(model: Any) -> None:
    data = numbered_data()
    whole = TrainBatches(data, model, AUX_LAYERS, tokens=100)
    parts = [TrainBatches(data, model, AUX_LAYERS, tokens=100, shard=(i, 3)) for i in range(3)]
    for epoch in range(3):
        all_groups = [tuple(group) for group in whole._epoch(epoch)]
        shares = [[tuple(group) for group in part._epoch(epoch)] for part in parts]
        assert len({len(share) for share in shares}) == 1
        joined = [group for share in shares for group in share]
        assert len(set(joined)) == len(joined)
        assert set(joined) <= set(all_groups)
        assert 0 <= len(all_groups) - len(joined) < 3
    with pytest.raises(ConfigError, match=r"90 processes and .* batches"):
        next(TrainBatches(data, model, AUX_LAYERS, tokens=100, shard=(0, 90)).from_step(0))


def test_a_stream_from_a_step_is_independent_of_the_steps_before(model: Any) -> None:
    batches = TrainBatches(numbered_data(), model, AUX_LAYERS, tokens=100, seed=3)
    stream = batches.from_step(0)
    first = [next(stream).tokens for _ in range(2 * len(batches) + 3)]
    later = TrainBatches(numbered_data(), model, AUX_LAYERS, tokens=100, seed=3).from_step(
        len(first) - 1
    )
    assert torch.equal(next(later).tokens, first[-1])
    other = TrainBatches(numbered_data(), model, AUX_LAYERS, tokens=100, seed=4).from_step(0)
    assert any(not torch.equal(next(other).tokens, tokens) for tokens in first)


def test_data_without_tokens_to_learn_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="no text has tokens to learn"):
        TrainBatches(Dataset.of([([1, 2, 3], []), ([1], [2])]), model, AUX_LAYERS, tokens=100)
    with pytest.raises(ConfigError, match=r"after 1 to 3 layers, not \[0, 2\]"):
        TrainBatches(numbered_data(), model, (0, 2), tokens=100)
