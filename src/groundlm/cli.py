"""The command line: one verb per command, each a typed dataclass and the function that takes it.

Flags, types, defaults and help texts come from the dataclasses. Dashes and underscores in flags are
the same. Bad input ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from groundlm.errors import UserError, nearest


class Command(NamedTuple):
    """Where a command lives; its module is imported only when it is called."""

    summary: str
    module: str
    config: str
    run: str
    uses_presets: bool = False
    positional: str | None = None
    """Option that first words without dashes stand for."""
    preset_folder: str = "."
    """Where the presets lie among those of the package."""


COMMANDS = {
    "quickstart": Command(
        "prepare the built-in corpus, train, evaluate and sample in minutes",
        "groundlm.quickstart", "QuickstartConfig", "run_quickstart",
    ),
    "prepare": Command(
        "turn text into token files", "groundlm.data.prepare", "PrepareConfig", "prepare"
    ),
    "data-info": Command(
        "what a folder of token files holds", "groundlm.data.info", "DataInfoConfig", "data_info",
        positional="data",
    ),
    "train": Command(
        "train a model, or continue a run", "groundlm.training.command", "TrainConfig",
        "train_command", uses_presets=True,
    ),
    "eval": Command(
        "perplexity, bits per byte and LAMBADA of a model", "groundlm.evaluation.command",
        "EvalConfig", "run_eval",
    ),
    "compare": Command(
        "train and score models at equal tokens and parameters, as a table",
        "groundlm.comparison.command", "CompareConfig", "run_compare",
        uses_presets=True, positional="config", preset_folder="compare",
    ),
    "analyze": Command(
        "what a model's state and memory hold, as numbers, plots and one report",
        "groundlm.analysis.command", "AnalyzeConfig", "run_analyze",
    ),
    "ablate": Command(
        "what each part of a GPN is worth in nats per token",
        "groundlm.analysis.ablate", "AblateConfig", "run_ablate",
    ),
    "plot": Command(
        "draw the curves of training runs", "groundlm.training.plot", "PlotConfig", "run_plot",
        positional="run",
    ),
    "generate": Command(
        "continue a text", "groundlm.generation", "GenerateConfig", "run_generate"
    ),
    "bench train": Command(
        "training speed: fused, reference and a Llama of equal size",
        "groundlm.benchmark.train", "BenchTrainConfig", "bench_train",
    ),
    "bench memory": Command(
        "peak memory of training against window length",
        "groundlm.benchmark.memory", "BenchMemoryConfig", "bench_memory",
    ),
    "bench generate": Command(
        "generation speed against a Llama of equal size with its KV cache",
        "groundlm.benchmark.generate", "BenchGenerateConfig", "bench_generate",
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process exit code (0, 2 for bad input, 130 when interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(importlib.metadata.version("groundlm"))
        return 0
    name = _command_name(arguments)
    try:
        if name is None:
            raise UserError(f"unknown command {arguments[0]!r}{nearest(arguments[0], COMMANDS)}")
        _quiet()
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a letter shows a "?"
            sys.stdout.reconfigure(errors="replace")
        command = COMMANDS[name]
        module = importlib.import_module(command.module)
        config_class = getattr(module, command.config)
        rest = arguments[len(name.split()) :]
        if command.positional and rest and not rest[0].startswith("-"):
            rest = [f"--{command.positional}", *rest]
        config = parse(config_class, rest, name, command.uses_presets, command.preset_folder)
        code = getattr(module, command.run)(config)
    except UserError as error:
        if str(error):  # empty: another process says it
            print(f"groundlm {name or ''}".rstrip() + f": {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"groundlm {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `| head`
        sys.stderr.close()
        return 141
    return code if isinstance(code, int) else 0


def parse(
    config_class: type,
    arguments: list[str],
    name: str,
    uses_presets: bool = False,
    preset_folder: str = ".",
) -> Any:
    """Arguments -> an instance of a configuration dataclass.

    Raises `UserError` for unknown flags or keys (with the nearest known one) and bad values.
    """
    parser = _Parser(
        prog=f"groundlm {name}",
        description=config_class.__doc__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    if uses_presets:
        parser.add_argument(
            "--config",
            action=ActionConfigFile,
            help="Preset (" + ", ".join(presets(preset_folder)) + ") or YAML file; later flags "
            "overrule it.",
        )
    parser.add_class_arguments(config_class)
    try:
        folder = preset_folder if uses_presets else None
        values = parser.parse_args(_normalise(arguments, config_class, folder))
    except UserError:
        raise
    except Exception as error:  # jsonargparse reports through several exception classes
        raise UserError(_readable(str(error), config_class)) from None
    values = parser.instantiate(values)
    fields = {f.name for f in dataclasses.fields(config_class)}
    return config_class(**{k: v for k, v in vars(values).items() if k in fields})


def presets(folder: str = ".") -> dict[str, Path]:
    """The configurations that ship with the package in a folder of its presets, by name."""
    root = Path(str(resources.files("groundlm") / "presets"))
    return {path.stem: path for path in sorted((root / folder).glob("*.yaml"))}


class _Parser(ArgumentParser):
    """Shows flags with dashes."""

    def format_help(self, *args: Any) -> str:
        return re.sub(
            r"--[a-z][\w.]*", lambda m: m[0].replace("_", "-"), super().format_help(*args)
        )


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: groundlm COMMAND [--option value ...]",
            "",
            "Grounded Prediction Networks: one-layer recurrent language models.",
            "",
            "commands:",
            *lines,
            "",
            "groundlm COMMAND --help lists the options of a command.",
        ]
    )


def _command_name(arguments: list[str]) -> str | None:
    """The longest command (of one or two words) that the arguments start with."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name
    return None


def _normalise(arguments: list[str], config_class: type, preset_folder: str | None) -> list[str]:
    """Underscores in flags, preset names as paths, several values of a list flag as one list."""
    hints = dict(_fields(config_class))
    lists = {f"--{name}" for name, hint in hints.items() if str(hint).startswith(("list", "tuple"))}
    booleans = {f"--{name}" for name, hint in hints.items() if hint in (bool, bool | None)}
    out: list[str] = []
    stream = _Peekable(arguments)
    for word in stream:
        if not word.startswith("--"):
            out.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("-", "_").replace("__", "--", 1) if len(flag) > 2 else flag
        if flag in lists and not equals:
            values = list(stream.until_flag())
            is_list = len(values) == 1 and values[0].startswith("[") and values[0].endswith("]")
            is_list = is_list and not Path(values[0]).exists()
            out.append(f"{flag}={values[0] if is_list else json.dumps(values)}")
        elif flag in booleans and not equals and stream.at_flag():
            out.append(f"{flag}=true")
        elif flag == "--config" and preset_folder is not None:
            value = value if equals else next(stream, "")
            out.append(f"--config={_preset_path(value, preset_folder)}")
        else:
            out.append(flag + equals + value)
    return out


class _Peekable:
    """Arguments one by one, able to tell whether the next one is a flag."""

    def __init__(self, words: list[str]) -> None:
        self._words = list(words)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if not self._words:
            raise StopIteration
        return self._words.pop(0)

    def at_flag(self) -> bool:
        return not self._words or self._words[0].startswith("--")

    def until_flag(self) -> Iterator[str]:
        while not self.at_flag():
            yield next(self)


def _preset_path(name: str, folder: str) -> str:
    """The file of a preset by its name, or by its path as in the package (`presets/x.yaml`)."""
    known = presets(folder)
    if name in known:
        return str(known[name])
    if Path(name).is_file():
        return name
    shipped = Path(str(resources.files("groundlm"))) / name
    if name.startswith("presets/") and shipped.is_file():
        return str(shipped)
    raise UserError(f"no preset or file {name!r}{nearest(name, known)}")


def _fields(config_class: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and type of every field, sections included."""
    for name, kind in get_type_hints(config_class).items():
        yield prefix + name, kind
        if dataclasses.is_dataclass(kind):
            yield from _fields(kind, f"{prefix}{name}.")  # type: ignore[arg-type]


def _readable(message: str, config_class: type) -> str:
    """jsonargparse's message as one line, with the nearest known key for an unknown one."""
    known = [name for name, _ in _fields(config_class)]
    if match := re.search(r"unrecognized arguments?: --([\w.]+)", message, re.IGNORECASE):
        return f"unknown option --{match[1]}{nearest(match[1], known)}"
    if match := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        name = f"{match[1]}.{match[2]}"
        return f"unknown key {name}{nearest(name, known)}"
    if match := re.search(
        r"(?:Key|Option) ['\"]?([\w.]+)['\"]? is not (?:expected|accepted)", message
    ):
        for kind in get_type_hints(config_class).values():  # keys of a list's entries stand alone
            known += [f.name for entry in get_args(kind) if dataclasses.is_dataclass(entry)
                      for f in dataclasses.fields(entry)]  # fmt: skip
        return f"unknown key {match[1]}{nearest(match[1], known)}"
    if match := re.search(r"argument (--[\w.]+): expected one argument", message):
        flag = match[1].replace("_", "-")
        return f"{flag} needs a value; one that begins with a dash is given as {flag}=VALUE"
    message = re.sub(r"Expected a typing\.Literal\[(.*?)\]\. Got value: ",
                     r"expected one of \1, got ", message)  # fmt: skip
    message = re.sub(r"Problem with given class_path '[\w.]+': ", "", " ".join(message.split()))
    message = re.sub(r"Expected an? <class '(\w+)'>\. Got value: ", r"expected \1, got ", message)
    return re.sub(r"Parser key \"([\w.]+)\": ", r"\1: ", message)


def _quiet() -> None:
    """Keep libraries' notices out of our output; our own messages say what a user needs."""
    logging.getLogger("groundlm").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="jsonargparse|torch|transformers|datasets")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    set_parsing_settings(docstring_parse_attribute_docstrings=True)


if __name__ == "__main__":
    sys.exit(main())
