"""The numbers of a sweep over its steps, for its files."""

from collections.abc import Mapping, Sequence
from typing import Any

from t5x_fwdloss.analysis.numbers import result_from_json
from t5x_fwdloss.analysis.report import events


def curves(documents: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each measurement and each of its numbers the values over steps.

    Args:
        documents: step to the content of its `results.json`.
    """
    found: dict[str, dict[str, Any]] = {}
    for step, document in sorted(documents.items()):
        for entry in document["measurements"]:
            if entry["status"] != "finished":
                continue
            of_name = found.setdefault(
                entry["name"],
                {
                    "name": entry["name"],
                    "kind": entry["kind"],
                    "settings": entry["settings"],
                    "numbers": {},
                },
            )
            for name, number in entry["results"].items():
                curve = of_name["numbers"].setdefault(
                    name,
                    {"unit": number["unit"]} | {key: [] for key in _COLUMNS.values()},
                )
                curve["steps"].append(step)
                for key, column in _COLUMNS.items():
                    if key != "step":
                        curve[column].append(number[key])
    return list(found.values())


def scalars(
    documents: Mapping[int, dict[str, Any]], neighbors: Sequence[dict[str, Any]]
) -> dict[int, dict[str, float]]:
    """For each step the tags and values of its TensorBoard events.

    Args:
        documents: step to the content of its `results.json`.
        neighbors: the overlaps with the step before, as `sweep.json` has them.
    """
    found = {}
    for step, document in sorted(documents.items()):
        found[step] = events.scalars(
            [
                result_from_json(entry, {})
                for entry in document["measurements"]
                if entry["status"] == "finished"
            ]
        )
    for x in neighbors:
        tag = f"{x['measurement']}/{x['end']}_overlap_with_step_before"
        found[x["later"]][tag] = x["overlap"]
    return found


_COLUMNS = {
    "step": "steps",
    "value": "values",
    "error": "errors",
    "error_kind": "error_kinds",
    "interval": "intervals",
    "converged": "converged",
}
