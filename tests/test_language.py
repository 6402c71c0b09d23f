"""Habits of speech that a reader stumbles on do not come back."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
# What was written, and what says the same in the words of the field.
INSTEAD = {
    r"to the bit\b": "bit for bit",
    r"goes on where it (was|stopped)": "resumes where it stopped",
    r"\b(bytes|[KMG]iB) a device": "per device",
    r"(tangent|vector) can be pushed": "has forward mode",
    r"differentiated forwards": "has no forward mode",
    r"refused in a sentence": "rejected with an explanation",
    r"where its report lies": "the path of the report",
    r"joined products?": "there are none",
    r"\bpart_below_zero\b": "negative_fraction",
    r"what (a row owes|their mean knows)": "accumulated effect, confidence interval",
    r"made it small": "is small by chance",
}


def test_no_text_has_a_phrase_with_a_plainer_word():
    texts = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    texts += [
        path
        for folder in ("t5x_fwdloss", "configs", "scripts")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".gin", ".sh")
    ]
    assert len(texts) > 100
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}; say: {plain}"
        for path in texts
        for phrase, plain in INSTEAD.items()
        # A phrase may go on in the next line.
        for match in re.finditer(
            phrase, re.sub(r"\s+(#\s)?", " ", path.read_text(encoding="utf-8"))
        )
    ]
    assert not found, "\n".join(found)
