"""The console command ``psa``: release steering vectors, look into them, export them, try them, run the notebooks.

Exit codes: 0 done, 1 refused (the reason on standard error, nothing half-written), 2 wrong usage, 3 charged, but the
vectors are not under the name asked for (standard error says where they are): running ``psa release`` again would
spend the privacy again. Standard output holds the result only.
"""

import argparse
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__, arguments, config, paths

REFUSED = (ValueError, OSError, MemoryError, RuntimeError)
"""What a command raises for input that it does not take; anything else is a fault of ours and shows its traceback."""
COLUMNS_ELSEWHERE = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``psa`` with the arguments of the command line and return its exit code."""
    args = parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"psa {args.command}: warning: {message}", file=sys.stderr)
        try:
            args.function(args)
        except REFUSED as error:
            print(f"psa {args.command}: {error}", file=sys.stderr)
            return getattr(error, "exit_code", 1)
    return 0


def parser() -> argparse.ArgumentParser:
    """All subcommands and options."""
    top = argparse.ArgumentParser(
        prog="psa",
        description="Differentially private steering vectors for language models.",
        epilog="`psa COMMAND --help` shows the options of a command, with examples.",
    )
    top.add_argument("--version", action="version", version=f"psa_utils {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_release, add_inspect, add_export, add_chat, add_run):
        add(commands)
    return top


def add_inspect(commands: Any) -> None:
    """``psa inspect``."""
    command = _command(
        commands,
        "inspect",
        _inspect,
        "Print what a vector file guarantees, to whom, and how it was made. Refuses a file that was edited.",
        "psa inspect vector.safetensors",
    )
    command.add_argument("file", type=Path, metavar="FILE", help="steering vectors (.safetensors)")


def _inspect(args: argparse.Namespace) -> None:
    from . import describe

    print(describe.describe_file(*_read(args.file)))


def add_export(commands: Any) -> None:
    """``psa export``."""
    from . import export

    command = _command(
        commands,
        "export",
        _export,
        "Write a vector for llama.cpp (gguf), steering-vectors, repeng or NumPy. Costs no privacy.",
        "psa export vector.safetensors --to gguf",
        "psa export vector.safetensors --to numpy --out elsewhere/vector.npz",
    )
    command.add_argument("file", type=Path, metavar="FILE", help="steering vectors (.safetensors)")
    command.add_argument("--to", required=True, choices=list(export.FORMATS), help="program to write for")
    command.add_argument("--out", type=Path, metavar="PATH", help="file to write (default: beside FILE)")
    command.add_argument(
        "--architecture",
        metavar="TYPE",
        help="model_type of the model, such as llama; only for a FILE without a privacy record",
    )


def _export(args: argparse.Namespace) -> None:
    from . import export

    vectors, record = _read(args.file)
    known = record.model.architecture if record else None
    if known and args.architecture not in (None, known):
        raise ValueError(f"--architecture {args.architecture} contradicts the privacy record ({known}); leave it out")
    target = args.out or export.default_target(args.file, args.to)
    if target.resolve() == args.file.resolve():
        raise ValueError(f"--out {target} is the vector file itself; choose another name")
    export.export(vectors, args.to, target, architecture=known or args.architecture)
    print(target)


def add_chat(commands: Any) -> None:
    """``psa chat``."""
    command = _command(
        commands,
        "chat",
        _chat,
        "Ask a model and see its answer with and without the vector, side by side. Without --prompt it reads questions "
        "from standard input, one a line, until it ends (Ctrl-D); each is asked on its own.",
        "psa chat --model smollm2-135m --vector vector.safetensors --multiplier 0.5",
        'psa chat --model smollm2-135m --vector vector.safetensors --multiplier -1 --prompt "Is tea healthy?"',
    )
    _add_model(command, revision="of a hub id (default: the one in the privacy record)")
    command.add_argument("--vector", required=True, type=Path, metavar="FILE", help="steering vectors (.safetensors)")
    command.add_argument(
        "--multiplier", type=arguments.finite, metavar="X", help="strength (default: the record's suggestion)"
    )
    command.add_argument("--prompt", metavar="TEXT", help="one question, instead of standard input")
    command.add_argument(
        "--temperature", type=arguments.not_negative, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the answers, if the temperature is not 0")
    command.add_argument(
        "--max-new-tokens", type=arguments.count, default=100, metavar="N", help="longest answer (default: 100)"
    )


def _chat(args: argparse.Namespace) -> None:
    vectors, record = _read(args.vector)
    multiplier = record.multiplier if record and args.multiplier is None else args.multiplier
    if multiplier is None:
        raise ValueError(f"{args.vector} suggests no strength; give --multiplier, for example 0.5")
    import torch  # here, so that --help and usage errors answer at once

    from . import chat

    lm = _load(args, args.revision or (record.model.revision if record else None))
    chat.check_model(lm, vectors, record)
    generator = torch.Generator(lm.device).manual_seed(args.seed)
    options = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens, "generator": generator}
    given = chat.questions(interactive=sys.stdin.isatty()) if args.prompt is None else [args.prompt]
    for prompt in given:
        plain, steered = chat.answers(lm, vectors, prompt, multiplier=multiplier, **options)
        columns = f"UNSTEERED\n{plain}", f"MULTIPLIER {multiplier:g}\n{steered}"
        width = shutil.get_terminal_size((COLUMNS_ELSEWHERE, 24)).columns
        print(chat.side_by_side(*columns, width=width), end="\n\n")


def _load(args: argparse.Namespace, revision: str | None) -> Any:
    from . import models

    if sys.stderr.isatty():
        print(f"loading {args.model} ...", file=sys.stderr)
    return models.load(args.model, revision=revision, dtype=args.dtype, device=args.device)


def add_run(commands: Any) -> None:
    """``psa run``."""
    command = _command(
        commands,
        "run",
        _run,
        "Execute a notebook of this repository headless; its figures and tables appear only if every cell completed.",
        "psa run 03_eval",
        "psa run 03_eval --profile smoke --seed 1",
    )
    command.add_argument("notebook", metavar="NOTEBOOK", help="name without .ipynb, such as 03_eval")
    command.add_argument("--profile", default="laptop", choices=config.available(), help="scale (default: laptop)")
    command.add_argument("--seed", type=int, default=0, help="base seed of noise and bootstrap (default: 0)")


def _run(args: argparse.Namespace) -> None:
    import papermill

    from . import run

    os.environ["PYTHONWARNINGS"] = "ignore"  # as `python -m psa_utils.run`: outputs hold results, not warnings
    try:
        print(run.run(args.notebook, profile=args.profile, seed=args.seed))
    except papermill.PapermillExecutionError as error:
        raise run.RunError(str(error)) from error


def add_release(commands: Any) -> None:
    """``psa release``."""
    command = _command(
        commands,
        "release",
        _release,
        "Compute steering vectors from private pairs under differential privacy, with noise from the operating "
        "system's entropy, and write them with their privacy record.",
        "psa release --model smollm2-135m --pairs notes.jsonl --epsilon 1 --out vector.safetensors",
        "psa release --model smollm2-135m --pairs notes.csv --epsilon 1 --delta 1e-6 --layers 12,13,14 "
        "--ledger notes.ledger --budget 3 --out vector.safetensors",
    )
    command.epilog += (
        "\n\nexit codes: 0 released, 1 refused and nothing charged, 2 wrong usage, 3 charged, but the vectors are\n"
        "not under --out (the message says where they are): running it again would spend the privacy again"
    )
    _add_model(command, revision="commit of a hub id; required for one")
    command.add_argument(
        "--pairs", required=True, type=Path, metavar="FILE",
        help="private pairs: JSONL, JSON, CSV, Parquet or a datasets folder; a `user` column makes persons the unit",
    )  # fmt: skip
    command.add_argument(
        "--epsilon", required=True, type=arguments.positive, help="privacy of the release of all layers together"
    )
    command.add_argument(
        "--delta", type=arguments.probability, default=1e-5, help="should be far below 1/n (default: 1e-5)"
    )
    command.add_argument(
        "--layers", type=arguments.layers, default="auto", help="0-based blocks such as 11,12,13 (default: auto)"
    )
    command.add_argument("--estimator", metavar="NAME", help="how to estimate (default: the best on public data)")
    command.add_argument(
        "--multiplier",
        type=arguments.finite,
        metavar="X",
        help="strength to suggest, chosen without private data (default: 0.5)",
    )
    command.add_argument("--ledger", type=Path, metavar="FILE", help="adds up all releases from the same private data")
    command.add_argument(
        "--budget", type=arguments.positive, metavar="EPSILON", help="refuse to pass this total; with --ledger"
    )
    command.add_argument("--out", required=True, type=Path, metavar="FILE", help="new file to write (.safetensors)")
    command.add_argument("--demonstration", type=int, metavar="SEED", help="seeded noise: repeatable, protects NOBODY")


def _release(args: argparse.Namespace) -> None:
    from .release import release

    release(**{name: value for name, value in vars(args).items() if name not in ("command", "function")})
    print(args.out)


def _add_model(command: argparse.ArgumentParser, *, revision: str) -> None:
    """Options that say which model to load, and how."""
    command.add_argument("--model", required=True, help="packaged name, folder, .gguf file or hub id")
    command.add_argument("--revision", metavar="COMMIT", help=revision)
    command.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    command.add_argument("--device", default="cpu", help="cpu (default), cuda, or auto to use all GPUs")


def _read(path: Path) -> tuple[Any, Any]:
    """Vectors and record of a file."""
    from . import record

    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the .safetensors file of the vectors")
    return record.read(paths.require(path, "psa release"))


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], None], description: str, *examples: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=description.split(". ")[0].rstrip("."),
        description=textwrap.fill(description, 80),
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(function=function)
    return command


if __name__ == "__main__":
    sys.exit(main())
