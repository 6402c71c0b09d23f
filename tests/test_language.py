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
    r"to the last bit\b": "bit for bit",
    r"[Gg]oes on (from|with|there)\b": "resumes from",
    r"[Ww]here (a|the) run stands": "the state of a run",
    r"[Ww]hat an error calls": "its name in error messages",
    r"[Ww]hat (an|the) optimizer multiplies": "the preconditioner",
    r"[Ww]hat rounding (does|leaves)": "the effect, or the level, of rounding",
    r"[Ss]ay of whatever": "turn any failure into an error",
    r"\b[Ll]aw of the probes": "distribution of the probes",
    r"\bmass (moved|S|\$S)": "target weight, target sum",
    r"\bone (row|label|line|file|draw|vector) an? [a-z]": "one per",
    r"\bclass numbers\b": "class indices",
    r"(?<!here )\b(is|are) no (class|part of)\b": "matches no class, is not part",
    r"[Nn]one for (none|one everywhere)": "None means no token, None means all ones",
    r"\b(makes|made) (the logits|it|them) again": "recomputes, recomputed",
    r"\ba program of (its|their) own": "a function",
    r"\blinear programs?\b": "linear function, linear jaxpr",
    r"[Tt]aken back by": "accepted as",
    r"\b[Aa]nalys(e|ed|ing)\b": "analyze, as the package's names",
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
