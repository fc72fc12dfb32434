"""The command line: verbs, a few to a file, each with the arguments it takes and what runs it; no logic of its own.

Options are config keys, `section.key=value`. A file dropped into this room adds the verbs of its `VERBS`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vitruvius._errors import ConfigError, VitruviusError
from vitruvius._registry import first_line
from vitruvius._secrets import RedactedStream, redact
from vitruvius._signals import CODES, answering, goodbye
from vitruvius._version import __version__
from vitruvius.cli._verb import Verb

WHERE = "-v shows where."
EXAMPLES = """\
examples:
  vitruvius demo                                            everything on the embedded digits, ends with a page
  vitruvius train digits/rpc train.epochs=20                a recipe by name or path, with overrides
  vitruvius evaluate runs/rpc --threat pgd:eps=8/255        a run folder is a model everywhere
  vitruvius evaluate deit_tiny_patch16_224 data.dataset=folder data.root=/imagenet
  vitruvius evaluate runs/rpc --threat corruptions          15 corruptions at 5 severities
  vitruvius report runs/softmax runs/rpc --out page.html
  vitruvius list attentions
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; 0 if it worked, 1 after an error, 75 when pre-empted and saved, 130 when interrupted.

    `arguments` are the words behind `vitruvius`; by default those of the process.
    """
    _print_what_cannot_be_encoded()
    with contextlib.redirect_stderr(RedactedStream(sys.stderr)):  # argparse repeats what it refuses
        options = read(arguments)
    _start_log(verbose=options.verbose)
    verb: Callable[[argparse.Namespace], None] = options.verb
    try:
        with answering(), contextlib.redirect_stdout(_answer_stream()), warnings.catch_warnings():
            if not options.verbose:
                warnings.showwarning = Once()
            _check_words(options)
            verb(options)
    except KeyboardInterrupt as error:
        words, code = goodbye(error)
        print(f"vitruvius: {words}", file=sys.stderr)
        return code
    except BrokenPipeError:  # `vitruvius list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if options.verbose:
            print(redact(traceback.format_exc()), file=sys.stderr, end="")
        print(redact(f"vitruvius: {in_one_line(error)}"), file=sys.stderr)
        return exit_code_of(error)
    return 0


def _check_words(options: argparse.Namespace) -> None:
    """Refuse null bytes, numbers beyond 64 bits, and results elsewhere: only a training goes to a URL (`out=s3://…`)."""
    for value in vars(options).values():
        _check_value(value)
    for name in ("out", "figure"):
        place = getattr(options, name, None)
        if isinstance(place, str) and "://" in place:
            raise ConfigError(
                f"--{name} {place} is a URL; name a file or folder of this machine, and copy it from there."
            )


def _check_value(value: object) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{value} is too large a number for anything here.")
    words = [value] if isinstance(value, str) else value
    if isinstance(words, list) and any(isinstance(word, str) and "\0" in word for word in words):
        raise ConfigError("a word of the command holds a null byte, which no name or path can.")


def run_and_exit() -> NoReturn:
    """The command of a shell: run one verb and leave the process.

    After a signal it leaves at once: everything is kept and said by then, and PyTorch takes seconds to be torn down.
    """
    code = main()
    if code in CODES.values():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def exit_code_of(error: Exception) -> int:
    """What a shell is told: 1, or what an error of ours says.

    `error` is whatever a verb raised.
    """
    if isinstance(error, VitruviusError):
        return error.exit_code
    return 1


def in_one_line(error: Exception) -> str:
    """What went wrong, for somebody who has not read the code; of what was not foreseen, how to see where.

    `error` is whatever a verb raised.
    """
    words = " ".join(str(error).split())
    if isinstance(error, VitruviusError):
        return words
    if _is_out_of_memory(error):
        return f"out of memory: {_short(words)} Use smaller batches (data.batch_size, data.eval_batch_size). {WHERE}"
    if isinstance(error, OSError):
        return f"a file cannot be read or written: {_short(words)} {WHERE}"
    if not words:
        return f"{type(error).__name__}. {WHERE}"
    return f"{type(error).__name__}: {_short(words)} {WHERE}"


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own error, or PyTorch's for the host or an accelerator, which is a RuntimeError."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words


def _short(words: str, most: int = 300) -> str:
    """At most this many characters, ending like a sentence."""
    if len(words) > most:
        words = f"{words[:most]}…"
    if not words.endswith((".", "…", "!", "?")):
        words += "."
    return words


def _print_what_cannot_be_encoded() -> None:
    """Where the terminal's encoding lacks a character, `·` or a foreign name, print its code instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):  # of the locale C
            stream.reconfigure(errors="backslashreplace")


def _start_log(*, verbose: bool) -> None:
    level = logging.WARNING
    if verbose:
        level = logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=RedactedStream(sys.stderr))


def _answer_stream() -> Any:
    """Where answers go, with secrets hidden: of many processes one answers."""
    if os.environ.get("RANK", "0") == "0":
        return RedactedStream(sys.stdout)
    return io.StringIO()


class Once:
    """Says a warning once, in a line, without the place in the code that it came from."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Stands in for `warnings.showwarning`: of what that is told, only the `message` is said."""
        text = redact(" ".join(str(message).split()))
        if text not in self.said:
            self.said.add(text)
            print(f"vitruvius: warning: {text}", file=sys.stderr)


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The words of a command. argparse takes `key=value` only before the first option; here they may come late.

    `arguments` are the words behind `vitruvius`; None takes those of the process.
    """
    words = sys.argv[1:]
    if arguments is not None:
        words = list(arguments)
    parser = make_parser()
    options, late = parser.parse_known_args(words)
    wrong = [word for word in late if not _may_come_late(word, options.several)]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{_hint(wrong[0], words, options)}")
    if late:
        getattr(options, options.several).extend(late)
    return options


def _may_come_late(word: str, several: str | None) -> bool:
    """Whether a word after an option belongs to the list `several`: a setting, or where any word is meant, any."""
    if word.startswith("-") or several is None:
        return False
    return "=" in word or several != "overrides"


def _hint(wrong: str, words: list[str], options: argparse.Namespace) -> str:
    """How a flag that is a key of the recipe is written: `--epochs 3` → `train.epochs=3`; `words` are the command's."""
    flag, _, value = wrong.partition("=")
    if not flag.startswith("--") or options.several != "overrides":
        return ""
    from vitruvius.recipe_keys import find_key

    sections = ("train", "data", "model", "recipe") if hasattr(options, "recipe") else ("data",)
    key = find_key(flag[2:], sections)
    if key is None:
        return ""
    return f"; write {key}={value or _word_after(wrong, words)}"


def _word_after(flag: str, words: list[str]) -> str:
    """The value of an unknown flag; Python 3.13's argparse takes it for one of the overrides."""
    after = words[words.index(flag) + 1 :]
    if after and not after[0].startswith("-") and "=" not in after[0]:
        return after[0]
    return "…"


def make_parser() -> argparse.ArgumentParser:
    """A parser with every verb of this room."""
    parser = argparse.ArgumentParser(
        prog="vitruvius",
        description="Study and harden vision transformers: change their attention, train, attack, look inside.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vitruvius {__version__}")
    _add_verbose(parser, default=False)
    common = argparse.ArgumentParser(add_help=False)
    _add_verbose(common, default=argparse.SUPPRESS)  # after the verb it must not undo what was said before
    parsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in every_verb():
        words = first_line(verb.run).rstrip(".")
        own = parsers.add_parser(verb.name, parents=[common], aliases=verb.aliases, help=words, description=f"{words}.")
        verb.arguments(own)
        own.set_defaults(verb=verb.run, several=_find_several(own))
    return parser


def _find_several(parser: argparse.ArgumentParser) -> str | None:
    """The list among the words of a verb; one that may be empty is not among what a usage error calls required."""
    for action in parser._actions:
        if not action.option_strings and action.nargs in ("*", "+"):
            action.required = action.nargs == "+"
            return action.dest
    return None


def every_verb() -> list[Verb]:
    """The verbs of every public file of this room, by name."""
    verbs: list[Verb] = []
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            verbs += importlib.import_module(f"{__name__}.{info.name}").VERBS
    return sorted(verbs, key=lambda verb: verb.name)


def _add_verbose(parser: argparse.ArgumentParser, *, default: Any) -> None:
    words = "log more, and show where an error came from"
    parser.add_argument("-v", "--verbose", action="store_true", default=default, help=words)
