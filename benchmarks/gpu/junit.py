"""Reads the file that ctest --output-junit wrote. It uses the standard library only."""

import pathlib
import xml.etree.ElementTree as ElementTree

_STATUS = {"run": "passed", "fail": "failed", "notrun": "not run", "disabled": "not run"}


def read(path):
    """Returns [{"name", "status", "seconds", "message"}]. The status is "passed", "failed", "skipped" or "not run".
    Returns an empty list if there is no file."""
    if not pathlib.Path(path).exists():
        return []
    return [_test(case) for case in ElementTree.parse(path).getroot().iter("testcase")]


def _test(case):
    status, message = _STATUS[case.get("status")], ""
    for child in ("failure", "skipped"):
        element = case.find(child)
        if element is not None:
            message = element.get("message") or ""
    if case.find("skipped") is not None and "SKIP" in message:
        status = "skipped"
    if status == "failed":
        message = (case.findtext("system-out") or message).strip()[-2000:]
    return {"name": case.get("name"), "status": status, "seconds": float(case.get("time", 0)), "message": message}
