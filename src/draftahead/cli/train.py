"""`draftahead train`: answers to learn from, and drafters made of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from draftahead.cli import options
from draftahead.errors import ConfigError, DraftaheadError

if TYPE_CHECKING:
    from draftahead.train.blocks import Blocks
    from draftahead.train.loop import History, Task
    from draftahead.train.run import Material

app = typer.Typer(help="Make a drafter for your model.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="The folder to write to.")]


@app.command()
def answers(
    prompts: Annotated[Path, typer.Option(help="JSON lines with prompt, messages, turns or text.")],
    out: Out,
    model: options.Model = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
    longest: Annotated[int | None, typer.Option(min=1, help="Leave out longer prompts.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 8,
    part: Annotated[str, typer.Option(help="2/3: the second of three processes.")] = "1/1",
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    max_context: options.MaxContext = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantize: options.Quantize = None,
) -> None:
    """Let the model answer prompts, to train on. What was interrupted goes on where it was."""
    from draftahead.train import texts

    shares = part.split("/")
    if len(shares) != 2 or not all(share.isdecimal() for share in shares):
        raise ConfigError(f"--part is a number of a number of parts, as 2/3, not {part!r}")
    mine, of = int(shares[0]), int(shares[1])
    if not 1 <= mine <= of:
        raise ConfigError(f"--part {part}: there are parts 1 to {of}")
    options.check_folder(out)
    config = options.drafter_from(drafter, draft_model, speculative_config, None)
    llm = options.build_llm(
        model,
        config,
        dtype=dtype,
        device=device,
        quantize=quantize,
        max_context=max_context,
        max_batch=batch,
    )
    asked, whole = texts.read_prompts(prompts, llm)
    sampling = options.sampling_from(temperature=temperature, max_tokens=max_tokens, seed=seed)
    notes = Console(stderr=True)

    def told(done: int, files: int, tokens: int) -> None:
        notes.print(f"{done} of {files} files, {tokens} new tokens", highlight=False)

    if whole is not None:
        texts.write_texts(whole, out)
    if asked:
        texts.write_answers(
            llm, asked, out, sampling=sampling, longest=longest, part=(mine, of), told=told
        )
    found = texts.read_answers(out)
    typer.echo(f"{len(found)} texts with {found.learnt} tokens to learn in {out}")


# ------------------------------------------------------------------------- trainings of heads


@dataclass(frozen=True)
class Training:
    """The options that all trainings share."""

    answers: Annotated[Path, typer.Option(help="A folder that `train answers` wrote.")]
    out: Out
    model: options.Model = "smollm2"
    held_out: Annotated[
        Path | None, typer.Option(help="Such a folder, to test on. Unset: some of the first.")
    ] = None
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 4000
    rate: Annotated[float, typer.Option(help="Learning rate, after the warm-up.")] = 6e-4
    warmup: Annotated[int, typer.Option(help="Steps until the rate is reached.")] = 200
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a block: what is computed at once.")
    ] = 8192
    accumulate: Annotated[int, typer.Option(help="Blocks to a step.")] = 1
    longest: Annotated[
        int, typer.Option(min=1, help="Longer texts keep so many tokens: the last.")
    ] = 1024
    every: Annotated[int, typer.Option(help="Steps between evaluations, with checkpoints.")] = 500
    patience: Annotated[
        int, typer.Option(help="Evaluations without a gain until it ends; 0: never.")
    ] = 0
    average: Annotated[float, typer.Option(help="Of the weights: how much a step keeps.")] = 0.999
    keep_states: Annotated[
        float, typer.Option(min=0, help="GB of the target's states to keep, not to compute again.")
    ] = 0.0
    states_folder: Annotated[
        Path | None, typer.Option(help="Keep them in a file there, not in memory.")
    ] = None
    float32: Annotated[bool, typer.Option(help="No bfloat16, on a GPU.")] = False
    seed: Annotated[int, typer.Option(help="The same seed gives the same head.")] = 0
    resume: Annotated[bool, typer.Option(help="Go on with a training in this folder.")] = False
    plot: Annotated[Path | None, typer.Option(help="Draw it into a PNG file.")] = None
    dtype: options.Dtype = None
    device: options.Device = None

    def material(self) -> Material:
        from draftahead.loader.hub import terminal_report
        from draftahead.train.report import check_drawing
        from draftahead.train.run import gathered

        if self.plot is not None:
            check_drawing()
            options.check_writable(self.plot)
        options.check_folder(self.out)
        if self.states_folder is not None and not self.keep_states:
            raise ConfigError("--states-folder is for states that are kept: give --keep-states GB")
        with terminal_report() as report:
            report("loading torch and transformers")
            return gathered(
                self.model,
                self.answers,
                self.held_out,
                dtype=self.dtype,
                device=self.device,
                seed=self.seed,
                report=report,
            )

    def apart(self, material: Material, depths: tuple[int, ...]) -> Blocks:
        """The texts to test on."""
        return material.held_out_blocks(depths, tokens=self.tokens, longest=self.longest)

    def run(self, material: Material, task: Task, depths: tuple[int, ...], method: str) -> None:
        """`method`: the drafter that what is trained is for."""
        from draftahead.train.loop import Plan
        from draftahead.train.run import trained

        same = ("steps", "rate", "warmup", "accumulate", "average", "every", "patience", "seed")
        plan = Plan(half=not self.float32, **{name: getattr(self, name) for name in same})
        blocks = material.blocks(
            depths,
            tokens=self.tokens,
            longest=self.longest,
            keep=round(self.keep_states * 1e9),
            folder=self.states_folder,
            seed=self.seed,
        )
        is_main = material.processes.is_main_process
        notes = Console(stderr=True, quiet=not is_main)
        size = sum(weight.numel() for weight in task.module.parameters() if weight.requires_grad)
        notes.print(
            f"{material.texts.learnt} tokens to learn in {len(material.texts)} texts "
            f"({len(blocks)} blocks), {len(material.held_out)} texts to test on; "
            f"{size / 1e6:.1f}M weights",
            highlight=False,
            soft_wrap=True,
        )
        history = trained(
            material,
            task,
            blocks,
            plan,
            self.out,
            resume=self.resume,
            told=lambda line: notes.print(line, highlight=False, soft_wrap=True),
        )
        material.processes.destroy_process_group()
        if is_main:
            self._tell(material, history, method)

    def _tell(self, material: Material, history: History, method: str) -> None:
        from draftahead.train.gain import measured

        best = max(range(len(history.lengths)), key=history.lengths.__getitem__)
        typer.echo(f"{self.out}: acceptance length {history.lengths[best]:.3f} on held-out texts")
        drafter = {
            "method": method,
            "adapter" if method == "early_exit" else "model": str(self.out),
        }
        speedups = None
        try:
            gain = measured(material.model, drafter, material.held_out, len(history.by_depth[best]))
            typer.echo(gain.told(history.by_depth[best]))
            speedups = [gain.of(by_depth)[0] for by_depth in history.by_depth]
        except DraftaheadError as problem:  # what was trained is good all the same
            typer.echo(f"no estimate of the speed: {problem}")
        if self.plot is not None:
            from draftahead.train.report import draw

            draw(history, self.plot, speedups)


def trains(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes a Training, with that one's options among its own."""
    kinds = get_type_hints(command, include_extras=True)
    own = [p for name, p in inspect.signature(command).parameters.items() if name != "training"]
    shared = get_type_hints(Training, include_extras=True)
    found = [p.replace(annotation=kinds[p.name]) for p in own]
    for field in fields(Training):
        has_default = field.default is not MISSING
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default if has_default else inspect.Parameter.empty,
                annotation=shared[field.name],
            )
        )
    found = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in found]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        training = Training(**{name: given.pop(name) for name in shared})
        command(training=training, **given)

    run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in found}
    return app.command()(run)


@trains
def eagle(
    training: Training,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the head.")] = 1,
    inner: Annotated[
        int | None, typer.Option(min=1, help="Width inside; unset: the target's.")
    ] = None,
    states: Annotated[str | None, typer.Option(help="After which layers; unset: 2,L/2,L-3")] = None,
    vocabulary: Annotated[int, typer.Option(min=1, help="Tokens that it can say.")] = 16384,
    train_vocabulary: Annotated[bool, typer.Option(help="Learn their rows, too.")] = False,
    depth: Annotated[int, typer.Option(min=1, help="Guesses of a chain in training.")] = 5,
    fade: Annotated[float, typer.Option(help="What a guess counts of the one before.")] = 0.8,
) -> None:
    """Train an EAGLE-3 head, unrolled over its own outputs."""
    from draftahead.drafters.eagle.head import new_head
    from draftahead.train.eagle import EagleTask

    material = training.material()
    count = int(material.model.config.get_text_config(decoder=True).num_hidden_layers)
    depths = tuple(sorted({2, count // 2, count - 3}))
    if states is not None:
        depths = tuple(sorted(options.numbers_of("--states", states)))
    spoken = material.most_used(vocabulary)
    head = new_head(material.model, spoken, depths=depths, layers=layers, intermediate_size=inner)
    apart = training.apart(material, depths)
    task = EagleTask(
        head,
        material.model,
        apart,
        depth=depth,
        fade=fade,
        train_vocabulary=train_vocabulary,
        name=training.model,
    )
    training.run(material, task, depths, "eagle")


@trains
def medusa(
    training: Training,
    heads: Annotated[int, typer.Option(min=1, help="Heads: how many tokens ahead.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Residual blocks of a head.")] = 1,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Tokens that they can say; unset: all.")
    ] = None,
    fade: Annotated[float, typer.Option(help="What a head counts of the one before.")] = 0.8,
) -> None:
    """Train Medusa heads, and find the best tree of their guesses."""
    from draftahead.drafters.medusa.heads import new_heads
    from draftahead.train.medusa import MedusaTask

    material = training.material()
    spoken = None if vocabulary is None else material.most_used(vocabulary)
    made = new_heads(material.model, heads, layers=layers, tokens=spoken)
    apart = training.apart(material, ())  # they go by the last state, which is always there
    task = MedusaTask(made, material.model, apart, fade=fade, name=training.model)
    training.run(material, task, (), "medusa")


@trains
def exit(
    training: Training,
    layer: Annotated[int, typer.Option(help="The exit: after so many layers.")],
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter.")] = 256,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Tokens that it can say; unset: all.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Guesses of a chain, in evaluations.")] = 4,
) -> None:
    """Train an adapter that makes the target's first layers draft well."""
    from draftahead.drafters.early_exit.adapter import new_adapter
    from draftahead.train.exit import ExitTask

    material = training.material()
    spoken = None if vocabulary is None else material.most_used(vocabulary)
    adapter = new_adapter(material.model, layer, rank=rank, tokens=spoken)
    apart = training.apart(material, (layer,))
    task = ExitTask(adapter, material.model, apart, depth=depth)
    training.run(material, task, (layer,), "early_exit")


@trains
def distill(
    training: Training,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the draft model.")],
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Its width; unset: the target's, of which it is made.")
    ] = None,
    inner: Annotated[
        int | None, typer.Option(min=1, help="Width inside; unset: in proportion.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads; unset: as wide.")
    ] = None,
    key_heads: Annotated[
        int | None, typer.Option(min=1, help="For keys; unset: in proportion.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Guesses of a chain, in evaluations.")] = 5,
) -> None:
    """Train a small draft model of the target's architecture and vocabulary."""
    from draftahead.train.distill import DistillTask, new_student

    material = training.material()
    student = new_student(
        material.model, layers=layers, hidden=hidden, inner=inner, heads=heads, key_heads=key_heads
    )
    apart = training.apart(material, ())
    task = DistillTask(student, material.model, apart, tokenizer=material.tokenizer, depth=depth)
    training.run(material, task, (), "draft_model")


# ------------------------------------------------------------------------------------ export


@app.command()
def export(
    head: Annotated[str, typer.Option(help="Folder, file or hub id of a trained head.")],
    out: Out,
    model: options.Model = "smollm2",
    dtype: options.Dtype = None,
    device: options.Device = None,
) -> None:
    """Write an EAGLE head or Medusa heads with the vocabulary's rows, as some servers want."""
    from draftahead.loader import hub
    from draftahead.train.export import export_head

    with hub.terminal_report() as report:
        report("loading torch and transformers")
        target, _ = hub.load(model, dtype=dtype, device=device, report=report)
    typer.echo(f"{out}: {export_head(head, target, out, name=model)}")
