"""The words of the code base: docs/glossary.md, and old words that must not come back."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest

import draftahead

ROOT = Path(__file__).parent.parent.parent
# Unmistakable words of an earlier, private language. Words that also mean something else (pass,
# rows, keys, live, room) are left to reviewers.
BANNED = """
    strangers sisters tenants warmth foreseen outlook dice dicedraft entrance grower regrown
    aboves nobody somebody shortlist tellings beacon key_heads law_of CachedModel DraftDice
    Tally a_level spoken plant
"""
# To be replaced as a whole: the policy and the drafter that merges others.
EXEMPT = ("src/draftahead/control/", "src/draftahead/drafters/auto.py", "tests/control/")
EXEMPT += ("tests/drafters/test_auto", "tests/docs/test_words.py", "CHANGELOG.md")
SUFFIXES = (".py", ".h", ".cpp", ".md", ".toml", ".yml", ".yaml")


def banned() -> set[str]:
    return {word.lower() for word in BANNED.split()}


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.splitlines() if name.endswith(SUFFIXES)]
    return [name for name in names if not name.startswith(EXEMPT) and (ROOT / name).exists()]


def words_in(text: str) -> set[str]:
    """Words and the parts of identifiers, in lower case."""
    names = re.findall(r"[A-Za-z_]+", text)
    parts = re.findall(r"[A-Za-z][a-z]*", " ".join(names))
    return {word.lower() for word in [*names, *parts]}


def test_old_words_do_not_come_back() -> None:
    found = {
        name: old
        for name in tracked_files()
        if (old := words_in((ROOT / name).read_text("utf-8")) & banned())
    }
    assert not found


def glossary() -> set[str]:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    assert len(rows) > 50
    entries = (entry.strip(" *") for row in rows[1:] for entry in row.split(","))
    return {entry.lower() for entry in entries}


@pytest.mark.parametrize("name", draftahead.__all__)
def test_public_names_are_documented_in_words_of_the_glossary(name: str) -> None:
    text = " ".join((inspect.getdoc(getattr(draftahead, name)) or "").lower().split())
    assert len(text.split()) >= 4
    assert not words_in(text) & banned()
    known = [
        word for word in glossary() if re.search(rf"\b{re.escape(word)}(s|ed|es|ing)?\b", text)
    ]
    assert known, f"{name}: {text}"


def test_glossary_is_sorted_and_says_each_word_once() -> None:
    lines = (ROOT / "docs/glossary.md").read_text().splitlines()
    first = lines.index("|---|---|") + 1
    words = [line.split("|")[1].strip(" *").lower() for line in lines[first:]]
    assert len(set(words)) == len(words)
    assert words == sorted(words)


# What users import: later versions add to this list, and take nothing from it.
PUBLIC = """
    LLM Batch Completion Draft DraftaheadError Drafter DrafterContext DrafterFaultWarning
    ForwardOutput LLMConfig SamplingParams SequenceView Stats StreamChunk TokenLogprob Verdict
    register
"""


def test_public_names_are_those_that_were_agreed_on() -> None:
    assert sorted(draftahead.__all__) == sorted(PUBLIC.split())
    assert {*PUBLIC.split(), "__version__"} <= set(dir(draftahead))
    with pytest.raises(AttributeError, match="no attribute 'Sampling'"):
        draftahead.Sampling  # noqa: B018
