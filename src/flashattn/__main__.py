"""`python -m flashattn`: the commands of `commands`, or how to get what they need."""

import sys


def main() -> int:
    try:
        from .commands import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(f"flashattn: needs {error.name}: pip install 'flashattn[roofline]'", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
