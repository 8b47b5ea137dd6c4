"""Writes the prompts that the heads of smollm2 are trained on; the model generates most of them.

    python scripts/head_prompts.py --out prompts.jsonl [--share 0.33 --seed 1]

The model continues user turns of the chat template from a few opening words, and articles without a
template. Arithmetic problems and German sentences are combined from lists. Nothing comes from a
data set, so nothing of a benchmark can be in it. `--share`: the share of the prompts to write.
"""

from __future__ import annotations

import argparse
import json
import random
import tomllib
from pathlib import Path

from draftahead import LLM, SamplingParams

LISTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


class PromptWriter:
    def __init__(self, llm: LLM, share: float, seed: int) -> None:
        self.llm, self.share, self.seed = llm, share, seed
        self.random = random.Random(seed)
        template = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": "@"}], tokenize=False
        )
        self.user = template.split("@")[0]
        self.num_calls = 0

    def count(self, whole: int) -> int:
        return round(self.share * whole)

    def pick(self, name: str) -> str:
        return self.random.choice(LISTS[name])

    def complete(self, openings: list[str], max_tokens: int, *, ended: bool) -> list[str]:
        """The openings with the model's continuations; `ended`: only those with an end token."""
        found = []
        batch = self.llm.engine.scheduler.max_batch
        for start in range(0, len(openings), batch):
            group = openings[start : start + batch]
            ids = [
                self.llm.tokenizer(text, add_special_tokens=False).input_ids or [0]
                for text in group
            ]
            self.num_calls += 1
            seeds = [hash((self.seed, self.num_calls, i)) & 0xFFFFFF for i in range(len(group))]
            params = [
                SamplingParams(
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    min_p=0.02,
                    max_tokens=max_tokens,
                    seed=seed,
                )
                for seed in seeds
            ]
            for text, completion in zip(group, self.llm.generate(ids, params), strict=True):
                if completion.finish_reason == "stop" or not ended:
                    found.append(text + completion.text)
        return found

    def user_turns(self, openings: list[str], max_tokens: int) -> list[str]:
        """User messages that the model generates."""
        size, openings = len(self.user), [self.user + opening for opening in openings]
        found = self.complete(openings, max_tokens, ended=True)
        return [text[size:].strip() for text in found if len(text) > size + 8]

    # ---------------------------------------------------------------------------- the kinds

    def prompts(self) -> list[str]:
        chat = self.user_turns([self.pick("chat") for _ in range(self.count(13000))], 80)
        questions = self.user_turns([self.pick("questions") for _ in range(self.count(9000))], 32)
        problems = [self._named(self.pick("problems")) for _ in range(self.count(5000))]
        sums = self.user_turns(problems, 90) + [self._sum() for _ in range(self.count(4000))]
        code = self.user_turns([self.pick("code") for _ in range(self.count(3000))], 80)
        ask = "Translate German to English: "
        german = self.user_turns([ask + self.pick("german") for _ in range(self.count(5000))], 60)
        german += [ask + self._german() for _ in range(self.count(3500))]
        articles = self.complete(
            [self.pick("articles") for _ in range(self.count(4500))], 400, ended=False
        )
        long = [self._summary(articles) for _ in range(self.count(7000))]
        long += [self._passages(articles, questions) for _ in range(self.count(7000))]
        found = list(dict.fromkeys(chat + questions + sums + code + german + long))
        self.random.shuffle(found)
        return found

    def _named(self, text: str) -> str:
        one, other = self.random.sample(LISTS["names"], 2)
        return text.format(n=one, m=other)

    def _sum(self) -> str:
        a, b, c, d = (self.random.randint(2, 60) for _ in range(4))
        n, m = self.random.sample(LISTS["names"], 2)
        t = self.random.choice(LISTS["things"])
        return self.random.choice(
            [
                f"{n} has {a} {t}. {m} gives {n} {b} more. Then {n} sells half of them. "
                f"How many {t} does {n} have left?",
                f"A shop sells {t} for ${a} each. {n} buys {b} {t} and pays with ${a * b + c}. "
                f"How much change does {n} get?",
                f"{n} reads {a} pages every day. How many pages does {n} read in {b} weeks? "
                f"If the book has {a * b * 7 + c} pages, how many are left?",
                f"There are {a} rows of {b} chairs. {c} chairs are broken. How many can be used?",
                f"{n} is {a} years old and {m} is {b} years older. In {c} years, what will be the "
                "sum of their ages?",
                f"A car travels at {a} miles per hour for {b % 9 + 1} hours and then {c} miles per "
                f"hour for {d % 7 + 1} hours. How far does it travel in total?",
                f"{n} earns ${a} per hour and works {b % 10 + 1} hours a day, {c % 5 + 2} days a "
                f"week. How much does {n} earn in {d % 6 + 2} weeks?",
                f"If {a}% of {b * 10} {t} are red, how many {t} are not red?",
                f"{n} bakes {a} cakes with {b} {t} on each. {m} eats {c} {t}. How many are there "
                f"now, and how many does each of {d} guests get?",
            ]
        )

    def _german(self) -> str:
        def sentence() -> str:
            parts = [self.pick(name) for name in ("subjects", "says", "matters", "ends")]
            return " ".join(parts) + self.random.choice((".", " ."))

        return sentence() if self.random.random() < 0.7 else f"{sentence()} {sentence()}"

    def _cut(self, articles: list[str], least: int, most: int) -> str:
        """Some of an article, or of several, up to a number of characters."""
        text, length = self.random.choice(articles), self.random.randint(least, most)
        while len(text) < length:
            text += " " + self.random.choice(articles)
        return " ".join(text[:length].split()[:-1])

    def _summary(self, articles: list[str]) -> str:
        instruction = self.random.choice(
            ["Summarize: "] * 6
            + [
                "Summarize the following text: ",
                "Give a short summary of this article.\n\n",
                "TL;DR: ",
            ]
        )
        return instruction + self._cut(articles, 500, 4000)

    def _passages(self, articles: list[str], questions: list[str]) -> str:
        count, question = self.random.randint(1, 4), self.random.choice(questions)
        text = "\n\n".join(self._cut(articles, 400, 900) for _ in range(count))
        return self.random.choice(
            [f"{text}\n\n{question}"] * 3
            + [f"{text}\n\nQuestion: {question}", f"Answer by these passages.\n{text}\n{question}"]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dtype", default=None)
    args = parser.parse_args()
    llm = LLM(args.model, "none", max_batch=args.batch, max_context=1024, dtype=args.dtype)
    found = PromptWriter(llm, args.share, args.seed).prompts()
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in found]
    args.out.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{len(found)} prompts in {args.out}")


if __name__ == "__main__":
    main()
