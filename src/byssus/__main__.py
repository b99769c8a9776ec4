"""`python -m byssus` is the command `byssus`, and this is where both begin."""

import sys


def main() -> int:
    """Run the command. It is imported here, so that Ctrl-C ends it quietly from the first moment on."""
    try:
        from byssus.cli import main as command  # noqa: PLC0415

        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
