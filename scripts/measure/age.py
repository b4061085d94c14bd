"""Which tables of time and memory are older than the code that they measure."""

import os
import re
import subprocess

from machine import git

DOCUMENTS = ["README.md", "lab/README.md", "benches/RESULTS.md", "docs/measurements.md"]
ENGINE = ["src/backend/cpu", "src/backend/*.rs", "src/mixture", "src/loss", "src/heads"]
DECODING = ["src/decoding", "src/backend/cpu", "src/backend/*.rs", "src/mixture"]
# All of the lab's library.
LAB = ["lab/src/*.rs", "lab/src/[!b]*/**"]
TRAINING = [*ENGINE, *LAB, "lab/src/bin/language_model"]
VOCABULARIES = [*ENGINE, "src/decoder", "src/two_level"]
CODE = dict.fromkeys(["step-ptb", "step-llm", "steps", "without-gradients", "dtypes", "instruction-sets"], ENGINE)
CODE |= dict.fromkeys(["positions", "confident", "budget", "docs/step.svg"], ENGINE)
CODE |= {"decoding": DECODING, "decoding-all": DECODING, "decoding-heads": DECODING}
CODE |= {"output-steps": VOCABULARIES, "outputs": [*VOCABULARIES, *TRAINING], "language-model": TRAINING}
CODE |= {"fine-tune": [*ENGINE, "src/decoder", "lab/src/bin/fine_tune"], "docs/memory.svg": ENGINE}
CODE |= {"penn-treebank": TRAINING, "assignment": ["codes/src/assignment"]}
TRANSLATION = [*ENGINE, *LAB, "lab/src/bin/translation"]
CODE |= dict.fromkeys(["fast-mos", "multi30k-vocabularies", "multi30k-equal-time"], [*TRANSLATION, "codes/src"])
CODE |= {"characters": [*ENGINE, "lab/src/bin/characters"]}


def changes(commit, paths):
    """What happened to the code since a commit, without comments; empty if nothing did."""
    known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], stderr=subprocess.DEVNULL)
    if known.returncode:
        return "not in this repository"
    globs = [f":(glob){path}" if "*" in path else path for path in paths]
    file, files = None, set()
    for line in git("diff", "-U0", "-M", commit, "HEAD", "--", *globs).splitlines():
        if line.startswith("diff --git"):
            file = line
        elif line[:1] in ("+", "-") and line[:4] not in ("+++ ", "--- "):
            code = line[1:].strip()
            if code and not code.startswith("//"):
                files.add(file)
    commits = git("log", "--oneline", f"{commit}..HEAD", "--", *globs).count("\n")
    return f"{commits} commits, which changed {len(files)} files" if files else ""


def shown():
    """The tables and pictures of time or memory: document, name, commits."""
    commits = re.compile(r"\bcommits? ((?:[0-9a-f]{7,40}(?:, )?)+)")
    for document in DOCUMENTS:
        if not os.path.exists(document):
            continue
        with open(document, encoding="utf-8") as file:
            text = file.read()
        for name, table in re.findall(r"<!-- figures: (\S+) -->\n(.*?)<!-- /figures -->", text, re.DOTALL):
            if name in CODE:
                yield document, f"table {name}", CODE[name], re.findall(r"[0-9a-f]{7,}", " ".join(commits.findall(table)[-1:]))
        for picture in set(re.findall(r"\(([^()\s]+\.svg)\)", text)):
            path = os.path.normpath(os.path.join(os.path.dirname(document), picture))
            if path in CODE:
                with open(path, encoding="utf-8") as file:
                    found = commits.findall(" ".join(file.read().split()))
                yield document, f"picture {path}", CODE[path], re.findall(r"[0-9a-f]{7,}", " ".join(found))


def check():
    old = []
    for document, name, paths, commits in shown():
        reasons = [f"{commit}: {reason}" for commit in commits if (reason := changes(commit, paths))]
        if reasons or not commits:
            old.append(document)
            print(f"{document}: {name} is older than the code: {'; '.join(reasons) or 'it has no commit'}")
    if not old:
        print("every table of time or memory is as new as the code that it measures")
    return 1 if "README.md" in old else 0
