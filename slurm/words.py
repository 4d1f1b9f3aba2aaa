"""Print the words of a site's setting, each with a NUL behind it: `words.py NAME TEXT`."""

import os
import shlex
import sys


def main(name: str, text: str) -> None:
    """Exit with code 2 and a message where the text has no words, since a quote has no end."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        print(f"error: {name} of the site: {error}: {text}", file=sys.stderr)
        sys.exit(2)
    for word in words:
        sys.stdout.buffer.write(os.fsencode(word) + b"\0")


if __name__ == "__main__":
    main(*sys.argv[1:])
