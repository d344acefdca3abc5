"""Checks a commit message: `[area][type] summary` as its subject, and a sign-off line."""

import re
import sys
from pathlib import Path

AREAS = (
    *("base", "layout", "kv", "sched", "transfer", "cpu", "bindings"),
    *("core", "msa", "models", "spec", "graphs", "parallel", "engine", "serve", "eval", "bench", "cli", "demo"),
    *("tools", "ci", "docs"),
)
TYPES = ("feat", "fix", "perf", "test", "refactor", "chore")
MAX_SUBJECT = 100

_SUBJECT = re.compile(r"\[(?P<area>[^\]]*)\]\[(?P<type>[^\]]*)\] (?P<summary>\S.*)")
_SIGN_OFF = re.compile(r"^Signed-off-by: \S.* <[^<>@\s]+@[^<>@\s]+>$", re.MULTILINE)
# Subjects that git itself writes.
_GENERATED = re.compile(r'^(Merge |Revert "|fixup! |squash! )')


def faults(message: str) -> list[str]:
    """What is wrong with `message`, a line each; comment lines of git's template do not count."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).strip()
    if not text:
        return ["the message is empty"]
    subject = text.splitlines()[0]
    found = [] if _GENERATED.match(subject) else _subject_faults(subject)
    if not _SIGN_OFF.search(text):
        found.append("no sign-off: commit with `git commit -s` (Signed-off-by: Name <address>)")
    return found


def _subject_faults(subject: str) -> list[str]:
    match = _SUBJECT.fullmatch(subject)
    if match is None:
        return [f"the subject is {subject!r}, not of the form '[area][type] summary'"]
    found = []
    if match["area"] not in AREAS:
        found.append(f"area {match['area']!r} is none of {', '.join(AREAS)}")
    if match["type"] not in TYPES:
        found.append(f"type {match['type']!r} is none of {', '.join(TYPES)}")
    if match["summary"].endswith("."):
        found.append("the summary ends with a full stop")
    if len(subject) > MAX_SUBJECT:
        found.append(f"the subject has {len(subject)} characters, more than {MAX_SUBJECT}")
    return found


def main(arguments: list[str]) -> int:
    """`commit_message.py FILE`, as git's commit-msg hook calls it."""
    found = faults(Path(arguments[0]).read_text(encoding="utf-8"))
    for fault in found:
        print(f"commit message: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
