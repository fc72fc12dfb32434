"""Pages of the documentation as what can be run: blocks of Python, shell and YAML, in reading order.

A comment in the line before a block says how it is run:

    <!-- run: long -->              by `make docs-long` only: it takes minutes
    <!-- run: no, REASON -->        not at all: it needs what a test does not have

Python blocks of a page share their names. A command `vitruvius …` runs in a forked process that has imported PyTorch
already; other commands run in bash. A YAML block with a title, ```yaml title="mine.yaml", is written to that file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

BLOCK = re.compile(
    r"^(?:<!-- run: (?P<how>[^\n]*?) -->\n)?```(?P<language>\w+)?(?P<rest>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHELLS = ("sh", "bash")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, text, line on the page, file name (YAML), and how it is run."""

    language: str
    text: str
    line: int
    title: str = ""
    how: str = ""

    @property
    def is_run(self) -> bool:
        return not self.how.startswith("no") and (self.language in ("python", *SHELLS) or bool(self.title))

    @property
    def is_long(self) -> bool:
        return self.how == "long"


def read_blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', found["rest"])
        blocks.append(
            Block(
                language=found["language"] or "",
                text=found["text"],
                line=text[: found.start("text")].count("\n") + 1,
                title=title[1] if title else "",
                how=found["how"] or "",
            )
        )
    return blocks


def read_notebook(notebook: Path) -> list[Block]:
    """The code cells of a notebook as blocks, in order; a line on the page is a line of the cells together."""
    blocks = []
    line = 1
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"]) + "\n"
        if cell["cell_type"] == "code":
            blocks.append(Block(language="python", text=text, line=line))
        line += text.count("\n")
    return blocks


def run_blocks(blocks: list[Block], name: str) -> None:
    """Run the blocks in the current folder; the first that fails raises, with the page and its line."""
    names: dict[str, object] = {"__name__": "__main__"}
    shell = Shell()
    for block in blocks:
        tell(f"--- {name}:{block.line} ---")
        if block.language == "python":
            padded = "\n" * (block.line - 1) + block.text  # so that a traceback has the line of the page
            exec(compile(padded, name, "exec"), names)
        elif block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        else:
            for command in commands(block.text):
                shell.run(command)


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as words; comments are dropped, `\\` continues a line, `&&` ends a command."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in shlex.split(line, comments=True):
            if word == "&&":
                yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words


class Shell:
    """Runs commands in the current folder. Verbs of ours run in a process forked before any Python block of the page,
    so that they see what a shell would see: nothing of what these blocks have registered."""

    def __init__(self) -> None:
        self.here, there = multiprocessing.Pipe()
        if fork() == 0:
            self.here.close()
            serve(there)
        there.close()

    def run(self, words: list[str]) -> None:
        tell(f"$ {shlex.join(words)}")
        if words[0] == "cd":
            os.chdir(words[1])
            return
        if words[0] == "vitruvius":
            self.here.send((str(Path.cwd()), words[1:]))
            code = self.here.recv()
        else:
            code = subprocess.run(words, check=False).returncode
        if code != 0:
            raise AssertionError(f"{shlex.join(words)} ended with {code}")


def serve(connection: Connection) -> NoReturn:
    """Run verb after verb, each in a fork of its own, until the page ends."""
    while True:
        try:
            folder, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        os.chdir(folder)
        connection.send(run_verb(arguments))


def tell(line: str) -> None:
    """A line of the page's output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_verb(arguments: list[str]) -> int:
    """A verb of the command line, in a process of its own that need not import PyTorch again."""
    child = fork()
    if child == 0:
        code = 1
        try:
            from vitruvius.cli import main

            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork() -> int:
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        return os.fork()
