"""A bar in a terminal, silence elsewhere."""

import io

from rich.console import Console

from vitruvius._bar import Bar


def drawn(*, terminal: bool, shown: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with Bar("averaging", shown=shown, console=console) as bar:
        bar(3, 8, "half-way")
        bar.bars.refresh()
    return console.file.getvalue()


def test_a_terminal_sees_title_numbers_words_and_the_time_left() -> None:
    text = drawn(terminal=True)
    assert all(word in text for word in ("averaging", "3/8", "half-way", "left"))


def test_elsewhere_and_on_other_processes_it_is_silent() -> None:
    assert "averaging" not in drawn(terminal=False)
    assert "averaging" not in drawn(terminal=True, shown=False)
