"""Typical acceptance, which is not lossless: only where asked for, and never unsaid."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import zoo
from command_line import run
from draftahead import LLM, Draft, SamplingParams, errors
from draftahead.bench.report import results_table
from draftahead.core.types import Batch, ForwardOutput
from draftahead.sampling import accept
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import NodeContext, sample_gumbel, target_rng_key
from drafted import Clairvoyant, GarbageTree
from test_rules import SETTINGS
from toy import VOCABULARY, World

WARM = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
GREEDY = SamplingParams(temperature=0, max_tokens=30)
RED = "\x1b[31m"


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


# ---------------------------------------------------------------------------------- the rule


def random_tree(seed: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(seed)

    def below(end: int) -> int:
        return int(torch.randint(0, end, (1,), generator=generator))

    return [(below(VOCABULARY), below(node)) for node in range(1, 10)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_rule_is_medusas(setting: str) -> None:
    """The longest path of which every token is likelier than min(0.3, 0.09 exp(-entropy)), of
    equals the likeliest; then what the target draws. By hand, over many trees of two rows."""
    unlike_the_draw = 0
    for seed in range(12):
        world = World(seed, SETTINGS[setting])
        sequences = (world.sequence(), world.sequence())
        trees = [random_tree(seed), random_tree(seed + 100)[: seed % 10]]
        draft = Draft.trees([world.prompt[-1]] * 2, trees)
        paths: list[list[tuple[int, ...]]] = []
        logits = torch.zeros(2, draft.width, VOCABULARY, dtype=torch.float64)
        for b, tree in enumerate(trees):
            paths.append([()])
            for token, parent in tree:
                paths[b].append((*paths[b][parent], token))
            for node, path in enumerate(paths[b]):
                logits[b, node] = world.logits("target", world.prompt + path)
        batch = Batch(
            sequences, (9, 9), RecordedDraftSampler(sequences, [9, 9], VOCABULARY, "distribution")
        )
        verdict, _ = accept.accept(draft, ForwardOutput(logits), batch, lossless=False)
        for b, sequence in enumerate(sequences):
            best, best_worth = (), (0, 1.0)
            for path in paths[b]:
                chances = []
                for at, token in enumerate(path):
                    probs = world.probs(path[:at]).tolist()
                    entropy = -sum(p * math.log(p) for p in probs if p)
                    if not probs[token] > min(0.3, 0.09 * math.exp(-entropy)):
                        break
                    chances.append(probs[token])
                else:
                    worth = (len(path), math.prod(chances))
                    if worth > best_worth:
                        best, best_worth = path, worth
            own = int(
                sample_gumbel(
                    world.probs(best)[None], [target_rng_key(NodeContext(sequence, best))]
                )[0]
            )
            assert verdict.tokens[b] == [*best, own]
            assert paths[b][verdict.paths[b][-1]] == best
            drawn, _ = accept.accept(draft, ForwardOutput(logits), batch)
            unlike_the_draw += drawn.tokens[b] != verdict.tokens[b]
    assert unlike_the_draw  # it is another rule


def test_the_floor_falls_with_doubt_and_is_never_high(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4])
    torch.testing.assert_close(accept.typical_threshold(probs), 0.09 / torch.tensor([1.0, 2, 4]))
    monkeypatch.setattr(accept, "DELTA", 1.0)
    torch.testing.assert_close(accept.typical_threshold(probs), torch.tensor([0.3, 0.3, 0.25]))


def test_greedy_texts_stay_exact(target: Any) -> None:
    """A probs that is sure of one token has one typical token."""
    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): zoo.reference(target, p, 30) for p in prompts}
    for drafter in (GarbageTree(), Clairvoyant(answers)):
        outs = LLM(target, drafter, lossless=False).generate(prompts, GREEDY)
        assert [out.token_ids for out in outs] == list(answers.values())
    assert all(out.stats.mean_acceptance_length > 3.5 for out in outs)


def test_sampled_texts_are_bent(target: Any) -> None:
    """What the flag does: guesses that the target did not draw stay."""
    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): zoo.reference(target, p, 30) for p in prompts}
    exact, bent = (
        LLM(target, Clairvoyant(answers), lossless=lossless).generate(prompts, WARM)
        for lossless in (True, False)
    )
    assert [out.token_ids for out in exact] != [out.token_ids for out in bent]
    assert all(out.lossless for out in exact)
    assert not any(out.lossless for out in bent)
    kept = [sum(out.stats.accepted for out in outs) for outs in (exact, bent)]
    assert kept[1] > 2 * kept[0]


def test_only_who_asks_gets_it(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    real = accept.accept_typical
    monkeypatch.setattr(accept, "accept_typical", lambda *args: called.append(args) or real(*args))
    for exact in ("distribution", "replay"):
        LLM(target, GarbageTree(), exact=exact).generate(zoo.ragged_prompts(2), WARM)
    LLM(target, GarbageTree()).with_drafter(GarbageTree(), max_batch=1).generate([1, 2], WARM)
    assert not called
    LLM(target, GarbageTree(), lossless=False).generate(zoo.ragged_prompts(2), WARM)
    assert called
    with pytest.raises(errors.ConfigError, match="exclude each other"):
        LLM(target, lossless=False, exact="replay")
    with pytest.raises(errors.ConfigError, match="no option 'lossless'"):
        LLM(target, {"method": "suffix", "lossless": False})


def test_no_law_ends_the_text() -> None:
    world = World(1, SETTINGS["plain"])
    sequence = world.sequence()
    draft = Draft.chains([1], [[2, 3]])
    logits = torch.full((1, 3, VOCABULARY), torch.nan)
    batch = Batch(
        (sequence,), (9,), RecordedDraftSampler([sequence], [9], VOCABULARY, "distribution")
    )
    verdict, _ = accept.accept(draft, ForwardOutput(logits), batch, lossless=False)
    assert verdict.tokens == [[]]
    assert isinstance(verdict.errors[0], errors.NonFiniteLogitsError)


# --------------------------------------------------------------------------------- the reports


def test_explain_says_it_first(target: Any) -> None:
    llm = LLM(target, "suffix", lossless=False)
    llm.generate([1, 2, 3], WARM)
    assert llm.explain()[0].startswith("not lossless")
    assert not any("lossless" in reason for reason in LLM(target, "suffix").explain())


def test_generate_says_it_in_red(
    model_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    common = (
        "generate",
        "w5 w6",
        "--model",
        model_folder,
        "--max-tokens",
        "4",
        "--drafter",
        "lookup",
    )
    for extra in ((), ("--stats",), ("--json",), ("--explain",)):
        assert run(*common, *extra) == 0
        assert "not lossless" not in capsys.readouterr().err
        assert run(*common, *extra, "--not-lossless") == 0
        out, err = capsys.readouterr()
        assert err.count(f"{RED}not lossless") == 1, extra
        if "--json" in extra:
            assert json.loads(out)["lossless"] is False
    assert run(*common, "--not-lossless", "--exact", "replay") == 1
    assert "exclude each other" in capsys.readouterr().err


def test_bench_says_it_in_red(
    model_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    common = (
        "bench",
        "--model",
        model_folder,
        "--drafter",
        "lookup",
        "--limit",
        "1",
        "--repeats",
        "1",
    )
    more = ("--max-tokens", "4", "--prompts", "random", "--json", str(file))
    assert run(*common, *more, "--not-lossless", "--plot", str(picture)) == 0
    assert "lookup, not lossless" in capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    flags = {row["drafter"]: row["lossless"] for row in results}
    assert flags == {"none": True, "lookup": False}  # plain decoding has nothing to lose
    console = Console(force_terminal=True, color_system="standard", width=140)
    with console.capture() as shown:
        console.print(results_table(results, "title"))
    assert f"{RED}lookup, not lossless" in shown.get()
    assert run(*common, *more) == 0
    assert "not lossless" not in capsys.readouterr().out
    assert run(*common, "--shape", "llama-8b", "--not-lossless") == 1
    assert "leave it out with --shape" in capsys.readouterr().err
