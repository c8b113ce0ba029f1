"""Fails when a new commit's message breaks the rules of CONTRIBUTING.md.

Looks at the commits since BASE: the length of the subject, its mood where one word shows it, the
empty line below it, and folders of somebody's machine anywhere. Where BASE is not in the history
(a shallow clone, or an exported tree put under git anew), those younger than BASE are new.
`python .ci/check_commits.py [ROOT [BASE SECONDS]]` prints one line per offence, `commit: what
(remedy)`, and exits 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# The last commit that is not checked, and when it was made (`git show -s --format='%H %ct'`).
BASE = "e97d21276af10103182262bc8bff3ed106cce48f"
BASE_SECONDS = 1795416156

SUBJECT_COLUMNS = 72
# Top folders under which people and machines keep their own files, followed by a name.
MACHINE_PATH = re.compile(
    r"(?<![\w.~@}/-])(?:file://)?"
    r"(?:/(?:home|root|Users|work|workspace|tmp|private|var/tmp|mnt|srv|opt|data|scratch)/[\w.+-]+"
    r"|[A-Za-z]:\\\w)[^\s'\"`,;)]*"
)
SCOPE = re.compile(r"^[\w./+-]+: +(?=\S)")
NO_VERBS = (
    "a an the this that these those it its we i you what who why how when where which whoever "
    "whatever every each all both some no any one two three now wip"
)
VERBS = (
    "accept add allow answer ask avoid break bring build change check choose clean close compare "
    "compile copy correct count cover create cut declare delete deny describe document drop ease "
    "enable end ensure explain extend fail find fix forbid format give handle hide ignore "
    "implement improve install introduce keep lay let limit link list load lower make mark measure "
    "mention merge move name note open pass pin prevent print raise read rebuild record reduce "
    "refactor refuse reject remove rename reorder repair replace report require return revert "
    "rewrite run say send set sharpen show simplify skip sort split start state stop support test "
    "tidy trim try tune turn unify update use verify wait warn work write"
)


def other_moods(verb: str) -> Iterator[str]:
    """The regular forms of a verb that are no imperative: adds, added, adding."""
    stem = verb[:-1] if verb.endswith("e") else verb
    doubled = stem + stem[-1]
    if verb.endswith("y") and verb[-2] not in "aeou":
        yield from (verb[:-1] + "ies", verb[:-1] + "ied")
    else:
        yield verb + ("es" if re.search(r"(?:s|x|ch|sh)$", verb) else "s")
    for ending in ("ed", "ing"):
        yield from (stem + ending, doubled + ending)


# Form -> verb.
NOT_IMPERATIVE = {form: verb for verb in VERBS.split() for form in other_moods(verb)}


def offences(message: str) -> Iterator[str]:
    """What is wrong with a message, and the remedy."""
    subject, *body = message.rstrip("\n").split("\n")
    if len(subject) > SUBJECT_COLUMNS:
        yield f"subject of {len(subject)} characters (at most {SUBJECT_COLUMNS})"
    if subject.endswith("."):
        yield "subject ends with a full stop (drop it)"
    if body and body[0].strip():
        yield "no empty line below the subject (add one)"
    words = SCOPE.sub("", subject).split()
    first = words[0] if words else ""
    if not words:
        yield "no subject (say what the commit does)"
    elif first.lower() in NOT_IMPERATIVE:
        yield f"subject begins with '{first}' (imperative: '{NOT_IMPERATIVE[first.lower()]}')"
    elif first.lower() in NO_VERBS.split():
        yield f"subject begins with '{first}' (imperative: begin with a verb)"
    for found in MACHINE_PATH.finditer(message):
        yield f"path of one machine: {found.group()} (name what is meant; git rebase, not merge)"


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One git command in `root`."""
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )


def new_commits(root: Path, base: str, seconds: int) -> list[tuple[str, str]]:
    """(short id, message) of the commits after `base`, or, without it, after that time."""
    known = git(root, "merge-base", "--is-ancestor", base, "HEAD").returncode == 0
    done = git(root, "log", "-z", "--format=%h %ct %B", f"{base}..HEAD" if known else "HEAD")
    if done.returncode != 0:
        raise SystemExit(f"commits: git log failed: {done.stderr.strip()}")
    commits = []
    for record in filter(None, done.stdout.split("\0")):
        short, made, message = record.split(" ", 2)
        if known or int(made) > seconds:
            commits.append((short, message))
    return commits


def main(root: str = str(Path(__file__).parent.parent), *since: str) -> int:
    folder = Path(root).resolve()
    if not (folder / ".git").exists():
        print("commits: not a git checkout, nothing to check")
        return 0
    base, seconds = since or (BASE, BASE_SECONDS)
    commits = new_commits(folder, base, int(seconds))
    count = 0
    for short, message in commits:
        for what in offences(message):
            count += 1
            print(f"{short}: {what}")
    print(f"commits: {count} offences" if count else f"commits: {len(commits)} new ones in order")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
