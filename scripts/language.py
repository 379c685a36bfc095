#!/usr/bin/env python3
"""Checks the texts that people read against the rules of CONTRIBUTING.md, "Language".

Reads documents (*.md), comments and messages (string literals) of the product code. Prints each offence as
`file:line: rule: text` and a summary. Exit status 1 if a rule that is enforced is broken.

    scripts/language.py                  everything, the summary alone
    scripts/language.py --list [RULE]    each offence, or those of one rule
    scripts/language.py --json           the summary for scripts
    scripts/language.py --sample N       N comments and messages drawn at random
    scripts/language.py FILE...          these files alone
"""

import argparse
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_WORDS = 35
MAX_MEDIAN = 18
MAX_FRAGMENTS = 0.05

# Words of the first dialect of this project, as regular expressions, and the field's words for them.
DIALECT = {
    r"\bis over\b(?! (TCP|TLS|UDP|QUIC|HTTP|the wire|\d|\{))": "expired, ended, timed out",
    r"\b(is|are) (not|no longer) there\b": "does not exist, not found, not configured",
    r"\b(is|are) no (more|longer there)\b": "no longer",
    r"\bno more (than|of it)\b": "at most; none",
    r"\bis no [a-z-]+ here\b": "unknown",
    r"\bis none\b": "is not one",
    r"\b(is|are) to be\b": "should, must",
    r"\bso many\b": "a number of",
    r"\bhung up\b": "closed the connection",
    r"\bwithout a word\b": "without a response; silently",
    r"\bin silence\b": "silently",
    r"\bsaid once\b": "logged once",
    r"\bsays? so\b": "reports it",
    r"\bgo(es)? on with\b": "continues",
    r"\btaken? in\b": "accepted",
    r"\bwho it is for\b": "the recipient",
    r"\bwhat it is for\b": "its purpose",
    r"\bin (its|their|his) place\b": "instead of it",
    r"\btakes? (its|the) place\b": "replaces",
    r"\bhas gone\b": "was removed; closed",
    r"\bat its end\b": "ended",
    r"\bis asked (of|about)\b": "is requested from",
    r"\bas of \[`": "errors of",
    r"\bbelieves?\b.*\bno more\b": "revokes",
    r"\b(is|are) away\b": "is unreachable",
    r"\ball the same\b": "nevertheless",
    r"\bmay go\b": "may be removed",
    r"\bwhoever\b": "name the actor",
}
HEADLESS = r"(Who|What|Of|Where|Whoever|Whose|Whatever|Whom)"
# A comment that opens so has no subject, or one that stands elsewhere.
FRAGMENT = re.compile(
    r"^(It|Its|They|Their|Them|That|This|Those|These|He|She|One|Ones|Who|What|Whoever|Whose|Whatever|Whom|Which|Of|Where|How|"
    r"As|So|Such|And|But|Or|Nor|Not|No|None|Nothing|Nobody|Neither|Else|For|To|In|On|By|From|With|Without|Than|Then|There|"
    r"Here|Again|Also|Only|Even|Once)\b"
)
# "For", "In", "On" and such open a sentence well when a comma and a subject follow; "How many bytes" is a noun phrase
# without a head and counts.
PREPOSITION = re.compile(r"^(For|To|In|On|By|From|With|Without|As|Once|Then|Only|Not|This|No)\b")


class Text:
    def __init__(self, file, line, kind, text):
        self.file, self.line, self.kind, self.text = file, line, kind, text


def sentences(text):
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\[([^\]]*)\](\[[^\]]*\])?", r"\1", text)
    text = re.sub(r"https?://\S+", "X", text)
    text = re.sub(r"\{[^}]*\}", "X", text)
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|cf|approx|No|Sec|Fig)\.", r"\1", text)
    for sentence in re.split(r"(?<=[.!?])[)\"']*\s+(?=[A-Z0-9`\"(*])", text):
        sentence = sentence.strip(" *_>-")
        if sentence:
            yield sentence


def words(sentence):
    return len(re.findall(r"[A-Za-z0-9'’_./+-]*[A-Za-z0-9][A-Za-z0-9'’_./+-]*", sentence))


def markdown(path):
    """Paragraphs, list items and table cells of a document; code and headings left out."""
    fence, paragraph, start = False, [], 0
    lines = path.read_text().split("\n")
    result = []

    def flush():
        nonlocal paragraph
        if paragraph:
            result.append(Text(path, start, "document", " ".join(paragraph)))
        paragraph = []

    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            flush()
            fence = not fence
            continue
        if fence:
            continue
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            flush()
        elif stripped.startswith("|"):
            flush()
            if not re.fullmatch(r"[|:\s-]+", stripped):
                cells = re.split(r"(?<!\\)\|", stripped.strip("|"))
                result.extend(Text(path, number, "document", cell.strip()) for cell in cells if cell.strip())
        else:
            item = re.match(r"([-*]|\d+\.)\s+", stripped)
            if item:
                flush()
                stripped = stripped[item.end():]
            if not paragraph:
                start = number
            paragraph.append(stripped)
    flush()
    return result


LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"', re.S)


def rust(path):
    """Comments, paragraph by paragraph, and string literals of three words and more; tests in the file left out."""
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines):
        if line.startswith("#[cfg(test)]") and number + 1 < len(lines) and lines[number + 1].startswith("mod "):
            if lines[number + 1].rstrip().endswith("{"):
                lines = lines[:number]
                break
    result, block, start, mark, fence = [], [], 0, None, False
    code = []

    def flush():
        nonlocal block
        if block:
            result.append(Text(path, start, "comment", " ".join(block)))
        block = []

    for number, line in enumerate(lines, 1):
        match = re.match(r"\s*(//[/!]?)\s?(.*)$", line)
        if not match:
            flush()
            fence = False
            mark = None
            code.append(re.sub(r"\s//\s.*$", "", line))
            continue
        code.append("")
        kind, text = match.groups()
        text = text.strip()
        if kind != mark:
            flush()
            mark = kind
        if text.startswith("```"):
            flush()
            fence = not fence
            continue
        if fence:
            continue
        if not text or text.startswith("#") or text.startswith("|"):
            flush()
            continue
        item = re.match(r"([-*]|\d+\.)\s+", text)
        if item:
            flush()
            text = text[item.end():]
        if not block:
            start = number
        block.append(text)
    flush()
    body = "\n".join(code)
    for match in LITERAL.finditer(body):
        if body[max(0, match.start() - 1):match.start()] in ("b", "'"):
            continue
        # A text of several lines is a template: a configuration, a picture, a script.
        if re.search(r"[^\\]\n", match.group(1)):
            continue
        # Scripts, configurations and pictures are not sentences.
        if re.search(r"<\w+ \w+=|\$\w|^#|%s=", match.group(1)):
            continue
        text = re.sub(r"\\\n\s*", "", match.group(1)).replace('\\"', '"').replace("\\n", " ")
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text:
            result.append(Text(path, body[:match.start()].count("\n") + 1, "message", text))
    return result


def offences(texts):
    for text in texts:
        for sentence in sentences(text.text):
            count = words(sentence)
            if count > MAX_WORDS:
                yield "long", text, f"{count} words: {sentence}"
            # Messages start in lower case.
            case = re.IGNORECASE if text.kind == "message" else 0
            if re.match(HEADLESS + r"\b", sentence, case) and not sentence.endswith("?"):
                yield "headless", text, sentence
            elif re.search(r"[;:] " + HEADLESS.lower() + r"\b", sentence):
                yield "headless", text, sentence
            for pattern in DIALECT:
                if re.search(pattern, sentence, re.I):
                    yield "dialect", text, f"{pattern}: {sentence}"
        if text.kind == "comment" and is_fragment(text.text):
            yield "fragment", text, text.text


def is_fragment(text):
    if text.startswith("In: "):
        # The prescribed form of a file header.
        return False
    first = next(iter(sentences(text)), "")
    if not FRAGMENT.match(first):
        return False
    if re.match(r"^(This|These|Those|That|No)\s+[a-z-]+", first) and re.match(r"^(This|No|These)\s", first):
        return re.match(r"^(This|These)\s+(is|are|was|has|does|can|may|must)\b", first) is not None
    if PREPOSITION.match(first):
        return "," not in first and not re.match(r"^(To|In|On|By|For|From|With|Once|Only)\b.*\b(is|are|has|does|the)\b", first)
    return True


def files(arguments):
    if arguments:
        return [pathlib.Path(argument).resolve() for argument in arguments]
    listed = subprocess.run(["git", "ls-files", "*.md", "crates/*.rs"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = [pathlib.Path(name) for name in listed.stdout.split("\n") if name]
    return [ROOT / name for name in names if name.suffix == ".md" or is_product(name)]


def is_product(name):
    parts = name.parts
    return "src" in parts and "testkit" not in parts[1] and "e2e" not in parts[1] and name.name != "tests.rs" \
        and "tests" not in parts and "simulation" not in name.name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="?", const="all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sample", type=int)
    parser.add_argument("files", nargs="*")
    options = parser.parse_args()
    texts = []
    for path in files(options.files):
        texts.extend(markdown(path) if path.suffix == ".md" else rust(path))
    if options.sample:
        for text in random.sample([text for text in texts if text.kind != "document"], options.sample):
            print(f"{text.file.relative_to(ROOT)}:{text.line}: {text.kind}: {text.text}")
        return 0
    found = list(offences(texts))
    if options.list:
        for rule, text, what in found:
            if options.list in ("all", rule):
                print(f"{text.file.relative_to(ROOT)}:{text.line}: {rule}: {what}")
    summary = {}
    for kind in ("document", "message", "comment"):
        chosen = [text for text in texts if text.kind == kind]
        lengths = [words(sentence) for text in chosen for sentence in sentences(text.text)]
        rules = {rule: sum(1 for name, text, _ in found if name == rule and text.kind == kind)
                 for rule in ("long", "headless", "dialect", "fragment")}
        summary[kind] = {"texts": len(chosen), "sentences": len(lengths),
                         "median_words": statistics.median(lengths) if lengths else 0, **rules}
    comments = summary["comment"]
    comments["fragment_share"] = round(comments["fragment"] / max(1, comments["texts"]), 3)
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        for kind, figures in summary.items():
            print(kind, " ".join(f"{key}={value}" for key, value in figures.items()))
    enforced = [kind for kind in ("document", "message")
                if summary[kind]["long"] + summary[kind]["headless"] + summary[kind]["dialect"]
                or summary[kind]["median_words"] >= MAX_MEDIAN]
    return 1 if enforced or comments["fragment_share"] > MAX_FRAGMENTS else 0


if __name__ == "__main__":
    sys.exit(main())
