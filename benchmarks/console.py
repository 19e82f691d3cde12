"""The commands that a document shows, run again: `python -m benchmarks.console docs/roofline.md` writes what they print under them.

A block that is fenced ```console has lines "$ command", each with its output below. What a command prints in Markdown stands between
<!-- $ command --> and <!-- end -->. Only the commands of COMMANDS are run, and in this process. `--check` writes nothing and says whether a
document is out of date, and tests/test_docs.py does the same.

Surprising fact: a document whose output was typed is right once. This one is right as long as its test passes.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from benchmarks import plot
from flashattn import commands
from flashattn.roofline import cli

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "python -m flashattn": commands.main,
    "python -m flashattn.roofline": cli.main,
    "python -m benchmarks.plot": plot.main,
}
BLOCK = re.compile(r"^```console\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
MARKDOWN = re.compile(r"^<!-- \$ (.*?) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def output(command: str) -> str:
    """What a command prints, on stdout and stderr, without spaces at the ends of lines. ValueError for a command that isn't known."""
    for start, run in COMMANDS.items():
        if command == start or command.startswith(start + " "):
            printed = io.StringIO()
            # a document is as wide everywhere, and has no colours, whoever wants some
            plain = mock.patch.dict(os.environ, {"NO_COLOR": "1", "TTY_COMPATIBLE": "0", "COLUMNS": "120"})
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), plain:
                os.environ.pop("FORCE_COLOR", None)
                run(shlex.split(command[len(start) :]))
            lines = [line.rstrip() for line in printed.getvalue().strip("\n").splitlines()]
            return "\n".join(lines).strip("\n") + "\n"
    raise ValueError(f"{command!r}: expected a command that begins with {' or '.join(COMMANDS)}")


def replaced(text: str) -> str:
    """The document with what its commands print now."""

    def again(match: re.Match) -> str:
        commands = [line[2:] for line in match[1].splitlines() if line.startswith("$ ")]
        return "```console\n" + "\n".join(f"$ {command}\n{output(command)}" for command in commands) + "```"

    text = BLOCK.sub(again, text)
    return MARKDOWN.sub(lambda match: f"<!-- $ {match[1]} -->\n\n{output(match[1])}\n<!-- end -->", text)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.console", description="Runs the commands that a document shows.")
    p.add_argument("document", type=Path)
    p.add_argument("--check", action="store_true", help="only say whether it is up to date; exit code 1 if not")
    args = p.parse_args(argv)
    old = args.document.read_text(encoding="utf-8")
    new = replaced(old)
    if args.check:
        print(f"{args.document} is {'up to date' if new == old else 'out of date'}")
        return int(new != old)
    args.document.write_text(new, encoding="utf-8")
    print(f"wrote {args.document}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
