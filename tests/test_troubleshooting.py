"""Messages that docs/troubleshooting.md quotes are messages of the package or of JAX."""

import ast
import re

import pytest

PAGE = "docs/troubleshooting.md"
# Headings that are symptoms in words, and the message of JAX, which the page produces.
NOT_OURS = re.compile(
    "Can't apply forward-mode|jvp\\(grad\\(f\\)\\)|The loss is tens|An eigenvalue or a step|"
    "The negative fraction|The numbers of two runs|Memory runs out"
)
HOLE = "\x00"


def templates(text):
    """The messages in a module's strings, with a hole for each value put in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE
                for part in node.values
            )


def fits(heading, template):
    """Whether one is the other, with something in its holes."""
    pairs = (heading, template, HOLE), (template, heading, "<...>")
    return any(
        re.fullmatch(".*".join(map(re.escape, other.split(hole))), text, re.DOTALL)
        for text, other, hole in pairs
    )


@pytest.fixture(scope="module")
def messages(repository):
    files = (repository / "t5x_fwdloss").rglob("*.py")
    found = {t for file in files for t in templates(file.read_text(encoding="utf-8"))}
    # Enough words of its own to be recognized.
    return [t for t in found if len(t.replace(HOLE, "").split()) >= 2]


def quoted(repository):
    text = (repository / PAGE).read_text(encoding="utf-8")
    return re.findall(r"(?m)^### (.*)$", text)


def test_quoted_messages_are_messages_of_the_package(repository, messages):
    headings = [x for x in quoted(repository) if not NOT_OURS.match(x)]
    assert len(headings) >= 6
    for heading in headings:
        assert any(fits(heading, x) for x in messages), heading


def test_another_message_is_not_found(messages):
    words = "The run file needs other values for <...>. If a file sets one, then not."
    assert not any(fits(words, x) for x in messages)
