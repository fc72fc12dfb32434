"""The command line, made by cyclopts from typed functions: one function is one verb, its docstring is the help.

The verbs are named in `VERBS` and imported when they are needed. Options of a verb are flags; everything that a recipe
knows is a setting, `section.key=value`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import cyclopts
from cyclopts import App, CycloptsError, Parameter, Token

from vitruvius._errors import VitruviusError
from vitruvius._progress import messages_shown
from vitruvius._secrets import RedactedStream
from vitruvius._signals import CODES, exit_message, handle_signals
from vitruvius._version import __version__

VERBS = {  # names of a verb → the function behind it
    ("analyse", "analyze"): "look:analyse",
    ("attack",): "evaluate:attack",
    ("bench",): "about:bench",
    ("completion",): "about:completion",
    ("compress",): "compress:compress",
    ("convert",): "convert:convert",
    ("corrupt",): "corrupt:corrupt",
    ("cycles",): "masks:cycles",
    ("demo",): "about:demo",
    ("evaluate", "eval"): "evaluate:evaluate",
    ("export",): "masks:export",
    ("list",): "about:list_pieces",
    ("look",): "look:look",
    ("maps",): "masks:maps",
    ("masks",): "masks:masks",
    ("report",): "look:report",
    ("schema",): "about:schema",
    ("study",): "look:study",
    ("sweep",): "train:sweep",
    ("train",): "train:train",
}
HELP = "Study and harden vision transformers: change their attention, train, attack, look inside."
EXAMPLES = """\
-v, --verbose, with any verb: log more, and show where an error came from.

Examples:
  vitruvius demo                                            a robust ViT under attack, then everything on digits
  vitruvius train digits/rpc train.epochs=20                a recipe by name or path, with overrides
  vitruvius evaluate runs/rpc --threat pgd:eps=8/255        a run folder is a model everywhere
  vitruvius evaluate deit_tiny_patch16_224 data.dataset=folder data.root=/imagenet
  vitruvius look runs/rpc dog.jpg --threat pgd:eps=2/255    where does it look on my picture?
  vitruvius evaluate runs/rpc --threat corruptions          15 corruptions at 5 severities
  vitruvius report runs/softmax runs/rpc --out page.html
  vitruvius list attentions
"""
VERBOSE = ("-v", "--verbose")
LEAK_CHECKERS = {"triton._C.libtriton", "onnx"}  # modules that complain at the end about what was not collected
WHERE = "-v shows where."
OTHER_FLAGS = {"--attack": "--threat", "--attacks": "--threat", "--threats": "--threat", "--limit": "--images"}


def make_app() -> App:
    """The parser of all verbs, which are imported when they are asked for."""
    app = App(
        name="vitruvius",
        help=HELP,
        help_epilogue=EXAMPLES,
        help_format="plaintext",
        version=__version__,
        version_format="plaintext",
        default_parameter=Parameter(negative=(), show_default=False, converter=_convert),
        exit_on_error=False,
        print_error=False,
    )
    for names, function in VERBS.items():
        app.command(f"vitruvius.cli.{function}", name=names, help_epilogue="")
    return app


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb; 0 if it worked, 1 after an error, 2 for words that are no command, 75 and 130 after a signal."""
    words = sys.argv[1:] if words is None else list(words)
    verbose = any(word in VERBOSE for word in words)
    _print_what_cannot_be_encoded()
    first = os.environ.get("RANK", "0") == "0"  # of many processes one answers
    answers: Any = RedactedStream(sys.stdout) if first else io.StringIO()
    with contextlib.redirect_stderr(RedactedStream(sys.stderr)), contextlib.redirect_stdout(answers):
        _start_log(verbose=verbose)
        try:
            _run([word for word in words if word not in VERBOSE], verbose=verbose)
        except CycloptsError as error:
            print(f"vitruvius: {_usage_error(error, words)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as error:
            text, code = exit_message(error)
            print(f"vitruvius: {text}", file=sys.stderr)
            return code
        except BrokenPipeError:  # `vitruvius list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # type: ignore[union-attr]
            return 0
        except Exception as error:
            if verbose:
                traceback.print_exc()
            print(f"vitruvius: {in_one_line(error)}", file=sys.stderr)
            return error.exit_code if isinstance(error, VitruviusError) else 1
    return 0


def _run(words: list[str], *, verbose: bool) -> None:
    app = make_app()
    if not words or words[0] in ("--help", "-h"):
        for names in VERBS:
            app[names[0]]  # imported, for the first lines of their docstrings
    if not words:
        app.help_print([])
        raise CycloptsError(msg="say one of these verbs.")
    verb, bound, _ = app.parse_args(words)
    speaks = os.environ.get("RANK", "0") == "0" and not bound.arguments.get("quiet")  # of many processes one
    with (
        handle_signals(),
        messages_shown(verbose=verbose) if speaks else contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        if not verbose:
            shown: set[str] = set()
            warnings.showwarning = lambda message, *_, **__: _warn_once(" ".join(str(message).split()), shown)
        verb(*bound.args, **bound.kwargs)


def run_and_exit() -> NoReturn:
    """The command of a shell: run one verb and leave the process.

    After a signal it leaves at once: everything is kept and said by then, and PyTorch takes seconds to be torn down.
    """
    code = main()
    if not LEAK_CHECKERS & sys.modules.keys():
        gc.freeze()  # at its end Python looks through all objects for garbage, which the operating system frees anyway
    if code in CODES.values():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _convert(hint: Any, tokens: Sequence[Token]) -> Any:
    """The values of a flag, refused where a number, a path or a text cannot be what was written."""
    for word in (token.value for token in tokens):
        if "\0" in word:
            raise ValueError("a word of the command holds a null byte, which no name or path can.")
        if hint in (int, list[int]) and not (re.fullmatch(r"[+-]?\d+", word) and abs(int(word)) < 2**63):
            raise ValueError(f"{word!r} is not a whole number of at most 64 bits.")
        if hint is float and not math.isfinite(float(word)):
            raise ValueError(f"{word!r} is not a finite number.")
        if hint is Path and "://" in word:
            raise ValueError(f"{word} is a URL; name a file or folder of this machine, and copy it from there.")
    return cyclopts.convert(hint, tokens)


def _usage_error(error: CycloptsError, words: list[str]) -> str:
    """One line, with the right word where we know it: `--attack` → --threat, `--epochs 3` → train.epochs=3."""
    text = " ".join(str(error).split())
    if not isinstance(error, cyclopts.UnknownOptionError):
        return text
    flag, _, value = (error.token.keyword or error.token.value).partition("=")
    names = [name for argument in error.argument_collection for name in argument.names]
    if OTHER_FLAGS.get(flag) in names:
        return f"Unknown option: {flag}. Did you mean {OTHER_FLAGS[flag]}?"
    from vitruvius.recipe_keys import find_key

    key: str | None = flag.lstrip("-")
    if "RECIPE" in names:
        key = find_key(flag.lstrip("-"))
    elif key not in ("device", "seed"):
        key = find_key(flag.lstrip("-"), ("data",))
    if key is None or not {"RECIPE", "TARGET"} & set(names):
        return text
    after = words[words.index(flag) + 1 :] if flag in words else []
    said = after[0] if after and not after[0].startswith("-") and "=" not in after[0] else "…"
    return f"Unknown option: {flag}. It is a setting: write {key}={value or said}."


def in_one_line(error: Exception) -> str:
    """What went wrong, for somebody who has not read the code; of what was not foreseen, how to see where."""
    text = " ".join(str(error).split())
    if isinstance(error, VitruviusError):
        return text
    if len(text) > 300:
        text = f"{text[:300]}…"
    if text and not text.endswith((".", "…", "!", "?")):
        text += "."
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", text, re.I):
        return f"out of memory: {text} Use smaller batches (data.batch_size, data.eval_batch_size). {WHERE}"
    if isinstance(error, OSError):
        return f"a file cannot be read or written: {text} {WHERE}"
    return f"{type(error).__name__}: {text} {WHERE}" if text else f"{type(error).__name__}. {WHERE}"


def _print_what_cannot_be_encoded() -> None:
    """Where the terminal's encoding lacks a character, `·` or a foreign name, print its code instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):  # of the locale C
            stream.reconfigure(errors="backslashreplace")


def _start_log(*, verbose: bool) -> None:
    """Show warnings of other packages, with -v also what they tell; those of this one are shown by `messages_shown`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: not record.name.startswith("vitruvius"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", handlers=[handler])


def _warn_once(text: str, shown: set[str]) -> None:
    """Say a warning in a line, without the place in the code that it came from."""
    if text not in shown:
        shown.add(text)
        print(f"vitruvius: warning: {text}", file=sys.stderr)
